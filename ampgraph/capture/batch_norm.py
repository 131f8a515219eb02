"""Captures batch norm with a cumulative average (``momentum=None``).

torch's forward converts the batch counter to a Python number, which no capture supports.
``torch.optim.swa_utils.update_bn`` and stochastic weight averaging set this momentum temporarily.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

from .._compat import BatchNorm, replaced


def with_cumulative_average(is_capturing: Callable[[], bool]) -> AbstractContextManager[None]:
    """Keeps the batch counter a tensor in threads that are capturing."""
    original = BatchNorm.forward

    def forward(self: BatchNorm, input: torch.Tensor) -> torch.Tensor:
        if self.momentum is None and self.training and self.track_running_stats and is_capturing():
            return _averaging(self, input)
        return original(self, input)

    return replaced(BatchNorm, "forward", forward)


def _averaging(norm: BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """Normalizes by the statistics of the batch (momentum 1) and updates the averages."""
    norm._check_input_dim(input)
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked is None:
        return nn.functional.batch_norm(input, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
    norm.num_batches_tracked.add_(1)
    mean, var = torch.zeros_like(norm.running_mean), torch.zeros_like(norm.running_var)
    result = nn.functional.batch_norm(input, mean, var, norm.weight, norm.bias, True, 1.0, norm.eps)
    share = norm.num_batches_tracked.to(mean.dtype).reciprocal()
    norm.running_mean.lerp_(mean, share)
    norm.running_var.lerp_(var, share)
    return result
