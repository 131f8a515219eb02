"""`tests.inductor_schedule` schedules what Inductor would compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from . import inductor_schedule


def test_the_backward_gets_the_layouts_that_the_forward_saves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[bool, list[Any]]] = []
    original = inductor_schedule._kernels

    def kernels(graph_module: Any, inputs: Any, is_backward: bool) -> Any:
        found.append((is_backward, [x for x in inputs if isinstance(x, Tensor) and x.dim() == 4]))
        return original(graph_module, inputs, is_backward)

    monkeypatch.setattr(inductor_schedule, "_kernels", kernels)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3))
    inductor_schedule.scheduled(lambda x: model(x).sum(), torch.randn(2, 3, 16, 16))
    (_, given), (is_backward, saved) = found
    assert is_backward
    assert all(x.is_contiguous() for x in given)
    # Inductor keeps activations of convolutions on a CPU with their channels next to each other.
    activations = [x for x in saved if x.shape[:2] == (2, 8)]
    assert activations
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in activations)
