"""What must hold of the conversion of any module: the invariants of the pipeline, checked by running it.

How far values may be from float32 is computed. The captured source is run several times with the result of
every node moved by ``+-eps`` of itself (that of the coarsest dtype in source and policy); where these runs
differ from the unmoved one by ``spread``, the converted module may differ by
``8 * spread + 4 * eps * (|value| + mean |value|)``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves

import ampgraph
from ampgraph import NoLossScale, Policy
from ampgraph.capture import Reads, capture_program
from ampgraph.capture.unlift import unlift
from ampgraph.passes import InlineRegions, is_inserted_cast, run_passes
from ampgraph.passes.analysis.alias import viewed, written_args
from ampgraph.passes.pipeline import rewrite
from ampgraph.passes.place import autocast_rule, place_within
from ampgraph.policy.policy import LOW_DTYPES
from ampgraph.runtime.graph_copies import copy_graph_module

from .brute_force import moved
from .captures import copied
from .exact_integers import differing_integers
from .helpers import graph_lines, problem_of
from .random_modules import Program
from .test_precision_property import autocast_bytes, fp32_reads_rounded, violations

RUNS, MORE_RUNS = 3, 24


class NotConvertible(Exception):
    """The source does not run, or torch.export refuses it: nothing to check."""


@dataclass
class Outcome:
    """What one run yields.

    Attributes:
        values: By name: outputs, gradients, and what it left in inputs and buffers.
        spec: The structure of the outputs.
        shares: Which (output, input) share memory.
    """

    values: dict[str, Any]
    spec: Any
    shares: set[tuple[int, int]]


def check_program(program: Program, level: str, backward: bool = True) -> str:
    """Converts the program's module and checks every invariant; returns "low" or "untouched".

    Raises:
        NotConvertible: The source itself fails.
        AssertionError: An invariant does not hold.
    """
    source = program.build()
    try:
        expected = run(source, program, backward)
        captured = Captured(program)
        captured.check_itself(expected, backward)
    except Exception as error:
        raise NotConvertible(f"{type(error).__name__}: {error}") from error
    amp = captured.converted(level)
    actual = run(amp, program, backward)
    check_types(actual, expected, dict.fromkeys(amp.stored_low, program.low))
    check_casts(amp.graph_module, program.low)
    check_again_changes_nothing(captured, level)
    check_integers(amp, program)
    if level == "O1":
        check_against_autocast(captured)
    low = amp.plan.low_dtype
    if all(d.dtype != low for d in amp.plan.decisions.values()):
        for name, value in expected.values.items():
            assert same(actual.values[name], value), f"{name}: nothing is low, yet values differ"
        return "untouched"
    if level != "O3":
        check_values(actual, expected, captured, backward)
    return "low"


def check_just_in_time(program: Program, level: str, backward: bool = True) -> str:
    """As `check_program`, captured by ``torch.compile``'s front end: types, values, what was written."""
    try:
        expected = run(program.build(), program, backward)
        captured = Captured(program)
        captured.check_itself(expected, backward)
    except Exception as error:
        raise NotConvertible(f"{type(error).__name__}: {error}") from error
    amp = ampgraph.convert(program.build(), policy=policy_of(program, level), backend="eager")
    actual = run(amp, program, backward)
    check_types(actual, expected)
    if level != "O3":
        check_values(actual, expected, captured, backward)
    return f"just in time, {len(amp.graph_modules)} graphs"


def policy_of(program: Program, level: str) -> Policy:
    """Returns the policy that a program is converted with."""
    return Policy(level=level, dtype=program.low, loss_scale=NoLossScale())


