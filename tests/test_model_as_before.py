"""`assert_close_to_fp32` leaves a model as it was, whatever forward does to buffers and attributes."""

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph.runtime.unchanged_model import unchanged
from ampgraph.testing import assert_close_to_fp32


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table.shape[0] < x.shape[0]:
            self.table = torch.arange(float(x.shape[0]))
        return self.fc(x) + self.table[: x.shape[0], None]


class Makes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(8.0))
        return self.fc(x) + self.table


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.fc(x) * self.calls


@pytest.mark.parametrize("make", [Grows, Makes, Counts])
def test_a_comparison_leaves_the_model_as_it_was(make: type[nn.Module]) -> None:
    model = make()
    amp = ampgraph.convert(model, dtype=torch.bfloat16)
    attributes, buffers = dict(vars(model)), dict(model.named_buffers())
    assert_close_to_fp32(amp, (torch.randn(4, 8),))
    assert {n: v for n, v in vars(model).items() if v is not attributes.get(n)} == {}
    assert [(n, id(b)) for n, b in model.named_buffers()] == [(n, id(b)) for n, b in buffers.items()]


def test_a_sparse_buffer_stays_as_it_was() -> None:
    model = nn.Linear(8, 8)
    model.register_buffer("neighbours", torch.eye(4).to_sparse())
    with unchanged(model), torch.no_grad():
        model.neighbours.mul_(2.0)
    assert torch.equal(model.neighbours.to_dense(), torch.eye(4))
