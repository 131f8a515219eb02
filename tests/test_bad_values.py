"""Values that are not legal: each raises an error of ampgraph that names the value."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import AmpGraphError, OpLists, Policy, StaticLossScale, testing

X = torch.randn(4, 8)
DEEP = "[" * 100_000


@functools.cache
def given() -> SimpleNamespace:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    amp = ampgraph.convert(model, (X,), dtype=torch.float16)
    calibration = ampgraph.calibrate(amp, [(X,)])
    return SimpleNamespace(model=model, amp=amp, calibration=calibration, report=ampgraph.explain(amp))


def draw(**options):
    return lambda g: ampgraph.draw(g.amp, "x.dot", **options)


def convert(shapes):
    return lambda g: ampgraph.convert(g.model, (X,), dtype=torch.float16, dynamic_shapes=shapes)


CASES = {
    "a loss that is no function": (lambda g: ampgraph.check_numerics(g.amp, (X,), loss="x"), "loss='x'"),
    "why": (lambda g: g.report.why(None), "no node None"),
    "chain": (lambda g: g.report.chain(5), "no node 5"),
    "flip": (lambda g: g.report.flip(5), "no node 5"),
    "a row": (lambda g: g.calibration.row(5), "statistics of 5"),
    "statistics of no graph": (lambda g: g.calibration.of(5), "takes a graph module, got int"),
    "a file that is a folder": (lambda g: g.calibration.save("."), "Is a directory"),
    "op lists": (lambda g: OpLists(white=5), r"write \[5\]"),
    "focus": (draw(focus=5), "focus=5"),
    "highlight": (draw(highlight=5), "highlight=5"),
    "all_layers": (draw(all_layers="x"), "all_layers='x'"),
    "a pattern": (lambda g: testing.assert_dtype(g.amp, None, "float16"), "expected a glob"),
    "a policy's JSON": (lambda g: Policy.from_json({}), "not valid JSON"),
    "a comparison's JSON": (lambda g: ampgraph.NumericComparison.from_json(DEEP), "not the JSON"),
    "no blocks": (lambda g: ampgraph.convert_blocks(g.model, []), "which is empty"),
    "no level": (lambda g: ampgraph.tune(g.model, [(X,)], budget=1.0, level=None), "level=None"),
    "dynamic shapes": (convert(5), "dynamic_shapes=5"),
    "a misspelt argument": (convert({"inptu": {0: torch.export.Dim.AUTO}}), "'inptu'.* Did you mean 'input'"),
    "a guard": (lambda g: Policy(use_fp16_guard=1), "use_fp16_guard=1"),
    "a static scale": (lambda g: StaticLossScale(skip_on_overflow="no"), "skip_on_overflow='no'"),
    "a norm": (
        lambda g: ampgraph.compile_step(
            g.amp, torch.optim.SGD(g.model.parameters()), lambda amp, x: amp(x).sum(), clip_norm=True
        ),
        "clip_norm=True",
    ),
    "steps": (lambda g: ampgraph.watch(g.amp, steps=(True, True)), r"steps=\(True, True\)"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_value_raises_an_error_that_names_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, message = CASES[name]
    with pytest.raises(AmpGraphError, match=message):
        call(given())
    assert not [*tmp_path.iterdir()]