class Captured:
    """The source's graph, captured once, over a model of its own."""

    def __init__(self, program: Program) -> None:
        self.program, self.model = program, program.build()
        self.reads = Reads(self.model)
        with _quiet():
            self.exported = capture_program(self.model, program.inputs(), reads=self.reads)
        self.graph_module = unlift(copied(self.exported), self.model)[0]
        self.buffers = {n: b.clone() for n, b in self.model.named_buffers()}
        self.eps = max(torch.finfo(dtype).eps for dtype in {program.low, *_low_dtypes(self.graph_module)})

    def check_itself(self, expected: Outcome, backward: bool) -> None:
        """Raises unless the captured graph, unconverted, does what the source does."""
        actual = run(self.model, self.program, backward, fx.Interpreter(self.graph_module).run)
        check_types(actual, expected)
        wrong = [n for n, v in expected.values.items() if not _nearly(actual.values[n], v)]
        assert not wrong, f"torch.export changes {wrong}"

    def copy(self) -> fx.GraphModule:
        """Returns a copy that passes may edit."""
        return copy_graph_module(self.graph_module)

    def converted(self, level: str) -> ampgraph.AmpModule:
        """Converts the model, from the same capture; at O3, which changes parameters, another like it."""
        policy, inputs = policy_of(self.program, level), self.program.inputs()
        if level == "O3":
            return ampgraph.convert(self.program.build(), inputs, policy=policy, capture="ahead of time")

        def capture(model: nn.Module, args: tuple, kwargs: dict, shapes: None, reads: Reads, gradients: bool):
            assert model is self.model
            vars(reads).update(vars(self.reads))
            return copied(self.exported)

        self.reset()
        with mock.patch("ampgraph.runtime.export_call.capture_program", capture):
            return ampgraph.convert(self.model, inputs, policy=policy, capture="ahead of time")

    def reset(self) -> None:
        """Gives the buffers the values that they had before any run."""
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self.buffers[name])

    def moved(self, seed: int, backward: bool) -> Outcome:
        """Runs it once from the start, every result moved a little."""
        self.reset()
        interpreter = _Moving(self.graph_module, self.eps, seed)
        return run(self.model, self.program, backward, interpreter.run)


def run(model: nn.Module, program: Program, backward: bool, call: Callable | None = None) -> Outcome:
    """Runs forward and backward once on fresh inputs."""
    inputs = program.inputs()
    parameters = dict(model.named_parameters())
    torch.manual_seed(0)
    with _quiet():
        result = (call or model)(*inputs)
    leaves, spec = tree_flatten(result)
    values = {f"output {i}": leaf for i, leaf in enumerate(leaves)}
    ends = [t for t in leaves if t.is_floating_point() and t.requires_grad]
    if backward and ends:
        loss = sum((t.float() * _weights(t)).sum() for t in ends)
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        values |= {f"gradient of {n}": g for n, g in zip(parameters, gradients, strict=True)}
    values |= {f"input {i}": t for i, t in enumerate(inputs)}
    values |= {f"buffer {n}": t for n, t in model.named_buffers()}
    shares = {
        (i, j) for i, leaf in enumerate(leaves) for j, t in enumerate(inputs) if _memory(leaf) == _memory(t)
    }
    return Outcome(
        {n: v.detach().clone() if v is not None else None for n, v in values.items()}, spec, shares
    )


