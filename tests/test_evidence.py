"""A calibration is evidence: for conversions and for `check_numerics`, as for `tune`."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from ampgraph import AmpGraphError, Policy, PolicyError

POLICY = Policy("O2", torch.float16, hazards=False)
CAPTURES = ["ahead of time", "just in time"]


class Net(nn.Module):
    """Values that leave the range of float16 where the input is large, and are divided down again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        z = y * y + y
        return self.head(z / (z.amax() + 1))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


SMALL, LARGE = torch.linspace(-1, 1, 32).reshape(4, 8), torch.linspace(-9e3, 9e3, 32).reshape(4, 8)


def converted(net: nn.Module, capture: str = "ahead of time", **given: object) -> ampgraph.AmpModule:
    given = {"policy": POLICY, "backend": "eager", "capture": capture, **given}
    return ampgraph.convert(net, (SMALL,), **given)


def ranges_of(net: nn.Module, capture: str = "ahead of time", **given: object) -> ampgraph.Calibration:
    return ampgraph.calibrate(converted(net, capture, **given), [(SMALL,), (LARGE,)])


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("capture", CAPTURES)
def test_a_conversion_keeps_what_left_the_range(net, capture, level):
    policy = POLICY.replace(level=level, rules={"node:mul": "low", "node:linear": "low"})
    assert not converted(net, capture, policy=policy)(LARGE).isfinite().all()
    ranges = ranges_of(net, capture)
    policy = POLICY.replace(level=level)
    amp = converted(net, capture, policy=policy, calibration=ranges)
    with torch.no_grad():
        torch.testing.assert_close(amp(LARGE), net(LARGE), rtol=2e-2, atol=2e-2)
    assert amp.plan.decisions["mul"].dtype == torch.float32
    replayed = Policy.from_json(amp.policy.to_json())
    again = converted(net, capture, policy=replayed)
    again(SMALL)
    assert {n: d.dtype for n, d in again.plan.decisions.items()} == {
        n: d.dtype for n, d in amp.plan.decisions.items()
    }


def test_a_saved_calibration_is_evidence(net, tmp_path):
    ranges_of(net).save(tmp_path / "ranges.json")
    amp = converted(net, calibration=ampgraph.Calibration.load(tmp_path / "ranges.json"))
    assert amp(LARGE).isfinite().all()
    assert amp.policy.rules["node:mul"] == "fp32"


def test_ranges_that_fit_change_nothing(net):
    ranges = ampgraph.calibrate(converted(net), [(SMALL,)])
    assert converted(net, calibration=ranges).policy == converted(net).policy


def test_the_model_stays_as_it_was(net):
    net.register_buffer("calls", torch.zeros(()))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    converted(net, calibration=ranges_of(net))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("capture", CAPTURES)
def test_check_numerics_finds_what_other_batches_break(net, capture):
    amp = converted(net, capture)
    assert ampgraph.check_numerics(amp, (SMALL,)) is None
    found = ampgraph.check_numerics(amp, (SMALL,), calibration=ranges_of(net, capture))
    assert (found.op, found.direction) == ("aten.mul.Tensor", "forward")
    assert "in the calibrated batches, and float16 holds 65504" in found.reason
    cured = converted(net, capture, policy=amp.policy.replace(rules=found.remedy))
    assert cured(LARGE).isfinite().all()
    assert ampgraph.check_numerics(cured, (SMALL,), calibration=ranges_of(net, capture)) is None


