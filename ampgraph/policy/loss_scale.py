"""The loss scale of a policy: none, fixed or dynamic; and the rule that adapts it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compat import update_scale
from ..errors import PolicyError


@dataclass(frozen=True)
class NoLossScale:
    """Gradients are not scaled. Right for bfloat16, which has the exponent range of float32."""


@dataclass(frozen=True)
class StaticLossScale:
    """A fixed loss scale (MindSpore's ``FixedLossScaleManager``).

    Args:
        value: The scale; a power of two rounds no gradient.
        skip_on_overflow: Whether a step with non-finite gradients is skipped (MindSpore's
            ``drop_overflow_update``).
    """

    value: float = 2.0**15
    skip_on_overflow: bool = True

    def __post_init__(self) -> None:
        _check_positive(self, "value")
        _check_scale(self, "value")
        if not isinstance(self.skip_on_overflow, bool):
            raise PolicyError(
                f"StaticLossScale: skip_on_overflow={self.skip_on_overflow!r}; legal: True, False."
            )


@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that grows while gradients stay finite and backs off after an overflow.

    It follows the rule of ``torch.amp.GradScaler`` and adds a floor and a ceiling (torch's scale reaches 0
    after about 200 bad steps). Like Paddle and Megatron-LM it can tolerate bad steps before a backoff.

    Args:
        init_scale: The first scale.
        growth_factor: Factor after ``growth_interval`` good steps in a row (Paddle's ``incr_ratio``).
        backoff_factor: Factor at a backoff (Paddle's ``decr_ratio``).
        growth_interval: Good steps before growing (Paddle's ``incr_every_n_steps``).
        floor: Lower limit of the scale.
        ceiling: Upper limit of the scale.
        hysteresis: The first ``hysteresis - 1`` backoffs after a growth are ignored (Megatron-LM).
        bad_steps_before_backoff: Consecutive bad steps that cause one backoff (Paddle's
            ``decr_every_n_nan_or_inf``).
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    floor: float = 1.0
    ceiling: float = 2.0**24
    hysteresis: int = 1
    bad_steps_before_backoff: int = 1

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            _check_positive(self, name)
        for name in ("init_scale", "floor", "ceiling"):
            _check_scale(self, name)
        for name in ("growth_interval", "hysteresis", "bad_steps_before_backoff"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) >= 2**31:
                raise PolicyError(
                    f"DynamicLossScale: {name}={getattr(self, name)!r} must be a whole number below 2**31."
                )
        if not (math.inf > as_float32(self.growth_factor) > 1 > as_float32(self.backoff_factor) > 0):
            raise PolicyError(
                f"DynamicLossScale: growth_factor={self.growth_factor!r} must be above 1 and backoff_factor="
                f"{self.backoff_factor!r} between 0 and 1, in float32."
            )
        if not self.floor <= self.init_scale <= self.ceiling:
            raise PolicyError(
                f"DynamicLossScale: init_scale={self.init_scale} is outside floor={self.floor} .. "
                f"ceiling={self.ceiling}."
            )


LossScale = NoLossScale | StaticLossScale | DynamicLossScale


def first_scale(config: LossScale) -> float:
    """Returns the initial scale."""
    if isinstance(config, DynamicLossScale):
        return config.init_scale
    return config.value if isinstance(config, StaticLossScale) else 1.0


def first_counters(config: LossScale) -> list[int]:
    """Returns the initial counters: consecutive good steps, consecutive bad steps, backoffs to ignore."""
    return [0, 0, config.hysteresis if isinstance(config, DynamicLossScale) else 0]


def in_range(config: LossScale, scale: Tensor) -> Tensor:
    """Returns the scale within the config's floor and ceiling."""
    return scale.clamp(config.floor, config.ceiling) if isinstance(config, DynamicLossScale) else scale


def adapted(
    config: DynamicLossScale, scale: Tensor, counters: Tensor, found: Tensor
) -> tuple[Tensor, Tensor]:
    """Applies the rule of `DynamicLossScale`; all work is on the device.

    Args:
        config: The parameters of the rule.
        scale: The scale of the step that ends, 0-dim float32.
        counters: See `first_counters`, int32.
        found: 1 if the step's gradients were not finite, else 0; 0-dim float32.

    Returns:
        Scale and counters of the next step.
    """
    bad = found > 0
    good_steps, bad_steps, patience = counters
    bad_steps = torch.where(bad, bad_steps + 1, 0)
    due = bad_steps >= config.bad_steps_before_backoff
    back = due
    if config.hysteresis > 1:
        patience = torch.where(due, (patience - 1).clamp(min=0), patience)
        back = due & (patience == 0)
    good_steps = torch.where(bad, 0, good_steps + 1)
    grow = good_steps >= config.growth_interval
    exact = scale.to(torch.float64)  # GradScaler's kernel multiplies so
    grown = torch.where(grow, exact * config.growth_factor, exact)
    new = torch.where(back, exact * config.backoff_factor, grown).to(torch.float32)
    after = (
        torch.where(grow, 0, good_steps),
        torch.where(due, 0, bad_steps),
        torch.where(grow, config.hysteresis, patience),
    )
    return in_range(config, new), torch.stack(after).to(torch.int32)


def within(config: LossScale, counters: Tensor) -> Tensor:
    """Returns counters with which the next good step lets the scale grow, if there were enough before.

    GradScaler's kernel compares the good steps with the interval for equality.
    """
    if not isinstance(config, DynamicLossScale):
        return counters
    return torch.cat([counters[:1].clamp(max=config.growth_interval - 1), counters[1:]])


def adapted_by_kernel(
    config: DynamicLossScale, scale: Tensor, counters: Tensor, found: Tensor
) -> tuple[Tensor, Tensor]:
    """Does what `adapted` does, with torch's kernel for the rule of ``GradScaler``: fewer calls.

    Not for a compiler, which would not fuse the kernel.
    """
    if (config.hysteresis, config.bad_steps_before_backoff) != (1, 1):
        return adapted(config, scale, counters, found)
    factors = config.growth_factor, config.backoff_factor
    scale, counters = update_scale(scale, counters, found, *factors, config.growth_interval)
    return in_range(config, scale), counters


class SavedNumbers(NamedTuple):
    """The checked numbers of a state dict."""

    config: LossScale
    scale: float
    counters: list[int]
    steps: int


def checked_state(config: LossScale, state: Mapping[str, Any], counters: list[int]) -> SavedNumbers:
    """Returns the numbers of a state dict of ampgraph or of ``torch.amp.GradScaler``.

    Args:
        config: Supplies numbers that the state does not have.
        state: The state dict.
        counters: See `first_counters`; supplies counters that the state does not have.

    Raises:
        PolicyError: The state is no dict or is empty, or a number is not legal for a scale.
    """
    if not isinstance(state, Mapping):
        raise PolicyError(
            f"load_state_dict takes the dict that a scaler's state_dict returns, got {type(state).__name__}."
        )
    if "scale" not in state:
        what = f"has no 'scale', only {', '.join(map(repr, state))}" if state else "is empty"
        raise PolicyError(f"the scaler's state {what}; was it saved by a scaler that was not enabled?")
    scale = state["scale"]
    # torch's own scale falls to 0 after 200 bad steps; the floor takes its place.
    if not _is_number(scale) or not 0 <= as_float32(scale) < math.inf:
        raise PolicyError(f"the scaler's state has scale={scale!r}, which must be a finite number.")
    given = {name: state[name] for name in vars(config) if name in state}
    config = dataclasses.replace(config, **given)
    names = ("_growth_tracker", "_bad_tracker", "_hysteresis_left")
    found = [
        state.get("_growth_tracker", 0),
        *(state.get(n, c) for n, c in zip(names[1:], counters[1:], strict=True)),
    ]
    steps = state.get("_steps", 0)
    for name, value in zip((*names, "_steps"), (*found, steps), strict=True):
        if not isinstance(value, int) or not 0 <= value < 2**31:
            raise PolicyError(f"the scaler's state has {name}={value!r}, which must be a whole number.")
    scale = as_float32(scale)
    if isinstance(config, StaticLossScale) and scale == 0:
        raise PolicyError(
            "the scaler's state has scale=0.0, and a static scale has no floor to put in its place."
        )
    return SavedNumbers(config, scale, found, steps)


def new_scale_of(value: float | Tensor, scale: Tensor) -> Tensor:
    """Returns the scale that a loop sets, on the device of the present one; does not wait for a GPU.

    Raises:
        PolicyError: The scale is not a positive, finite number in float32.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or not value.is_floating_point() or value.requires_grad:
            raise PolicyError(
                "update takes a number or a float tensor of one element that requires no gradient."
            )
        new = value.detach().reshape(()).to(scale.device, torch.float32, copy=True)
        if value.device.type != "cpu":
            return torch.where(new.isfinite() & (new > 0), new, scale)
        value = float(value)
    if not _is_number(value) or not _TINY <= as_float32(value) <= _HUGE:
        raise PolicyError(f"update: new_scale={value!r} must be positive and finite in float32.")
    return torch.full_like(scale, float(value))


def as_float32(value: float) -> float:
    """Returns the number in the precision of the device."""
    return float(torch.tensor(float(value), dtype=torch.float32, device="cpu"))


# Both a scale and its inverse are normal numbers of float32.
_TINY, _HUGE = 2.0**-126, 2.0**126


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_scale(config: object, name: str) -> None:
    value = getattr(config, name)
    if not _TINY <= value <= _HUGE:
        raise PolicyError(
            f"{type(config).__name__}: {name}={value!r} must be between 2**-126 and 2**126, so that float32 "
            "can hold it and its inverse."
        )


def _check_positive(config: object, name: str) -> None:
    value = getattr(config, name)
    if not _is_number(value) or not 0 < value < math.inf:
        raise PolicyError(f"{type(config).__name__}: {name}={value!r} must be a positive, finite number.")
