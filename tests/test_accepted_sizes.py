"""A graph runs for the sizes for which the model's Python code would go the same way, and for no others."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import ampgraph
from ampgraph._compat import is_same_shape, without_new_guards


class Applies(nn.Module):
    """A linear layer, then a function of its result and of the inputs."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self.linear(inputs[0]), *inputs)


def _windows(h: Tensor, x: Tensor) -> Tensor:
    return F.pad(h, (0, 0, 0, -x.shape[1] % 8)).unflatten(1, (-1, 8)).mean(2)


# Each asks something of the second size of x.
ASKING = {
    "larger": lambda h, x: h * 2 if x.shape[1] > 50 else h,
    "smaller": lambda h, x: h * 2 if x.shape[1] < 35 else h,
    "divides": lambda h, x: h * 2 if x.shape[1] % 4 == 0 else h,
    "equals": lambda h, x: h * 3 if x.shape[1] == 40 else h,
    "not the batch": lambda h, x: h * 3 if x.shape[1] != x.shape[0] else h,
    "loops": lambda h, x: sum((h[:, i] for i in range(x.shape[1] // 16)), h[:, 0]),
    "as a number": lambda h, x: h.mean(1) * float(int(x.shape[1])),
    "linspace": lambda h, x: h.mean(1, keepdim=True) * torch.linspace(0, 1, x.shape[1])[None, :, None],
    "hann_window": lambda h, x: h * torch.hann_window(x.shape[1]).sum(),
    "in a tensor": lambda h, x: h / torch.tensor([float(x.shape[1])]),
    "text": lambda h, x: h * {"32": 2.0, "100": 3.0}.get(str(x.shape[1]), 1.0),
    "text of a tuple": lambda h, x: h * {"(3, 32, 4)": 2.0, "(3, 100, 4)": 3.0}.get(str(tuple(x.shape)), 1.0),
    "formatted list": lambda h, x: h * {"[3, 100]": 3.0}.get(f"{[*x.shape[:2]]}", 1.0),
    "formatted text": lambda h, x: h * len(f"{x.shape[1]}"),
    "table": lambda h, x: h + torch.arange(64.0)[: x.shape[1], None] if x.shape[1] <= 64 else h,
}
# Each needs no second graph for other sizes.
INDIFFERENT = {
    "mean": lambda h, x: h.mean(1),
    "root": lambda h, x: h / x.shape[1] ** 0.5,
    "arange": lambda h, x: h + torch.arange(x.shape[1])[:, None] / x.shape[1],
    "windows": _windows,
}
SIZES = (32, 40, 100, 36, 64, 41, 40, 32, 3)


def close(got: Tensor, expected: Tensor) -> bool:
    """Whether a result has the right shape and is right up to the rounding of bfloat16."""
    return got.shape == expected.shape and float((got - expected).norm()) <= 0.03 * float(expected.norm())


def x_of(size: int, batch: int = 3) -> Tensor:
    return torch.randn(batch, size, 4, generator=torch.Generator().manual_seed(size))


def right_for(amp: ampgraph.AmpModule, sizes: tuple[int, ...]) -> list[bool]:
    return [close(amp(x_of(size)), amp.source(x_of(size))) for size in sizes]


@pytest.mark.parametrize("name", [*ASKING, *INDIFFERENT])
def test_each_size_gets_what_the_model_computes_for_it(name: str) -> None:
    model = Applies({**ASKING, **INDIFFERENT}[name])
    for order in (SIZES, (40, 48, 30, 100, 8)):
        amp = ampgraph.convert(model, (x_of(order[0]),))
        assert all(right_for(amp, order))
        assert not amp.is_just_in_time


@pytest.mark.parametrize("name", ASKING)
def test_sizes_that_the_user_leaves_to_torch(name: str) -> None:
    amp = ampgraph.convert(
        Applies(ASKING[name]),
        (x_of(40),),
        dynamic_shapes={"inputs": ({1: Dim.AUTO},)},
        capture="ahead of time",
    )
    assert all(right_for(amp, SIZES))


@pytest.mark.parametrize("name", INDIFFERENT)
def test_one_graph_serves_all_sizes_that_nothing_asks_for(name: str) -> None:
    amp = ampgraph.convert(
        Applies(INDIFFERENT[name]), (x_of(40),), dynamic_shapes={"inputs": ({1: Dim.DYNAMIC},)}
    )
    assert all(right_for(amp, (40, 48, 56, 104, 64)))
    assert len(amp.graph_modules) == 1


def test_a_bound_of_the_user_holds() -> None:
    size = Dim("size", min=8, max=64)
    amp = ampgraph.convert(Applies(INDIFFERENT["mean"]), (x_of(40),), dynamic_shapes={"inputs": ({1: size},)})
    assert all(right_for(amp, (64, 8, 33)))
    assert len(amp.graph_modules) == 1
    assert all(right_for(amp, (65, 7, 2)))
    assert len(amp.graph_modules) > 1


def test_sizes_that_depend_on_each_other() -> None:
    half = Dim("half", min=4, max=64)
    model = Applies(lambda h, x, y: h.mean(1) + y.unflatten(1, (-1, 2)).sum((1, 2)))
    shapes = {"inputs": ({1: half}, {1: 2 * half})}
    amp = ampgraph.convert(model, (x_of(8), x_of(16)), dynamic_shapes=shapes, capture="ahead of time")
    assert close(amp(x_of(20), x_of(40)), model(x_of(20), x_of(40)))
    assert len(amp.graph_modules) == 1
    assert close(amp(x_of(20), x_of(42)), model(x_of(20), x_of(42)))
    assert len(amp.graph_modules) == 2


def test_a_size_that_only_another_one_depends_on() -> None:
    half = Dim("half", min=4, max=64)
    model = Applies(lambda h, x: h.unflatten(1, (-1, 2)).sum((1, 2)))
    amp = ampgraph.convert(model, (x_of(16),), dynamic_shapes={"inputs": ({1: 2 * half},)})
    assert all(right_for(amp, (20, 40, 128)))
    assert len(amp.graph_modules) == 1


def test_equal_sizes_of_two_arguments() -> None:
    model = Applies(lambda h, x, y: h.mean(1) + y.mean(1) if 2 * x.shape[1] == y.shape[1] else h.mean(1))
    amp = ampgraph.convert(model, (x_of(20), x_of(40)))
    for sizes in ((20, 40), (30, 60), (30, 30), (20, 41), (40, 80), (41, 41)):
        inputs = tuple(map(x_of, sizes))
        assert close(amp(*inputs), model(*inputs)), sizes


def test_blocks_that_share_a_capture() -> None:
    model = nn.Sequential(*(Applies(ASKING["larger"]) for _ in range(3)))
    expected = {size: model(x_of(size)).detach() for size in SIZES}
    ampgraph.convert_blocks(model, Applies, dtype=torch.bfloat16)
    assert all(close(model(x_of(size)), expected[size]) for size in SIZES)


def test_a_whole_step() -> None:
    torch.manual_seed(0)
    amp = ampgraph.convert(Applies(ASKING["equals"]), (x_of(32),))
    optimizer = torch.optim.SGD(amp.parameters(), lr=0.0, fused=True)
    step = ampgraph.compile_step(amp, optimizer, lambda amp, x: amp(x).square().mean())
    for size in (32, 40, 100, 40, 32, 100, 41, 100):
        expected = amp.source(x_of(size)).square().mean()
        assert float(step(x_of(size))) == pytest.approx(float(expected), rel=0.03)


def test_an_exported_program_refuses_other_sizes() -> None:
    program = ampgraph.export(
        Applies(ASKING["linspace"]), (x_of(40),), dynamic_shapes={"inputs": ({1: Dim.AUTO},)}
    )
    with pytest.raises(Exception, match="40"):
        program.module()(x_of(100))


class SetsForLong(Applies):
    """A long input sets a state that short inputs read."""

    def __init__(self) -> None:
        super().__init__(lambda h, x: h)
        self.seen_long = False

    def forward(self, *inputs: Tensor) -> Tensor:
        if inputs[0].shape[1] > 50:
            self.seen_long = True
        return self.linear(inputs[0]) * (2 if self.seen_long else 1)


def test_state_that_only_some_sizes_set_is_told() -> None:
    amp = ampgraph.convert(SetsForLong(), (x_of(10),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp(x_of(20))
    with pytest.warns(UserWarning, match="reads seen_long and sets it for the next call"):
        amp(x_of(60))


def test_questions_of_the_analysis_bind_no_size() -> None:
    lengths = {0: Dim("rows"), 1: Dim("length")}
    module = torch.export.export(nn.ReLU(), (torch.randn(6, 6),), dynamic_shapes=(lengths,)).module()
    (x,) = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    environment = x.fake_mode.shape_env
    guards = [guard.expr for guard in environment.guards]
    assert is_same_shape(x, x.relu())
    assert not is_same_shape(x, x.t())  # both are 6 by 6 here
    with without_new_guards(module.graph):
        assert x.shape[0] == x.shape[1]
    assert [guard.expr for guard in environment.guards] == guards
    assert x.shape[0] == x.shape[1]
    assert len(environment.guards) > len(guards)
