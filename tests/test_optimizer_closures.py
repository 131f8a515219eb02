"""Optimizers that call their closure several times, or change the parameters before they do."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import DynamicLossScale, Policy

pytestmark = pytest.mark.usefixtures("shared_captures")
INF = float("inf")


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation: the gradient that counts is that of the worst point nearby."""

    def __init__(self, parameters: Iterable[nn.Parameter], base: type, rho: float = 0.05, **options: Any):
        super().__init__(list(parameters), {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.detach().clone()
                p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p, state in self.state.items():
            if "before" in state:
                p.copy_(state["before"])
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Callable) -> Any:
        closure = torch.enable_grad()(closure)
        self.first_step()
        loss = closure()
        self.second_step()
        return loss


class Lookahead(torch.optim.Optimizer):
    """Pulls the parameters towards slow ones after every second step of the optimizer inside."""

    def __init__(self, inner: torch.optim.Optimizer):
        self.inner, self.calls = inner, 0
        super().__init__(inner.param_groups, {})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Any:
        loss = self.inner.step(closure)
        self.calls += 1
        if self.calls % 2 == 0:
            for p, state in self.state.items():
                state["slow"].lerp_(p, 0.5)
                p.copy_(state["slow"])
        return loss


def source() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def convert(model: nn.Module, **numbers: float) -> ampgraph.AmpModule:
    scale = DynamicLossScale(**{"init_scale": 1024.0, **numbers})
    return ampgraph.convert(model, (torch.randn(4, 8),), policy=Policy(dtype=torch.float16, loss_scale=scale))


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
Y = torch.sin(X[:, :4])


def loss_of(model: nn.Module, x: torch.Tensor = X) -> torch.Tensor:
    return (model(x) - Y).square().mean()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = copy.deepcopy(list(optimizer.state.values()))
    tensors = [t for s in state for t in s.values() if isinstance(t, torch.Tensor)]
    return [*(p.detach().clone() for p in model.parameters()), *tensors]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def train_sam(model: nn.Module, optimizer: SAM, steps: int = 15) -> list[float]:
    def closure() -> torch.Tensor:
        loss = loss_of(model)
        loss.backward()
        return loss

    losses = []
    for _ in range(steps):
        loss = closure()
        optimizer.step(closure)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adam])
def test_sam_trains_as_it_does_in_float32(base) -> None:
    reference = source()
    amp = convert(copy.deepcopy(reference))
    expected = train_sam(reference, SAM(reference.parameters(), base, lr=0.1))
    optimizer = SAM(amp.parameters(), base, lr=0.1)
    amp.scaler.attach(optimizer)
    found = train_sam(amp, optimizer)
    assert expected[-1] < 0.6 * expected[0]
    assert found == pytest.approx(expected, rel=0.02)
    assert amp.scaler.state_dict()["_growth_tracker"] == 15


