"""Low-precision kernels of torch that are wrong on a CPU: the avoided ones, and the documented ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampgraph
from ampgraph import NoLossScale, OpLists, Policy
from tests.zoo.cpu_kernels import layer_norm_sums_in_float32

from .helpers import dtype_of

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def gradients(module: nn.Module, x: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    (module(x) * weights).sum().backward()
    return [p.grad.clone() for p in module.parameters()]


class Sampled(nn.Module):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return sampled(features, pixels(features))


def worst(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """Returns the largest relative error of one parameter's gradient; NaN counts as infinite."""
    errors = [float((one - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]
    return max(e if e == e else float("inf") for e in errors)


@pytest.mark.parametrize("how", ["ahead of time", "just in time"])
@pytest.mark.parametrize("layer", [nn.Conv3d, nn.ConvTranspose3d])
def test_3d_convolutions_train_right_in_bfloat16(layer, how):
    model, x = (
        nn.Sequential(layer(3, 16, 7, padding=3), nn.ReLU(), nn.Conv3d(16, 8, 5)),
        torch.randn(2, 3, 6, 14, 14),
    )
    amp = ampgraph.convert(model, (x,) if how == "ahead of time" else None, dtype=BF16)
    weights = torch.randn(amp(x).shape)
    exact = gradients(model, x, weights)
    assert worst(gradients(amp, x, weights), exact) < 0.05


@pytest.mark.parametrize(
    ("layer", "shape", "ops", "dtype", "expected"),
    [
        (nn.Conv3d(1, 2, 3), (1, 1, 4, 4, 4), OpLists.default(), BF16, FP32),
        (nn.Conv3d(1, 2, 3), (1, 1, 4, 4, 4), OpLists.default(), FP16, FP16),
        (nn.Conv3d(1, 2, 3), (1, 4, 4, 4), OpLists.default(), BF16, FP32),  # without a batch
        (nn.Conv2d(1, 2, 3), (1, 1, 4, 4), OpLists.default(), BF16, BF16),
        (nn.Conv3d(1, 2, 3), (1, 1, 4, 4, 4), OpLists.default().with_white("aten.conv3d"), BF16, BF16),
        (nn.Conv3d(1, 2, 3), (1, 1, 4, 4, 4), OpLists.torch(), BF16, BF16),
    ],
)
def test_only_3d_convolutions_in_bfloat16_of_the_default_lists(layer, shape, ops, dtype, expected):
    amp = ampgraph.convert(copy.deepcopy(layer), (torch.randn(shape),), policy=Policy(ops=ops, dtype=dtype))
    assert dtype_of(amp.graph_module, "conv2d" if isinstance(layer, nn.Conv2d) else "conv3d") == [expected]


def test_on_other_devices_they_run_low():
    with torch.device("meta"):
        layer, x = nn.Conv3d(1, 2, 3), torch.randn(1, 1, 4, 4, 4)
    amp = ampgraph.convert(layer, (x,), dtype=BF16)
    assert dtype_of(amp.graph_module, "conv3d") == [BF16]


def pixels(features: torch.Tensor) -> torch.Tensor:
    """The position of every pixel, as ``grid_sample`` takes it."""
    spread = torch.eye(features.dim() - 2, features.dim() - 1)[None]
    return nn.functional.affine_grid(spread, list(features.shape), align_corners=False)


def sampled(features: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return nn.functional.grid_sample(features, grid.to(features.dtype), align_corners=False)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize(("layer", "shape"), [(nn.Conv2d, (300, 300)), (nn.Conv3d, (2, 8, 300))])
def test_grid_sample_runs_in_float32(layer, shape, dtype, level):
    """The low kernel computes positions and weights low, and returns noise or what nothing wrote."""
    low = torch.randn(1, 2, *shape).to(dtype)
    grid = pixels(low).to(dtype)
    found, exact = sampled(low, grid).float(), sampled(low.float(), grid.float())
    assert not torch.allclose(found, exact, atol=0.02), "torch's kernel is right now: drop it from BROKEN_ON"
    model = nn.Sequential(layer(1, 2, 1), Sampled()).eval()
    x = torch.randn(1, 1, *shape)
    with torch.no_grad():
        expected = model(x)
        amp = ampgraph.convert(model, (x,), policy=Policy(level=level, dtype=dtype))
        assert (amp(x).float() - expected).norm() / expected.norm() < 0.02
    assert dtype_of(amp.graph_module, "grid_sampler") == [FP32]


class Resized(nn.Module):
    """Resizes the output of a layer, and a parameter, as vision transformers resize position embeddings."""

    def __init__(self, mode: str, antialias: bool) -> None:
        super().__init__()
        self.layer, self.positions = nn.Conv2d(3, 4, 3), nn.Parameter(torch.randn(1, 4, 5, 5))
        self.how = {"mode": mode, "antialias": antialias}

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = self.layer(image)
        positions = F.interpolate(self.positions, size=features.shape[2:], **self.how)
        return self.layer(F.interpolate(features + positions, size=(9, 9), **self.how)[:, :3])


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize(
    ("mode", "antialias"),
    [
        *((mode, False) for mode in ("nearest", "nearest-exact", "area", "bilinear", "bicubic")),
        ("bilinear", True),
        ("bicubic", True),
    ],
)
def test_all_ways_to_resize_can_be_trained(mode, antialias, level, dtype):
    model, x = Resized(mode, antialias), torch.randn(2, 3, 12, 12)
    policy = Policy(level=level, dtype=dtype, loss_scale=NoLossScale())
    amp = ampgraph.convert(copy.deepcopy(model), (x,), policy=policy)
    weights = torch.randn(model(x).shape)
    assert worst(gradients(amp, x, weights), gradients(model, x, weights)) < 0.05


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_layer_norm_sums_its_gradients_low(dtype):
    """A named limit: what is off is the kernel's sum over rows, which torch's CPU autocast shares."""
    model = nn.Sequential(nn.Linear(16, 96), nn.LayerNorm(96), nn.Linear(96, 16))
    x, weights = torch.randn(3136, 16), torch.randn(3136, 16) + 0.3
    policy = Policy(dtype=dtype, loss_scale=NoLossScale())
    amp = ampgraph.convert(model, (x,), policy=policy)
    exact, eps = gradients(model, x, weights), torch.finfo(dtype).eps
    assert dtype_of(amp.graph_module, "layer_norm") == [dtype]
    assert worst(gradients(amp, x, weights), exact) > 4 * eps
    with torch.autocast("cpu", dtype=dtype):
        assert worst(gradients(model, x, weights), exact) > 4 * eps
    with layer_norm_sums_in_float32():
        assert worst(gradients(amp, x, weights), exact) < 2 * eps
    assert worst(gradients(amp, x, weights), exact) > 4 * eps
    black = Policy(dtype=dtype, loss_scale=NoLossScale(), ops=OpLists.default().with_black("aten.layer_norm"))
    assert worst(gradients(ampgraph.convert(model, (x,), policy=black), x, weights), exact) < 2 * eps


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_layer_norm_with_a_bias_alone_has_a_backward(level):
    """On a CPU the kernel of the backward takes a float32 bias beside a low input only with a weight."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.bias = nn.Linear(8, 8), nn.Parameter(torch.rand(8))

        def forward(self, x):
            return F.layer_norm(self.inner(x), (8,), None, self.bias).sin()

    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 8)
    amp = ampgraph.convert(model, (x,), policy=Policy(level, dtype=torch.bfloat16))
    y = amp(x)
    y.square().sum().backward()
    assert torch.allclose(y, model(x), atol=0.05)
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
