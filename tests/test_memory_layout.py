"""Models that ask how tensors lie in memory: another layout is captured again, for those models alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ampgraph

from .helpers import close

LOW = {"policy": "O1", "dtype": torch.bfloat16}
X = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))


class Asks(nn.Module):
    def __init__(self, asks):
        super().__init__()
        self.conv, self.asks = nn.Conv2d(3, 3, 1), asks

    def forward(self, x):
        return self.conv(x) * (2 if self.asks(self, x) else 3)


def clone(x, memory_format=torch.preserve_format):
    return x.clone(memory_format=memory_format)


LAST = clone(X, torch.channels_last)
SWAPPED = X.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
ASKS = {
    "is_contiguous": (lambda m, x: x.is_contiguous(), LAST),
    "channels last": (lambda m, x: x.is_contiguous(memory_format=torch.channels_last), LAST),
    "stride": (lambda m, x: x.stride(0) == 60, SWAPPED),
    "stride()": (lambda m, x: x.stride()[-1] == 1, LAST),
    "dim_order": (lambda m, x: x.dim_order()[1] == 1, LAST),
    "of a view": (lambda m, x: x.transpose(0, 1).is_contiguous(), SWAPPED),
    "of a result": (lambda m, x: m.conv(x).is_contiguous(), LAST),
    "as a function": (lambda m, x: torch.Tensor.is_contiguous(x), LAST),
    "is_neg": (lambda m, x: x.is_neg(), torch._neg_view(X)),
    "as a function of torch": (lambda m, x: torch.is_neg(x), torch._neg_view(X)),
    "storage_offset": (lambda m, x: x.storage_offset() == 0, torch.cat([X, X])[2:]),
}


@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
@pytest.mark.parametrize("what", ASKS)
def test_another_layout_is_captured_again(what, capture):
    asks, other = ASKS[what]
    model = Asks(asks)
    for first, second in ((X, other), (other, X)):
        torch._dynamo.reset()
        amp = ampgraph.convert(model, (first,), capture=capture, **LOW)
        for x in (first, second, first, second):
            close(amp(x), model(x))
        assert amp.is_just_in_time or len(amp.graph_modules) == 2


def test_a_parameter_of_another_layout():
    model = Asks(lambda m, x: m.conv.weight.is_contiguous())
    model.conv = nn.Conv2d(3, 3, 2)
    amp = ampgraph.convert(model, (X,), capture="ahead of time", **LOW)
    close(amp(X), model(X))
    amp.to(memory_format=torch.channels_last)
    assert not model.conv.weight.is_contiguous()
    close(amp(X), model(X))


def test_other_sizes_of_one_layout_are_the_same_layout():
    model = Asks(lambda m, x: x.is_contiguous())
    amp = ampgraph.convert(model, (X,), capture="ahead of time", **LOW)
    for size in (3, 5, 7):
        x = torch.randn(size, 3, 4, 5)
        close(amp(x), model(x))
    assert len(amp.graph_modules) == 2
    close(amp(clone(x, torch.channels_last)), model(clone(x, torch.channels_last)))
    assert len(amp.graph_modules) == 3


def test_a_model_that_does_not_ask_is_captured_once():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Flatten()).eval()
    amp = ampgraph.convert(model, (X,), capture="ahead of time", **LOW)
    for x in (X, LAST, SWAPPED):
        close(amp(x), model(x))
    assert len(amp.graph_modules) == 1


class Writes(nn.Module):
    """Writes to what is its argument, or a copy of it."""

    def __init__(self, same):
        super().__init__()
        self.conv, self.same = nn.Conv2d(3, 3, 1), same

    def forward(self, x):
        self.same(x).mul_(2)
        return self.conv(x)


SAME = {
    "contiguous": lambda x: x.contiguous(),
    "reshape": lambda x: x.reshape(2, -1),
    "flatten": lambda x: torch.flatten(x, 1),
    "to": lambda x: x.to(memory_format=torch.channels_last),
    "contiguous, channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("capture", ["ahead of time", "just in time"])
@pytest.mark.parametrize("same", SAME)
def test_a_write_to_what_may_be_a_copy(same, capture):
    model = Writes(SAME[same])
    for first, second in ((X, LAST), (LAST, X)):
        torch._dynamo.reset()
        amp = ampgraph.convert(model, (clone(first),), capture=capture, **LOW)
        for x in (first, second):
            got, wanted = clone(x), clone(x)
            close(amp(got), model(wanted))
            close(got, wanted)
