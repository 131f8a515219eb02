"""`watch`: names the first node of each step that is not finite; nothing is left behind."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from ampgraph import DynamicLossScale, NumericsError, Policy, PolicyError

pytestmark = pytest.mark.usefixtures("shared_captures")


class Squares(nn.Module):
    """Overflows where the input is large; has state that the forward writes, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("mask", torch.full((8,), -torch.inf).where(torch.arange(8) == 0, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        weights = (self.norm(y) + self.mask).softmax(-1)
        return self.head(y * y + weights)


CAPTURES = ["ahead of time", "just in time"]


def model_and_optimizer(capture: str, **given: object) -> tuple[ampgraph.AmpModule, torch.optim.Optimizer]:
    torch.manual_seed(0)
    policy = Policy(**{"level": "O2", "dtype": torch.float16, "hazards": False, **given})
    model, x = Squares().train(), torch.randn(4, 8)
    args = (x,) if capture == "ahead of time" else None
    amp = ampgraph.convert(model, args, policy=policy, backend="eager", capture=capture)
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.01)
    amp.scaler.attach(optimizer)
    return amp, optimizer


def train(amp: ampgraph.AmpModule, optimizer: torch.optim.Optimizer, peaks: list[float]) -> list[Tensor]:
    """One step for each peak of the input; returns the losses."""
    losses = []
    for i, peak in enumerate(peaks):
        torch.manual_seed(i)
        optimizer.zero_grad()
        loss = amp(torch.randn(4, 8) * peak).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("capture", CAPTURES)
def test_reports_the_step_and_the_node(capture, caplog):
    amp, optimizer = model_and_optimizer(capture)
    amp.scaler.update(64.0)
    with caplog.at_level(logging.WARNING, "ampgraph"), ampgraph.watch(amp) as watched:
        train(amp, optimizer, [1, 1e4, 1, 1e4])
    assert [s.step for s in watched.sightings] == [2, 4]
    assert {(s.node, s.op, s.direction) for s in watched.sightings} == {("mul", "aten.mul.Tensor", "forward")}
    assert watched.sightings[0].line.startswith(__file__)
    told = [r.message for r in caplog.records if "check_numerics" in r.message and "mul" in r.message]
    assert len(told) == 1  # each node once


@pytest.mark.parametrize("capture", CAPTURES)
def test_training_is_the_same_watched_or_not(capture):
    results = []
    for is_watched in (False, True):
        amp, optimizer = model_and_optimizer(capture)
        with ampgraph.watch(amp) if is_watched else torch.enable_grad():
            losses = train(amp, optimizer, [1, 2, 1e4, 1, 3])
        results.append((losses, dict(amp.state_dict()), amp.scaler.state_dict(), amp.scaler.last_overflow))
    for ours, theirs in zip(results[0][0], results[1][0], strict=True):
        assert torch.equal(ours, theirs) or (ours.isnan() and theirs.isnan())
    assert results[0][2:] == results[1][2:]
    for name, value in results[0][1].items():
        torch.testing.assert_close(value, results[1][1][name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("capture", CAPTURES)
def test_gradients_are_watched(capture):
    amp, optimizer = model_and_optimizer(capture)
    amp.scaler.update(2.0**24)
    with ampgraph.watch(amp) as watched:
        train(amp, optimizer, [1])
    (found,) = watched.sightings
    assert (found.direction, found.scale) == ("backward", 2.0**24)


@pytest.mark.parametrize("capture", CAPTURES)
def test_abort_raises_at_the_step(capture):
    amp, optimizer = model_and_optimizer(capture)
    amp.scaler.update(64.0)
    peaks = [1, 1, 1e4, 1]
    with pytest.raises(NumericsError, match="step 3: mul"), ampgraph.watch(amp, on="abort"):
        train(amp, optimizer, peaks)
    assert isinstance(amp.forward, type(train))
    assert train(amp, optimizer, [1])[0].isfinite()


def test_abort_lets_a_scale_settle():
    amp, optimizer = model_and_optimizer("ahead of time")
    amp.scaler.update(2.0**24)
    with ampgraph.watch(amp, on="abort") as watched:
        train(amp, optimizer, [1] * 14)
    assert watched.sightings
    assert watched.sightings[-1].step < 14


def test_abort_at_the_floor_of_the_scale():
    scale = DynamicLossScale(init_scale=2.0**24, floor=2.0**24)
    amp, optimizer = model_and_optimizer("ahead of time", loss_scale=scale)
    with pytest.raises(NumericsError, match="gradient"), ampgraph.watch(amp, on="abort"):
        train(amp, optimizer, [1])


@pytest.mark.parametrize("capture", CAPTURES)
def test_only_the_given_steps(capture):
    amp, optimizer = model_and_optimizer(capture)
    amp.scaler.update(64.0)
    with ampgraph.watch(amp, steps=(2, 3)) as watched:
        train(amp, optimizer, [1e4] * 5)
    assert [s.step for s in watched.sightings] == [2, 3]
    assert watched.step == 5


def test_nothing_is_left_behind():
    amp, optimizer = model_and_optimizer("ahead of time")
    train(amp, optimizer, [1])
    (captured,) = amp._graphs
    before = dict(captured._runners), amp.__dict__["forward"]
    with ampgraph.watch(amp):
        train(amp, optimizer, [1])
        assert captured._runners != before[0]
    assert (captured._runners, amp.__dict__["forward"]) == before


def test_several_calls_make_one_step():
    amp, _ = model_and_optimizer("ahead of time")
    with ampgraph.watch(amp) as watched:
        for _ in range(2):
            (amp(torch.randn(4, 8)).sum() + amp(torch.randn(4, 8)).sum()).backward()
            with torch.no_grad():
                amp(torch.randn(4, 8) * 1e4)
    assert watched.step == 2


def test_another_shape_is_watched_too():
    amp, _ = model_and_optimizer("ahead of time")
    with ampgraph.watch(amp) as watched:
        amp(torch.randn(6, 8) * 1e4).sum().backward()
    assert watched.sightings[0].node == "mul"


@pytest.mark.parametrize("capture", CAPTURES)
def test_weight_that_does_not_fit(capture):
    amp, _ = model_and_optimizer(capture)
    with ampgraph.watch(amp) as watched:
        amp(torch.randn(4, 8)).sum().backward()
        with torch.no_grad():  # at a capture, the range of the weight would count
            amp.source.up.weight[0, 0] = 1e6
        amp(torch.randn(4, 8)).sum().backward()
    assert watched.sightings[-1].direction == "forward"
    assert watched.sightings[-1].node in ("up.weight", "l_self_modules_up_parameters_weight_")


def test_what_is_not_legal():
    amp, _ = model_and_optimizer("ahead of time")
    with pytest.raises(PolicyError, match=r"'report', 'abort'.*Did you mean 'report'"):
        ampgraph.watch(amp, on="reprot")
    for steps in ((0, 2), (3, 2), 5, (1,)):
        with pytest.raises(PolicyError, match=r"expected \(first, last\)"):
            ampgraph.watch(amp, steps=steps)
    with pytest.raises(ampgraph.AmpGraphError, match="got a Linear"):
        ampgraph.watch(nn.Linear(2, 2))
    with ampgraph.watch(amp), pytest.raises(ampgraph.AmpGraphError, match="already"), ampgraph.watch(amp):
        pass


def test_a_value_that_only_its_cast_makes_infinite_is_named_with_the_dtype():
    amp, optimizer = model_and_optimizer("ahead of time")
    with ampgraph.watch(amp) as watched:
        train(amp, optimizer, [1e6])
    (seen,) = watched.sightings
    assert (seen.node, seen.dtype) == ("x", "float16")
    assert "x (placeholder) is not finite in float16, at loss scale" in str(seen)
