"""Converted models under ``torch.func``: other parameters for a call, gradients, batching, ensembles."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap

import ampgraph
from ampgraph import CaptureError, Policy, StaticLossScale

BF16, FP16 = torch.bfloat16, torch.float16
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
KINDS = pytest.mark.parametrize(
    ("level", "dtype"), [(level, dtype) for level in ("O1", "O2") for dtype in (BF16, FP16)], ids=str
)


def built(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def converted(level, dtype, *examples):
    scale = StaticLossScale(16.0) if dtype == FP16 else None
    amp = ampgraph.convert(built(), (X,), policy=Policy(level, dtype=dtype, loss_scale=scale))
    for example in examples:
        amp(example)
    return amp


def others(model):
    return {name: value.detach() + 0.3 for name, value in model.named_parameters()}


def loss(model, x=X):
    return lambda parameters: functional_call(model, parameters, (x,)).square().mean()


def near(actual, expected, dtype):
    """Close to float32, and not float32."""
    error = (actual - expected).norm() / expected.norm()
    assert actual.dtype == expected.dtype
    assert 0 < error < 4 * torch.finfo(dtype).eps


def all_near(actual, expected, dtype):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        near(actual[name], value, dtype)


@KINDS
def test_gradients_of_other_parameters(level, dtype):
    """They come out unscaled, and the model's own parameters are as before."""
    amp, model = converted(level, dtype), built()
    given, before = others(model), amp(X).detach()
    all_near(grad(loss(amp))(given), grad(loss(model))(given), dtype)
    assert torch.equal(amp(X), before)
    assert all(p.grad is None for p in amp.parameters())


@KINDS
def test_gradients_by_autograd_of_other_parameters(level, dtype):
    amp, model = converted(level, dtype), built()
    given = {name: value.clone().requires_grad_() for name, value in others(model).items()}
    found = torch.autograd.grad(loss(amp)(given), list(given.values()))
    all_near(dict(zip(given, found, strict=True)), grad(loss(model))(others(model)), dtype)


@KINDS
def test_batched(level, dtype):
    amp, model = converted(level, dtype, X[:1]), built()
    near(vmap(lambda x: amp(x[None])[0])(X), model(X), dtype)


@KINDS
def test_gradients_per_sample(level, dtype):
    amp, model = converted(level, dtype, X[:1]), built()
    given = others(model)

    def of_each(module):
        return vmap(lambda x: grad(loss(module, x[None]))(given))(X)

    all_near(of_each(amp), of_each(model), dtype)


@KINDS
def test_jacobian(level, dtype):
    amp, model = converted(level, dtype), built()
    near(jacrev(amp)(X), jacrev(model)(X), dtype)


@KINDS
def test_ensemble(level, dtype):
    amp, members = converted(level, dtype), [built(2), built(3)]
    stacked, _ = stack_module_state(members)
    found = vmap(lambda parameters: functional_call(amp, parameters, (X,)))(stacked)
    near(found, torch.stack([member(X) for member in members]), dtype)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.zeros(8))

    def forward(self, x):
        return (self.linear(x) + self.mask).softmax(-1)


@pytest.mark.parametrize("seen", [0.0, -1e9])
def test_ensemble_of_buffers_with_other_values(seen):
    """The plan holds for values that float16 can hold, and no value of a batch leaves vmap."""
    members = [Masked(), Masked()]
    members[1].mask[3:] = seen
    amp = ampgraph.convert(members[0], (X,), dtype=torch.float16)
    stacked = stack_module_state(members)

    def ensemble():
        return vmap(lambda *state: functional_call(amp, state, (X,)))(*stacked)

    if seen:
        with pytest.raises(CaptureError, match="cannot be captured inside a transform"):
            ensemble()
    else:
        near(ensemble(), torch.stack([member(X) for member in members]), torch.float16)


def test_what_cannot_be_captured_inside_a_transform_says_so():
    amp = converted("O1", BF16)
    with pytest.raises(CaptureError, match=r"not captured for .*\(1, 8\).*call the converted model once"):
        vmap(lambda x: amp(x[None])[0])(X)
    late = ampgraph.convert(built(), dtype=BF16)
    late(X)
    with pytest.raises(CaptureError, match="pass example inputs to"):
        grad(loss(late))(others(late))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_ordinary_training_goes_on_after_a_transform(backend):
    model = built()
    amp = ampgraph.convert(model, (X,), policy="O2", dtype=FP16, backend=backend)
    grad(loss(amp))(others(model))
    amp(X).square().mean().backward()
    reference = built()
    reference(X).square().mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        near(mine.grad, theirs.grad, FP16)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_replaced_parameters_and_submodules_are_read(level, backend):
    """On the source, after conversion: the graph reads the live model."""
    model = built()
    amp = ampgraph.convert(model, (X,), policy=level, dtype=FP16, backend=backend)
    amp(X)
    model[0].weight = nn.Parameter(torch.randn(16, 8))
    model[3] = nn.Linear(16, 4)
    near(amp(X).detach(), model(X).detach(), FP16)
