"""A step of several evaluations that overflows leaves no trace in an optimizer of any kind."""

import operator
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph.errors import LoopError


class Keeps(torch.optim.Optimizer):
    """Adds one to something that it keeps, and evaluates the closure twice."""

    def __init__(self, parameters: Any, made: Callable[[], Any], add: Callable[[Any], None]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.kept, self.count, self._add = made(), 0, add
        self.alias = self.kept

    def step(self, closure: Callable) -> Any:
        loss = closure()
        self._add(self.kept)
        self.count += 1
        closure()
        return loss


def overflow_in(optimizer_of: Callable[[Any], Keeps]) -> Keeps:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    amp = ampgraph.convert(model, (x,), dtype=torch.float16)
    optimizer, losses = optimizer_of(amp.parameters()), iter((1e-3, float("inf")))
    amp.scaler.attach(optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = amp(x).square().mean() * next(losses)
        loss.backward()
        return loss

    optimizer.step(closure)
    return optimizer


@pytest.mark.parametrize(
    ("made", "add"),
    [
        (lambda: torch.zeros(()), lambda kept: kept.add_(1)),
        (lambda: [0], lambda kept: kept.append(1)),
        (lambda: torch.zeros(2), lambda kept: kept.resize_(4).fill_(1)),
        (lambda: torch.zeros(()).expand(3), lambda kept: None),
        (lambda: deque([0]), lambda kept: kept.append(1)),
    ],
)
def test_attributes_of_an_optimizer_are_restored(made: Callable, add: Callable) -> None:
    optimizer = overflow_in(lambda parameters: Keeps(parameters, made, add))
    assert optimizer.kept is optimizer.alias
    is_same = torch.equal if isinstance(optimizer.kept, torch.Tensor) else operator.eq
    assert is_same(optimizer.kept, made())
    assert optimizer.count == 0


@pytest.mark.parametrize("kind", [tuple, list, deque])
def test_a_write_to_state_that_is_not_copied_is_told(kind: type) -> None:
    class InState(Keeps):
        def step(self, closure: Callable) -> Any:
            self.state[self.param_groups[0]["params"][0]]["pair"] = self.kept
            return super().step(closure)

    def optimizer_of(parameters: Any) -> Keeps:
        optimizer = InState(parameters, lambda: kind([torch.zeros(())]), lambda kept: kept[0].add_(1))
        optimizer.state[optimizer.param_groups[0]["params"][0]]["pair"] = optimizer.kept
        return optimizer

    with pytest.raises(LoopError, match="in place"):
        overflow_in(optimizer_of)
