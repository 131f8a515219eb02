"""After a forward that is not finite, the next step names the node; good steps do nothing for it."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from ampgraph import Policy
from ampgraph.runtime import captured_graph, dynamo_backend, first_nonfinite

pytestmark = pytest.mark.usefixtures("shared_captures")
PLAIN = Policy("O2", torch.float16, hazards=False)
POLICY = PLAIN.replace(rules={"node:mul*": "low"})
CAPTURES = ["ahead of time", "just in time"]


class Squares(nn.Module):
    """Overflows where the input is large; has a mask, dropout, and state that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("mask", torch.full((8,), -torch.inf).where(torch.arange(8) == 0, 0.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        weights = (self.norm(x) + self.mask).softmax(-1)
        return self.head(self.drop(y * y) + weights)


class Loop:
    """A model in training; ``step`` takes one for each peak of the input."""

    def __init__(self, capture: str = "ahead of time", fused: bool = False, backend: str = "eager") -> None:
        torch.manual_seed(0)
        args = (torch.randn(4, 8),) if capture == "ahead of time" else None
        model = Squares()
        self.amp = ampgraph.convert(model, args, policy=POLICY, backend=backend, capture=capture)
        self.amp.scaler.update(64.0)
        self.optimizer = torch.optim.SGD(self.amp.parameters(), lr=1e-3, fused=fused)
        self.amp.scaler.attach(self.optimizer)

    def step(self, *peaks: float) -> ampgraph.training.overflow.Overflow | None:
        """One step, of a call for each peak."""
        self.optimizer.zero_grad()
        for peak in peaks:
            torch.manual_seed(1)
            self.amp(torch.randn(4, 8) * peak).square().mean().backward()
        self.optimizer.step()
        return self.amp.scaler.last_overflow


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Counts the graphs that are looked at."""
    found: list[str] = []

    def look_for(graph_module, *args):
        found.append(type(graph_module).__name__)
        first_nonfinite.look_for(graph_module, *args)

    monkeypatch.setattr(captured_graph, "look_for", look_for)
    monkeypatch.setattr(dynamo_backend, "look_for", look_for)
    return found


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("fused", [False, True])
def test_the_next_step_names_the_node(capture, fused, backend, looks, caplog):
    loop = Loop(capture, fused, backend)
    assert loop.step(1) is None
    assert not looks
    with caplog.at_level(logging.WARNING, "ampgraph"):
        first = loop.step(1e4)
        assert (first.step, first.in_forward, first.node) == (2, True, "")
        assert not looks
        found = loop.step(1e4)
    assert (found.step, found.in_forward) == (3, True)
    assert (found.node, found.op, found.module) == ("mul", "aten.mul.Tensor", "")
    assert found.line.startswith(__file__)
    assert len(looks) == 1
    assert "step 2: the model's outputs are not finite" in caplog.text
    assert "the next step looks for the node" in caplog.text
    assert "step 3: the forward is not finite at any loss scale, first in mul (aten.mul" in caplog.text
    assert "first in up" not in caplog.text
    assert loop.step(1).step == 3  # looks, finds nothing
    assert len(looks) == 2
    loop.step(1)
    assert len(looks) == 2


@pytest.mark.parametrize("given", [float("nan"), float("inf")])
@pytest.mark.parametrize("capture", CAPTURES)
def test_a_value_that_was_given_is_not_called_a_result(capture, given, caplog):
    loop = Loop(capture)
    loop.step(1)
    with caplog.at_level(logging.WARNING, "ampgraph"):
        loop.step(given)
        loop.step(given)
    name = "x" if capture == "ahead of time" else "l_x_"
    assert f"step 3: the forward was given a value that is not finite, {name}; no loss scale" in caplog.text


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_value_that_is_finite_and_too_large_is_not_called_infinite(capture, caplog):
    loop = Loop(capture)
    loop.step(1)
    with caplog.at_level(logging.WARNING, "ampgraph"):
        loop.step(1e8)
        found = loop.step(1e8)
    assert found.node == ("x" if capture == "ahead of time" else "l_x_")
    assert found.op == "cast to float16"
    assert f"first in {found.node} (cast to float16); ampgraph.check_numerics" in caplog.text
    assert "given a value" not in caplog.text


@pytest.mark.parametrize("capture", CAPTURES)
def test_looking_changes_nothing(capture, monkeypatch):
    states = []
    for is_looking in (True, False):
        loop = Loop(capture)
        if not is_looking:
            monkeypatch.setattr(captured_graph, "look_for", lambda *args: None)
            monkeypatch.setattr(dynamo_backend, "look_for", lambda *args: None)
        for peak in (1e4, 1e4, 1, 2):
            loop.step(peak)
        states.append({**loop.amp.state_dict(), "drawn": torch.rand(2)})
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("capture", CAPTURES)
def test_statistics_that_a_batch_spoiled_are_not_the_cause(capture, looks):
    """In training mode a batch norm does not read them; its gradients overflow at this scale."""
    loop = Loop(capture)
    loop.amp.scaler.update(2.0**24)
    assert loop.step(float("inf")).in_forward
    assert not loop.amp.source.norm.running_var.isfinite().all()
    found = loop.step(1)
    assert len(looks) == 1
    assert (found.step, found.in_forward, found.node) == (2, False, "")


class Scaled(nn.Module):
    """Writes in place what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).clone()
        y[:, 0].mul_(1e30).mul_(1e30)
        return y


def test_a_write_in_place_is_named(looks):
    torch.manual_seed(0)
    amp = ampgraph.convert(Scaled(), (torch.randn(4, 8),), policy=PLAIN)
    optimizer = torch.optim.SGD(amp.parameters(), lr=1e-3)
    amp.scaler.attach(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        amp(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        found = amp.scaler.last_overflow
    assert (found.in_forward, found.op) == (True, "aten.mul_.Tensor")


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_call_before_the_last_counts(capture):
    """Of several calls in one step the outputs of the last alone are known, so the next step looks."""
    loop = Loop(capture)
    loop.step(1e4, 1)
    found = loop.step(1e4, 1)
    assert (found.in_forward, found.node) == (True, "mul")


def test_large_outputs_count(monkeypatch):
    monkeypatch.setattr("ampgraph.training.overflow.MOST_BYTES", 8)
    loop = Loop()
    assert not loop.step(1e4).in_forward
    found = loop.step(1e4)
    assert (found.in_forward, found.node) == (True, "mul")


@pytest.mark.parametrize("capture", CAPTURES)
def test_an_overflow_of_gradients_looks_at_nothing(capture, looks):
    loop = Loop(capture)
    for _ in range(3):
        loop.amp.scaler.update(2.0**24)
        found = loop.step(1)
        assert (found.scale, found.in_forward, found.node) == (2.0**24, False, "")
    assert not looks


def test_a_weight_that_does_not_fit_is_named(caplog):
    loop = Loop()
    with torch.no_grad():
        loop.amp.up.weight[0, 0] = 1e6
    with caplog.at_level(logging.WARNING, "ampgraph"):
        loop.step(1)
        found = loop.step(1)
    assert (found.node, found.op) == ("up.weight", "cast to float16")
    assert "first in up.weight (cast to float16); ampgraph.check_numerics" in caplog.text


def test_an_overflow_that_is_read_late_has_its_own_node():
    loop = Loop(fused=True)
    loop.step(1e4)
    loop.optimizer.zero_grad()
    loop.amp(torch.randn(4, 8) * 1e4).sum().backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.amp(torch.randn(4, 8)).sum().backward()
    loop.optimizer.step()
    found = loop.amp.scaler.last_overflow
    assert (found.step, found.node) == (2, "mul")


class Stack(nn.Module):
    """Blocks that are alike; the second one gets what is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Squares() for _ in range(3))
        self.last = nn.Linear(4, 8)

    def forward(self, x: Tensor, peak: float) -> Tensor:
        x = self.last(self.layers[0](x)) * peak
        return self.layers[2](self.last(self.layers[1](x)).clamp(-1, 1))


@pytest.mark.parametrize("capture", CAPTURES)
def test_the_node_of_a_block_has_its_path(capture):
    torch.manual_seed(0)
    model = Stack()
    blocks = ampgraph.convert_blocks(model, "layers.*", policy=PLAIN, backend="eager", capture=capture)
    blocks.scaler.update(64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    blocks.scaler.attach(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 8), 2e3).sum().backward()
        optimizer.step()
    found = blocks.scaler.last_overflow
    assert (found.module, found.op, found.in_forward) == ("layers.1", "aten.mul.Tensor", True)


def test_a_recomputed_block_is_told_too():
    torch.manual_seed(0)
    loop = Loop()

    def call(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(loop.amp, x, use_reentrant=False)

    for _ in range(2):
        loop.optimizer.zero_grad()
        call(torch.randn(4, 8) * 1e4).sum().backward()
        loop.optimizer.step()
    assert loop.amp.scaler.last_overflow.node == "mul"


def test_a_compiled_step_names_no_node(caplog):
    loop = Loop(fused=True)
    step = ampgraph.compile_step(loop.amp, loop.optimizer, lambda amp, x: amp(x).square().mean())
    with caplog.at_level(logging.WARNING, "ampgraph"):
        for _ in range(3):
            step(torch.randn(4, 8) * 1e4)
            found = loop.amp.scaler.last_overflow
    assert (found.step, found.in_forward, found.node) == (3, True, "")
    assert "the next step looks" not in caplog.records[-1].message