def test_sam_whose_inner_optimizer_is_attached_is_no_stranger() -> None:
    amp = convert(source())
    optimizer = SAM(amp.parameters(), torch.optim.SGD, lr=0.1)
    amp.scaler.attach(optimizer.base_optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_sam(amp, optimizer, 3)
    assert amp.scaler.state_dict()["_growth_tracker"] == 3


def test_sam_whose_inner_optimizer_asks_another_scaler_is_a_stranger() -> None:
    amp, other = convert(source()), convert(source())
    optimizer = SAM([*amp.parameters(), *other.parameters()], torch.optim.SGD, lr=0.1)
    other.scaler.attach(optimizer.base_optimizer)

    def closure() -> torch.Tensor:
        loss = loss_of(amp) + loss_of(other)
        loss.backward()
        return loss

    closure()
    with pytest.warns(UserWarning, match="the scale never adapts"):
        optimizer.step(closure)


@pytest.mark.parametrize("bad", ["first", "second"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_sam_leaves_out_a_step_with_either_gradient_bad(bad, by_hand) -> None:
    amp = convert(source())
    optimizer = SAM(amp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    amp.scaler.attach(optimizer)
    train_sam(amp, optimizer, 2)
    before = everything(amp, optimizer.base_optimizer)
    losses: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        losses.append(loss_of(amp, X * INF if bad == "second" else X))
        losses[-1].backward()
        return losses[-1]

    loss_of(amp, X * INF if bad == "first" else X).backward()
    if by_hand:
        optimizer.first_step()
        closure()
        optimizer.second_step()
    else:
        assert optimizer.step(closure) is losses[0]
    assert same(before, everything(amp, optimizer.base_optimizer))
    assert amp.scaler.get_scale() == 512.0
    optimizer.zero_grad()
    train_sam(amp, optimizer, 1)
    assert not same(before, everything(amp, optimizer.base_optimizer))


@pytest.mark.parametrize("with_closure", [False, True])
def test_lookahead_is_that_of_float32_and_skips(with_closure) -> None:
    def run(model: nn.Module, optimizer: Lookahead, bad: int) -> None:
        for step in range(6):

            def closure(x: torch.Tensor = X * INF if step == bad else X) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                return loss

            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()

    reference = source()
    amp = convert(copy.deepcopy(reference))
    optimizer = Lookahead(torch.optim.SGD(amp.parameters(), lr=0.1))
    amp.scaler.attach(optimizer)
    run(amp, optimizer, bad=3)
    assert optimizer.calls == 5
    assert amp.scaler.get_scale() == 512.0
    plain = Lookahead(torch.optim.SGD(reference.parameters(), lr=0.1))
    for _ in range(5):
        plain.zero_grad()
        loss_of(reference).backward()
        plain.step()
    for low, full in zip(amp.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(low, full, rtol=0.01, atol=0.001)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("bad_call", [1, 2, 4])
def test_lbfgs_leaves_out_a_step_with_a_bad_evaluation(line_search, bad_call) -> None:
    amp = convert(source())
    optimizer = torch.optim.LBFGS(amp.parameters(), lr=0.1, max_iter=5, line_search_fn=line_search)
    amp.scaler.attach(optimizer)
    calls = [0]

    def closure(bad_call: int = 0) -> torch.Tensor:
        calls[0] += 1
        optimizer.zero_grad()
        loss = loss_of(amp, X * INF if calls[0] == bad_call else X)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    before, directions = everything(amp, optimizer), len(next(iter(optimizer.state.values()))["old_dirs"])
    calls[0] = 0
    losses: list[torch.Tensor] = []

    def kept() -> torch.Tensor:
        losses.append(closure(bad_call))
        return losses[-1]

    assert optimizer.step(kept) is losses[0]
    assert calls[0] == bad_call == len(losses)
    assert same(before, everything(amp, optimizer))
    assert len(next(iter(optimizer.state.values()))["old_dirs"]) == directions
    assert amp.scaler.get_scale() == 512.0
    calls[0] = 0
    optimizer.step(closure)
    assert not same(before, everything(amp, optimizer))


@pytest.mark.parametrize("by_scaler", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_returns_the_loss_of_its_closure(by_scaler, fused) -> None:
    amp = convert(source())
    optimizer = torch.optim.AdamW(amp.parameters(), lr=0.1, fused=fused)
    if not by_scaler:
        amp.scaler.attach(optimizer)
    losses: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        losses.append(loss_of(amp, X * INF))
        losses[-1].backward()
        return losses[-1]

    found = amp.scaler.step(optimizer, closure) if by_scaler else optimizer.step(closure)
    assert len(losses) == 1
    assert found is losses[0]
    amp.scaler.update()
    assert amp.scaler.get_scale() == 512.0


def test_lbfgs_survives_a_scale_that_grows_too_far() -> None:
    amp = convert(source(), init_scale=2.0**15, growth_interval=1, growth_factor=4.0)
    optimizer = torch.optim.LBFGS(amp.parameters(), lr=0.1, max_iter=4)
    amp.scaler.attach(optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(amp)
        loss.backward()
        return loss

    first = closure().item()
    for _ in range(12):
        optimizer.step(closure)
        assert all(p.isfinite().all() for p in amp.parameters())
    assert amp.scaler.last_overflow is not None
    assert closure().item() < 0.8 * first


def test_an_optimizer_that_writes_what_it_lists_cannot_be_taken_back() -> None:
    class Writes(torch.optim.Optimizer):
        def step(self, closure: Callable) -> None:  # type: ignore[override]
            kept = self.state[self.param_groups[0]["params"][0]].setdefault("kept", [torch.zeros(2)])
            for tensor in kept:
                tensor.add_(1)
            closure()

    amp = convert(source())
    optimizer = Writes(amp.parameters(), {})
    amp.scaler.attach(optimizer)
    optimizer.step(lambda: loss_of(amp).backward())
    with pytest.raises(RuntimeError, match="Writes changed tensors in a list of its state in place"):
        optimizer.step(lambda: loss_of(amp, X * INF).backward())
