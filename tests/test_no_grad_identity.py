"""Regions without gradients: what returns its input keeps gradients, and nothing else there has any."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import NoLossScale, Policy


def broadcast(x):
    return torch.broadcast_tensors(x, x)[1]


def partly(x):
    return torch.broadcast_tensors(x[:1], x)[1]


def at_least(x):
    return torch.atleast_1d(x, x)[0]


def written(x):
    memory = torch.zeros_like(x)
    memory[:, :4] = x[:, :4]
    with torch.no_grad():
        same = memory.float()
    return same + memory


def filled(x):
    memory = torch.zeros_like(x)
    memory.add_(x)
    with torch.no_grad():
        low = memory.to(torch.bfloat16)
    return low + memory


def written_inside(x):
    with torch.no_grad():
        same = x.float()
        same.mul_(2)
        again = x.float()
    return same + again


def like_a_later_one(x):
    later = x * 2
    return x.type_as(later) + later


def in_autocast(x):
    with torch.enable_grad(), torch.autocast("cpu", enabled=False), torch.no_grad():
        return x * 2


def between_autocasts(x):
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        before = x.exp()
        with torch.no_grad():
            result = x @ before.t() @ x
            with torch.enable_grad():
                inner = x.sigmoid()
        after = x.tanh()
    return result + inner + after


CALLS = {
    "to": lambda x: x.to(x.dtype),
    "float": lambda x: x.float(),
    "type_as": lambda x: x.type_as(x),
    "contiguous": lambda x: x.contiguous(),
    "twice": lambda x: x.float().contiguous().float(),
    "dropout": lambda x: nn.functional.dropout(x, 0.5, training=False),
    "broadcast": broadcast,
    "partly": partly,
    "atleast_1d": at_least,
    "new": lambda x: x * 2,
    "new and the same": lambda x: (x * 2).float(),
    "expanded": lambda x: torch.broadcast_tensors(x[:1], x)[0],
    "low": lambda x: x.to(torch.bfloat16),
    "low and back": lambda x: x.to(torch.bfloat16).float(),
    "type_as low": lambda x: x.type_as(x.to(torch.bfloat16)).float(),
    "type_as later": like_a_later_one,
    "written": torch.enable_grad()(written),
    "filled": torch.enable_grad()(filled),
    "written inside": written_inside,
    "in autocast": in_autocast,
    "between autocasts": between_autocasts,
}


class Model(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.first, self.second, self.call = nn.Linear(8, 8), nn.Linear(8, 8), call

    def forward(self, x):
        hidden = self.first(x)
        with torch.no_grad():
            same = self.call(hidden)
        return self.second(hidden) + same.exp()


class LowSource(nn.Module):
    """Widens a low tensor without gradients; a low op reads the result."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        low = self.first(x).to(torch.bfloat16)
        with torch.no_grad():
            wide = low.float()
        return self.second(wide) + self.third(x)


class Branches(nn.Module):
    """Chooses between two layers without gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        hidden = self.first(x)
        with torch.no_grad():
            chosen = torch.cond(x.sum() > 0, self.second, self.third, (hidden,))
        return hidden + chosen


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_pass_a_returned_input(name, capture, level):
    check(Model(CALLS[name]), capture, level)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
def test_a_widening_without_gradients_cuts_them(capture, level):
    check(LowSource(), capture, level)


def test_a_region_around_a_sub_graph_is_not_lost():
    model = Branches()
    with pytest.warns(UserWarning, match="the grad mode of the region around cond"):
        check(model, "auto", "O1")
    assert model.second.weight.grad is None
    with torch.no_grad():
        amp = convert(model, "ahead of time", "O1")
        torch.testing.assert_close(amp(x := torch.randn(4, 8)), model(x), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
@pytest.mark.parametrize("op", [torch.exp, torch.square, torch.Tensor.detach])
def test_a_region_returns_what_was_made_from_what_another_returned(op, capture, level):
    class Twice(nn.Linear):
        def forward(self, x):
            low = x.to(torch.bfloat16)
            with torch.no_grad():
                same = low.to(torch.bfloat16)
            made = op(same)
            with torch.no_grad():
                again = made.to(torch.bfloat16)
            return super().forward(x) + again

    check(Twice(8, 8), capture, level)


def test_a_forward_that_leaves_gradients_off_returns_a_tensor_that_has_some():
    class Leaves(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            torch.set_grad_enabled(False)
            return y

    amp = convert(Leaves(8, 8), "just in time", "O1")
    with torch.enable_grad():  # gives the mode back
        assert amp(torch.randn(4, 8)).requires_grad


def test_an_exported_program_keeps_the_regions():
    model = Model(CALLS["float"])
    program = ampgraph.export(model, (torch.randn(4, 8),), policy=Policy(dtype=torch.bfloat16))
    torch.export.save(program, file := io.BytesIO())
    file.seek(0)
    exported = torch.export.load(file).module()
    x = torch.randn(4, 8, requires_grad=True)
    expected, found = (torch.autograd.grad(f(x).sum(), x)[0] for f in (model, exported))
    assert (found - expected).norm() / expected.norm() < 0.03


def convert(model, capture, level):
    policy = Policy(level, dtype=torch.bfloat16, loss_scale=NoLossScale())
    given = None if capture == "just in time" else (torch.randn(4, 8),)
    return ampgraph.convert(model, given, policy=policy, capture=capture, backend="eager")


def check(model, capture, level):
    """Holds the gradients of parameters and of the input against those of the source."""
    torch.manual_seed(0)
    x = torch.randn(4, 8, requires_grad=True)
    leaves = {"x": x, **dict(model.named_parameters())}
    expected = gradients(model, x, leaves)
    amp = convert(model, capture, level)
    for name, gradient in gradients(amp, x, leaves).items():
        assert (gradient is None) == (expected[name] is None), name
        if gradient is not None:
            error = (gradient - expected[name]).norm() / expected[name].norm()
            assert error < 0.03, f"{name}: {error:.3f}"


def gradients(model, x, leaves):
    found = torch.autograd.grad(model(x).sum(), list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, found, strict=True))
