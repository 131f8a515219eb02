"""Which loss scale a policy asks for: none, a fixed one, or one that adapts; and how it adapts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import PolicyError


@dataclass(frozen=True)
class NoLossScale:
    """Gradients are not scaled: right for bfloat16, whose exponent range is float32's."""


@dataclass(frozen=True)
class StaticLossScale:
    """A fixed loss scale (MindSpore's ``FixedLossScaleManager``).

    Args:
        value: The scale; a power of two loses no bits.
        skip_on_overflow: Whether a step with non-finite gradients is skipped (MindSpore's
            ``drop_overflow_update``).
    """

    value: float = 2.0**15
    skip_on_overflow: bool = True

    def __post_init__(self) -> None:
        _check_positive(self, "value")


@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that grows while gradients stay finite and backs off when they do not.

    The rule is that of ``torch.amp.GradScaler``, with a floor and a ceiling (torch's own scale reaches 0
    after some 200 bad steps) and with Paddle's and Megatron-LM's patience.

    Args:
        init_scale: The first scale.
        growth_factor: Factor after ``growth_interval`` good steps in a row (Paddle's ``incr_ratio``).
        backoff_factor: Factor at a backoff (Paddle's ``decr_ratio``).
        growth_interval: Good steps before growing (Paddle's ``incr_every_n_steps``).
        floor: The scale never falls below.
        ceiling: The scale never grows above.
        hysteresis: Backoffs to ignore, less one, since the scale last grew (Megatron-LM).
        bad_steps_before_backoff: Bad steps in a row that count as one (Paddle's
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
        for name in ("growth_interval", "hysteresis", "bad_steps_before_backoff"):
            if not isinstance(getattr(self, name), int):
                raise PolicyError(f"DynamicLossScale: {name}={getattr(self, name)!r} must be a whole number.")
        if self.growth_factor < 1 or self.backoff_factor > 1:
            raise PolicyError("DynamicLossScale: growth_factor must be at least 1, backoff_factor at most 1.")
        if not self.floor <= self.init_scale <= self.ceiling:
            raise PolicyError(
                f"DynamicLossScale: init_scale={self.init_scale} is outside floor={self.floor} .. "
                f"ceiling={self.ceiling}."
            )


LossScale = NoLossScale | StaticLossScale | DynamicLossScale


def first_scale(config: LossScale) -> float:
    """Returns the scale that training begins with."""
    if isinstance(config, DynamicLossScale):
        return config.init_scale
    return config.value if isinstance(config, StaticLossScale) else 1.0


def first_counters(config: LossScale) -> list[int]:
    """Returns good steps in a row, bad steps in a row, and how many backoffs are still to be ignored."""
    return [0, 0, config.hysteresis if isinstance(config, DynamicLossScale) else 0]


def in_range(config: LossScale, scale: Tensor) -> Tensor:
    """Returns the scale within the config's floor and ceiling."""
    return scale.clamp(config.floor, config.ceiling) if isinstance(config, DynamicLossScale) else scale


def adapted(config: DynamicLossScale, scale: Tensor, counters: Tensor, bad: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.amp.GradScaler``'s rule, with patience, floor and ceiling; all on the device.

    Args:
        config: The rule's numbers.
        scale: The scale of the step that ends, 0-dim float32.
        counters: See `first_counters`, int32.
        bad: Whether the step's gradients were not finite, 0-dim bool.

    Returns:
        Scale and counters of the next step.
    """
    good_steps, bad_steps, patience = counters
    bad_steps = torch.where(bad, bad_steps + 1, 0)
    due = bad_steps >= config.bad_steps_before_backoff
    patience = torch.where(due, (patience - 1).clamp(min=0), patience)
    back = due & (patience == 0)
    good_steps = torch.where(bad, 0, good_steps + 1)
    grow = good_steps >= config.growth_interval
    grown = torch.where(grow, scale * config.growth_factor, scale)
    new = torch.where(back, scale * config.backoff_factor, grown)
    after = (
        torch.where(grow, 0, good_steps),
        torch.where(due, 0, bad_steps),
        torch.where(grow, config.hysteresis, patience),
    )
    return in_range(config, new), torch.stack(after).to(torch.int32)


def _check_positive(config: object, name: str) -> None:
    value = getattr(config, name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise PolicyError(f"{type(config).__name__}: {name}={value!r} must be a positive, finite number.")
