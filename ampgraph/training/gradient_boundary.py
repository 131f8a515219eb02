"""The boundary of a converted graph: where gradients are scaled on entry, and unscaled and checked on exit.

Both are plain ``autograd.Function`` calls and nodes of the graph. Eager mode runs them, and AOTAutograd
traces the same arithmetic into the backward graph of every backend: ``tangent * scale`` at each output,
``gradient * inverse`` and a finite check at each parameter and differentiable input.

The gradient of the *probe* carries the result of the finite checks. The probe is a vector with one element
per parameter and one for the inputs. Autograd adds the flags over micro-batches, sub-graphs and repeated
uses, without a write in place. `training.scaler.LossScaler` reads them.

The forward reads the scale, and no code writes the scale in place. So a backward always multiplies and
divides by the same number, even if the scaler has changed the scale since.

Another node reads the low copies of parameters (`ampgraph.training.low_copies`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.fx import traceback as fx_traceback

from .._compat import (
    flag_if_not_finite,
    is_batched,
    is_compiling,
    native_apply,
    never_compiled,
    returns_no_argument,
    unscale_and_flag,
)
from ..guards import is_capturing
from ..marks import BoundaryRole
from .compiler_traces import is_for_a_compiler
from .low_copies import shadow_weights, shadow_weights_eagerly
from .new_gradients import forget_new, is_new
from .scale_state import CHECKED

# A trace carries an annotation onto every node made inside it.
_ROLE_KEY = "ampgraph_boundary"
_NOT_TRACED = nullcontext()
# Of a mean size: an H200 reads 2**22 float32 values in about 4 microseconds, the time of a kernel's launch.
IN_PLACE_ELEMENTS = 2**22


class ScaleGradients(Function):
    """Identity whose backward multiplies by the scale; on the graph's outputs."""

    @staticmethod
    @returns_no_argument
    def forward(ctx: Any, scale: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        views = tuple(t.detach() for t in outputs)  # a view would refuse in-place writes such as loss /= 4
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(v for v, n in zip(views, needed, strict=True) if not n))
        return views

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with _role("scale"):
            return None, *(None if g is None else scaled(g, ctx.scale) for g in grads)


