"""What a CUDA graph recorded by hand must not take for constant, on a CPU whose streams the test tells."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ampgraph
from ampgraph import DynamicLossScale, NoLossScale, Policy, StaticLossScale
from ampgraph.errors import PolicyError
from ampgraph.runtime import writers
from ampgraph.training import scaler

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The current stream, whether it is recorded, and the waits; a CPU has none of them."""
    told = SimpleNamespace(handle=0, recorded=False, waits=[])

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.cuda_stream = told.handle

        def wait_stream(self, other: Stream) -> None:
            told.waits.append((self.cuda_stream, other.cuda_stream))

    monkeypatch.setattr(writers, "stream_handle", lambda device: told.handle)
    monkeypatch.setattr(writers, "is_recording", lambda device: told.recorded)
    monkeypatch.setattr(scaler, "is_recording", lambda device: told.recorded)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return told


def converted(policy: Policy) -> tuple[nn.Module, ampgraph.AmpModule]:
    torch.manual_seed(0)
    source = nn.Linear(8, 8)
    return source, ampgraph.convert(source, (X,), policy=policy)


def shadows_of(amp: ampgraph.AmpModule) -> writers.Writers:
    shadows = amp._graphs.shadows
    assert shadows is not None
    shadows._columns.devices.append(CPU)
    return shadows


@pytest.mark.parametrize(("trains", "copies"), [(False, [2]), (True, [2, 2, 2])])
def test_a_recorded_call_copies_weights_and_calls_after_recorded_training_do(streams, trains, copies) -> None:
    _, amp = converted(Policy("O1", dtype=torch.bfloat16))
    shadows = shadows_of(amp)
    copied: list[int] = []
    with torch.no_grad():
        amp(X)
    copy_weights = shadows._copy
    shadows._copy = lambda stale, *rest: (copied.append(len(stale)), copy_weights(stale, *rest))
    for handle, recorded in ((0, False), (7, True), (0, False), (0, False)):
        streams.handle, streams.recorded = handle, recorded
        with torch.set_grad_enabled(trains and recorded):
            amp(X)
        shadows._writers.note([CPU])
    # After recorded training a replay may have updated the weights.
    assert copied == copies
    assert streams.waits == [(0, 7)]  # what is recorded waits for nothing else


def test_other_streams_wait_for_the_copies(streams) -> None:
    _, amp = converted(Policy("O1", dtype=torch.bfloat16))
    shadows = shadows_of(amp)
    with torch.no_grad():
        shadows._writers.note([CPU])
        amp(X)
        assert streams.waits == []
        streams.handle = 7
        amp(X), amp(X)
        assert streams.waits == [(7, 0)]
        shadows._writers.note([CPU])
        streams.handle = 9
        amp(X)
    assert streams.waits == [(7, 0), (9, 7)]


@pytest.mark.parametrize("scale", [DynamicLossScale(), StaticLossScale(8.0)])
def test_a_loss_scale_with_skipped_steps_is_refused(streams, scale) -> None:
    _, amp = converted(Policy("O1", dtype=torch.float16, loss_scale=scale))
    streams.handle, streams.recorded = 7, True
    with pytest.raises(PolicyError, match="same loss scale in each replay"):
        amp(X)


@pytest.mark.parametrize("scale", [NoLossScale(), StaticLossScale(8.0, skip_on_overflow=False)])
def test_other_loss_scales_are_recorded(streams, scale) -> None:
    source, amp = converted(Policy("O1", dtype=torch.float16, loss_scale=scale))
    streams.handle, streams.recorded = 7, True
    amp(X).sum().backward()
    assert source.weight.grad is not None


def test_copies_of_low_copies_leave_streams_out(streams) -> None:
    _, amp = converted(Policy("O1", dtype=torch.bfloat16))
    shadows = shadows_of(amp)
    shadows._writers.note([CPU])
    assert copy.deepcopy(shadows._writers)._last == {}
    assert shadows._writers._last.keys() == {CPU}
