"""A plan depends on the values of masks and biases: a checkpoint that is loaded later gets another plan."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ampgraph
from ampgraph import Policy

SIZE = 8


class Attention(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).transpose(1, 2) + self.mask).softmax(-1) @ self.v(x)


class Head(nn.Module):
    def __init__(self, bias: float) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        nn.init.constant_(self.fc.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).softmax(-1)


def mask(hidden: float) -> Tensor:
    whole_row = torch.zeros(SIZE, SIZE)
    whole_row[0] = hidden
    return whole_row


MODELS = {
    "mask": (lambda: Attention(mask(0.0)), lambda: Attention(mask(-1e9))),
    "bias": (lambda: Head(0.0), lambda: Head(-1e9)),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_with_other_values_gets_another_plan(name: str, level: str) -> None:
    make, make_loaded = MODELS[name]
    amp = ampgraph.convert(make().eval(), (x := torch.randn(2, SIZE, 16),), policy=policy(level))
    loaded = make_loaded().eval()
    with torch.no_grad():
        amp(x)
        amp.load_state_dict(loaded.state_dict())
        torch.testing.assert_close(amp(x), loaded(x), atol=0.02, rtol=0.02)


def write(model: Attention) -> None:
    model.mask.copy_(mask(-1e9))


def exchange(model: Attention) -> None:
    model.mask = mask(-1e9)


def exchange_data(model: Attention) -> None:
    model.mask.data = mask(-1e9)


def exchange_uncounted(model: Attention) -> None:
    with torch.inference_mode():
        model.mask = mask(-1e9)


@pytest.mark.filterwarnings("ignore:Attention could not be captured")  # with an inference tensor among others
@pytest.mark.parametrize("change", [write, exchange, exchange_data, exchange_uncounted])
def test_a_buffer_that_changes_gets_another_plan(change: Callable[[Attention], None]) -> None:
    model = Attention(mask(0.0)).eval()
    amp = ampgraph.convert(model, (x := torch.randn(2, SIZE, 16),), policy=policy("O2"))
    with torch.no_grad():
        amp(x)
        change(model)
        for _ in range(2):
            torch.testing.assert_close(amp(x), model(x), atol=0.02, rtol=0.02)
    assert len(amp.graph_modules) == (1 if change is exchange_uncounted else 2)


@pytest.mark.parametrize("change", [lambda p: p.mul_(1.5), lambda p: p.add_(0.01)])
def test_ordinary_weights_keep_the_plan(change: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    amp = ampgraph.convert(model, (x := torch.randn(2, 3, 8, 8),), policy=policy("O2"))
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in (*other.parameters(), other[1].running_mean, other[1].running_var):
            change(parameter)
        amp.load_state_dict(other.state_dict())
        torch.testing.assert_close(amp(x), other(x), atol=0.02, rtol=0.02)
    assert len(amp.graph_modules) == 1


def policy(level: str) -> Policy:
    return Policy(level=level, dtype=torch.float16)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale


def test_a_buffer_that_the_loop_writes_keeps_the_plan() -> None:
    amp = ampgraph.convert(Scaled(), (x := torch.randn(2, 16),), policy=policy("O2"))
    for step in range(20):
        amp.source.scale.fill_(0.9**step)
        torch.testing.assert_close(amp(x), amp.source(x), atol=0.02, rtol=0.02)
    assert len(amp.graph_modules) == 1


def test_a_module_around_the_model_loads_it() -> None:
    make, make_loaded = MODELS["bias"]
    outer = nn.Sequential(ampgraph.convert(make(), (x := torch.randn(2, 16),), policy=policy("O2")))
    loaded = nn.Sequential(make_loaded())
    with torch.no_grad():
        outer.load_state_dict(loaded.state_dict())
        torch.testing.assert_close(outer(x), loaded(x), atol=0.02, rtol=0.02)
