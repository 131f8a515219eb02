"""Sums that a graph adds term by term stay in float32 at O2 where torch.autocast has float32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from ampgraph import NoLossScale, Policy
from ampgraph.passes.analysis.running_sums import MANY

LABELS, WIDTH = 6, 16
BF16 = torch.bfloat16


class Chain(nn.Module):
    """The loss of a linear-chain CRF: log Z minus the score of the labels."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.emit = nn.Linear(WIDTH, LABELS)
        self.moves = nn.Parameter(torch.zeros(LABELS, LABELS))
        self.in_place = in_place

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        emitted, labels = self.emit(x).transpose(0, 1), labels.t()
        batch = torch.arange(emitted.shape[1])
        paths, score = emitted[0], emitted[0, batch, labels[0]]
        for i in range(1, emitted.shape[0]):
            paths = (paths[:, :, None] + self.moves[None] + emitted[i][:, None]).logsumexp(1)
            if self.in_place:
                score += self.moves[labels[i - 1], labels[i]]
                score += emitted[i, batch, labels[i]]
            else:
                score = score + self.moves[labels[i - 1], labels[i]] + emitted[i, batch, labels[i]]
        return paths.logsumexp(1) - score


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    loss.mean().backward()
    return [p.grad.double() for p in model.parameters()]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_the_loss_of_a_chain_is_as_exact_as_autocasts(dtype: torch.dtype, in_place: bool) -> None:
    torch.manual_seed(0)
    model, x = Chain(in_place), torch.randn(8, 60, WIDTH)
    with torch.no_grad():
        model.emit.weight.mul_(12)
        labels = model.emit(x).argmax(-1)
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    amp = ampgraph.convert(model, (x, labels), policy=Policy("O2", dtype=dtype, loss_scale=NoLossScale()))
    loss = exact(x.double(), labels)
    with torch.autocast("cpu", dtype):
        rule = plain(x, labels)
    ours = amp(x, labels)
    assert (ours - loss).abs().max() <= 1.5 * (rule - loss).abs().max()
    of = gradients(exact, loss), gradients(plain, rule), gradients(model, ours)
    for right, theirs, found in zip(*of, strict=True):
        assert (found - right).norm() <= 1.5 * (theirs - right).norm()


class Applied(nn.Linear):
    """A layer, and a function of it and its input."""

    def __init__(self, function) -> None:
        super().__init__(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(super().forward, self.weight, x)


def test_few_additions_are_free_and_many_are_not() -> None:
    def total(count: int):
        def function(layer, weight: Tensor, x: Tensor) -> Tensor:
            y, found = layer(x), weight[0]
            for i in range(count):
                found = found + y[i]
            return layer(found.tanh())

        return function

    for count in (MANY - 1, MANY):
        model = Applied(total(count))
        amp = ampgraph.convert(model, (torch.randn(16, WIDTH),), policy=Policy("O2", dtype=BF16))
        found = {d.by for name, d in amp.plan.decisions.items() if name.startswith("add")}
        assert found == ({"hazard"} if count == MANY else {"placement"})


def test_a_flow_of_coupling_layers_is_no_total() -> None:
    """Layers read the half that is chunk's second result."""

    def flow(layer, weight: Tensor, x: Tensor) -> Tensor:
        x = weight + x
        for _ in range(2 * MANY):
            first, second = x.chunk(2, -1)
            changed = first + layer(torch.cat([second, second], -1))[:, : WIDTH // 2]
            x = torch.cat([second, changed], -1)
        return layer(x)

    amp = ampgraph.convert(Applied(flow), (torch.randn(16, WIDTH),), policy=Policy("O2", dtype=BF16))
    assert "hazard" not in {d.by for name, d in amp.plan.decisions.items() if name.startswith("add_")}


def test_a_residual_stream_is_no_total() -> None:
    def stream(layer, weight: Tensor, x: Tensor) -> Tensor:
        x = weight + x
        for _ in range(2 * MANY):
            x = x + layer(x)
        return layer(x)

    amp = ampgraph.convert(Applied(stream), (torch.randn(16, WIDTH),), policy=Policy("O2", dtype=BF16))
    assert "hazard" not in {d.by for name, d in amp.plan.decisions.items() if name.startswith("add_")}