def test_a_remedy_covers_this_batch_and_the_others(net):
    """One value leaves the range in the batch at hand, others in calibrated batches."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.last = net, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.last(self.net(x)) * 1e3
            z = y * y * 30
            return z / (z.amax() + 1)

    model = Two().eval()
    amp, ranges = converted(model), ranges_of(model)
    alone = ampgraph.check_numerics(amp, (SMALL,))
    both = ampgraph.check_numerics(amp, (SMALL,), calibration=ranges)
    assert alone.node == both.node
    assert set(alone.remedy) < set(both.remedy)
    assert not converted(model, policy=amp.policy.replace(rules=alone.remedy))(LARGE).isfinite().all()
    assert converted(model, policy=amp.policy.replace(rules=both.remedy))(LARGE).isfinite().all()


def _edited(ranges: ampgraph.Calibration, **numbers: object) -> str:
    """Returns the JSON with other numbers in the row of ``mul``."""
    data = ranges.to_dict()
    (graph,) = data["graphs"].values()
    graph["values"]["mul"] |= numbers
    return json.dumps(data)


EDITS = [
    *({"peak": value} for value in ("x", None, -1.0, math.nan, 1.0)),
    *({"exponents": value} for value in ({"3": -2}, {})),
    *({"smallest": 1e30}, {"beyond": 1000}, {"zeroed": 0.5}, {"elements": 7}),
]


@pytest.mark.parametrize("numbers", EDITS, ids=str)
def test_an_edited_row_is_refused(net, numbers):
    ranges = ranges_of(net)
    assert ampgraph.Calibration.from_json(_edited(ranges)) == ranges
    with pytest.raises(AmpGraphError, match="not the JSON of a Calibration"):
        ampgraph.Calibration.from_json(_edited(ranges, **numbers))


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 6000, "", "[]", '{"format": 1}'])
def test_other_text_is_refused(text):
    with pytest.raises(AmpGraphError, match="not the JSON of a Calibration"):
        ampgraph.Calibration.from_json(text)


@pytest.mark.parametrize("numbers", [{"scale": math.nan}, {"scale": 0.0}, {"batches": 0}], ids=str)
def test_an_edited_head_is_refused(net, numbers):
    data = ranges_of(net).to_dict() | numbers
    with pytest.raises(AmpGraphError, match="expected positive numbers"):
        ampgraph.Calibration.from_json(json.dumps(data))


def test_a_graph_with_other_rows_is_refused(net):
    ranges = ranges_of(net)
    (graph,) = ranges.graphs.values()
    row = graph.values.pop("mul")
    with pytest.raises(AmpGraphError, match="other values than its graph has, mul for example"):
        converted(net, calibration=ranges)
    graph.values["mull"] = row
    with pytest.raises(AmpGraphError, match="other values than its graph has"):
        ampgraph.check_numerics(converted(net), (SMALL,), calibration=ranges)


def test_a_batch_that_float32_does_not_hold_is_told(net):
    with pytest.warns(UserWarning, match="the result of batch 2 is NaN or infinite in float32"):
        ampgraph.calibrate(converted(net), [(SMALL,), (SMALL * math.inf,), (SMALL * math.nan,)])


def test_what_is_refused(net):
    ranges = ranges_of(net)
    with pytest.raises(PolicyError, match=r"calibration must be what ampgraph.calibrate .* got dict"):
        converted(net, calibration={})
    with pytest.raises(PolicyError, match=r"calibration must be .* got str"):
        ampgraph.check_numerics(converted(net), (SMALL,), calibration="ranges.json")
    with pytest.raises(PolicyError, match="needs example inputs"):
        ampgraph.convert(net, policy=POLICY, calibration=ranges)
    with pytest.raises(PolicyError, match="O1 and O2; the policy has O3"):
        converted(net, policy=POLICY.replace(level="O3"), calibration=ranges)
    other = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(AmpGraphError, match="the calibration of Net has no statistics of this graph"):
        converted(other, calibration=ranges)
    with pytest.raises(AmpGraphError, match="the calibration of Net has no statistics of this graph"):
        ampgraph.check_numerics(converted(other), (SMALL,), calibration=ranges)
    program = torch.export.export(net, (SMALL,))
    with pytest.raises(ampgraph.CaptureError, match="calibration do not apply"):
        ampgraph.convert(program, policy=POLICY, calibration=ranges)
