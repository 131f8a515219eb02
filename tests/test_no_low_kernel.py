"""Ops that cannot run low, although no table says so: FakeTensor is asked, and the reason is told."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampgraph

X = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
WINDOW = torch.hann_window(32)


class After(nn.Module):
    """A function of what a linear layer yields."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(64, 64), function

    def forward(self, x):
        return self.function(self.linear(x))


def there_and_back(x):
    return torch.istft(torch.stft(x, 32, window=WINDOW, return_complex=True), 32, window=WINDOW)


@pytest.mark.parametrize("args", [(X,), None], ids=["ahead of time", "just in time"])
@pytest.mark.parametrize(
    ("function", "node", "reason"),
    [
        (there_and_back, "istft", "from low operands too"),
        (lambda x: torch.linalg.matrix_norm(x, "nuc"), "linalg_matrix_norm", "no low-precision kernel: "),
        (lambda x: torch.linalg.vander(x[:, :4]), "linalg_vander", ""),
        (lambda x: torch.matrix_exp(x[:2, :2] / 8), "matrix_exp", "no low-precision kernel"),
        (lambda x: torch._lu_with_info(x[:2, :2])[0], "_lu_with_info", "no low-precision kernel"),
    ],
    ids=["istft", "nuclear norm", "vander", "matrix_exp", "lu"],
)
def test_everything_low_but_what_cannot_be(function, node, reason, args):
    model = After(function).eval()
    expected = model(X)
    amp = ampgraph.convert(model, args, policy="O3", dtype=torch.float16)
    result = amp(X)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=0.02, atol=0.02)
    explanation = ampgraph.explain(amp.graph_module)
    (row,) = [row for row in explanation.nodes if row.name.startswith(node)]
    assert row.dtype.startswith("float32")
    assert (row.by, reason in row.reason) == ("kernel", True)
