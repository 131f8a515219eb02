"""Masks of attention have contiguous rows where kernels want them, so that torch takes no formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampgraph
from ampgraph import NoLossScale, Policy
from ampgraph.ops import kernels
from ampgraph.passes import LayOutMasks

X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
KEEP = torch.tensor([[True, False], [True, True]])


class Attends(nn.Module):
    """Attends twice under one mask of a given kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.first, self.second = kind, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        mask = {
            "expanded": lambda: keep[:, :1, None].expand(2, 4, 4),
            "transposed": lambda: torch.ones(2, 4, 4, dtype=torch.bool).tril().transpose(1, 2),
            "float": lambda: torch.zeros(2, 1, 1).masked_fill(~keep[:, :1, None], -1.0).expand(2, 4, 4),
            "written": lambda: written(keep),
            "input": lambda: keep,
            "dense": lambda: torch.ones(2, 4, 4, dtype=torch.bool).triu(),
        }[self.kind]()
        for layer in (self.first, self.second):
            x = F.scaled_dot_product_attention(layer(x), x, x, attn_mask=mask)
        return x


def written(keep: Tensor) -> Tensor:
    mask = torch.ones(2, 4, 4, dtype=torch.bool).transpose(1, 2)
    mask[:, :, 3] = keep[:, 1:]
    return mask


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "wants_contiguous_rows", lambda device: True)


def converted(kind: str, level: str = "O1") -> ampgraph.AmpModule:
    policy = Policy(level, dtype=torch.bfloat16, loss_scale=NoLossScale())  # type: ignore[arg-type]
    return ampgraph.convert(Attends(kind), (X, KEEP), policy=policy)


def layouts(amp: ampgraph.AmpModule) -> list[int]:
    """Returns the last strides of the masks, and the number of copies."""
    nodes = amp.graph_module.graph.nodes
    attention = [n for n in nodes if "scaled_dot_product" in str(n.target)]
    masks = [n.args[3] if len(n.args) > 3 else n.kwargs["attn_mask"] for n in attention]
    copies = [n for n in nodes if n.target is torch.ops.aten.contiguous.default]
    return [*(m.meta["val"].stride(-1) for m in masks), len(copies)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("expanded", 1), ("transposed", 1), ("float", 1), ("written", 2), ("dense", 0)],
)
def test_kernels_on_a_gpu_read_copies(kind: str, expected: int, on_gpu: None) -> None:
    amp = converted(kind)
    assert layouts(amp) == [1, 1, expected]
    assert torch.equal(amp(X, KEEP), without_copies(kind)(X, KEEP))


def without_copies(kind: str) -> ampgraph.AmpModule:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayOutMasks, "run", lambda self, graph_module: False)
        return converted(kind)


def test_masks_among_the_inputs(on_gpu: None) -> None:
    mask = torch.ones(2, 4, 4, dtype=torch.bool).tril().transpose(1, 2)
    amp = ampgraph.convert(Attends("input"), (X, mask), dtype=torch.bfloat16)
    assert layouts(amp) == [1, 1, 1]
    amp.graph_module.graph.lint()
    kinds = [node.op == "call_function" for node in amp.graph_module.graph.nodes if node.op != "output"]
    assert kinds == sorted(kinds)  # inputs stay first
    assert torch.equal(amp(X, mask), amp(X, mask.contiguous()))


@pytest.mark.parametrize("kind", ["expanded", "transposed", "float"])
def test_nothing_changes_on_a_cpu_and_at_o0(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = layouts(converted(kind))
    assert own[-1] == 0
    monkeypatch.setattr(kernels, "wants_contiguous_rows", lambda device: True)
    assert layouts(converted(kind, "O0")) == own


def test_devices() -> None:
    wants = {kind: kernels.wants_contiguous_rows(torch.device(kind)) for kind in ("cpu", "cuda", "xpu")}
    assert wants == {"cpu": False, "cuda": True, "xpu": True}
