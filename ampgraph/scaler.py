"""`LossScaler`: the state of loss scaling, the skipping of bad steps, and who overflowed.

The scaling itself is inside the converted graph (`ampgraph.boundary`); the scaler owns the numbers that
the graph reads. Its method names are those of ``torch.amp.GradScaler``, so that loops written for that
run unchanged; `scale` and `unscale_` have nothing left to do.
"""

from __future__ import annotations

import logging
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .boundary import non_finite
from .loss_scale import DynamicLossScale, LossScale, NoLossScale, StaticLossScale

log = logging.getLogger("ampgraph")

INPUTS = "<inputs>"
_MOST_CHECKS = 100
STATE_NAMES = ("amp_scale", "amp_inverse", "amp_probe")


@dataclass(frozen=True)
class Overflow:
    """One step whose gradients were not finite.

    Attributes:
        step: Which step it was, counted from 1, skipped ones included.
        parameters: The parameters with non-finite gradients, in the order in which the backward met them.
        scale: The loss scale of that step.
    """

    step: int
    parameters: tuple[str, ...]
    scale: float


class ScaleState(nn.Module):
    """What graphs read: ``scale``, ``inverse`` (0-dim float32) and ``probe`` (float32, one per parameter)."""

    scale: Tensor
    inverse: Tensor
    probe: Tensor

    def __init__(self, scale: float, size: int, device: torch.device):
        super().__init__()
        self.set(torch.tensor(scale, dtype=torch.float32, device=device))
        probe = torch.zeros(size, dtype=torch.float32, device=device, requires_grad=True)
        object.__setattr__(self, "probe", probe)

    def set(self, scale: Tensor) -> None:
        """Replaces the scale; the old tensors stay as they are, for backwards still to come."""
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "inverse", scale.reciprocal())

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns scale, inverse and probe."""
        return self.scale, self.inverse, self.probe

    def move(self, device: torch.device) -> None:
        """Moves everything to another device."""
        self.set(self.scale.to(device))
        probe = torch.zeros(self.probe.shape[0], dtype=torch.float32, device=device, requires_grad=True)
        object.__setattr__(self, "probe", probe)


class LossScaler:
    """Owns the loss scale of one converted model; ``amp.scaler``.

    Attributes:
        config: What the policy asked for.
        state: The tensors that the model's graphs read.
    """

    def __init__(self, config: LossScale, model: nn.Module, device: torch.device):
        self.config = config
        self.names = [name for name, _ in model.named_parameters()]
        self.state = ScaleState(self._first_scale(), len(self.names) + 1, device)
        self._slots = {id(p): i for i, (_, p) in enumerate(model.named_parameters())}
        self._candidates = list(model.parameters()) if self.is_enabled() else []
        self._watched: nn.Parameter | None = None
        self._counters = torch.zeros(3, dtype=torch.int32, device=device)
        self._counters[2] = config.hysteresis if isinstance(config, DynamicLossScale) else 0
        self._found = torch.zeros((), dtype=torch.float32, device=device)
        self._steps = 0
        self._attached: list[weakref.ref[Optimizer]] = []
        self._stepped: list[Optimizer] = []
        self._pending: tuple[Tensor, Tensor, Tensor] | None = None
        self._last_overflow: Overflow | None = None
        self._watched_values: Tensor | None = None
        self._checks = 0
        self._in_use = self._told = False

    # -- the loop --------------------------------------------------------------------------------

    def slot_of(self, parameter: object) -> int | None:
        """Returns the probe's slot of a parameter of the model, or None."""
        return self._slots.get(id(parameter))

    def is_enabled(self) -> bool:
        """Whether gradients are scaled at all."""
        return not isinstance(self.config, NoLossScale)

    def attach(self, *optimizers: Optimizer) -> LossScaler:
        """Makes plain ``optimizer.step()`` skip bad steps and update the scale by itself; call it once.

        Returns:
            The scaler, so that ``scaler = amp.scaler.attach(optimizer)`` reads well.
        """
        for optimizer in optimizers:
            if not self.is_enabled() or self._is_attached(optimizer):
                continue
            self._attached.append(weakref.ref(optimizer))
            if "_amp_scalers" not in vars(optimizer):
                optimizer._amp_scalers, optimizer._amp_step = [], optimizer.step  # type: ignore[attr-defined]
                optimizer.step = _attached_step(optimizer)  # type: ignore[method-assign]
            optimizer._amp_scalers.append(self)  # type: ignore[attr-defined]
        return self

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
        return _step([self, *others], optimizer, take, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Ends a step: grows or backs off the scale, and forgets the found overflow."""
        if not self.is_enabled():
            return
        if new_scale is not None:
            scale = self.state.scale
            scale = torch.as_tensor(new_scale, dtype=scale.dtype, device=scale.device).clone()
            self.state.set(self._in_range(scale))
        elif isinstance(self.config, DynamicLossScale):
            self._adapt(self.config)
        self._found = torch.zeros_like(self._found)
        self._stepped = []

    def get_scale(self) -> float:
        """Returns the current scale; waits for the device."""
        return float(self.state.scale)

    @property
    def last_overflow(self) -> Overflow | None:
        """The last step whose gradients were not finite; waits for the device."""
        self._observe()
        return self._last_overflow

    # -- inside ----------------------------------------------------------------------------------

    def _find(self, optimizer: Optimizer) -> tuple[Tensor, Tensor]:
        """Begins a step: returns the flags of the optimizer's gradients and whether one is set."""
        if any(o is optimizer for o in self._stepped) and self._is_attached(optimizer):
            self.update()  # another attached optimizer rests: the round ends when this one comes again
        flags = self._take_flags(optimizer)
        found = (flags > 0).any().to(torch.float32)
        self._found = torch.maximum(self._found, found)
        self._steps += not self._stepped
        self._stepped.append(optimizer)
        self._in_use = True
        return flags, found

    def _skips(self) -> bool:
        return not isinstance(self.config, StaticLossScale) or self.config.skip_on_overflow

    def _find_rest(self, optimizer: Optimizer) -> None:
        """Counts what a closure's later calls left, for the scale alone."""
        if self.state.probe.grad is not None:
            flags = self._take_flags(optimizer)
            self._found = torch.maximum(self._found, (flags > 0).any().to(torch.float32))

    def _take_flags(self, optimizer: Optimizer) -> Tensor:
        """Returns the probe's flags for this optimizer's parameters (and the inputs), and clears them."""
        probe = self.state.probe
        if probe.grad is None:
            # Nothing came through backward(): torch.autograd.grad, backward(inputs=...) or another model.
            return _everywhere(self._flags_of_gradients(optimizer))
        flags = _everywhere(probe.grad)
        mine = {self._slots.get(id(p)) for group in optimizer.param_groups for p in group["params"]} - {None}
        if len(mine) >= len(self.names) or not mine:
            probe.grad = None
            return flags
        slots = torch.tensor(sorted([*mine, len(self.names)]), device=flags.device)  # type: ignore[type-var]
        taken = torch.zeros_like(flags).index_copy(0, slots, flags[slots])
        probe.grad = flags.index_fill(0, slots, 0)
        return taken

    def _flags_of_gradients(self, optimizer: Optimizer) -> Tensor:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        parameters = [p for p in parameters if p.grad.device == self._found.device]
        if not parameters:
            return torch.zeros_like(self.state.probe, requires_grad=False)
        slots = [self._slots.get(id(p), len(self.names)) for p in parameters]
        return non_finite([p.grad for p in parameters], slots, len(self.names) + 1)

    def _note(self, flags: Tensor, found: Tensor) -> None:
        """Keeps an overflow for `last_overflow` without waiting for the device."""
        new = torch.full_like(self._found, self._steps), flags, self.state.scale
        if self._pending is not None:
            new = tuple(torch.where(found > 0, n, old) for n, old in zip(new, self._pending, strict=True))  # type: ignore[assignment]
        self._pending = new

    def _observe(self) -> None:
        if self._pending is None:
            return
        (steps, flags, scale), self._pending = self._pending, None
        slots = [i for i, flag in enumerate(flags.tolist()) if flag > 0]
        if not slots:
            return
        names = [*self.names, INPUTS]
        parameters = tuple(names[i] for i in sorted(slots, reverse=True) if i < len(self.names)) or (INPUTS,)
        self._last_overflow = Overflow(int(steps), parameters, float(scale))
        log.warning(
            "step %d: non-finite gradients at loss scale %g, first in %s (%d parameters in all)",
            self._last_overflow.step,
            self._last_overflow.scale,
            parameters[0],
            len(parameters),
        )

    def _adapt(self, config: DynamicLossScale) -> None:
        """``torch.amp.GradScaler``'s rule, with patience, floor and ceiling; all on the device."""
        scale, bad = self.state.scale, self._found > 0
        good_steps, bad_steps, patience = self._counters
        bad_steps = torch.where(bad, bad_steps + 1, 0)
        due = bad_steps >= config.bad_steps_before_backoff
        patience = torch.where(due, (patience - 1).clamp(min=0), patience)
        back = due & (patience == 0)
        good_steps = torch.where(bad, 0, good_steps + 1)
        grow = good_steps >= config.growth_interval
        grown = torch.where(grow, scale * config.growth_factor, scale)
        new = torch.where(back, scale * config.backoff_factor, grown).clamp(config.floor, config.ceiling)
        counters = (
            torch.where(grow, 0, good_steps),
            torch.where(due, 0, bad_steps),
            torch.where(grow, config.hysteresis, patience),
        )
        self._counters = torch.stack(counters).to(torch.int32)
        self.state.set(new)

    def _is_attached(self, optimizer: Optimizer) -> bool:
        return any(ref() is optimizer for ref in self._attached)

    def _end_of_round(self) -> bool:
        return all(any(s is ref() for s in self._stepped) for ref in self._attached if ref() is not None)

    def check_loop(self) -> None:
        """Tells once that a loop steps its optimizer past an active scaler."""
        if self._told or self._in_use or self.state.probe.grad is None:
            return
        if _is_capturing(self._found.device):
            return
        if self._watched is None or not self._watched.requires_grad:
            self._watched = next((p for p in self._candidates if p.requires_grad), None)
            self._watched_values = None
        if self._watched is None:
            return
        # Values, since fused optimizers do not raise the version counter. Only a loop that never uses the
        # scaler comes here often, so the wait for the device is its own, and not for long.
        self._checks += 1
        before, values = self._watched_values, self._watched.detach().reshape(-1)[:64].clone()
        self._watched_values = values
        if self._checks > _MOST_CHECKS:
            self._told = True
            return
        if before is None or before.shape != values.shape or torch.equal(before, values.to(before.device)):
            return
        self._told = True
        warnings.warn(
            "ampgraph scales the loss of this model, but the loop lets every optimizer step happen, overflow "
            "or not, and the scale never adapts. Before the loop, add: amp.scaler.attach(optimizer)",
            stacklevel=4,
        )

    def _in_range(self, scale: Tensor) -> Tensor:
        if isinstance(self.config, DynamicLossScale):
            return scale.clamp(self.config.floor, self.config.ceiling)
        return scale

    def _first_scale(self) -> float:
        if isinstance(self.config, DynamicLossScale):
            return self.config.init_scale
        return self.config.value if isinstance(self.config, StaticLossScale) else 1.0

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
        self.state.set(self._in_range(scale))
        _, bad, patience = self._counters.tolist()
        bad, patience = state.get("_bad_tracker", bad), state.get("_hysteresis_left", patience)
        counters = [state.get("_growth_tracker", 0), bad, patience]
        self._counters = torch.tensor(counters, dtype=torch.int32, device=device)
        self._steps = state.get("_steps", 0)
        last = state.get("_last_overflow")
        self._last_overflow = Overflow(last[0], tuple(last[1]), last[2]) if last else None

    def move(self, device: torch.device) -> None:
        """Moves the state to the model's device."""
        if device == self.state.scale.device:
            return
        self.state.move(device)
        self._counters, self._found = self._counters.to(device), self._found.to(device)


def _attached_step(optimizer: Optimizer) -> Callable:
    original = optimizer.step

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        scalers = self._amp_scalers  # type: ignore[attr-defined]
        result = _step(scalers, self, original, *args, **kwargs)
        for scaler in scalers:
            if scaler._end_of_round():
                scaler.update()
        return result

    # A bound method, with the marks of what it wraps: learning rate schedulers look for both.
    step.__dict__.update(getattr(original, "__dict__", {}))
    return types.MethodType(step, optimizer)


def _step(scalers: list[LossScaler], optimizer: Optimizer, take: Callable, *args: Any, **kwargs: Any) -> Any:
    """Steps the optimizer unless a scaler that skips found an overflow."""
    closure = args[0] if args else kwargs.get("closure")
    if closure is not None:
        closure = _evaluated(closure)
        args, kwargs = (closure, *args[1:]), {k: v for k, v in kwargs.items() if k != "closure"}
    on_device = getattr(optimizer, "_step_supports_amp_scaling", False)
    bad = None
    unseen = []
    for scaler in scalers:
        flags, found = scaler._find(optimizer)
        if scaler._skips():
            bad = found if bad is None else torch.maximum(bad, found.to(bad.device))
        if on_device or not scaler._skips():
            scaler._note(flags, found)
        else:
            unseen.append((scaler, flags, found))
    if bad is not None and not on_device and float(bad) > 0:
        for scaler, flags, found in unseen:
            scaler._note(flags, found)
            scaler._observe()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn of a step left out
        return None
    if on_device and bad is not None:
        result = _gated(optimizer, bad, take, args, kwargs)
    else:
        result = take(*args, **kwargs)
    if closure is not None:
        for scaler in scalers:
            scaler._find_rest(optimizer)
    return result


def _evaluated(closure: Callable) -> Callable:
    """Calls the closure now, since its gradients decide on the step; the next call returns the same."""
    with torch.enable_grad():
        first = [closure()]

    def again() -> Any:
        return first.pop() if first else closure()

    return again


def _gated(optimizer: Optimizer, found: Tensor, take: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    optimizer.grad_scale, optimizer.found_inf = None, found  # type: ignore[attr-defined]
    try:
        return take(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _everywhere(flags: Tensor) -> Tensor:
    """Joins the flags of all ranks, so that all skip the same steps."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return flags
    flags = flags.clone()
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
    return flags
