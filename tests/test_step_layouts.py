"""Whole steps over transposed tensors, for which FakeTensor finds other strides than kernels return."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import ampgraph

X = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(0))


class Between(nn.Module):
    """Layers over the features of a sequence, between two that are over its positions."""

    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(16, 16), part, nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.rand(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(self.first(x).transpose(1, 2) * self.scale).transpose(1, 2))


class BetweenImages(Between):
    """The same with the features of an image."""

    def forward(self, x: Tensor) -> Tensor:
        image = self.first(x).view(4, 2, 3, 16).permute(0, 3, 1, 2)
        return self.last(self.part(image).permute(0, 2, 3, 1)).flatten(1, 2)


def loss_fn(amp: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(amp(x).flatten(0, 1), y.flatten())


def trained(model: nn.Module, whole: bool, level: str) -> ampgraph.CompiledStep:
    torch.manual_seed(1)
    amp = ampgraph.convert(model, (X,), policy=level, dtype=torch.float16, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = ampgraph.compile_step(amp, optimizer, loss_fn)
    if not whole:
        amp.scaler.attach(optimizer)
    for _ in range(5):
        if whole:
            step(X, Y)
            continue
        loss_fn(amp, X, Y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return step


class Layouts(fx.Interpreter):
    """Checks that nodes give results of the strides and dtypes that the trace found."""

    def run_node(self, node: fx.Node) -> Any:
        found = super().run_node(node)
        expected = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
        for fake, real in zip(expected, tree_leaves(found), strict=False):
            assert (real.stride(), real.dtype) == (fake.stride(), fake.dtype), node.format_node()
        return found


SEQUENCES = {
    "batch norm": lambda: nn.BatchNorm1d(16),
    "layer norm": lambda: nn.LayerNorm(6),
    "log softmax": lambda: nn.LogSoftmax(1),
    "logsigmoid": nn.LogSigmoid,
    "rrelu": nn.RReLU,
    "softplus": nn.Softplus,
    "losses": lambda: lambda x: F.mse_loss(x, x.detach() * 2, reduction="none"),
}
IMAGES = {
    "batch norm of images": lambda: nn.BatchNorm2d(16),
    "group norm": lambda: nn.GroupNorm(4, 16),
    "channel shuffle": lambda: nn.ChannelShuffle(4),
    "padding": lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.MaxPool2d(3, 1)),
}
CASES = [(Between, name) for name in SEQUENCES] + [(BetweenImages, name) for name in IMAGES]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_step_over_transposed_tensors_equals_the_loop(kind: type[Between], name: str, level: str) -> None:
    torch.manual_seed(0)
    model = kind((SEQUENCES | IMAGES)[name]())
    plain = copy.deepcopy(model)
    step = trained(model, whole=True, level=level)
    trained(plain, whole=False, level=level)
    assert step.reason is None
    for (key, mine), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), key
    (graph_module,) = step.graph_modules
    fakes = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
    with torch.no_grad():
        Layouts(graph_module).run(*(torch.zeros(x.shape, dtype=x.dtype) for x in fakes))
