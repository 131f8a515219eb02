"""Differences of values that torch.autocast has in float32 stay float32 at O2, with what they are made of."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from ampgraph import NoLossScale, Policy

WIDTH, ROWS, MANY_ROWS = 8, 64, 256


class Beside(nn.Module):
    """A function of layers and inputs beside a branch for which low values move the fewest bytes.

    Alone, so small a model would be placed by the rule of torch.autocast.
    """

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.linspace(3, 7, WIDTH))
        self.wide = nn.ModuleList(nn.Linear(ROWS, ROWS) for _ in range(3))
        self.norm, self.scale = nn.LayerNorm(ROWS), nn.Parameter(torch.ones(ROWS))

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        z = self.wide[0](z) * self.scale
        z = self.wide[1](nn.functional.gelu(self.norm(z)) * self.scale)
        z = z.softmax(-1) * self.scale
        z = self.wide[2](z * self.scale).softmax(-1) * self.scale
        return self.function(self, x, y), self.wide[2](z)


def angle(model: Beside, x: Tensor, y: Tensor) -> Tensor:
    z = (y / 10 + 10) * (1 + model.layer(x) / 100)
    return torch.atan2(z[:, 0] - z[:, 1], z[:, 2] - z[:, 3])


def one_minus_square(model: Beside, x: Tensor, y: Tensor) -> Tensor:
    a = model.gate.sigmoid()
    return (1 - a * a).sqrt() * model.layer(x)


def quotient(model: Beside, x: Tensor, y: Tensor) -> Tensor:
    a = (-0.1 * model.layer(x).sigmoid() * (1 + y.abs())).exp()
    return x / (1 - a * a)


def between_least_and_largest(model: Beside, x: Tensor, y: Tensor) -> Tensor:
    z = (y / 10 + 5) * (1 + model.layer(x) / 100)
    least, largest = z.amin(0), z.amax(0)
    return model.last((z - least) / (largest - least))


def ratio_minus_one(model: Beside, x: Tensor, y: Tensor) -> Tensor:
    score = model.layer(x).log_softmax(-1)[:, 0]
    change = score - (score.detach() + y[:, 0] / 100)
    return change.exp() - 1 - change


def reprojected(model: Beside, x: Tensor, y: Tensor) -> Tensor:
    def pixels(points: Tensor) -> Tensor:
        return 800 * points[:, :2] / points[:, 2:3] + 320

    points = y[:, :3] + y.new_tensor([0, 0, 8])
    return pixels(points + model.layer(x)[:, :3] / 10) - pixels(points)


def covariance(model: Beside, x: Tensor, y: Tensor) -> Tensor:
    z = y + 5 + model.layer(x) / 100
    return (y * z).mean(0) - y.mean(0) * z.mean(0)


FUNCTIONS = (
    angle,
    one_minus_square,
    quotient,
    between_least_and_largest,
    ratio_minus_one,
    reprojected,
    covariance,
)


def inputs_of_all() -> list[Tensor]:
    return [torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.randn(MANY_ROWS, ROWS)]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def results(model: Beside, inputs: list[Tensor], run: Callable) -> list[Tensor]:
    result, side = run(*inputs)
    (result.sum() + side.sum()).backward()
    used = [model.layer.weight] if model.layer.weight.grad is not None else []
    return [result.detach().double(), *(p.grad.double() for p in used)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_difference_is_as_exact_as_autocasts(function: Callable, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, inputs = Beside(function), inputs_of_all()
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    policy = Policy("O2", dtype=dtype, loss_scale=NoLossScale())
    amp = ampgraph.convert(model, tuple(inputs), policy=policy)
    right = results(exact, [t.double() for t in inputs], exact)
    with torch.autocast("cpu", dtype):
        rule = plain(*inputs)
    theirs, ours = results(plain, inputs, lambda *_: rule), results(model, inputs, amp)
    for found, expected in zip(errors(ours, right), errors(theirs, right), strict=True):
        assert found <= 3 * expected + 1e-6


@pytest.mark.parametrize("function", [angle, quotient, ratio_minus_one])
def test_a_difference_says_so(function: Callable) -> None:
    amp = ampgraph.convert(
        Beside(function), tuple(inputs_of_all()), policy=Policy("O2", dtype=torch.bfloat16)
    )
    reasons = [d.reason for name, d in amp.plan.decisions.items() if name.startswith(("sub", "rsub"))]
    assert any("a difference of values, and torch.autocast computes it in float32" in r for r in reasons)


class HandNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        return (x - mean) / ((x - mean).pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def test_a_norm_of_hidden_states_is_no_such_difference() -> None:
    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(16, ROWS), HandNorm()
            self.layers = nn.ModuleList(nn.Linear(ROWS, ROWS) for _ in range(4))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = x + layer(self.norm(x))
            return self.layers[0](x)

    ids = torch.randint(16, (4, 32))
    amp = ampgraph.convert(Stream(), (ids,), policy=Policy("O2", dtype=torch.bfloat16))
    first = [name for name, d in amp.plan.decisions.items() if d.by == "hazard" and name.startswith("sub")]
    assert first == ["sub", "sub_1"]  # of the embedding, which no low op feeds


def test_branches_that_norms_scaled_are_no_such_difference() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.scale = nn.Embedding(16, ROWS), nn.Parameter(torch.ones(ROWS))
            self.norms = nn.ModuleList(nn.BatchNorm1d(ROWS) for _ in range(3))
            self.layer = nn.Linear(ROWS, ROWS)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            x = x + self.layer(x)
            mixed = self.norms[0](self.layer(x)) + self.norms[1](x)
            return self.layer(x + self.scale * (mixed - self.norms[2](x)))

    amp = ampgraph.convert(Mixer().eval(), (torch.arange(16),), policy=Policy("O2", dtype=torch.bfloat16))
    assert "hazard" not in {d.by for d in amp.plan.decisions.values()}
