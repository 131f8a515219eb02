"""`LossScaler`: the state of loss scaling, the skipping of bad steps, and who overflowed.

The scaling itself is inside the converted graph (`ampgraph.boundary`); the scaler owns the numbers that
the graph reads. Its method names are those of ``torch.amp.GradScaler``, so that loops written for that
run unchanged; `scale` and `unscale_` have nothing left to do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ._compat import expects_uneven_inputs, is_in_backward
from .boundary import non_finite
from .errors import PolicyError
from .loop_watch import LoopWatch
from .loss_scale import (
    DynamicLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
    adapted,
    first_counters,
    first_scale,
    in_range,
)
from .optimizer_step import attached_step, step_unless_bad, stepping
from .overflow import Overflow, OverflowLog
from .ranks import active_wrapper, groups_of, join, local
from .scale_state import ScaleState
from .slots import ParameterSlots
from .warn import warn_user

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn.parallel import DistributedDataParallel


class LossScaler:
    """Owns the loss scale of one converted model; ``amp.scaler``.

    Attributes:
        config: What the policy asked for.
        state: The tensors that the model's graphs read.
        process_groups: The ranks that skip a step together. None: those of the DistributedDataParallel or
            FSDP2 around the model, or the default group where neither is seen. Empty: this rank alone.
    """

    def __init__(self, config: LossScale, model: nn.Module, device: torch.device):
        self.config = config
        self.process_groups: Sequence[ProcessGroup] | None = None
        self._slots = ParameterSlots(model)
        self.names = self._slots.names
        self.state = ScaleState(first_scale(config), len(self.names) + 1, device)
        self._counters = torch.tensor(first_counters(config), dtype=torch.int32, device=device)
        self._found = torch.zeros((), dtype=torch.float32, device=device)
        self._steps = 0
        self._attached: list[weakref.ref[Optimizer]] = []
        self._stepped: list[Optimizer] = []
        self._overflows = OverflowLog(self.names)
        self._watch = LoopWatch(model)
        self._at_boundary: set[int | None] = set()
        self._wrapper: weakref.ref[DistributedDataParallel] | None = None

    # -- the loop --------------------------------------------------------------------------------

    def is_enabled(self) -> bool:
        """Whether gradients are scaled at all."""
        return not isinstance(self.config, NoLossScale)

    def attach(self, *optimizers: Optimizer) -> LossScaler:
        """Makes plain ``optimizer.step()`` skip bad steps and update the scale by itself; call it once.

        Returns:
            The scaler, so that ``scaler = amp.scaler.attach(optimizer)`` reads well.

        Raises:
            PolicyError: Something is not an optimizer.
        """
        for optimizer in optimizers:
            if not (hasattr(optimizer, "step") and hasattr(optimizer, "param_groups")):
                raise PolicyError(f"attach takes optimizers, got {type(optimizer).__name__}.")
            self._warn_about_strangers(optimizer)
        for optimizer in map(stepping, optimizers):
            if not self.is_enabled() or self._is_attached(optimizer):
                continue
            self._attached.append(weakref.ref(optimizer))
            if "_amp_scalers" not in vars(optimizer):
                optimizer._amp_scalers, optimizer._amp_step = [], optimizer.step  # type: ignore[attr-defined]
                optimizer.step = attached_step(optimizer)  # type: ignore[method-assign]
            optimizer._amp_scalers.append(self)  # type: ignore[attr-defined]
        return self

    def _warn_about_strangers(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if parameters and all(slot is None for slot in self._slots.of(parameters)):
            warn_user(
                f"amp.scaler.attach: none of the {len(parameters)} parameters of this "
                f"{type(optimizer).__name__} belongs to this model; is it the optimizer of another?"
            )

    def scale(self, outputs: Any) -> Any:
        """Returns its argument: the graph scales."""
        return outputs

    def unscale_(self, optimizer: Optimizer) -> None:
        """Does nothing: ``.grad`` holds true gradients already."""

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps the optimizer unless its gradients are not finite.

        No host sync where the optimizer takes ``found_inf`` (``fused=True``), exactly one otherwise.

        Returns:
            What ``optimizer.step`` returned, or None for a skipped step.
        """
        take = vars(optimizer).get("_amp_step", optimizer.step)
        if not self.is_enabled():
            return take(*args, **kwargs)
        others = [s for s in vars(optimizer).get("_amp_scalers", ()) if s is not self]
        return step_unless_bad([self, *others], optimizer, take, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends a step: grows or backs off the scale, and forgets the found overflow."""
        if not self.is_enabled():
            return
        if new_scale is not None:
            scale = self.state.scale
            scale = torch.as_tensor(new_scale, dtype=scale.dtype, device=scale.device).clone()
            self.state.set(in_range(self.config, scale))
        elif isinstance(self.config, DynamicLossScale):
            bad = self._found > 0
            scale, self._counters = adapted(self.config, self.state.scale, self._counters, bad)
            self.state.set(scale)
        self._found = torch.zeros_like(self._found)
        self._stepped = []

    def get_scale(self) -> float:
        """Returns the current scale; waits for the device."""
        return float(self.state.scale)

    @property
    def last_overflow(self) -> Overflow | None:
        """The last step whose gradients were not finite; waits for the device."""
        return self._overflows.last()

    # -- for the graphs and `ampgraph.optimizer_step` ------------------------------------------------

    def slot_of(self, parameter: object) -> int | None:
        """Returns the probe's slot of a parameter that a graph's boundary is about to check, or None."""
        slot = self._slots.of([parameter])[0] if isinstance(parameter, Tensor) else None
        self._at_boundary.add(slot)
        return slot

    def check_loop(self) -> None:
        """Tells once that a loop steps its optimizer past an active scaler."""
        self._watch.check(self.state.probe)

    def note_wrapper(self) -> None:
        """Remembers the wrapper that calls the model now."""
        if (wrapper := active_wrapper()) is not None:
            self._wrapper = weakref.ref(wrapper)

    def skips(self) -> bool:
        """Whether a step with non-finite gradients is left out."""
        return not isinstance(self.config, StaticLossScale) or self.config.skip_on_overflow

    def begin_step(self, optimizer: Optimizer) -> tuple[Tensor, Tensor]:
        """Returns the flags of the optimizer's gradients and whether one is set."""
        if any(o is optimizer for o in self._stepped) and self._is_attached(optimizer):
            self.update()  # another attached optimizer rests: the round ends when this one comes again
        flags = self._take_flags(optimizer)
        found = (flags > 0).any().to(torch.float32)
        self._found = torch.maximum(self._found, found)
        self._steps += not self._stepped
        self._stepped.append(optimizer)
        self._watch.stop()
        return flags, found

    def note(self, flags: Tensor, found: Tensor) -> None:
        """Keeps an overflow for `last_overflow` without waiting for the device."""
        self._overflows.note(self._steps, flags, self.state.scale, found)

    def report(self) -> None:
        """Logs a noted overflow now; waits for the device."""
        self._overflows.last()

    def count_rest(self, optimizer: Optimizer) -> None:
        """Counts what a closure's later calls left, for the scale alone."""
        if self.state.probe.grad is not None:
            flags = self._take_flags(optimizer)
            self._found = torch.maximum(self._found, (flags > 0).any().to(torch.float32))

    def is_end_of_round(self) -> bool:
        """Whether every attached optimizer has stepped since the last update."""
        return all(any(s is ref() for s in self._stepped) for ref in self._attached if ref() is not None)

    def _is_attached(self, optimizer: Optimizer) -> bool:
        return any(ref() is optimizer for ref in self._attached)

    def _take_flags(self, optimizer: Optimizer) -> Tensor:
        """Returns the flags of this optimizer's parameters (and of the inputs), and clears them."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        slots = self._slots.of(parameters)
        mine = {slot for slot in slots if slot is not None}
        probe = self.state.probe
        if self._reads_gradients():
            probe.grad = None if not is_in_backward() else probe.grad
            flags = self._flags_of_gradients(zip(parameters, slots, strict=True))
            return flags if self._is_uneven() else join(flags, self._groups(parameters))
        flags = join(self._flags(parameters, slots), self._groups(parameters))
        if probe.grad is None:
            return flags
        if len(mine) >= len(self.names) or not mine:
            probe.grad = None
            return flags
        index = torch.tensor(sorted([*mine, len(self.names)]), device=flags.device)
        taken = torch.zeros_like(flags).index_copy(0, index, flags[index])
        probe.grad = flags.index_fill(0, index, 0)
        return taken

    def _reads_gradients(self) -> bool:
        """Whether the gradients themselves decide on a step, and the probe does not."""
        # In a backward (an optimizer that steps as gradients arrive) the probe is not complete yet.
        return is_in_backward() or self._is_uneven()

    def _is_uneven(self) -> bool:
        """Whether ranks may have run out of inputs, and so answer DistributedDataParallel alone.

        The gradients that it has averaged are the same on all that are left, and so is what they decide.
        """
        wrapper = self._wrapper() if self._wrapper is not None else None
        return wrapper is not None and self.process_groups is None and expects_uneven_inputs(wrapper)

    def _flags(self, parameters: list[Tensor], slots: list[int | None]) -> Tensor:
        """Returns the probe's flags, and those of gradients that no boundary has seen."""
        seen = self.state.probe.grad
        if seen is None:
            # Nothing came through backward(): torch.autograd.grad, backward(inputs=...) or another model.
            return self._flags_of_gradients(zip(parameters, slots, strict=True))
        # What lies outside of every graph: modules that were not converted, or could not be captured.
        outside = set(slots) - self._at_boundary - {None}
        if not outside:
            return seen
        rest = ((p, s) for p, s in zip(parameters, slots, strict=True) if s in outside)
        return torch.maximum(seen, self._flags_of_gradients(rest))

    def _flags_of_gradients(self, parameters: Iterable[tuple[Tensor, int | None]]) -> Tensor:
        last = len(self.names)
        found = [(local(p.grad), last if s is None else s) for p, s in parameters if p.grad is not None]
        found = [(g, s) for g, s in found if g.device == self._found.device and g.numel()]
        if not found:
            return torch.zeros_like(self.state.probe, requires_grad=False)
        found.sort(key=lambda pair: pair[1])
        return non_finite([g for g, _ in found], [s for _, s in found], last + 1)

    def _groups(self, parameters: list[Tensor]) -> Sequence[ProcessGroup] | None:
        if self.process_groups is not None:
            return self.process_groups
        groups = groups_of(parameters)
        if (wrapper := self._wrapper and self._wrapper()) is not None:
            groups.append(wrapper.process_group)
        return groups or None

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns ``torch.amp.GradScaler``'s keys and ours; plain numbers only."""
        if not self.is_enabled():
            return {}
        good, bad, patience = self._counters.tolist()
        config = {k: getattr(self.config, k) for k in getattr(self.config, "__dataclass_fields__", ())}
        last = self.last_overflow
        return {
            "scale": self.get_scale(),
            "_growth_tracker": good,
            **config,
            "_bad_tracker": bad,
            "_hysteresis_left": patience,
            "_steps": self._steps,
            "_last_overflow": None if last is None else (last.step, last.parameters, last.scale),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state of ours or of ``torch.amp.GradScaler``."""
        if not self.is_enabled() or not state:
            return
        legal = self.config.__dataclass_fields__
        given = {k: v for k, v in state.items() if k in legal}
        self.config = type(self.config)(**{**vars(self.config), **given})
        device = self.state.scale.device
        scale = torch.tensor(float(state["scale"]), dtype=torch.float32, device=device)
        self.state.set(in_range(self.config, scale))
        _, bad, patience = self._counters.tolist()
        bad, patience = state.get("_bad_tracker", bad), state.get("_hysteresis_left", patience)
        counters = [state.get("_growth_tracker", 0), bad, patience]
        self._counters = torch.tensor(counters, dtype=torch.int32, device=device)
        self._steps = state.get("_steps", 0)
        last = state.get("_last_overflow")
        self._overflows.restore(Overflow(last[0], tuple(last[1]), last[2]) if last else None)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has no optimizers yet, and no peers.
        return {
            **vars(self),
            "_attached": [],
            "_stepped": [],
            "process_groups": None,
            "_wrapper": None,
        }

    def move(self, device: torch.device) -> None:
        """Moves the state to the model's device; a model without values has it on the CPU."""
        if device in (self.state.scale.device, torch.device("meta")):
            return
        self.state.move(device)
        self._counters, self._found = self._counters.to(device), self._found.to(device)
