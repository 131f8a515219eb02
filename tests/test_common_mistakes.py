"""Common mistakes: the error names the cause, and its advice works."""

from __future__ import annotations

import copy
import dataclasses
import logging
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import CaptureError, Policy, PolicyError

X = torch.randn(2, 4)


@dataclasses.dataclass
class Result:
    value: torch.Tensor


@dataclasses.dataclass
class Registered:
    value: torch.Tensor


class Calls(nn.Module):
    """A model whose forward is the given function of its linear layer and the inputs."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: object) -> object:
        return self.function(self.linear, x)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, packed: nn.utils.rnn.PackedSequence) -> torch.Tensor:
        return self.lstm(packed)[0].data


class PackedInside(Packed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2])))


def gradient(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(linear(x).exp().sum(), x)[0]


@pytest.mark.parametrize(
    ("model", "example", "hint"),
    [
        (Calls(lambda linear, x: Result(linear(x))), X, "torch.export.register_dataclass(TheClass)"),
        (Calls(lambda linear, r: linear(r.value)), Result(X), "torch.export.register_dataclass(TheClass)"),
        (PackedInside(), torch.randn(3, 2, 4), "pass the padded batch"),
        (Packed(), nn.utils.rnn.pack_sequence([torch.randn(3, 4), X]), "pass the padded batch"),
        (Calls(gradient), X, "Gradients inside forward: take them outside of the model"),
        (Calls(lambda linear, x: linear(x) if x.sum() > 0 else x), X, "use torch.cond"),
        (Calls(lambda linear, x: torch.linalg.lstsq(linear(x), x)[0]), X, "What the op returns depends on"),
    ],
    ids=["dataclass out", "dataclass in", "packed inside", "packed in", "autograd.grad", "branch", "lstsq"],
)
def test_capture_errors_say_what_helps(model: nn.Module, example: object, hint: str) -> None:
    with pytest.raises(CaptureError) as error:
        ampgraph.convert(model, (example,), capture="ahead of time")
    assert hint in str(error.value).splitlines()[-1]


def test_an_error_of_another_kind_has_no_hint() -> None:
    with pytest.raises(CaptureError) as error:
        ampgraph.convert(nn.LSTM(3, 3), (torch.randn(2, 1, 4),))
    assert "\n" not in str(error.value)


def test_a_registered_dataclass_is_captured() -> None:
    torch.export.register_dataclass(Registered)
    amp = ampgraph.convert(Calls(lambda linear, x: Registered(linear(x))), (X,))
    assert isinstance(amp(X), Registered)


def test_gradients_inside_forward_run_just_in_time() -> None:
    amp = ampgraph.convert(Calls(gradient))
    torch.testing.assert_close(amp(X), amp.source(X), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["float16", "fp16", "torch.float16"])
def test_a_low_dtype_may_be_given_by_name(name: str) -> None:
    assert Policy(dtype=name) == Policy(dtype=torch.float16)  # type: ignore[arg-type]
    assert ampgraph.convert(nn.Linear(4, 4), (X,), dtype=name).plan["linear"].dtype == torch.float16
    assert Policy.of(Policy(dtype=torch.float16), name).dtype == torch.float16


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("bfloat", "Did you mean 'bfloat16'"),
        ("float32", "is not a low dtype; legal: torch.float16, torch.bfloat16"),
        (torch.float32, "dtype=torch.float32 is not a low dtype"),
        (16, "dtype=16 is not a low dtype"),
    ],
)
def test_other_dtypes_are_refused(dtype: object, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        ampgraph.convert(nn.Linear(4, 4), (X,), dtype=dtype)  # type: ignore[call-overload]


@pytest.mark.parametrize(("name", "near"), [("inductr", "inductor"), ("aot_eagre", "aot_eager")])
def test_a_misspelled_backend_gets_the_nearest(name: str, near: str) -> None:
    with pytest.raises(PolicyError, match=f"legal: eager, .*Did you mean '{near}'"):
        ampgraph.convert(nn.Linear(4, 4), (X,), backend=name)


@pytest.mark.parametrize("examples", [(X,), None], ids=["ahead of time", "just in time"])
def test_timings_of_every_graph(examples: tuple | None) -> None:
    amp = ampgraph.convert(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), examples)
    amp(X)
    amp.eval()(X)
    assert len(amp.timings) == len(amp.graph_modules) == 2
    assert all(timing.capture > 0 and timing.rewrite > 0 for timing in amp.timings)


@pytest.mark.parametrize(
    ("args", "kwargs", "given", "cause"),
    [
        ((X, X), {}, "Tensor, Tensor", "too many positional arguments"),
        ((X,), {"mask": None}, "Tensor, mask=NoneType", "got an unexpected keyword argument 'mask'"),
        ((), {}, "", "missing a required argument: 'x'"),
    ],
)
def test_inputs_that_forward_does_not_take(args: tuple, kwargs: dict, given: str, cause: str) -> None:
    message = f"Calls.forward takes (x: 'object') -> 'object', but the example inputs are ({given}): {cause}."
    with pytest.raises(CaptureError) as raised:
        ampgraph.convert(Calls(lambda linear, x: linear(x)), args, kwargs)
    assert str(raised.value) == message


def test_a_type_error_in_forward_is_forwards_own() -> None:
    with pytest.raises(CaptureError, match=r"could not be captured at .*TypeError: bad operand type"):
        ampgraph.convert(Calls(lambda linear, x: -"x"), (X,))


def test_what_is_raised_is_not_logged_as_well(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CaptureError, match="same reduction dim"):
        ampgraph.convert(Calls(lambda linear, x: linear(x)), (torch.randn(2, 5),))
    assert not errors(caplog)
    with pytest.raises(RuntimeError):
        torch.export.export(nn.Linear(4, 4), (torch.randn(2, 5),))
    assert errors(caplog)  # outside of a capture, torch logs as ever


def errors(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_compiled_model_is_told_that_its_compilation_is_not_used() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parts = [torch.compile(model), nn.Sequential(torch.compile(nn.Linear(4, 4))), copy.deepcopy(model)]
    parts[2].compile()
    for compiled in parts:
        with pytest.warns(UserWarning, match="does not use that compilation"):
            amp = ampgraph.convert(compiled, (torch.randn(2, 4),))
        assert amp(torch.randn(2, 4)).shape == (2, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            ampgraph.convert(compiled, (torch.randn(2, 4),), backend="eager")


def test_export_refuses_what_is_exported() -> None:
    program = torch.export.export(nn.Linear(4, 4), (torch.randn(2, 4),))
    with pytest.raises(CaptureError, match=r"ampgraph\.convert\(program"):
        ampgraph.export(program, (torch.randn(2, 4),))  # type: ignore[arg-type]
