"""Every op of torch's own operator tests as a model of one op: the forms in which it is converted.

``op_db`` of ``torch.testing._internal`` has samples for each op. A sample becomes a model in several forms,
which differ in what reaches the op in low precision; `one_op_checks` converts them.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# Of others than float32 nothing is to be touched.
OTHER_DTYPES = (torch.float64, torch.complex64, torch.int64, torch.bool)
# Where the ops run; `tools/op_sweep.py --device` changes it.
DEVICE = "cpu"
FORMS = (
    "float32",
    "low inputs",
    "mixed inputs",
    "after low",
    "first low",
    "rest low",
    "between low",
    "in place",
)
# Inputs near the ends of float16's range: squares just fit, or are below its smallest normal number.
RANGE_FORMS = {"large": 200.0, "small": 1 / 200}
_INTO = {
    "after low": lambda i: True,
    "between low": lambda i: True,
    "in place": lambda i: True,
    "large": lambda i: True,
    "small": lambda i: True,
    "first low": lambda i: i == 0,
    "rest low": lambda i: i > 0,
}
_LOW_INPUTS = {"low inputs": lambda i: True, "mixed inputs": lambda i: i == 0}


@cache
def op_db() -> list[Any]:
    """Returns torch's operator tests; their import takes seconds."""
    from torch.testing._internal import common_methods_invocations as op_tests

    # Samples of random ops reset the seed around each call, which would hide that they are random.
    op_tests.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return op_tests.op_db


class Low(nn.Module):
    """A copy that a rule makes low; in the reference it rounds and stays float32."""

    rounds_to: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rounds_to is None or x.layout != torch.strided:
            return x.clone()
        return x.to(self.rounds_to).to(x.dtype)


class OneOp(nn.Module):
    """One op over the tensors of a sample; everything else about the call is fixed."""

    def __init__(self, function: Callable, call: Any, form: str) -> None:
        super().__init__()
        self.function, self.call_id = function, (function, id(call))
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
        return tree_unflatten([self.low(x) if is_float(x) else x for x in leaves], spec)


@dataclass
class Case:
    """One sample in one form.

    Attributes:
        model: The op as a model.
        inputs: Its tensors, as the form has them.
        low: The low dtype.
        random: Whether the op draws random numbers, so that values are not compared.
        differentiable: Whether gradients are compared too.
        scaled: Whether its values lie near the ends of float16's range.
    """

    model: OneOp
    inputs: list[torch.Tensor]
    low: torch.dtype
    random: bool = False
    differentiable: bool = False
    scaled: bool = False


class Unusable(Exception):
    """The source model does not run in this form: nothing to convert."""


