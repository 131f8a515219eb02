"""Code that looks at classes of tensors or sizes, or catches an error of torch, is captured as it runs."""

import functools
import operator

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph.capture.code import Code
from ampgraph.capture.real_types import real_types

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def _is_tensor(x):
    return type(x) is torch.Tensor


@functools.singledispatch
def scale_of(value):
    return 1


@scale_of.register
def _(value: torch.Tensor):
    return 3


def _of_metaclass():
    class Meta(type):
        scale = 3

    class Made(metaclass=Meta):
        pass

    return type(Made).scale if type(Made) is Meta else 1


def _scaled_by_type(y):
    return y * 3 if type(y) is torch.Tensor else y * 1


SCALES = {
    "type": lambda model, x, y: 3 if type(y) is torch.Tensor else 1,
    "type of an input": lambda model, x, y: 3 if type(x) == torch.Tensor else 1,  # noqa: E721
    "one of types": lambda model, x, y: 3 if type(y) in (torch.Tensor, nn.Parameter) else 1,
    "in a function": lambda model, x, y: 3 if _is_tensor(y) else 1,
    "parameter": lambda model, x, y: 3 if type(model.fc.weight) is nn.Parameter else 1,
    "new tensor": lambda model, x, y: 3 if type(torch.ones(2)) is torch.Tensor else 1,
    "__class__": lambda model, x, y: 3 if y.__class__ is torch.Tensor else 1,
    "name of the class": lambda model, x, y: 3 if y.__class__.__name__ == "Tensor" else 1,
    "singledispatch": lambda model, x, y: scale_of(y),
    "other types": lambda model, x, y: 3 if type(model).__name__ == "Scaled" else 1,
    "a class": lambda model, x, y: 3 if isinstance(nn.Linear, type) and issubclass(type, object) else 1,
    "a new class": lambda model, x, y: type("New", (), {"scale": 3}).scale,
    "a new metaclass": lambda model, x, y: _of_metaclass(),
    "an alias": lambda model, x, y: 3 if type[int].__origin__ is type and type(type) is type else 1,
    "a nested function": lambda model, x, y: (lambda value: 3 if type(value) is torch.Tensor else 1)(y),
    "a branch": lambda model, x, y: (
        torch.cond(x.sum() > -1e9, _scaled_by_type, torch.zeros_like, (y,)).new_ones(()) * 3
    ),
}


class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 4), scale

    def forward(self, x):
        y = self.fc(x)
        return y * self.scale(self, x, y)


@pytest.mark.parametrize("name", SCALES)
def test_a_tensor_has_its_own_class_in_a_capture(name):
    model = Scaled(SCALES[name])
    assert model.scale(model, X, X) == 3
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16, capture="ahead of time")
    torch.testing.assert_close(amp(X), model(X), rtol=0.05, atol=0.05)
    assert not [name for name in globals() if name.startswith("__ampgraph")]
    assert "type" in _is_tensor.__code__.co_names


def _count(model, x, y):
    try:
        return int(y.abs().sum()) + 5
    except RuntimeError:
        return 1


def _truth(model, x, y):
    try:
        return 3 if y.abs().sum() > 0 else 2
    except Exception:
        return 1


def _of_sizes(model, x, y):
    try:
        return len(y.sum())
    except TypeError:
        return 3


def _of_several(convert):
    def scale(model, x, y):
        try:
            return convert(y)
        except (ValueError, TypeError, RuntimeError):
            return 3

    return scale


def _histogram(model, x, y):
    """Tries first whether the edges are a number of bins."""
    return torch.histogramdd(y.detach(), [torch.linspace(-2.0, 2.0, 3)] * y.shape[1]).hist.sum()


@pytest.mark.parametrize(
    "scale", [_of_sizes, *map(_of_several, (int, float, bool, complex, operator.index)), _histogram]
)
def test_an_error_that_a_call_raises_too_is_a_branch(scale):
    model = Scaled(scale)
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16, capture="ahead of time")
    torch.testing.assert_close(amp(X), model(X), rtol=0.05, atol=0.05)


def _numpy(model, x, y):
    try:
        return float(y.detach().numpy().max()) + 5
    except (RuntimeError, TypeError):
        return 1


@pytest.mark.parametrize("scale", [_count, _truth, _numpy])
def test_an_error_that_forward_catches_is_no_branch_of_a_graph(scale):
    """Only a capture raises it, for it has no values."""
    model = Scaled(scale)
    with pytest.raises(ampgraph.CaptureError, match=r"catches an error of .*test_real_types\.py"):
        ampgraph.convert(model, (X,), dtype=torch.bfloat16, capture="ahead of time")
    with pytest.warns(UserWarning, match="catches an error of"):
        amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16)
    torch.testing.assert_close(amp(X), model(X), rtol=0.05, atol=0.05)


SIZES = {
    "isinstance": lambda n: isinstance(n, int),
    "isinstance of several": lambda n: isinstance(n, (str, int)),
    "type": lambda n: type(n) is int,
    "quotient": lambda n: isinstance(n / 2, float),
    "comparison": lambda n: isinstance(n > 1, bool),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_an_int_in_a_capture_of_dynamic_sizes(name):
    """The second capture has symbols in place of sizes."""
    model = Scaled(lambda model, x, y: 3 if SIZES[name](x.shape[0]) else 1)
    amp = ampgraph.convert(model, (X,), dtype=torch.bfloat16, capture="ahead of time")
    for rows in (3, 5, 7, 2):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(amp(x), 3 * model.fc(x), rtol=0.05, atol=0.05)
    assert len(amp.graph_modules) <= 2


def test_a_capture_inside_a_capture():
    code, before = Code(_is_tensor), _is_tensor.__code__
    with real_types(code, lambda: True):
        with real_types(code, lambda: True):
            assert _is_tensor(X)
        assert _is_tensor(X)
        assert _is_tensor.__code__ is not before
    assert _is_tensor(X)
    assert _is_tensor.__code__ is before
