"""What must hold of the conversion of one op, with a tolerance that follows from dtype and conditioning.

The reference is the source in float32, on values rounded where the form rounds them. An element of a result
may differ from it by

    4 * (eps * |reference| + spread) + eps * mean |reference|

where ``spread`` is the largest change of the element when every floating input of the reference moves by
``+-eps`` of itself, and ``eps`` is that of the low dtype; a gradient by ``eps`` of the mean incoming gradient
more. Where nothing runs low, both must be equal bit for bit. Elements beyond the low dtype's range are not
compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

import ampgraph
from ampgraph import NoLossScale, Policy
from ampgraph.passes import is_inserted_cast

from .captures import LastCapture
from .one_op import (
    Case,
    Result,
    first_line,
    is_complex,
    is_float,
    is_tensor,
    leaves_of,
    quiet,
    rounding,
    run,
    same,
    same_bits,
)

PERTURBATIONS, MEAN_COTANGENT = 4, 1.0


class Finding(AssertionError):
    """A conversion that breaks a promise."""


class KernelError(Finding):
    """A result outside the tolerance that torch's low-precision kernel gives by itself."""


class TorchError(Exception):
    """Fails in the same way without ampgraph: exported by ``torch.export`` and run."""


def check(case: Case, level: str) -> str:
    """Converts and compares; returns what happened in a word.

    Raises:
        Finding: The result is wrong.
        TorchError: The exported program of the source is wrong in itself.
    """
    try:
        return _check(case, level)
    except KernelError:
        raise
    except Exception as error:
        if case.scaled and isinstance(error, torch.linalg.LinAlgError):
            raise KernelError(f"after a product that overflows: {first_line(error)}") from error
        if reason := exported_fails(case):
            raise TorchError(reason) from error
        raise


def exported_fails(case: Case) -> str | None:
    """Returns why the source, exported and run without ampgraph, fails or is not what its graph says."""
    leaves = leaves_of(case, case.inputs)
    try:
        with quiet():
            exported = torch.export.export(case.model, tuple(leaves), strict=False).module()
            with torch.no_grad():
                check_graph(exported, case)
            result = run(exported, case)
        expected = run(case.model, case)
        _compare_types(result.outputs, expected.outputs)
        _compare_types(result.gradients, expected.gradients)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def _check(case: Case, level: str) -> str:
    rules = {"low": "low"} if case.model.through_low else {}
    policy = Policy(level=level, dtype=case.low, rules=rules, loss_scale=NoLossScale())
    form = (case.model.call_id, tuple(case.model.through_low), case.model.low_after)
    with _captured.of(form):  # once for both levels and, where its inputs are float32, both dtypes
        amp = ampgraph.convert(
            case.model,
            tuple(leaves_of(case, case.inputs)),
            policy=policy,
            backend="eager",
            capture="ahead of time",
        )
    return _compare(amp, case, check_graph(amp.graph_module, case))


_captured = LastCapture()


def check_just_in_time(case: Case, level: str) -> str:
    """As `check`, for the model captured by ``torch.compile``'s front end; graph breaks run as they are."""
    rules = {"low": "low"} if case.model.through_low else {}
    policy = Policy(level=level, dtype=case.low, rules=rules, loss_scale=NoLossScale())
    torch._dynamo.reset()
    return _compare(ampgraph.convert(case.model, policy=policy, backend="eager"), case, runs_low=True)


def _compare(amp: ampgraph.AmpModule, case: Case, runs_low: bool) -> str:
    actual = run(amp, case)
    expected_types = run(case.model, case)
    _compare_types(actual.outputs, expected_types.outputs)
    _compare_types(actual.gradients, expected_types.gradients)
    if case.random:
        return "random"
    if not runs_low:
        _compare_bits(actual, expected_types)
        return "untouched"
    try:
        _compare_values(actual, case)
    except Finding as finding:
        if _is_torchs_own(actual, case):
            raise KernelError(str(finding)) from finding
        raise
    return "mixed"


def _is_torchs_own(actual: Result, case: Case) -> bool:
    """Whether plain torch, on low inputs and without any conversion, gives the very same values."""
    low = [t.to(case.low) if t.dtype == torch.float32 else t for t in case.inputs]
    try:
        plain = run(case.model, case, low)
    except Exception:
        return False
    return all(map(_same_values, actual.outputs + actual.gradients, plain.outputs + plain.gradients))


def _same_values(a: Any, b: Any) -> bool:
    return same_bits(a.double(), b.double()) if is_float(a) and is_float(b) else same(a, b)


def check_graph(graph_module: fx.GraphModule, case: Case) -> bool:
    """Checks that real kernels yield the recorded dtypes; returns whether anything at all runs low."""
    casts = [n for n in graph_module.graph.nodes if is_inserted_cast(n)]
    for node in casts:
        if node.args[0].meta["val"].dtype not in (torch.float32, case.low):
            raise Finding(f"casts a {node.args[0].meta['val'].dtype} tensor")
    check_real_dtypes(graph_module, case.inputs)
    dtypes = {
        t.dtype for n in graph_module.graph.nodes for t in tree_leaves(n.meta.get("val")) if is_tensor(t)
    }
    return case.low in dtypes


