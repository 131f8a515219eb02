"""`Writers`: the CUDA streams that wrote low copies last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._compat import is_recording, stream_handle


class Writers:
    """The streams that wrote copies last, one for each CUDA device.

    Attributes:
        are_recorded: Whether a CUDA graph that somebody recorded reads the copies. Its replays update
            parameters in ways that no version counter shows.
    """

    def __init__(self) -> None:
        self._last: dict[torch.device, torch.cuda.Stream] = {}
        self.are_recorded = False

    def wait(self) -> None:
        """Lets the current streams wait for the writers; notes whether their work is recorded.

        A recorded stream cannot wait for work that is not recorded.
        """
        for device, writer in self._last.items():
            handle = stream_handle(device)
            if is_recording(device):
                self.are_recorded = True
            elif handle != writer.cuda_stream:
                torch.cuda.current_stream(device).wait_stream(writer)

    def note(self, devices: Iterable[torch.device]) -> None:
        """Notes that the current streams of CUDA devices have written."""
        for device in devices:
            self._last[device] = torch.cuda.current_stream(device)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last": {}}
