"""Warnings point at the line of the user's that brought them about."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ampgraph

X = torch.ones(2, 4)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Signed(nn.Linear):
    def forward(self, x):
        return Straight.apply(super().forward(x))


class Method(nn.Linear):
    def loss(self, x):
        return (x @ self.weight).sum()


class Broken(nn.Linear):
    def forward(self, x):
        with ampgraph.fp32_guard():  # here
            torch._dynamo.graph_break()
            return super().forward(x)


def custom_backward():
    ampgraph.convert(Signed(4, 4), (X,))  # here


def nothing_captured():
    amp = ampgraph.convert(nn.Identity())
    amp(X)  # here


def break_inside_a_guard():
    ampgraph.convert(Broken(4, 4))(X)


def foreign_optimizer():
    amp = ampgraph.convert(nn.Linear(4, 4), (X,), dtype=torch.float16)
    amp.scaler.attach(torch.optim.SGD(nn.Linear(4, 4).parameters()))  # here


def loop_over_a_method():
    amp = ampgraph.convert(Method(4, 4), (X,), dtype=torch.float16)
    optimizer = torch.optim.SGD(amp.parameters())
    amp.scaler.attach(optimizer)
    for _ in range(2):
        amp.loss(X).backward()
        optimizer.step()  # here


def loop_without_scaler():
    amp = ampgraph.convert(nn.Linear(4, 4), (X,), dtype=torch.float16)
    for _ in range(3):
        loss = amp(X).mean()  # here
        (1e-3 * loss).backward()
        with torch.no_grad():
            for parameter in amp.parameters():
                parameter.sub_(parameter.grad)


@pytest.mark.parametrize(
    ("case", "where", "text"),
    [
        (custom_backward, custom_backward, "a capture ahead of time loses the backward of Straight"),
        (nothing_captured, nothing_captured, "no part of it was captured"),
        (break_inside_a_guard, Broken.forward, "runs outside the captured graph"),
        (foreign_optimizer, foreign_optimizer, "it is the optimizer of another"),
        (loop_over_a_method, loop_over_a_method, "the converted model was not called with gradients"),
        (loop_without_scaler, loop_without_scaler, "the scale never adapts"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_warning_points_at_the_users_line(case: Callable, where: Callable, text: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        case()
    [warning] = [w for w in told if text in str(w.message)]
    lines, first = inspect.getsourcelines(where)
    [offset] = [i for i, line in enumerate(lines) if "# here" in line]
    assert (warning.filename, warning.lineno) == (__file__, first + offset)


def test_parameters_that_came_after_the_conversion_belong_to_the_model(recwarn) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    amp = ampgraph.convert(model, dtype=torch.float16)
    model[1] = nn.Linear(4, 4)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    amp.scaler.attach(optimizer)
    before, scale = model[1].weight.detach().clone(), amp.scaler.get_scale()
    (amp(X).mean() * float("inf")).backward()
    optimizer.step()
    assert torch.equal(model[1].weight, before)
    assert amp.scaler.get_scale() < scale
    assert not [each for each in recwarn if "another model" in str(each.message)]


def test_an_optimizer_that_creates_its_state_before_the_first_call_is_no_loop_over_methods() -> None:
    """As ``torch.distributed.checkpoint.state_dict.get_state_dict`` does for a new optimizer."""
    amp = ampgraph.convert(nn.Linear(4, 4), (X,), dtype=torch.float16)
    optimizer = torch.optim.AdamW(amp.parameters(), lr=0.0)
    amp.scaler.attach(optimizer)
    for parameter in amp.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        optimizer.zero_grad()
        amp(X).sum().backward()
        optimizer.step()
    assert len(optimizer.state) == 2
