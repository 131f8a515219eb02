"""The bytes that `explain` says an eager forward saves are those that autograd saves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ampgraph

X = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(0))
INDEX = torch.tensor([1, 0, 3])
MASK = X > 0


class Model(nn.Module):
    """Gives a function two trained tensors of one size, and a parameter."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function, self.gain = function, nn.Parameter(torch.ones(8, 1, 1))
        self.conv, self.linear, self.norm = nn.Conv2d(8, 8, 1), nn.Linear(6, 6), nn.LayerNorm(6)
        self.batch_norm, self.table = nn.BatchNorm2d(8), nn.Embedding(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x + self.gain, x - self.gain)


CASES: dict[str, Callable[[Model, Tensor, Tensor], Tensor]] = {
    "sum": lambda m, x, y: x + y,
    "product": lambda m, x, y: x * y,
    "square": lambda m, x, y: x * x,
    "product with a number": lambda m, x, y: x * 3.0,
    "product with a mask": lambda m, x, y: x * MASK.float(),
    "quotient": lambda m, x, y: x / y,
    "quotient by a number": lambda m, x, y: x / 3.0,
    "power": lambda m, x, y: x**3,
    "relu": lambda m, x, y: F.relu(x),
    "relu twice": lambda m, x, y: F.relu(x) + F.relu(x),
    "relu in place": lambda m, x, y: F.relu(x, inplace=True),
    "tanh": lambda m, x, y: torch.tanh(x),
    "sigmoid": lambda m, x, y: torch.sigmoid(x) * y,
    "exp": lambda m, x, y: x.exp(),
    "sqrt": lambda m, x, y: x.abs().sqrt(),
    "gelu": lambda m, x, y: F.gelu(x),
    "silu": lambda m, x, y: F.silu(x),
    "elu": lambda m, x, y: F.elu(x),
    "softmax": lambda m, x, y: x.softmax(-1),
    "log_softmax": lambda m, x, y: x.log_softmax(1),
    "cat": lambda m, x, y: torch.cat([x, y]),
    "where": lambda m, x, y: torch.where(x > 0, x, y),
    "masked_fill": lambda m, x, y: x.masked_fill(y > 0, 0.0),
    "index": lambda m, x, y: x[INDEX],
    "gather": lambda m, x, y: x.gather(1, MASK.long()),
    "embedding": lambda m, x, y: m.table(MASK[0, 0].long()),
    "linear": lambda m, x, y: m.linear(x),
    "two linears of one input": lambda m, x, y: m.linear(x) + m.linear(x),
    "linear after tanh": lambda m, x, y: m.linear(torch.tanh(x)),
    "conv": lambda m, x, y: m.conv(x),
    "matmul": lambda m, x, y: x @ y,
    "bmm": lambda m, x, y: x[0].bmm(y[0]),
    "max_pool2d": lambda m, x, y: F.max_pool2d(x, 2),
    "avg_pool2d": lambda m, x, y: F.avg_pool2d(x, 2),
    "interpolate": lambda m, x, y: F.interpolate(x, scale_factor=2.0),
    "pad": lambda m, x, y: F.pad(x, (1, 1)),
    "mean": lambda m, x, y: x.mean(-1),
    "cumsum": lambda m, x, y: x.cumsum(-1),
    "amax": lambda m, x, y: x.amax(-1),
    "logsumexp": lambda m, x, y: x.logsumexp(-1),
    "dropout": lambda m, x, y: F.dropout(x, 0.5),
    "dropout in evaluation": lambda m, x, y: F.dropout(x, 0.5, training=False),
    "dropout of nothing": lambda m, x, y: F.dropout(x, 0.0),
    "max": lambda m, x, y: x.max(-1).values,
    "sort": lambda m, x, y: x.sort(-1).values,
    "topk": lambda m, x, y: x.topk(2).values,
    "expanded": lambda m, x, y: x.mean(0, keepdim=True).expand_as(y) * y,
    "l1_loss": lambda m, x, y: F.l1_loss(x, y),
    "mse_loss": lambda m, x, y: F.mse_loss(x, y),
    "half of a tensor": lambda m, x, y: torch.tanh(x.chunk(2, 1)[0]) * y.chunk(2, 1)[1].sin(),
}
# Beside what is counted, they save statistics.
STATISTICS = {
    "layer_norm": (lambda m, x, y: m.norm(x), 8 * 4 * 8 * 6),
    "batch_norm": (lambda m, x, y: m.batch_norm(x), 16 * 8),
    "attention": (lambda m, x, y: F.scaled_dot_product_attention(x, y, x), 4 * 4 * 8 * 6),
    "cross_entropy": (lambda m, x, y: F.cross_entropy(x.flatten(1), INDEX.new_zeros(4)), 4 + 32),
}


def saved(amp: ampgraph.AmpModule, x: Tensor) -> int:
    """Returns the bytes of the memory that autograd keeps, without that of the model and its constants."""
    own = {t.untyped_storage()._cdata for t in (*amp.parameters(), *amp.buffers(), INDEX)}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        found.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        amp(x)
    return sum(t.untyped_storage().nbytes() for key, t in found.items() if key not in own)


def said_and_saved(function: Callable, level: str) -> tuple[int, int]:
    policy = ampgraph.Policy(level, dtype=torch.bfloat16, weight_copies=False, loss_scale=None)
    amp = ampgraph.convert(Model(function), (X,), policy=policy)
    return ampgraph.explain(amp).totals.saved, saved(amp, X)


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("name", CASES)
def test_one_op(name, level) -> None:
    said, found = said_and_saved(CASES[name], level)
    assert said == found


@pytest.mark.parametrize("name", STATISTICS)
def test_an_op_with_statistics(name) -> None:
    function, statistics = STATISTICS[name]
    said, found = said_and_saved(function, "O0")
    assert found - statistics <= said <= found
