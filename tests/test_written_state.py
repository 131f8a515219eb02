"""State that a forward writes in place: gradients that enter through it are scaled, as an output's are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from ampgraph import NoLossScale, Policy, StaticLossScale
from ampgraph.marks import BoundaryMark, mark_of

BF16, F16 = torch.bfloat16, torch.float16
SCALED = {"eager": 1024.0, "aot_eager": 1024.0, "just in time": 1024.0, "no scale": None}


class Cell(nn.Module):
    """A recurrent cell whose state is an argument or a buffer; ``how`` is its forward."""

    h: Tensor

    def __init__(self, how: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.k, self.o = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("h", torch.zeros(2, 8))
        self.how = how

    def forward(self, x: Tensor, state: Tensor) -> object:
        return self.how(self, x, state)


def new(cell: Cell, x: Tensor, state: Tensor) -> Tensor:
    return state[0] * 0.5 + torch.tanh(cell.k(x)).float()


def one_row(cell, x, state):
    now = new(cell, x, state)
    state[0] = now
    return cell.o(now)


def one_row_by_copy(cell, x, state):
    now = new(cell, x, state)
    state[0].copy_(now)
    return cell.o(now)


def only_written(cell, x, state):
    now = torch.tanh(cell.k(x)).float()
    state[0] = now
    return cell.o(now)


def nothing_returned(cell, x, state):
    state[0] = torch.tanh(cell.k(x)).float()


def detached(cell, x, state):
    now = torch.tanh(cell.k(x)).float()
    state[0] = now.detach()
    return cell.o(now + state[0])


def without_gradients(cell, x, state):
    now = torch.tanh(cell.k(x)).float()
    with torch.no_grad():
        state[0] = now
    return cell.o(now + state[0])


def by_data(cell, x, state):
    now = torch.tanh(cell.k(x)).float()
    state.data[0] = now.detach()
    return cell.o(now + state[0])


def whole(cell, x, state):
    state.mul_(0.5).add_(torch.tanh(cell.k(x)))
    return cell.o(state.clone())


def returned(cell, x, state):
    now = new(cell, x, state)
    state[0] = now
    return cell.o(now), state


def returned_view(cell, x, state):
    now = new(cell, x, state)
    state[0] = now
    return cell.o(now), state[0]


def returned_write(cell, x, state):
    return cell.o(torch.tanh(cell.k(x))), state.mul_(2)


def twice(cell, x, state):
    state[0] = new(cell, x, state)
    state[1] = state[0].clone() * 2
    return cell.o(state[1].clone())


def buffer(cell, x, state):
    cell.h.mul_(0.5).add_(torch.tanh(cell.k(x)))
    return cell.o(cell.h.clone())


def only_written_buffer(cell, x, state):
    now = torch.tanh(cell.k(x)).float()
    cell.h.copy_(now.expand(2, 8))
    return cell.o(now)


def assigned_buffer(cell, x, state):
    cell.h = cell.h * 0.5 + torch.tanh(cell.k(x))
    return cell.o(cell.h)


WAYS = (
    *(one_row, one_row_by_copy, only_written, nothing_returned, detached, without_gradients, by_data, whole),
    *(returned, returned_view, returned_write, twice, buffer, only_written_buffer, assigned_buffer),
)


def outcome(cell: Callable, of: Cell, *, first: float) -> list[Tensor]:
    """Returns results, states and gradients of two calls; the loss reads what was written, too.

    Args:
        cell: What is called.
        of: Whose buffer and gradients count.
        first: 1 if the state depends on a tensor with gradients, else 0.
    """
    x, start = torch.linspace(-1, 1, 8), torch.ones(2, 8, requires_grad=True)
    state = start * 1.0 if first else torch.ones(2, 8)
    of.h = torch.zeros(2, 8)
    results: list[Tensor] = []
    for _ in range(2):
        found = cell(x, state)
        results += [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]
    results += [state, of.h]
    loss = sum((t * torch.arange(1.0, t.numel() + 1).view(t.shape)).sum() for t in results)
    assert isinstance(loss, Tensor)
    loss.backward()
    written = [*(p.grad for p in of.parameters()), start.grad]
    return [*(t.detach() for t in results), *(torch.zeros(1) if g is None else g for g in written)]


def fails(way: Callable, first: float) -> bool:
    """Whether torch itself refuses it: the model writes to what its backward needs."""
    cell = Cell(way)
    try:
        outcome(cell, cell, first=first)
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("how", SCALED)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gradients_of_what_is_written_are_the_models(way, how, first):
    if fails(way, first):
        pytest.skip("the model itself has no backward then")
    source, own = Cell(way), Cell(way)
    scale = SCALED[how]
    policy = Policy(dtype=BF16, loss_scale=StaticLossScale(scale) if scale else NoLossScale())
    args = None if how == "just in time" else (torch.randn(8), torch.zeros(2, 8))
    amp = ampgraph.convert(own, args, policy=policy, backend="aot_eager" if how == "aot_eager" else "eager")
    found, expected = outcome(amp, own, first=first), outcome(source, source, first=first)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm() + 1e-6


def test_a_returned_view_is_one_of_the_callers_memory():
    amp = ampgraph.convert(
        Cell(returned_view),
        (torch.randn(8), torch.zeros(2, 8)),
        policy=Policy(dtype=BF16, loss_scale=StaticLossScale(2.0)),
        backend="eager",
    )
    state = torch.zeros(2, 8)
    _, row = amp(torch.randn(8), state)
    with torch.no_grad():
        row.fill_(7.0)
    assert state[0].eq(7.0).all()


def test_what_a_graph_writes_without_gradients_costs_nothing():
    policy = Policy(dtype=BF16, loss_scale=StaticLossScale(2.0))
    for way in (without_gradients, by_data):
        amp = ampgraph.convert(Cell(way), (torch.randn(8), torch.zeros(2, 8)), policy=policy)
        marked = [n for n in amp.training_graph.graph.nodes if mark_of(n, BoundaryMark)]
        assert not any(
            n.target in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default) for n in marked
        )


def test_float16_training_through_a_written_state_is_autocasts():
    """Backpropagation through time over four calls, with the default loss scale of float16."""
    weights = {}
    for name in ("autocast", "ampgraph"):
        cell = Cell(one_row)
        model = cell if name == "autocast" else ampgraph.convert(copy.deepcopy(cell), dtype=F16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu") if name == "autocast" else model.scaler
        for step in range(12):
            state, x = torch.zeros(2, 8), torch.linspace(-1, 1, 8) + step / 12
            with torch.autocast("cpu", torch.float16, enabled=name == "autocast"):
                for _ in range(4):
                    y = model(x, state)
            loss = y.float().square().mean() + state.square().mean()
            optimizer.zero_grad()
            if name == "autocast":
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
        weights[name] = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (weights["autocast"] - weights["ampgraph"]).norm() < 2e-3 * weights["autocast"].norm()
