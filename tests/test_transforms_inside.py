"""Models that use the transforms of ``torch.func`` themselves, captured both ways."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import ampgraph
from ampgraph import CaptureError

from .helpers import close, nodes_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def outer(x: Tensor) -> Tensor:
    return (x[:, None] * x[None, :]).softmax(-1).sum(0)


def vmapped(self: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(outer)(x)


def nested(self: nn.Module, x: Tensor) -> Tensor:
    pairs = torch.vmap(torch.vmap(torch.dot, (None, 0)), (0, None))(x, x)
    return torch.vmap(outer)(x) + pairs.sum()


def twice(self: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(outer)(torch.vmap(lambda row: row / row.norm())(x))


def over_parameters(self: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: F.linear(row, self.first.weight).relu())(x)


def with_constant(self: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * torch.arange(8.0) + torch.tensor(0.5))(x)


def mask(self: nn.Module, x: Tensor) -> Tensor:
    """As attention masks are made: from indices, by four nested maps."""
    size = x.shape[0]
    causal = torch.vmap(torch.vmap(lambda i, j: i >= j, (None, 0)), (0, None))
    kept = causal(torch.arange(size), torch.arange(size))
    return (x @ x.T).masked_fill(~kept, float("-inf")).softmax(-1) @ x


def gradient(self: nn.Module, x: Tensor) -> Tensor:
    """A force: the derivative of an energy by its input."""
    return torch.func.grad(lambda y: self.first(y).tanh().square().sum())(x)


def per_sample(self: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(torch.func.grad(lambda row: self.first(row).tanh().square().sum()))(x)


def checkpointed(self: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda y: torch.vmap(outer)(y), x, use_reentrant=False)


class Model(nn.Module):
    def __init__(self, middle) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.middle = nn.Linear(8, 8), nn.Linear(8, 8), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self, self.first(x)))


MIDDLES = [vmapped, nested, twice, over_parameters, with_constant, mask, gradient, per_sample, checkpointed]


# torch.export cannot take a gradient inside a model.
AHEAD = [middle for middle in MIDDLES if middle not in (gradient, per_sample)]
CASES = [*((middle, "just in time") for middle in MIDDLES), *((middle, "ahead") for middle in AHEAD)]


@pytest.mark.parametrize("middle", AHEAD)
def test_graph_without_casts_keeps_the_transform(middle):
    model = Model(middle)
    amp = ampgraph.convert(model, (X,), policy="O0", capture="ahead of time")
    assert torch.equal(amp(X), model(X))


@pytest.mark.parametrize(("middle", "how"), CASES, ids=lambda case: getattr(case, "__name__", case))
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_transform(middle, how, level):
    """One graph, with casts, whose result and gradients are those of float32."""
    model = Model(middle)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        amp = ampgraph.convert(model, (X,) if how == "ahead" else None, policy=level, dtype=torch.bfloat16)
        out = amp(X)
    expected = model(X)
    close(out, expected, 0.03)
    assert not torch.equal(out, expected)
    assert len(amp.graph_modules) == 1
    found = torch.autograd.grad(out.square().sum(), list(model.parameters()))
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    for mine, theirs in zip(found, wanted, strict=True):
        close(mine, theirs, 0.06)


def test_other_sizes_are_one_capture():
    model = Model(mask)
    amp = ampgraph.convert(model, dtype=torch.bfloat16)
    for size in (4, 6, 5, 9):
        x = torch.randn(size, 8)
        close(amp(x), model(x), 0.03)
    assert len(amp.graph_modules) == 2


def test_exported_program_with_a_transform():
    """Its sub-graphs are flat ops as well, so the program can be saved."""
    model = Model(mask)
    program = ampgraph.convert(torch.export.export(model, (X,), strict=False), dtype=torch.bfloat16)
    close(program.module()(X), model(X), 0.03)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(X), program.module()(X))


SCORES = {
    "plain": None,
    "bias": lambda score, batch, head, q, k: score + 0.1 * (q - k),
    "causal": lambda score, batch, head, q, k: torch.where(q >= k, score, -float("inf")),
}


class Flexible(nn.Module):
    """Its torch function makes a mask of blocks by vmap, from no tensor of the graph."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.score = SCORES[name]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return self.out(flex_attention(q, k, v, score_mod=self.score).transpose(1, 2).flatten(2))


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("way", ["ahead of time", "just in time", "export"])
@pytest.mark.parametrize("name", SCORES)
def test_flex_attention(name, way):
    """Frozen, because torch has no backward of it on a CPU."""
    model, x = Flexible(name).eval().requires_grad_(False), torch.randn(2, 16, 32)
    if way == "export":
        run = ampgraph.export(model, (x,), policy="O1", dtype=torch.bfloat16).module()
    else:
        given = (x,) if way == "ahead of time" else None
        run = ampgraph.convert(model, given, dtype=torch.bfloat16, capture=way)
    expected, out = model(x), run(x)
    close(out, expected, 0.03)
    assert not torch.equal(out, expected)


