"""Every op of torch's own operator tests as a model of one op, and what must hold of its conversion.

`torch.testing._internal`'s ``op_db`` has samples for each op. A sample becomes a model in several forms, which differ
in what reaches the op in low precision; `check` converts one and compares it with the float32 model.

The tolerance follows from dtype and conditioning. The reference is the source in float32, on values rounded
where the form rounds them. An element of a result may differ from it by

    4 * (eps * |reference| + spread) + eps * mean |reference|

where ``spread`` is the largest change of the element when every floating input of the reference moves by
``+-eps`` of itself, and ``eps`` is that of the low dtype if some node runs low or some input is low, else
the two must be equal bit for bit.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import ampgraph
from ampgraph import NoLossScale, Policy
from ampgraph.passes import is_inserted_cast

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# Of others than float32 nothing is to be touched.
OTHER_DTYPES = (torch.float64, torch.complex64, torch.int64, torch.bool)
FORMS = ("float32", "low inputs", "mixed inputs", "after low", "first low", "rest low", "between low")
PERTURBATIONS, MEAN_COTANGENT = 4, 1.0
_INTO = {
    "after low": lambda i: True,
    "between low": lambda i: True,
    "first low": lambda i: i == 0,
    "rest low": lambda i: i > 0,
}
_LOW_INPUTS = {"low inputs": lambda i: True, "mixed inputs": lambda i: i == 0}


class Low(nn.Module):
    """A copy that a rule makes low; in the reference it rounds and stays float32."""

    rounds_to: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone() if self.rounds_to is None else x.to(self.rounds_to).to(x.dtype)


class OneOp(nn.Module):
    """One op over the tensors of a sample; everything else about the call is fixed."""

    def __init__(self, function: Callable, call: Any, form: str) -> None:
        super().__init__()
        self.function = function
        leaves, self.spec = tree_flatten(call)
        self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.positions = [i for i, _ in tensors]
        floats = [k for k, (_, t) in enumerate(tensors) if t.dtype == torch.float32]
        chosen = _INTO.get(form, lambda i: False)
        self.through_low = {k for i, k in enumerate(floats) if chosen(i)}
        self.low_after = form == "between low"
        if self.through_low:
            self.low = Low()

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.leaves)
        for k, (position, tensor) in enumerate(zip(self.positions, tensors, strict=True)):
            leaves[position] = self.low(tensor) if k in self.through_low else tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        result = self.function(*args, **kwargs)
        if not self.low_after:
            return result
        leaves, spec = tree_flatten(result)
        return tree_unflatten([self.low(x) if _is_float(x) else x for x in leaves], spec)


@dataclass
class Case:
    """One sample in one form.

    Attributes:
        model: The op as a model.
        inputs: Its tensors, as the form has them.
        low: The low dtype.
        random: Whether the op draws random numbers, so that values are not compared.
        differentiable: Whether gradients are compared too.
    """

    model: OneOp
    inputs: list[torch.Tensor]
    low: torch.dtype
    random: bool = False
    differentiable: bool = False


class Unusable(Exception):
    """The source model does not run in this form: nothing to convert."""


class Finding(AssertionError):
    """A conversion that breaks a promise."""


class KernelError(Finding):
    """A result outside the tolerance that torch's low-precision kernel gives by itself."""


class TorchError(Exception):
    """Fails in the same way without ampgraph: exported by ``torch.export`` and run."""


def make_case(function: Callable, call: Any, form: str, low: torch.dtype, grad: bool) -> Case:
    """Builds the model and its inputs for one sample.

    Raises:
        Unusable: The source refuses the form, or the form is that of another.
    """
    model = OneOp(function, call, form)
    inputs = [leaf.detach().clone() for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    floats = [i for i, t in enumerate(inputs) if t.dtype == torch.float32]
    if form != "float32" and not floats:
        raise Unusable("no float32 tensor in the sample")
    if form in ("first low", "rest low", "mixed inputs") and len(floats) < 2:
        raise Unusable("one float32 tensor only")
    for order, i in enumerate(floats):
        if form in _LOW_INPUTS and _LOW_INPUTS[form](order):
            inputs[i] = inputs[i].to(low)
    case = Case(model, inputs, low, differentiable=grad)
    try:
        one, other = run(model, case), run(model, case, seed=1)
        case.random = not all(map(_same, one.outputs, other.outputs))
    except Exception as error:
        raise Unusable(f"{type(error).__name__}: {first_line(error)}") from error
    return case


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
        if reason := exported_fails(case):
            raise TorchError(reason) from error
        raise


def exported_fails(case: Case) -> str | None:
    """Returns why the source, exported and run without ampgraph, fails or is not what its graph says."""
    leaves = _leaves(case, case.inputs)
    try:
        with _quiet():
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
    amp = ampgraph.convert(case.model, tuple(_leaves(case, case.inputs)), policy=policy)
    return _compare(amp, case, check_graph(amp.graph_module, case))


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
    return same_bits(a.double(), b.double()) if _is_float(a) and _is_float(b) else _same(a, b)


@dataclass
class Result:
    """What one run gave: flat outputs and the gradients of the floating inputs (None: no gradient)."""

    outputs: list[Any]
    gradients: list[torch.Tensor | None]


def run(
    model: Callable,
    case: Case,
    inputs: list[torch.Tensor] | None = None,
    move: Callable | None = None,
    seed: int = 0,
) -> Result:
    """Runs forward and, where the case asks for it, backward with fixed cotangents (moved by ``move``)."""
    torch.manual_seed(seed)
    leaves = _leaves(case, inputs or case.inputs)
    with _quiet():
        outputs = tree_leaves(model(*leaves))
    ends = [t for t in outputs if _is_float(t) and t.requires_grad]
    if not case.differentiable or not ends:
        return Result(outputs, [])
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.rand(t.shape, generator=generator).add(0.5).to(case.low).to(t.dtype) for t in ends]
    cotangents = [move(t) for t in cotangents] if move else cotangents
    with _quiet():
        gradients = torch.autograd.grad(ends, [t for t in leaves if t.requires_grad], cotangents, allow_unused=True)
    return Result([t.detach() if isinstance(t, torch.Tensor) else t for t in outputs], list(gradients))


