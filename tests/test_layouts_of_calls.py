"""A graph that was captured for dense tensors runs for no sparse ones."""

import pytest
import torch
from torch import nn

import ampgraph


class Neighbours(nn.Module):
    """A dense matrix of neighbours is halved here; a sparse one is taken as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("own", torch.rand(4, 4))

    def forward(self, x: torch.Tensor, matrix: torch.Tensor | None = None) -> torch.Tensor:
        matrix = self.own if matrix is None else matrix
        product = torch.mm(matrix, self.fc(x))
        return product if matrix.is_sparse else 0.5 * product


@pytest.mark.parametrize("first_is_sparse", [False, True])
def test_an_argument_of_another_layout_has_its_own_graph(first_is_sparse: bool) -> None:
    model, x, dense = Neighbours().eval(), torch.randn(4, 8), torch.rand(4, 4)
    calls = [dense, dense.to_sparse()]
    first, then = reversed(calls) if first_is_sparse else calls
    amp = ampgraph.convert(model, (x, first), dtype=torch.bfloat16)
    with torch.no_grad():
        for matrix in (first, then, first, then):
            torch.testing.assert_close(amp(x, matrix), model(x, matrix), atol=0.05, rtol=0.05)
    assert len(amp.graph_modules) == 2


def test_a_buffer_of_another_layout_has_its_own_graph() -> None:
    model, x = Neighbours().eval(), torch.randn(4, 8)
    amp = ampgraph.convert(model, (x,), dtype=torch.bfloat16)
    model.own = model.own.to_sparse()
    with torch.no_grad():
        torch.testing.assert_close(amp(x), model(x), atol=0.05, rtol=0.05)