class UnscaleGradients(Function):
    """Identity whose backward multiplies by 1/scale and reports non-finite gradients to the probe.

    Args of ``forward``: the probe, 1/scale, the slot of each tensor in the probe, the tensors. The slots
    ascend and are text, because Dynamo makes integers dynamic if they differ between calls.
    """

    @staticmethod
    @returns_no_argument
    def forward(ctx: Any, probe: Tensor, inverse: Tensor, slots: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.inverse, ctx.slots, ctx.size = inverse, slots, probe.shape[0]
        ctx.fuses = is_for_a_compiler()
        ctx.checked = None if is_compiling() else getattr(probe, CHECKED, None)
        ctx.set_materialize_grads(False)
        views = tuple(t.detach() for t in tensors)
        needed = ctx.needs_input_grad[3:]
        ctx.mark_non_differentiable(*(v for v, n in zip(views, needed, strict=True) if not n))
        return views

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        given = [g for g in grads if g is not None]
        if not given:
            return None, None, None, *grads
        slots = [int(s) for s, g in zip(ctx.slots.split(), grads, strict=True) if g is not None]
        if not ctx.fuses and _pays_in_place(given):
            found = unscaled_in_place(given, slots, ctx.size, ctx.inverse)
            if ctx.checked is not None:
                ctx.checked.note(slots, given)
            return found, None, None, *grads
        by_vmap = _is_batched(given)
        with _role("unscale"):
            true = unscaled(given, ctx.inverse, ctx.fuses or by_vmap)
        results = iter(true)
        flags = None
        # Only torch.autograd.grad takes batches of gradients, and it does not add to the probe.
        if not by_vmap:
            with _role("finite check"):
                flags = non_finite(true, slots, ctx.size, ctx.fuses, are_new=not _counts_once())
            if ctx.checked is not None:
                ctx.checked.note(slots, true)
        return flags, None, None, *(None if g is None else next(results) for g in grads)


class _Times(Function):
    """Multiplies gradients that cross the boundary by a factor; its own backward is `_Once`.

    Inside, gradients of every order are scaled. A second derivative enters where a gradient left. There the
    chain rule gives it the factor 1/scale, and the scaling of what enters the factor scale: both cancel, also
    at the other border. A third derivative crosses as a first one.
    """

    @staticmethod
    def forward(ctx: Any, factor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.factor = factor
        ctx.set_materialize_grads(False)
        return tuple((t * factor).to(t.dtype) for t in tensors)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_applied(_Once, ctx.factor, grads)


class _Once(Function):
    """Identity for the gradients of `_Times`, which multiplies their own gradients by its factor."""

    @staticmethod
    def forward(ctx: Any, factor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.factor = factor
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_applied(_Times, ctx.factor, grads)


def _applied(function: type[Function], factor: Tensor, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Applies one of both to the gradients that are there."""
    results = iter(function.apply(factor, *[g for g in grads if g is not None]))
    return [None if g is None else next(results) for g in grads]


def scaled(grad: Tensor, scale: Tensor) -> Tensor:
    """Returns a gradient that enters the graph, scaled."""
    if _counts_once():
        return _Times.apply(scale, grad)[0]
    return (grad * scale).to(grad.dtype)


def unscaled(grads: list[Tensor], inverse: Tensor, one_by_one: bool) -> Sequence[Tensor]:
    """Returns gradients that leave the graph, unscaled.

    Neither AOTAutograd nor vmap has a kernel for many; a compiler fuses a single product with the check.
    """
    if _counts_once():
        return _Times.apply(inverse, *grads)
    if one_by_one or any(g.is_sparse for g in grads):
        return [g * inverse for g in grads]
    return torch._foreach_mul(grads, inverse)


def _pays_in_place(grads: Sequence[Tensor]) -> bool:
    """Whether gradients may be written, and are so large that a kernel each costs less than a second read."""
    if _counts_once() or not all(map(is_new, grads)):
        return False
    return sum(g.numel() for g in grads) >= IN_PLACE_ELEMENTS * len(grads)


def unscaled_in_place(grads: Sequence[Tensor], slots: Sequence[int], size: int, inverse: Tensor) -> Tensor:
    """Unscales gradients where they are, and returns their flags as `non_finite` does.

    One kernel reads each gradient once. Lists take two kernels for many gradients, and read them twice. The
    kernel looks before it multiplies, as under ``torch.amp.GradScaler``: with a scale below 1 the product of
    a finite gradient may overflow, and no flag tells.
    """
    flags = torch.zeros(size, device=grads[0].device)
    for grad, slot in zip(grads, slots, strict=True):
        forget_new(grad)
        unscale_and_flag(grad, flags[slot : slot + 1], inverse)
    return flags


def non_finite(
    tensors: Sequence[Tensor],
    slots: Sequence[int],
    size: int,
    fuses: bool = False,
    are_new: bool = False,
) -> Tensor:
    """Returns a float32 vector of ``size`` elements, 1 in the slots whose tensors are not all finite.

    Args:
        tensors: The tensors.
        slots: The slot of each; they ascend, and several tensors may have the same one.
        size: The number of slots.
        fuses: Whether a compiler fuses this arithmetic with what stands around it.
        are_new: Whether nobody else has the tensors yet, so that a kernel may write to them.
    """
    # An empty tensor is finite, but torch has no infinity norm of it.
    given = [(t._values() if t.is_sparse else t, slot) for t, slot in zip(tensors, slots, strict=True)]
    given = [(t, slot) for t, slot in given if t.numel()]
    if not given:
        return torch.zeros(size, device=tensors[0].device)
    values, slots = [t for t, _ in given], [slot for _, slot in given]
    if not fuses and all(map(_is_plain_on_cpu, values)):
        flags = _flags_on_cpu(values, are_new)
    else:  # not below infinity: infinity and NaN
        flags = (~(_peaks(values, fuses).detach() < math.inf)).to(torch.float32)
    # Slices and no index, which would have to travel to the device.
    pieces, first, end = [], 0, 0
    for slot, count, length in _runs(slots):
        of_run = flags if length * count == len(values) else flags[first : first + length * count]
        pieces += [flags.new_zeros(slot - end)] if slot > end else []
        pieces.append(of_run if count == 1 else of_run.amax(0, keepdim=True))
        first, end = first + length * count, slot + length
    pieces += [flags.new_zeros(size - end)] if size > end else []
    return torch.cat(pieces)


def _is_plain_on_cpu(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.is_floating_point()


def _flags_on_cpu(tensors: Sequence[Tensor], are_new: bool) -> Tensor:
    """Returns 1 for each tensor that is not finite, else 0.

    A CPU takes several times as long for the infinity norm, whose kernel has no vector instructions there.
    """
    on_cpu: Any = {"dtype": torch.float32, "device": "cpu"}
    flags, one = torch.zeros(len(tensors), **on_cpu), torch.ones((), **on_cpu)
    for tensor, flag in zip(tensors, flags.unbind(), strict=True):
        flag_if_not_finite(tensor if are_new else tensor.detach().clone(), flag, one)
    return flags


def _peaks(tensors: list[Tensor], fuses: bool) -> Tensor:
    """Returns the largest absolute value of each tensor.

    A compiler fuses each reduction with the product that it reads, and writes its element into the result.
    It would copy the scalars of ``_foreach_norm`` with one kernel each.
    """
    if not fuses:
        return torch.stack(torch._foreach_norm([*tensors], float("inf")))
    return torch.cat([_in_memory_order(t).abs().reshape(-1).amax(0, keepdim=True) for t in tensors])


def _in_memory_order(tensor: Tensor) -> Tensor:
    """Returns a contiguous view of a tensor in channels-last format, so that flattening copies nothing."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1)
    if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return tensor.permute(0, 2, 3, 4, 1)
    return tensor


def _is_batched(tensors: Sequence[Tensor]) -> bool:
    """Whether vmap runs: ``torch.autograd.grad(is_grads_batched=True)``, ``jacobian(vectorize=True)``."""
    return not is_compiling() and any(map(is_batched, tensors))


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields (first slot, how often each occurs, how many slots): neighbours that occur once make one run."""
    if len(set(slots)) == len(slots) == slots[-1] - slots[0] + 1:
        yield slots[0], 1, len(slots)
        return
    counts = [(slot, len(list(same))) for slot, same in itertools.groupby(slots)]
    start = 0
    for i, (slot, count) in enumerate(counts):
        following = counts[i + 1] if i + 1 < len(counts) else None
        if count == 1 and following == (slot + 1, 1):
            continue
        yield counts[start][0], counts[start][1], i + 1 - start
        start = i + 1


def _counts_once() -> bool:
    """Whether this is ``backward(create_graph=True)``."""
    return torch.is_grad_enabled() and not is_compiling()


def role_of(node: torch.fx.Node) -> BoundaryRole | None:
    """Returns ``"scale"``, ``"unscale"`` or ``"finite check"`` for a boundary node of a backward graph."""
    return (node.meta.get("custom") or {}).get(_ROLE_KEY)


def _role(name: BoundaryRole) -> AbstractContextManager:
    """Annotates the nodes that a trace makes inside; in eager mode it does nothing."""
    if is_compiling() or is_capturing():
        return fx_traceback.annotate({_ROLE_KEY: name})
    return _NOT_TRACED


def scale_gradients(scale: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
    """The node at the graph's outputs; see `ScaleGradients`."""
    return ScaleGradients.apply(scale, *outputs)


def unscale_gradients(probe: Tensor, inverse: Tensor, slots: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The node at the graph's parameters and differentiable inputs; see `UnscaleGradients`."""
    return UnscaleGradients.apply(probe, inverse, slots, *tensors)


# What does the same as a node's function in less time, in code that no tracer sees.
EAGERLY: dict[Callable, Callable] = {
    shadow_weights: shadow_weights_eagerly,
    scale_gradients: native_apply(ScaleGradients),
    unscale_gradients: native_apply(UnscaleGradients),
}