def make_case(
    function: Callable | None,
    call: tuple[tuple, dict],
    form: str,
    low: torch.dtype,
    grad: bool,
    uninitialized: bool = False,
) -> Case:
    """Builds the model and its inputs for one sample.

    Args:
        function: The op, or None if it has no such form.
        call: Its arguments and keyword arguments.
        form: One of `FORMS` or `RANGE_FORMS`.
        low: The low dtype.
        grad: Whether the op has a backward.
        uninitialized: Whether the values of its result mean nothing.

    Raises:
        Unusable: The source refuses the form, or the form is that of another.
    """
    if function is None:
        raise Unusable("the op has no such form")
    model = OneOp(function, call, form)
    inputs = [leaf.detach().clone() for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    floats = [i for i, t in enumerate(inputs) if t.dtype == torch.float32]
    if form != "float32" and not floats:
        raise Unusable("no float32 tensor in the sample")
    if form in ("first low", "rest low", "mixed inputs") and len(floats) < 2:
        raise Unusable("one float32 tensor only")
    scale = RANGE_FORMS.get(form, 1.0)
    for order, i in enumerate(floats):
        inputs[i] = inputs[i] * scale
        if form in _LOW_INPUTS and _LOW_INPUTS[form](order):
            inputs[i] = inputs[i].to(low)
    case = Case(model, inputs, low, differentiable=grad, scaled=form in RANGE_FORMS)
    try:
        if DEVICE != "cpu":
            _try_on_cpu(model, inputs)
        one, other = run(model, case), run(model, case, seed=1)
        case.random = uninitialized or not all(map(same, one.outputs, other.outputs))
    except Exception as error:
        if grad and "not differentiable with respect to" in str(error):  # running statistics: forward only
            return make_case(function, call, form, low, grad=False)
        raise Unusable(f"{type(error).__name__}: {first_line(error)}") from error
    return case


def _try_on_cpu(model: OneOp, inputs: list[torch.Tensor]) -> None:
    """Raises an error for values that an op refuses: a GPU would refuse all calls after one of them."""
    wide = [t.float() if is_float(t) else t for t in inputs]
    with torch.no_grad(), quiet():
        model(*(t.detach().cpu() for t in wide))


def op_names() -> list[str]:
    """Names of all entries of op_db, variants included."""
    return [name_of(op) for op in op_db()]


def name_of(op: Any) -> str:
    """Returns ``"max.reduction_with_dim"``: the op's name and the variant's."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def cases_of(op: Any, samples: int) -> Iterator[tuple[Callable[[], Case], str]]:
    """Yields, for each form of a few samples of an op, what builds the case, and where it comes from.

    The two low dtypes of a form follow each other: they may share a capture.
    """
    for dtype in (torch.float32, *OTHER_DTYPES):
        if dtype not in op.supported_dtypes(DEVICE):
            continue
        grad = op.supports_autograd and dtype in op.supported_backward_dtypes(DEVICE)
        empty = "empty" in op.name
        if dtype is not torch.float32:
            for call in _calls(op, dtype, 1):
                yield (
                    partial(make_case, op.op, call, "float32", torch.float16, grad, empty),
                    f"{dtype} sample",
                )
            continue
        for index, call in enumerate(_calls(op, dtype, samples)):
            forms = [(form, low) for form in FORMS for low in DTYPES]
            forms += [(form, "float16") for form in RANGE_FORMS] if index == 0 else []
            for form, low in forms:
                function = _on_a_copy(op.inplace_variant) if form == "in place" else op.op
                make = partial(make_case, function, call, form, DTYPES[low], grad, empty)
                yield make, f"sample {index}, {form}, {low}"


@cache
def _on_a_copy(function: Callable | None) -> Callable | None:
    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        copied = first + 0
        function(copied, *args, **kwargs)  # type: ignore[misc]
        return copied

    return call if function else None


def _calls(op: Any, dtype: torch.dtype, limit: int) -> list[tuple[tuple, dict]]:
    """Returns (args, kwargs) of up to ``limit`` samples, evenly spread over torch's own."""
    torch.manual_seed(0)
    random.seed(0)
    found = list(op.sample_inputs(DEVICE, dtype))
    if len(found) > limit:
        found = [found[round(i * (len(found) - 1) / max(limit - 1, 1))] for i in range(limit)]
    return [((sample.input, *sample.args), sample.kwargs) for sample in found]


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
    leaves = leaves_of(case, inputs or case.inputs)
    with quiet():
        outputs = tree_leaves(model(*leaves))
    ends = [t for t in outputs if is_float(t) and t.requires_grad]
    if not case.differentiable or not ends:
        return Result(outputs, [])
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.rand(t.shape, generator=generator).add(0.5).to(case.low) for t in ends]
    cotangents = [c.to(t.device, t.dtype) for c, t in zip(cotangents, ends, strict=True)]
    cotangents = [move(t) for t in cotangents] if move else cotangents
    with quiet():
        gradients = torch.autograd.grad(
            ends, [t for t in leaves if t.requires_grad], cotangents, allow_unused=True
        )
    return Result([t.detach() if isinstance(t, torch.Tensor) else t for t in outputs], list(gradients))


def leaves_of(case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns copies that require gradients where the case asks for them."""
    leaves = [t.detach().clone() for t in tensors]
    return [t.requires_grad_(case.differentiable and is_float(t)) for t in leaves]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN where NaN."""
    if a.is_quantized or a.is_nested:
        return a.dtype == b.dtype
    if a.layout != torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def same(a: Any, b: Any) -> bool:
    """Whether two leaves of a result are equal."""
    return same_bits(a, b) if is_tensor(a) else a == b


@contextlib.contextmanager
def rounding(case: Case) -> Iterator[None]:
    """Lets the source round, staying float32, where the form has low values."""
    if not case.model.through_low:
        yield
        return
    case.model.low.rounds_to = case.low
    try:
        yield
    finally:
        case.model.low.rounds_to = None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    return (str(error).strip().splitlines() or [""])[0]


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def is_complex(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_complex
