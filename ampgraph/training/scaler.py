"""`LossScaler`: holds the loss scale, skips bad steps and records overflows.

The converted graph applies the scale (`training.gradient_boundary`) and reads it from the scaler. The scaler
has the method names of ``torch.amp.GradScaler``, so loops written for GradScaler run unchanged; `scale`
returns its argument.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._compat import apart_from_dynamo, is_recording
from ..errors import LoopError, PolicyError, warn_user
from ..policy.loss_scale import (
    DynamicLossScale,
    LossScale,
    adapted_by_kernel,
    checked_state,
    in_range,
    new_scale_of,
    within,
)
from ..policy.policy import Policy
from .distributed import check_process_groups
from .gradient_flags import GradientFlags
from .judging import Share, judge_early
from .nested_optimizers import nested, put_inside
from .optimizer_step import attached_step, closure_of, parameters_of, shares, step_unless_bad, stepping
from .overflow import Overflow, overflow_of
from .parameter_index import ParameterIndex
from .partners import PartnerRegistry
from .scale_numbers import ScaleNumbers
from .step_guard import StepGuard
from .step_wrappers import note_wrapper_of
from .unscaled_step_warning import UnscaledStepWarning

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# A scaler that steps an optimizer over several converted models also asks the scalers of the other models.
_all_scalers: PartnerRegistry[LossScaler] = PartnerRegistry()

_RECORDED = (
    "a CUDA graph that is recorded by hand would read the same loss scale in each replay, and skip no step. "
    'Convert with mode="reduce-overhead" and use ampgraph.compile_step, which records CUDA graphs itself; or '
    "train in bfloat16, or with Policy(loss_scale=NoLossScale()). Record inference under torch.no_grad()."
)


class LossScaler(ScaleNumbers):
    """Owns the loss scale of one converted model; ``amp.scaler``.

    Args:
        config: The loss scale, or a policy for whose dtype the device decides, of a model without values.
        model: The model.
        device: Where the state is.

    Attributes:
        state: The tensors that the model's graphs read.
        guard: Decides whether a step is skipped.
    """

    _known: weakref.WeakSet[Optimizer]
    _partners: list[LossScaler]

    def __init__(self, config: LossScale | Policy, model: nn.Module, device: torch.device):
        self._slots = ParameterIndex(model)
        self.names = self._slots.names
        super().__init__(config, model, len(self.names) + 1, device)
        self._watch = UnscaledStepWarning(model, self._slots)
        self._flags = GradientFlags(self._slots, self.state, self._watch)
        self.guard = StepGuard(self._slots, self.state, self._flags)
        self._is_copy = False
        self._forget_optimizers()
        self._enlist()

    @property
    def number(self) -> int:
        """Number of scalers created before. Ranks ask scalers in this order."""
        return self.guard.number

    @property
    def process_groups(self) -> Sequence[ProcessGroup] | None:
        """The ranks that skip a step together.

        None: all ranks of the job, with or without parts of this model. Empty: only this rank. Another value
        raises `PolicyError`.
        """
        return self.guard.process_groups

    @process_groups.setter
    def process_groups(self, groups: Sequence[ProcessGroup] | None) -> None:
        check_process_groups(groups)
        self.guard.process_groups = groups

    # -- the loop --------------------------------------------------------------------------------

    def attach(self, *optimizers: Optimizer) -> LossScaler:
        """Makes ``optimizer.step()`` skip bad steps and update the scale; call it once.

        A step may call a closure several times (LBFGS, SAM). If one evaluation overflows, the whole step is
        undone: parameters and the optimizer's state are copied before the step and restored.

        Returns:
            The scaler, for ``scaler = amp.scaler.attach(optimizer)``.

        Raises:
            PolicyError: An argument is not an optimizer.
        """
        for optimizer in optimizers:
            _check_optimizer(optimizer, "attach takes optimizers")
            if self.is_enabled():
                self._warn_about_strangers(optimizer, "attach")
        self._check_decided("attach")
        for optimizer in optimizers if self.is_enabled() else ():
            note_wrapper_of(stepping(optimizer), optimizer)
            self._attach(stepping(optimizer))
        return self

    def _attach(self, optimizer: Optimizer) -> None:
        if self.guard.is_attached(optimizer):
            return
        self.guard.attach(optimizer)
        for one in nested(optimizer):
            put_inside(one, optimizer)
            if "_amp_scalers" not in vars(one):
                one._amp_scalers = []  # type: ignore[attr-defined]
                one.step = attached_step(one, _scalers_of)  # type: ignore[method-assign]
            one._amp_scalers.append(self)  # type: ignore[attr-defined]

    def scale(self, outputs: Any) -> Any:
        """Returns its argument: the graph scales."""
        return outputs

    @apart_from_dynamo
    def unscale_(self, optimizer: Optimizer) -> None:
        """Checks the gradients now, before they are clipped. They are already unscaled.

        The call is optional: without it, `step` checks the gradients and reads clipped ones again.

        Raises:
            LoopError: ``unscale_`` or ``step`` was already called for this optimizer since the last update.
            PolicyError: The argument is not an optimizer.
        """
        _check_optimizer(optimizer, "unscale_ takes an optimizer")
        if not self.is_enabled():
            return
        optimizer = stepping(optimizer)
        scalers = _all_scalers.with_partners([self], optimizer)
        self._add_partners(scalers)
        for scaler in scalers:
            if scaler.guard.has_stepped(optimizer) and scaler.guard.is_attached(optimizer):
                scaler.update()  # another attached optimizer rests
        judge_early(optimizer, [Share(s.guard, part, s) for s, part in shares(scalers, optimizer)])

    @apart_from_dynamo
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps the optimizer unless its gradients are not finite.

        An optimizer that takes ``found_inf`` (``fused=True``) needs no host sync. Other optimizers need one,
        or one for each evaluation of a closure.

        Returns:
            The result of ``optimizer.step``. For a skipped step what its closure returned first, or None
            without a closure.

        Raises:
            LoopError: The optimizer has stepped since the last `update`.
            PolicyError: The argument is not an optimizer.
        """
        _check_optimizer(optimizer, "step takes an optimizer")
        if not self.is_enabled():
            return optimizer.step(*args, **kwargs)
        known = [self, *vars(optimizer).get("_amp_scalers", ())]
        scalers = _all_scalers.with_partners(known, optimizer, closure_of(args, kwargs) is not None)
        self._check_step(optimizer)
        for scaler in scalers:
            if scaler.guard.has_stepped(optimizer) and scaler.guard.is_attached(optimizer):
                scaler.update()
        self._add_partners(scalers)
        return step_unless_bad(scalers, optimizer, optimizer.step, *args, **kwargs)

    def _add_partners(self, scalers: Sequence[LossScaler]) -> None:
        self._partners += [s for s in scalers if s is not self and s not in self._partners]

    def _check_step(self, optimizer: Optimizer) -> None:
        if self._is_copy:
            self._is_copy = False
            warn_user(
                "amp.scaler.step: this scaler is a copy, and no converted model reads its scale. Use the "
                "scaler of the model, and copy the state with load_state_dict(scaler.state_dict())."
            )
        if optimizer not in self._known:
            self._known.add(optimizer)
            self.guard.note_optimizer(optimizer)
            if all(p.grad is None for p in parameters_of(optimizer)):  # others have a loss of their own
                self._warn_about_strangers(optimizer, "step")
        is_dynamic = isinstance(self.config, DynamicLossScale)
        if is_dynamic and self.guard.has_stepped(optimizer) and not self.guard.is_attached(optimizer):
            raise LoopError(
                f"step was already called for this {type(optimizer).__name__} since the last update; after "
                "each round of steps, call amp.scaler.update()."
            )

    def _warn_about_strangers(self, optimizer: Optimizer, method: str) -> None:
        parameters = parameters_of(optimizer)
        if not parameters or len(_all_scalers.with_partners([self], optimizer, before=True)) > 1:
            return
        if any(slot is not None for slot in self._slots.of(parameters)):
            return
        if not any(map(self._slots.is_of_model, parameters)):
            warn_user(
                f"amp.scaler.{method}: none of the {len(parameters)} parameters of this "
                f"{type(optimizer).__name__} belongs to this model. Inputs of the model and copies of its "
                "parameters may be stepped so; else it is the optimizer of another model."
            )

    @apart_from_dynamo
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends a round: grows the scale or backs off, and clears the recorded overflow.

        The result of `unscale_` counts even if the loop skips the step. A round without `unscale_` and
        `step`, or without gradients, counts as neither good nor bad.

        Args:
            new_scale: The next scale; replaces the rule's.

        Raises:
            PolicyError: ``new_scale`` is not a positive, finite number.
        """
        if not self.is_enabled():
            return
        self.count_left_out()
        self.guard.count_unstepped()
        if new_scale is not None:
            self.state.set(in_range(self.config, new_scale_of(new_scale, self.state.scale)))
        elif isinstance(self.config, DynamicLossScale) and self.guard.found is not None:
            scale, counters = self._adapted(self.guard.found, self.guard.counts)
            if self._was_lowered is not None:
                is_known, self._was_lowered = (self.guard.found > 0) & self._was_lowered, None
                scale = torch.where(is_known, self.state.scale, scale)
                counters = torch.where(is_known, self._counters, counters)
            self.state.set(scale)
            self._counters = counters
        self.guard.end_round()
        partners, self._partners = self._partners, []
        for scaler in partners:
            scaler.update()

    def count_left_out(self) -> None:
        """Lets overflows count whose steps the loop left out.

        Where several gradients of one call were thrown away, the scale falls once; and once where the step
        that comes after is bad too (SAM's second half, gradients that are added up by hand).
        """
        for flags, scale in self.guard.left_out():
            is_bad = (flags > 0).any() & (self.state.scale >= scale)
            found = is_bad.to(torch.float32)
            self.guard.overflows.note(self.guard.steps + 1, flags * found, scale, found)
            if not isinstance(self.config, DynamicLossScale):
                continue
            lower, counters = adapted_by_kernel(self.config, self.state.scale, self._counters, found)
            self.state.set(torch.where(is_bad, lower, self.state.scale))
            self._counters = torch.where(is_bad, counters, self._counters)
            self._was_lowered = is_bad if self._was_lowered is None else is_bad | self._was_lowered

    # -- the numbers -----------------------------------------------------------------------------

    def get_scale(self) -> float:
        """Returns the current scale; waits for the device.

        All gradients outside the graph are unscaled. ``torch.autograd.grad(scaler.scale(loss), ...)`` also
        returns unscaled gradients, so do not divide them by this number as torch's gradient penalty does.
        """
        self.count_left_out()
        return float(self.state.scale)

    @property
    def last_overflow(self) -> Overflow | None:
        """The last step whose gradients were not finite; waits for the device."""
        return self.guard.overflows.last()

    # -- for the graphs and `training.optimizer_step` ------------------------------------------------

    def slot_of(self, parameter: object) -> int | None:
        """Returns the probe's slot of a parameter that a graph's boundary is about to check, or None."""
        self._is_copy = False
        return self._slots.of([parameter])[0] if isinstance(parameter, Tensor) else None

    def follow(self, outputs: Any) -> Any:
        """Returns the outputs of a compiled graph and follows their backward."""
        self.state.checked.follow(outputs, self.state.probe, self._slots.at_end_of_backward)
        return outputs

    def note_outputs(self, outputs: Any) -> Any:
        """Returns the outputs of a call, and remembers them for `last_overflow`."""
        self.guard.overflows.note_outputs(outputs, self.state.is_rewritten)
        return outputs

    def check_loop(self) -> None:
        """Warns once about each optimizer that steps without the active scaler.

        Raises:
            PolicyError: The call is recorded as a CUDA graph, and steps may be skipped.
        """
        if self.is_enabled() and self.skips() and is_recording(self.state.scale.device):
            raise PolicyError(_RECORDED)
        if self.skips():
            self._watch.check()
        self.guard.before_call()
        self.count_left_out()
        self.guard.note_call()

    def take_step(self, results: Sequence[Tensor]) -> None:
        """Takes over the round of a step that ran as one graph.

        Args:
            results: The flags, positive in the slots of gradients that were not finite; whether there were
                any, 1 or 0; the largest absolute value of the model's outputs, infinity or NaN if there is
                one; scale, its inverse and the counters of the next step.
        """
        if self.state.is_rewritten:
            results = [result.clone() for result in results]
        flags, found, outputs, scale, inverse, counters = results
        self.guard.steps += 1
        note = self.guard.overflows.note
        note(self.guard.steps, flags, self.state.scale, found, outputs=outputs)
        self.state.set(scale, inverse)
        self._counters = counters
        self.guard.end_round()

    def note_wrapper(self) -> None:
        """Stores the process group of the wrapper that calls the model now."""
        self.guard.note_wrapper()

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the keys of ``torch.amp.GradScaler`` and ampgraph's keys; plain numbers only."""
        if not self.is_enabled():
            return {}
        self.count_left_out()
        good, bad, patience = self._counters.tolist()
        config = {k: getattr(self.config, k) for k in getattr(self.config, "__dataclass_fields__", ())}
        last = self.last_overflow
        return {
            "scale": self.get_scale(),
            "_growth_tracker": good,
            **config,
            "_bad_tracker": bad,
            "_hysteresis_left": patience,
            "_steps": int(self.guard.steps),
            "_last_overflow": None if last is None else (last.step, last.parameters, last.scale, last.rank),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state of ampgraph or of ``torch.amp.GradScaler`` and clears recorded overflows.

        Raises:
            PolicyError: The state is no dict, or empty (of a disabled GradScaler), or a number is illegal.
                The scaler does not change.
        """
        self._check_decided("load_state_dict")
        if not self.is_enabled():
            return
        numbers = checked_state(self.config, state, self._counters.tolist())
        self.config = numbers.config
        device = self.state.scale.device
        scale = torch.tensor(numbers.scale, dtype=torch.float32, device=device)
        self.state.set(in_range(self.config, scale))
        counters = torch.tensor(numbers.counters, dtype=torch.int32, device=device)
        self._counters = within(self.config, counters)
        self.guard.forget()
        self._was_lowered = None
        self.guard.steps = numbers.steps
        last = state.get("_last_overflow")
        self.guard.overflows.restore(overflow_of(last) if last else None)

    def _forget_optimizers(self) -> None:
        self._known = weakref.WeakSet()
        self._partners = []

    def _enlist(self) -> None:
        _all_scalers.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_known", "_partners")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _is_copy=True)
        self._forget_optimizers()
        self._flags.connect()
        self._enlist()

    def move(self, device: torch.device) -> None:
        """Moves the state to the model's device; a model without values has it on the CPU."""
        if device in (self.state.scale.device, torch.device("meta")):
            return
        self.guard.overflows.last()  # of steps on the old device
        self.state.move(device)
        self._counters = self._counters.to(device)
        self._was_lowered = None
        self.guard.steps = int(self.guard.steps)
        self.guard.forget()


def _check_optimizer(value: object, legal: str) -> None:
    if not (hasattr(value, "step") and hasattr(value, "param_groups")):
        raise PolicyError(f"{legal}, got {type(value).__name__}.")


def _scalers_of(optimizer: Optimizer, has_closure: bool) -> list[LossScaler]:
    return _all_scalers.with_partners(vars(optimizer)["_amp_scalers"], optimizer, has_closure)
