"""The tensors through which a loss scaler and the graphs that it scales speak to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# The attribute of the probe by which a boundary that runs in Python tells what it has checked.
DELIVERED = "_amp_delivered"
Slots = set[int]  # `set` is a method of the state
STATE_NAMES = ("amp_scale", "amp_inverse", "amp_probe")


class ScaleState(nn.Module):
    """What graphs read: ``scale``, ``inverse`` (0-dim float32) and ``probe`` (float32, one per parameter).

    Attributes:
        flags: What the last backward reported to the probe.
        was_reached: Whether a backward has reported.
        delivered: The slots whose gradients boundaries have checked since the flags were taken.
        expected: The slots of each compiled graph that has run forward since then.
    """

    scale: Tensor
    inverse: Tensor
    probe: Tensor
    flags: Tensor | None
    was_reached: bool
    delivered: Slots
    expected: list[frozenset[int]]
    _tell: Callable[[], None]

    def __init__(self, scale: float, size: int, device: torch.device):
        super().__init__()
        self._build(torch.tensor(scale, dtype=torch.float32, device=device), size)

    def _build(self, scale: Tensor, size: int) -> None:
        object.__setattr__(self, "_tell", lambda: None)
        object.__setattr__(self, "flags", None)
        object.__setattr__(self, "was_reached", False)
        object.__setattr__(self, "delivered", set())
        object.__setattr__(self, "expected", [])
        self.set(scale)
        self._set_probe(size)

    def _set_probe(self, size: int) -> None:
        probe = torch.zeros(size, dtype=torch.float32, device=self.scale.device, requires_grad=True)
        setattr(probe, DELIVERED, self.delivered)
        object.__setattr__(self, "probe", probe)
        self.watch(self._tell)

    def set(self, scale: Tensor) -> None:
        """Replaces the scale; the old tensors stay as they are, for backwards still to come."""
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "inverse", scale.reciprocal())

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns scale, inverse and probe."""
        return self.scale, self.inverse, self.probe

    def watch(self, tell: Callable[[], None]) -> None:
        """Calls ``tell`` in each backward that reaches the probe."""
        object.__setattr__(self, "_tell", tell)
        if hook := self.__dict__.get("_hook"):
            hook.remove()
        hook = self.probe.register_post_accumulate_grad_hook(lambda _: tell())
        object.__setattr__(self, "_hook", hook)

    def expect(self, slots: frozenset[int]) -> None:
        """Notes what a compiled graph's backward will check; it cannot tell when it runs."""
        if not self.expected or self.expected[-1] is not slots:
            self.expected.append(slots)

    def take_flags(self) -> tuple[Tensor, Slots] | None:
        """Returns what the probe has received since it was asked last, and for which slots."""
        flags, delivered = self.probe.grad, self.delivered.union(*self.expected)
        self.delivered.clear()
        self.expected.clear()
        if flags is None:
            return None
        self.probe.grad = None
        object.__setattr__(self, "flags", flags.detach())
        object.__setattr__(self, "was_reached", True)
        return flags.detach(), delivered

    def move(self, device: torch.device) -> None:
        """Moves everything to another device."""
        self.set(self.scale.to(device))
        self._set_probe(self.probe.shape[0])

    def __getstate__(self) -> dict[str, Any]:
        return {"scale": self.scale, "size": self.probe.shape[0]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        self._build(state["scale"], state["size"])