def _memory(t: torch.Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _weights(t: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(t.numel())
    return torch.rand(t.shape, generator=generator) + 0.5


def check_types(
    actual: Outcome, expected: Outcome, stored: Mapping[str, torch.dtype] = MappingProxyType({})
) -> None:
    """Structure, shapes, dtypes, and which parameters get a gradient, of the dtype they are stored in."""
    dtypes = {f"gradient of {name}": dtype for name, dtype in stored.items()}
    assert actual.spec == expected.spec
    assert actual.shares == expected.shares, "outputs share memory with other inputs"
    assert actual.values.keys() == expected.values.keys()
    for name, value in expected.values.items():
        got = actual.values[name]
        assert (got is None) == (value is None), f"{name}: {got} instead of {value}"
        if value is not None:
            dtype = dtypes.get(name, value.dtype)
            assert (got.dtype, got.shape) == (dtype, value.shape), f"{name}: {got.dtype}, not {dtype}"


def check_casts(graph_module: fx.GraphModule, low: torch.dtype) -> None:
    """Only float32 and low tensors are cast."""
    for node in graph_module.graph.nodes:
        if is_inserted_cast(node):
            assert node.args[0].meta["val"].dtype in (torch.float32, low)


def check_integers(amp: ampgraph.AmpModule, program: Program) -> None:
    """Integers and booleans that no low op feeds, in between too, are the source's."""
    if amp.stored_low:
        return  # the source's graph cannot read parameters that are stored low
    wrong, _ = differing_integers(amp, *program.inputs())
    assert not wrong, f"no low op feeds {wrong}, yet their integers differ"


def check_again_changes_nothing(captured: Captured, level: str) -> None:
    """The pipeline on its own output changes nothing."""
    program, graph_module = captured.program, captured.copy()
    policy = policy_of(program, level)
    rewrite(graph_module, policy)
    once = graph_lines(graph_module)
    plan = rewrite(graph_module, policy)
    assert plan.casts == (), f"the second time casts {plan.casts}"
    assert graph_lines(graph_module) == once


def check_against_autocast(captured: Captured) -> None:
    """At O1: never less precise than the autocast rule, never more bytes."""
    program, graph_module = captured.program, captured.copy()
    run_passes(graph_module, [InlineRegions(policy_of(program, "O1"))])
    problem = problem_of(graph_module, policy_of(program, "O1"), program.low)
    placed = place_within(problem, autocast_bytes(problem))
    assert violations(problem, placed.labels) == []
    assert fp32_reads_rounded(problem, placed.labels) == []
    rule = autocast_rule(problem)
    ours, theirs = (moved(problem, p.labels, p.anchors) for p in (placed, rule))
    assert ours.traffic <= theirs.traffic
    assert ours.activation_cast_bytes <= autocast_bytes(problem)


# -- values --------------------------------------------------------------------------------------------


def check_values(actual: Outcome, expected: Outcome, captured: Captured, backward: bool) -> None:
    """Every value is within the bound that moved runs of the source give."""
    runs: list[Outcome] = []
    for wanted_runs in (RUNS, MORE_RUNS):
        while len(runs) < wanted_runs:
            runs.append(captured.moved(len(runs), backward))
        wrong = [n for n in expected.values if not _within(n, actual, expected, runs, captured.eps)]
        if not wrong:
            return
    name = wrong[0]
    raise AssertionError(
        f"{name}:\n{actual.values[name]}\ninstead of\n{expected.values[name]}\n(all wrong: {wrong})"
    )


def _low_dtypes(graph_module: fx.GraphModule) -> set[torch.dtype]:
    """Returns the low dtypes of the source: its autocast regions may name another than the policy."""
    parts = [m for m in graph_module.modules() if isinstance(m, fx.GraphModule)]
    leaves = [tree_leaves(n.meta.get("val")) for part in parts for n in part.graph.nodes]
    dtypes = {leaf.dtype for leaf in chain(*leaves) if isinstance(leaf, torch.Tensor)}
    return dtypes & set(LOW_DTYPES)


_MODES = {"wrap_with_set_grad_enabled": torch.set_grad_enabled, "wrap_with_autocast": torch.autocast}


class _Moving(fx.Interpreter):
    """Multiplies what each node computes, also in regions, by 1 +- eps; views move with what they view."""

    def __init__(self, graph_module: fx.GraphModule, eps: float, seed: int) -> None:
        super().__init__(graph_module)
        self.eps, self.generator = eps, torch.Generator().manual_seed(seed)

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        at = next((i for i, a in enumerate(args) if isinstance(a, fx.GraphModule)), None)
        if at is None:
            return super().call_function(target, args, kwargs)
        inner = _Moving(args[at], self.eps, 0)
        inner.generator = self.generator
        mode = _MODES[target.__name__]
        with mode(*args[:at]):
            return inner.run(*args[at + 1 :])

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if not isinstance(node.target, torch._ops.OpOverload):
            return result
        if written_args(node):
            with torch.no_grad():
                for argument in written_args(node):
                    self._factor_into(self.env.get(argument))
            return result
        if viewed(node):
            return result
        return tree_map_only_floats(self._moved, result)

    def _factor(self, t: torch.Tensor) -> torch.Tensor:
        sign = torch.randint(0, 2, t.shape, generator=self.generator) * 2 - 1
        return (1 + self.eps * sign).to(t.dtype)

    def _factor_into(self, t: torch.Tensor | None) -> None:
        if not isinstance(t, torch.Tensor) or 0 in t.stride():  # torch multiplies no expanded memory
            return
        if t.is_floating_point():
            t.data.mul_(self._factor(t))

    def _moved(self, t: torch.Tensor) -> torch.Tensor:
        return t * self._factor(t)


def tree_map_only_floats(function: Callable, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return (
            type(value)(tree_map_only_floats(function, v) for v in value)
            if type(value) in (list, tuple)
            else value
        )
    return function(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _within(name: str, actual: Outcome, expected: Outcome, runs: list[Outcome], eps: float) -> bool:
    got, wanted = actual.values[name], expected.values[name]
    if wanted is None or same(got, wanted):
        return True
    moved = [r.values.get(name) for r in runs]
    if any(m is None or m.shape != wanted.shape for m in moved):
        return True
    if not wanted.is_floating_point():
        differs = torch.stack([m != wanted for m in moved]).any(0)
        return bool((differs | (got == wanted)).all())
    got, wanted = got.double(), wanted.double()
    spread = torch.stack([(m.double() - wanted).abs() for m in moved]).amax(0)
    size = wanted.abs()
    allowed = 8 * (spread + spread.mean()) + 4 * eps * (size + size.mean()) + eps**2
    return bool(((got - wanted).abs() <= allowed).all()) or not wanted.isfinite().all()


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether two tensors are equal in dtype and every value, NaN where NaN."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _nearly(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)


def _quiet() -> warnings.catch_warnings:
    return _Quiet()


class _Quiet(warnings.catch_warnings):
    def __enter__(self) -> Any:
        result = super().__enter__()
        warnings.simplefilter("ignore")
        return result
