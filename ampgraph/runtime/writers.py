"""`Writers`: the CUDA streams that wrote low copies last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._compat import is_recording, stream_handle


class Writers:
    """The streams that wrote copies last, one for each CUDA device.

    Attributes:
        are_recorded: Whether a CUDA graph that somebody recorded with gradients reads the copies. Its replays
            may update parameters, which no version counter shows.
    """

    def __init__(self) -> None:
        self._last: dict[torch.device, torch.cuda.Stream] = {}
        self._waited: set[tuple[torch.device, int]] = set()
        self.are_recorded = False

    def wait(self) -> bool:
        """Lets the current streams wait for the writers; returns whether all copies count as stale.

        They do for work that is recorded, which cannot wait for work that is not, and after a recording.
        """
        is_recorded = False
        for device, writer in self._last.items():
            handle = stream_handle(device)
            if is_recording(device):
                is_recorded = True
            elif handle != writer.cuda_stream and (device, handle) not in self._waited:
                torch.cuda.current_stream(device).wait_stream(writer)
                self._waited.add((device, handle))
        self.are_recorded = self.are_recorded or (is_recorded and torch.is_grad_enabled())
        return is_recorded or self.are_recorded

    def note(self, devices: Iterable[torch.device]) -> None:
        """Notes that the current streams of CUDA devices have written."""
        for device in devices:
            self._last[device] = torch.cuda.current_stream(device)
            self._waited.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out streams: copies of a graph have low copies that no stream has written."""
        return {**vars(self), "_last": {}, "_waited": set()}
