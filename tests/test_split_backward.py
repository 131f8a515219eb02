"""Zero-bubble schedules of pipelines run a backward in two parts: that of inputs, then that of weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import ampgraph
from ampgraph import Policy
from ampgraph._compat import VERSION

BF16, F16 = torch.bfloat16, torch.float16


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def gradients(stage: nn.Module, x: Tensor, parts: bool) -> Tensor:
    x = x.clone().requires_grad_()
    loss = stage(x).float().square().mean()
    if parts:
        _, groups = stage_backward_input([loss], None, [x], iter(stage.parameters()))
        stage_backward_weight(iter(stage.parameters()), groups)
    else:
        loss.backward()
    found = [p.grad for p in stage.parameters()] + [x.grad]
    for parameter in stage.parameters():
        parameter.grad = None
    return torch.cat([g.flatten() for g in found if g is not None])


TWICE = pytest.mark.skipif(VERSION < (2, 12), reason="torch 2.11 counts intermediates of a group twice")


@pytest.mark.parametrize(
    "policy",
    [Policy(dtype=BF16, weight_copies=False), pytest.param(Policy(dtype=F16), marks=TWICE)],
    ids=["bfloat16", "float16"],
)
def test_a_backward_in_parts_is_a_whole_one(policy):
    torch.manual_seed(0)
    stage, x = nn.Sequential(Residual(), Residual()), torch.randn(4, 16)
    amp = ampgraph.convert(stage, (x,), policy=policy, backend="eager")
    torch.testing.assert_close(
        gradients(amp, x.detach(), parts=True), gradients(amp, x.detach(), parts=False)
    )


def test_low_copies_of_some_weights_are_refused_by_torch():
    """docs/distributed.md names the error."""
    torch.manual_seed(0)
    stage, x = nn.Sequential(Residual(), Residual()), torch.randn(4, 16)
    amp = ampgraph.convert(stage, (x,), dtype=BF16, backend="eager")
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        gradients(amp, x, parts=True)
