"""Notices a training loop that steps its optimizer past an active loss scaler."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .ranks import local
from .warn import warn_user

_MOST_CHECKS = 100


class LoopWatch:
    """Tells once when parameters change although the scaler was never asked.

    Args:
        model: The model; its parameters are looked up anew each time, since wrappers exchange them.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._values: Tensor | None = None
        self._checks = 0
        self._is_over = False

    def stop(self) -> None:
        """Stops watching: the loop uses the scaler."""
        self._is_over = True

    def check(self, probe: Tensor) -> None:
        """Compares a parameter with what it was at the last call that found gradients in the probe."""
        if self._is_over or probe.grad is None or _is_capturing(probe.device):
            return
        watched = next((local(p) for p in self._model.parameters() if p.requires_grad), None)
        if watched is None:
            return
        # Values, since fused optimizers do not raise the version counter. Only a loop that never uses the
        # scaler comes here often, so the wait for the device is its own, and not for long.
        self._checks += 1
        before, values = self._values, watched.detach().reshape(-1)[:64].clone()
        self._values = values
        if self._checks > _MOST_CHECKS:
            self._is_over = True
            return
        if before is None or before.shape != values.shape or torch.equal(before, values.to(before.device)):
            return
        self._is_over = True
        warn_user(
            "ampgraph scales the loss of this model, but the loop lets every optimizer step happen, overflow "
            "or not, and the scale never adapts. Before the loop, add: amp.scaler.attach(optimizer)"
        )


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