def _leaves(case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [t.detach().clone() for t in tensors]
    return [t.requires_grad_(case.differentiable and _is_float(t)) for t in leaves]


def check_graph(graph_module: fx.GraphModule, case: Case) -> bool:
    """Checks that real kernels yield the recorded dtypes; returns whether anything at all runs low."""
    casts = [n for n in graph_module.graph.nodes if is_inserted_cast(n)]
    for node in casts:
        if node.args[0].meta["val"].dtype not in (torch.float32, case.low):
            raise Finding(f"casts a {node.args[0].meta['val'].dtype} tensor")
    with torch.no_grad(), _quiet():
        torch.manual_seed(0)
        _DtypeChecker(graph_module).run(*[t.clone() for t in case.inputs])
    dtypes = {t.dtype for n in graph_module.graph.nodes for t in tree_leaves(n.meta.get("val")) if _is_tensor(t)}
    return case.low in dtypes


class _DtypeChecker(fx.Interpreter):
    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if node.op != "call_function" or "val" not in node.meta:
            return result
        for real, fake in zip(tree_leaves(result), tree_leaves(node.meta["val"]), strict=True):
            if _is_tensor(real) and real.dtype != fake.dtype:
                raise Finding(f"{node.name} is recorded as {fake.dtype} and yields {real.dtype}")
        return result


def _compare_types(actual: list, expected: list) -> None:
    if len(actual) != len(expected):
        raise Finding(f"{len(actual)} results instead of {len(expected)}")
    for got, wanted in zip(actual, expected, strict=True):
        if _is_tensor(got) != _is_tensor(wanted):
            raise Finding(f"{type(got).__name__} instead of {type(wanted).__name__}")
        if not _is_tensor(got):
            continue
        if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
            raise Finding(f"{got.dtype}{list(got.shape)} instead of {wanted.dtype}{list(wanted.shape)}")


def _compare_bits(actual: Result, expected: Result) -> None:
    for part in ("outputs", "gradients"):
        for got, wanted in zip(getattr(actual, part), getattr(expected, part), strict=True):
            if _is_tensor(got) and not same_bits(got, wanted):
                raise Finding(f"{part}: nothing runs low, yet values differ")
            if not _is_tensor(got) and got != wanted:
                raise Finding(f"{part}: {got!r} instead of {wanted!r}")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN where NaN."""
    if a.is_quantized or a.is_nested:
        return a.dtype == b.dtype
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _compare_values(actual: Result, case: Case) -> None:
    with _rounding(case):
        wide = [t.float() if t.dtype == case.low else t for t in case.inputs]
        reference = run(case.model, case, inputs=wide)
        bounds = _Bounds(case, wide, reference)
    for part in ("outputs", "gradients"):
        pairs = zip(getattr(actual, part), getattr(reference, part), strict=True)
        for index, (got, wanted) in enumerate(pairs):
            if not (_is_tensor(got) and _is_tensor(wanted)) or not wanted.numel():
                continue
            if not _is_float(wanted):
                if not _is_complex(wanted) and not torch.equal(got, wanted):
                    bounds.check_discrete(part, index, got, wanted)
                continue
            bounds.check(part, index, got, wanted)


def _same(a: Any, b: Any) -> bool:
    return same_bits(a, b) if _is_tensor(a) else a == b


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
        error = (got - wanted).abs()
        error[(got == wanted) | (got.isnan() & wanted.isnan())] = 0
        size = wanted.abs()
        finite = size[size.isfinite()]
        floor = self.eps * (finite.mean() if finite.numel() else 0) + torch.finfo(self.case.low).smallest_normal
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
            raise Finding(f"{part}[{index}]: {a:.6g} instead of {b:.6g} +- {c:.3g} ({int(bad.sum())} of {bad.numel()})")

    def check_discrete(self, part: str, index: int, got: torch.Tensor, wanted: torch.Tensor) -> None:
        """Integers and booleans may differ only where they differ between perturbed references as well."""
        free = torch.zeros(wanted.shape, dtype=torch.bool)
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
            with _rounding(self.case):
                self.perturbed = [self._run_moved(seed) for seed in range(PERTURBATIONS)]
        return self.perturbed

    def _run_moved(self, seed: int) -> Result:
        generator = torch.Generator().manual_seed(seed)

        def move(t: torch.Tensor) -> torch.Tensor:
            sign = torch.randint(0, 2, t.shape, generator=generator) * 2 - 1
            return t * (1 + self.eps * sign) if t.dtype == torch.float32 else t

        return run(self.case.model, self.case, [move(t) for t in self.inputs], move)


@contextlib.contextmanager
def _rounding(case: Case) -> Iterator[None]:
    if not case.model.through_low:
        yield
        return
    case.model.low.rounds_to = case.low
    try:
        yield
    finally:
        case.model.low.rounds_to = None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _is_complex(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_complex