def check_real_dtypes(graph_module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> None:
    """Checks that real kernels yield the recorded dtypes, node for node."""
    with torch.no_grad(), quiet():
        torch.manual_seed(0)
        _DtypeChecker(graph_module).run(*[t.clone() for t in inputs])


class _DtypeChecker(fx.Interpreter):
    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if node.op != "call_function" or "val" not in node.meta:
            return result
        for real, fake in zip(tree_leaves(result), tree_leaves(node.meta["val"]), strict=True):
            if is_tensor(real) and real.dtype != fake.dtype:
                raise Finding(f"{node.name} is recorded as {fake.dtype} and yields {real.dtype}")
        return result


def _compare_types(actual: list, expected: list) -> None:
    if len(actual) != len(expected):
        raise Finding(f"{len(actual)} results instead of {len(expected)}")
    for got, wanted in zip(actual, expected, strict=True):
        if is_tensor(got) != is_tensor(wanted):
            raise Finding(f"{type(got).__name__} instead of {type(wanted).__name__}")
        if not is_tensor(got):
            continue
        if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
            raise Finding(f"{got.dtype}{list(got.shape)} instead of {wanted.dtype}{list(wanted.shape)}")


def _compare_bits(actual: Result, expected: Result) -> None:
    for part in ("outputs", "gradients"):
        for got, wanted in zip(getattr(actual, part), getattr(expected, part), strict=True):
            if is_tensor(got) and not same_bits(got, wanted):
                raise Finding(f"{part}: nothing runs low, yet values differ")
            if not is_tensor(got) and got != wanted:
                raise Finding(f"{part}: {got!r} instead of {wanted!r}")


def _compare_values(actual: Result, case: Case) -> None:
    with rounding(case):
        wide = [t.float() if t.dtype == case.low else t for t in case.inputs]
        reference = run(case.model, case, inputs=wide)
        bounds = _Bounds(case, wide, reference)
    for part in ("outputs", "gradients"):
        pairs = zip(getattr(actual, part), getattr(reference, part), strict=True)
        for index, (got, wanted) in enumerate(pairs):
            if not (is_tensor(got) and is_tensor(wanted)) or not wanted.numel():
                continue
            if not is_float(wanted):
                if not is_complex(wanted) and not torch.equal(got, wanted):
                    bounds.check_discrete(part, index, got, wanted)
                continue
            bounds.check(part, index, got, wanted)


class _Bounds:
    """The tolerance of every element; perturbed references are run only when they are needed."""

    def __init__(self, case: Case, inputs: list[torch.Tensor], reference: Result) -> None:
        self.case, self.inputs, self.reference = case, inputs, reference
        self.eps = torch.finfo(case.low).eps
        self.perturbed: list[Result] | None = None

    def check(self, part: str, index: int, got: torch.Tensor, wanted: torch.Tensor) -> None:
        wanted, got = (t.to_dense() if t.layout != torch.strided else t for t in (wanted, got))
        wanted = wanted.to(got.dtype).float()
        got = got.float()
        beyond = wanted.abs() > torch.finfo(self.case.low).max
        error = (got - wanted).abs()
        error[(got == wanted) | (got.isnan() & wanted.isnan()) | beyond] = 0
        size = wanted.abs()
        finite = size[size.isfinite()]
        floor = (
            self.eps * (finite.mean() if finite.numel() else 0) + torch.finfo(self.case.low).smallest_normal
        )
        if part == "gradients":
            floor += self.eps * MEAN_COTANGENT
        allowed = 4 * self.eps * size.nan_to_num(0, 0, 0) + floor
        if bool((error <= allowed).all()):
            return
        allowed += 4 * self._spread(part, index, wanted)
        bad = ~(error <= allowed)
        if bool(bad.any()):
            at = int(bad.flatten().nonzero()[0])
            a, b, c = (t.flatten()[at].item() for t in (got, wanted, allowed))
            raise Finding(
                f"{part}[{index}]: {a:.6g} instead of {b:.6g} +- {c:.3g} ({int(bad.sum())} of {bad.numel()})"
            )

    def check_discrete(self, part: str, index: int, got: torch.Tensor, wanted: torch.Tensor) -> None:
        """Integers and booleans may differ only where they differ between perturbed references as well."""
        free = torch.zeros(wanted.shape, dtype=torch.bool, device=wanted.device)
        for other in self._perturbed():
            if getattr(other, part)[index].shape != wanted.shape:
                return
            free |= getattr(other, part)[index] != wanted
        if got.shape != wanted.shape or bool(((got != wanted) & ~free).any()):
            raise Finding(f"{part}[{index}]: {got.dtype} values differ")

    def _spread(self, part: str, index: int, wanted: torch.Tensor) -> torch.Tensor:
        spread = torch.zeros_like(wanted)
        for other in self._perturbed():
            value = getattr(other, part)[index]
            if value is None or value.shape != wanted.shape:
                return torch.full_like(wanted, torch.inf)
            value = value.to_dense() if value.layout != torch.strided else value
            change = (value.to(wanted.dtype) - wanted).abs()
            spread = torch.maximum(spread, change.nan_to_num(torch.inf))
        return spread

    def _perturbed(self) -> list[Result]:
        if self.perturbed is None:
            with rounding(self.case):
                self.perturbed = [self._run_moved(seed) for seed in range(PERTURBATIONS)]
        return self.perturbed

    def _run_moved(self, seed: int) -> Result:
        generator = torch.Generator().manual_seed(seed)

        def move(t: torch.Tensor) -> torch.Tensor:
            sign = (torch.randint(0, 2, t.shape, generator=generator) * 2 - 1).to(t.device)
            return t * (1 + self.eps * sign) if t.dtype == torch.float32 else t

        return run(self.case.model, self.case, [move(t) for t in self.inputs], move)
