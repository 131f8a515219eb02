"""Warns about a training loop without the loss scaler or without the graph, or that scales the loss twice."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._compat import is_recording, is_scaled_by_grad_scaler
from ..errors import warn_user
from ..proxy.all_parameters import all_parameters
from .distributed import local
from .nested_optimizers import is_inside, nested
from .optimizer_steps import tell_after_steps
from .parameter_index import ParameterIndex

_CALLS = 10
_LAST_CALL = 1 << 12
_VALUES = 8


class UnscaledStepWarning:
    """Warns once about each optimizer that steps without the scaler, and once about steps by hand.

    A hook of torch runs after the step of any optimizer. It reads an optimizer's parameters once, and again
    when the optimizer gets more. A call of the model detects steps by hand from changed values: at each of
    the first calls, then less and less often.

    Args:
        model: The model; its parameters are looked up each time, because wrappers replace them.
        slots: The index of the model's parameters.
    """

    def __init__(self, model: nn.Module, slots: ParameterIndex):
        self._model, self._slots = model, slots
        self._is_listening = False
        self._values: tuple[tuple[int, ...], Tensor] | None = None
        self._calls = 0
        self._was_asked = self._saw_backward = self._has_told = self._is_scaled_twice = False
        self._saw_backward_since = False
        self._forget_optimizers()

    def _forget_optimizers(self) -> None:
        self._strangers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._told: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def asked(self, is_alone: bool) -> None:
        """Records that the loop asks the scaler; warns if it trains this model alone, and without a call."""
        self._was_asked = True
        self._values = None
        if self._is_listening or self._has_told or not is_alone:
            return
        # `torch.distributed.checkpoint` steps once with gradients of zeros, to create the optimizer's state.
        if any(p.grad is not None and _has_values(p.grad) for p in all_parameters(self._model)):
            self._tell(
                f"{type(self._model).__name__} has gradients, and the converted model was not called with "
                "gradients: convert captures forward alone. Other methods that call layers (amp.loss(x)), "
                "and modules that the loop calls, run in the source's dtypes; ampgraph.convert_blocks "
                "converts modules in place."
            )

    def check(self) -> None:
        """Called before the model runs with gradients."""
        if not self._is_listening:
            self._is_listening = True
            tell_after_steps(self)
        if self._was_asked or self._has_told or not self._saw_backward_since:
            return
        self._saw_backward_since = False  # pruning changes parameters, too
        self._calls += 1
        if self._is_call_to_check() and self._has_changed():
            self._tell(
                "ampgraph scales the loss of this model, but the loop changes its parameters after every "
                "backward, overflow or not, and the scale never adapts. Call "
                "amp.scaler.step(optimizer) and amp.scaler.update(), or before the loop, once: "
                "amp.scaler.attach(optimizer)"
            )

    def _is_call_to_check(self) -> bool:
        calls = self._calls
        return calls <= _CALLS or (calls <= _LAST_CALL and calls & (calls - 1) == 0)

    def note_backward(self) -> None:
        """Called during each backward through the model's boundary."""
        self._saw_backward_since = True
        if self._saw_backward:
            return
        self._saw_backward = True
        if not self._was_asked and is_scaled_by_grad_scaler():
            self._is_scaled_twice = True
            self._tell(
                "a torch.amp.GradScaler multiplies the loss of this converted model, whose graph scales "
                "by itself: with both, gradients overflow at every step. Put amp.scaler in its place, "
                "or convert with Policy(loss_scale=ampgraph.NoLossScale())."
            )

    def after_step(self, optimizer: Optimizer, parameters: set[int]) -> None:
        """Called after the step of any optimizer."""
        if is_inside(optimizer) or not self._saw_backward or self._is_scaled_twice:
            return
        if optimizer in self._told or self._asks_within(optimizer):
            return
        if self._strangers.get(optimizer) == len(parameters):
            return
        if self._holds_own(optimizer):
            self._told.add(optimizer)
            self._tell(
                f"ampgraph scales the loss of this model, but {type(optimizer).__name__}.step() happens "
                "after every backward, overflow or not, and the scale never adapts. Before the loop, add: "
                "amp.scaler.attach(optimizer)"
            )
        else:
            self._strangers[optimizer] = len(parameters)

    def _asks_within(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer inside this one is attached to the scaler: the one that SAM updates with."""
        scalers = (scaler for one in nested(optimizer) for scaler in vars(one).get("_amp_scalers", ()))
        return any(scaler._watch is self for scaler in scalers)

    def _holds_own(self, optimizer: Optimizer) -> bool:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(slot is not None for slot in self._slots.of(parameters)):
            return True
        own = {id(p) for p in all_parameters(self._model)}  # includes parameters added after the conversion
        return any(id(p) in own for p in parameters)

    def _has_changed(self) -> bool:
        found = {id(p): local(p).detach().reshape(-1) for p in all_parameters(self._model) if p.requires_grad}
        found = {number: p for number, p in found.items() if p.numel() and p.device.type != "meta"}
        watched = list(found.values())
        if not watched or any(is_recording(p.device) for p in watched):
            return False
        values = torch.cat([p[:: -(-p.numel() // _VALUES)].to(watched[0].device) for p in watched])
        before, self._values = self._values, (tuple(found), values)
        # FSDP2 shows its shards and the whole parameters in turn.
        if before is None or before[0] != tuple(found) or before[1].shape != values.shape:
            return False
        return not torch.equal(before[1].to(values.device), values)

    def _tell(self, message: str) -> None:
        self._has_told, self._values = True, None
        warn_user(message)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_is_listening": False, "_strangers": None, "_told": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget_optimizers()


def _has_values(gradient: Tensor) -> bool:
    """Whether a gradient is not all zeros; one whose values nobody may read now counts."""
    gradient = local(gradient).detach()
    if gradient.device.type == "meta" or is_recording(gradient.device):
        return True
    return bool((gradient._values() if gradient.is_sparse else gradient).count_nonzero())
