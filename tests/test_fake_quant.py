"""Training aware of quantization: observers write ranges, and give buffers their sizes in the first call."""

import warnings

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

import ampgraph

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
BUFFERS = ("min_val", "max_val", "scale", "zero_point")


def observed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.qconfig = get_default_qat_qconfig("fbgemm")
        return prepare_qat(model)


def train(model, run, optimizer):
    losses = []
    for i in range(5):
        loss = (run(X + i / 10) - X[:, :4]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: b for name, b in model.named_buffers() if name.rpartition(".")[2] in BUFFERS}


@pytest.mark.parametrize("is_warm", [False, True], ids=["fresh observers", "warm"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_trains_as_in_float32(dtype, is_warm):
    model, reference = observed(), observed()
    if is_warm:
        model(X), reference(X)
    amp = ampgraph.convert(model, (X,), policy=ampgraph.Policy("O1", dtype=dtype))
    optimizer = torch.optim.SGD(amp.parameters(), 0.1)
    amp.scaler.attach(optimizer)
    losses, buffers = train(model, amp, optimizer)
    expected, ranges = train(reference, reference, torch.optim.SGD(reference.parameters(), 0.1))
    assert losses == pytest.approx(expected, rel=0.02)
    for name, value in ranges.items():
        assert buffers[name].shape == value.shape, name
        torch.testing.assert_close(buffers[name].float(), value.float(), rtol=0.05, atol=0.05, msg=name)
    assert amp.scaler.last_overflow is None
