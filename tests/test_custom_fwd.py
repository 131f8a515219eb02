"""``torch.amp.custom_fwd(cast_inputs=torch.float32)``: what it decorates computes in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ampgraph

from .helpers import dtype_of

BF16, FP32 = torch.bfloat16, torch.float32
X = torch.randn(4, 8)


class Plain(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()


class Exact(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=FP32)
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()


class Calls(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.first, self.second, self.function = nn.Linear(8, 8), nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.first(x), self.second.weight)


@pytest.mark.filterwarnings("ignore:.*loses the backward")
@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
@pytest.mark.parametrize(("function", "expected"), [(Plain, BF16), (Exact, FP32)])
def test_without_gradients(function: type, expected: torch.dtype, capture: str) -> None:
    amp = ampgraph.convert(Calls(function), (X,), dtype=BF16, capture=capture, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(amp(X), amp.source(X), rtol=0.05, atol=0.05)
    assert dtype_of(amp.graph_module, "linear") == [BF16]
    assert dtype_of(amp.graph_module, "matmul") == [expected]
