"""The loss scale of a policy, and the numbers that its rule keeps."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from ..errors import LoopError, PolicyError
from ..policy.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
    adapted_by_kernel,
    first_counters,
    first_scale,
    within,
)
from ..policy.policy import Policy
from ..proxy.all_parameters import all_parameters
from .agreement import LEAST
from .scale_state import ScaleState

_SHARED = 5


class ScaleNumbers:
    """The part of `LossScaler` that knows the loss scale: its rule, its counters, its factors.

    Attributes:
        state: The tensors that the model's graphs read.
    """

    def __init__(self, config: LossScale | Policy, model: nn.Module, slots: int, device: torch.device):
        self._config, self._model = config, model
        config = NoLossScale() if isinstance(config, Policy) else config
        self.state = ScaleState(first_scale(config), slots, device)
        self._counters = torch.tensor(first_counters(config), dtype=torch.int32, device=device)
        self._was_lowered: Tensor | None = None  # by a step left out since the last that was not

    @property
    def config(self) -> LossScale:
        """The loss scale; none as long as the model has no values and its device would decide."""
        if isinstance(self._config, Policy):
            self._decide(self._config)
        return NoLossScale() if isinstance(self._config, Policy) else self._config

    @config.setter
    def config(self, config: LossScale) -> None:
        self._config = config

    def _decide(self, policy: Policy) -> None:
        """Chooses the loss scale of a model that was converted without values, once it has some."""
        device = self.device_of_values()
        if device is None:
            return
        self._config = config = policy.resolved(device).active_loss_scale()
        self.state.set(torch.full_like(self.state.scale, first_scale(config)))
        self._counters = self._counters.new_tensor(first_counters(config))

    def device_of_values(self) -> torch.device | None:
        """Returns the device of the model's first parameter that has values, or None."""
        return next((p.device for p in all_parameters(self._model) if p.device.type != "meta"), None)

    def _check_decided(self, method: str) -> None:
        if not self.is_enabled() and isinstance(self._config, Policy):
            raise LoopError(
                f"amp.scaler.{method}: the model has no values yet (device meta), and its device decides "
                f"whether there is a loss scale. Call {method} after to_empty, or name the dtype at the "
                "conversion: dtype=torch.float16."
            )

    def is_enabled(self) -> bool:
        """Whether gradients are scaled at all."""
        return not isinstance(self.config, NoLossScale)

    def skips(self) -> bool:
        """Whether a step with non-finite gradients is skipped."""
        return not isinstance(self.config, StaticLossScale) or self.config.skip_on_overflow

    @property
    def counters(self) -> Tensor:
        """The counters of `DynamicLossScale`, see `first_counters`."""
        return self._counters

    def _adapted(self, found: Tensor, counts: bool | Tensor) -> tuple[Tensor, Tensor]:
        """Returns the next scale and counters; those of now after a round that does not count."""
        now = self.state.scale, self._counters
        if counts is False:
            return now
        scale, counters = adapted_by_kernel(self.config, *now, found)  # type: ignore[arg-type]
        if counts is True:
            return scale, counters
        return torch.where(counts, scale, now[0]), torch.where(counts, counters, now[1])

    # -- ranks -----------------------------------------------------------------------------------

    def shared(self) -> Tensor:
        """Returns the numbers that ranks make one, int64; of each the greatest of all ranks wins.

        They are the scale, the good steps and the backoffs to ignore, negative so that the least wins; then
        the bad steps, and whether a step left out has lowered the scale. A fixed scale has none.
        """
        if not isinstance(self.config, DynamicLossScale):
            return torch.full((_SHARED,), LEAST, dtype=torch.int64, device=self.state.scale.device)
        bits = self.state.scale.view(torch.int32).view(1)  # ordered as positive numbers are
        lowered = torch.zeros_like(bits) if self._was_lowered is None else self._was_lowered.view(1)
        least = torch.cat([bits, self._counters[::2]])
        return torch.cat([-least, self._counters[1:2], lowered]).to(torch.int64)

    def take_shared(self, numbers: Tensor) -> None:
        """Takes over the numbers that won."""
        if not isinstance(self.config, DynamicLossScale):
            return
        least = (-numbers[:3]).to(torch.int32)
        self.state.set(least[0].view(torch.float32))
        self._counters = torch.cat([least[1:2], numbers[3:4].to(torch.int32), least[2:]])
        self._was_lowered = numbers[4] > 0

    def get_growth_factor(self) -> float:
        """Returns `DynamicLossScale.growth_factor`."""
        return self._dynamic().growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Changes `DynamicLossScale.growth_factor`."""
        self.config = dataclasses.replace(self._dynamic(), growth_factor=new_factor)

    def get_backoff_factor(self) -> float:
        """Returns `DynamicLossScale.backoff_factor`."""
        return self._dynamic().backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Changes `DynamicLossScale.backoff_factor`."""
        self.config = dataclasses.replace(self._dynamic(), backoff_factor=new_factor)

    def get_growth_interval(self) -> int:
        """Returns `DynamicLossScale.growth_interval`."""
        return self._dynamic().growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Changes `DynamicLossScale.growth_interval`."""
        self.config = dataclasses.replace(self._dynamic(), growth_interval=new_interval)
        self._counters = within(self.config, self._counters)

    def _dynamic(self) -> DynamicLossScale:
        if isinstance(self.config, DynamicLossScale):
            return self.config
        raise PolicyError(
            f"{type(self.config).__name__} neither grows nor backs off; "
            "Policy(loss_scale=DynamicLossScale()) does."
        )