def test_a_capture_leaves_what_a_transform_writes():
    class Counting(Model):
        def __init__(self) -> None:
            super().__init__(lambda self, x: x + torch.vmap(lambda count: count.add_(1))(self.count).sum())
            self.count = torch.zeros(3)

    model = Counting()
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16, capture="ahead of time")
    assert model.count.tolist() == [0, 0, 0]
    for calls in (1, 2):
        amp(X)
        assert model.count.tolist() == [calls] * 3


def test_gradient_inside_is_refused_ahead_of_time():
    with pytest.raises(CaptureError, match=r"Gradients inside forward: .*just in time"):
        ampgraph.convert(Model(gradient), (X,), capture="ahead of time")


def test_ops_of_a_transform_are_classified():
    """The product in the map runs low, as any linear does."""
    amp = ampgraph.convert(Model(over_parameters), dtype=torch.bfloat16)
    amp(X)
    products = [n for name in ("linear", "mm", "bmm") for n in nodes_of(amp.graph_module, name)]
    assert len(products) == 3
    assert {node.meta["val"].dtype for node in products} == {torch.bfloat16}


def pulled_back(self: nn.Module, x: Tensor) -> Tensor:
    result, pull = torch.func.vjp(self.first, x)
    return pull(result.sin())[0] + result


def pulled_back_twice(self: nn.Module, x: Tensor) -> Tensor:
    result, pull, more = torch.func.vjp(lambda t: (self.first(t).tanh(), t * 2), x, has_aux=True)
    return pull(torch.ones_like(result))[0] * pull(result)[0] + more


def pulled_back_inside(self: nn.Module, x: Tensor) -> Tensor:
    def energy(t: Tensor) -> Tensor:
        result, pull = torch.func.vjp(self.first, t)
        return pull(result.tanh())[0].square().sum()

    return torch.func.grad(energy)(x)


@pytest.mark.filterwarnings("ignore:.*captured just in time")
@pytest.mark.parametrize("capture", ["auto", "just in time"])
@pytest.mark.parametrize("function", [pulled_back, pulled_back_twice, pulled_back_inside])
def test_functions_that_vjp_returns(function, capture, recwarn):
    class Pulls(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x):
            return function(self, x)

    def trained(model):
        result = model(X)
        result.square().mean().backward()
        return result, [parameter.grad for parameter in model.parameters()]

    model = Pulls()
    expected, grads = trained(copy.deepcopy(model))
    amp = ampgraph.convert(model, (X,), capture=capture, policy="O1", dtype=torch.bfloat16)
    result, low_grads = trained(amp)
    close(result, expected)
    for got, want in zip(low_grads, grads, strict=True):
        assert (got - want).norm() <= 0.03 * want.norm()
    assert not torch.equal(result, expected)
    with torch.autograd.graph.save_on_cpu():  # which a transform turns off while it runs
        pass
    assert not [each for each in recwarn if "unconverted" in str(each.message)]
