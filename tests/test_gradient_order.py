"""When gradients of parameters leave the backward: group by group while it runs, as wrappers expect."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from ampgraph import Policy
from ampgraph.passes.analysis import gradient_flow

BF16, FP16 = torch.bfloat16, torch.float16


class Chain(nn.Module):
    """Six layers; a region without gradients may read the fourth one first."""

    def __init__(self, region: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.region = region
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.region and index == 3:
                with torch.no_grad():
                    scale = layer(x).abs().mean()
                x = x / (1 + scale)
            x = x + layer(x).tanh()
        return x.square().mean()


def order(amp: nn.Module, x: Tensor) -> list[str]:
    """Returns the names of weights, and ``"input"``, in the order in which their gradients are there."""
    found: list[str] = []
    for name, parameter in amp.named_parameters():
        if name.endswith("weight"):
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: found.append(name.split(".")[1])
            )
    x.register_hook(lambda _: found.append("input"))
    amp(x).backward()
    return found


@pytest.mark.parametrize("copies", [True, False], ids=["copies", "casts"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gradients_leave_while_the_backward_runs(
    dtype: torch.dtype, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_flow, "GROUP_BYTES", 2 * 8 * 8 * 2)  # two layers
    model, x = Chain(), torch.randn(4, 8)
    amp = ampgraph.convert(model, (x,), policy=Policy(dtype=dtype, weight_copies=copies), backend="eager")
    found = order(amp, x.clone().requires_grad_())
    assert {"5", "4", "3", "2"}.isdisjoint(found[found.index("input") :])
    assert sorted(found) == ["0", "1", "2", "3", "4", "5", "input"]


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_first_read_without_gradients_cuts_none(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The boundary of a layer stands before the region that reads it first."""
    monkeypatch.setattr(gradient_flow, "GROUP_BYTES", 1)
    model, x = Chain(region=True), torch.randn(4, 8)
    amp = ampgraph.convert(model, (x,), policy=Policy(dtype=dtype), backend="eager")
    model(x).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    amp(x).backward()
    for name, p in amp.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=0.1, atol=2e-3)


class Towers(nn.Module):
    """Two outputs that read different inputs and different weights, and a third that reads all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, y = self.left(x).tanh(), self.right(y).tanh()
        return x.square().mean(), y.square().mean(), (x * y).mean()


@pytest.mark.parametrize("copies", [True, False], ids=["copies", "casts"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_one_output_runs_nothing_of_the_others(dtype: torch.dtype, copies: bool) -> None:
    """Neither hooks of their weights nor the graphs before their inputs, which a backward would free."""
    model, x, y = Towers(), torch.randn(4, 8), torch.randn(4, 8)
    amp = ampgraph.convert(model, (x, y), policy=Policy(dtype=dtype, weight_copies=copies), backend="eager")
    seen: list[str] = []
    for name, parameter in amp.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.append(name if grad is not None else "None"))
    left, right = x.clone().requires_grad_(), y.clone().requires_grad_()
    one, other, _ = amp(left.exp(), right.exp())
    one.backward()
    assert sorted(seen) == ["left.bias", "left.weight"]
    assert right.grad is None
    other.backward()
    assert sorted(seen) == ["left.bias", "left.weight", "right.bias", "right.weight"]
    assert right.grad is not None


class Chosen(nn.Module):
    """Weights that are read for a mask, for indices and for a shape: none has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.index, self.shape = (nn.Linear(8, 8) for _ in range(3))
        self.value = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.value(x).where(self.mask(x) > 0, 0.5)
        return (y[self.index(x).argmax(-1) % 4] + torch.zeros_like(self.shape(x))).square().mean()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_decisions_have_no_gradients(dtype: torch.dtype, backend: str) -> None:
    """A zero gradient would let an optimizer decay the weight."""
    model, x = Chosen(), torch.randn(4, 8)
    model(x).backward()
    wanted = {name for name, p in model.named_parameters() if p.grad is not None}
    assert wanted == {"value.weight", "value.bias"}
    model.zero_grad()
    amp = ampgraph.convert(model, (x,), policy=Policy(dtype=dtype), backend=backend)
    amp(x).backward()
    assert {name for name, p in amp.named_parameters() if p.grad is not None} == wanted


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_frozen_block_before_trained_ones(dtype: torch.dtype) -> None:
    model, x = Chain(), torch.randn(4, 8)
    model.layers[0].requires_grad_(False)
    ampgraph.convert_blocks(model, "layers.*", dtype=dtype, backend="aot_eager")
    model(x).backward()
    grads = [layer.weight.grad is not None for layer in model.layers]
    assert grads == [False, True, True, True, True, True]
