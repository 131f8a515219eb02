"""Masks that a caller passes: their numbers are not known when the model is captured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampgraph
from ampgraph import NoLossScale, Policy
from ampgraph.testing import cast_map

BF16, F16 = torch.bfloat16, torch.float16
MIN = torch.finfo(torch.float32).min
LENGTH, WIDTH = 6, 16
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _summed(change: Callable[[Tensor], Tensor] = lambda mask: mask) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.transpose(1, 2) / 4 + change(mask)).softmax(-1) @ v

    return attend


def _in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(1, 2) / 4
    scores += mask
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v


def _with_a_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    return (q @ k.transpose(1, 2) / 4 + (distance * -0.5 + mask)).softmax(-1) @ v


def _selected(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask < -1, mask, q @ k.transpose(1, 2) / 4).softmax(-1) @ v


def _written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(1, 2) / 4 + mask
    shares = (scores - scores.amax(-1, keepdim=True)).exp()
    return shares / shares.sum(-1, keepdim=True) @ v


ATTEND: dict[str, Attend] = {
    "added": _summed(),
    "a view": _summed(lambda mask: mask.transpose(1, 2).transpose(1, 2)),
    "expanded": _summed(lambda mask: mask[:, None].expand(-1, 2, -1, -1)[:, 1]),
    "added twice": _summed(lambda mask: mask + torch.zeros(LENGTH, LENGTH)),
    "multiplied": _summed(lambda mask: mask * 0.5),
    "concatenated": _summed(lambda mask: torch.cat([mask[:, :2], mask[:, 2:]], 1)),
    "in place": _in_place,
    "selected": _selected,
    "before a softmax that is written out": _written_out,
    "with a bias": _with_a_bias,
    "of torch": lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
}


class Attention(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.attend(self.q(x), self.k(x), self.v(x), mask)


X = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def padded(number: float = MIN) -> Tensor:
    """Returns a causal mask of a batch that is padded on the left; its first row masks everything."""
    mask = torch.full((LENGTH, LENGTH), number).triu(1).repeat(2, 1, 1)
    mask[0, :, :2] = number
    return mask


def converted(attend: Attend, mask: Tensor, backend: str = "eager", **options) -> ampgraph.AmpModule:
    policy = Policy(**{"level": "O2", "dtype": BF16, "loss_scale": NoLossScale(), **options})
    return ampgraph.convert(Attention(attend), (X, mask), policy=policy, backend=backend)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("attend", ATTEND)
def test_rows_that_mask_everything_are_finite(attend: str, level: str, dtype: torch.dtype) -> None:
    mask = padded()
    amp = converted(ATTEND[attend], mask, level=level, dtype=dtype)
    found, true = amp(X, mask), amp.source(X, mask)
    kept = torch.ones(2, LENGTH, dtype=torch.bool)
    kept[0, :2] = False
    assert (found - true)[kept].norm() < 0.02 * true[kept].norm()
    found[kept].square().sum().backward()
    assert all(p.grad.isfinite().all() for p in amp.source.parameters())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_blocks_that_receive_the_mask(backend: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attention(ATTEND["added"]) for _ in range(2))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x, mask)
            return x

    policy = Policy(level="O2", dtype=BF16, loss_scale=NoLossScale())
    model = Model()
    ampgraph.convert_blocks(model, "layers.*", policy=policy, backend=backend)
    model(X, padded())[:, 2:].square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_reason() -> None:
    amp = converted(ATTEND["added"], padded())
    assert "add: f32 <- widen(div), mask" in cast_map(amp)
    assert "'mask' may mask with numbers outside torch.bfloat16's range" in ampgraph.explain(amp).why("add")


class Gated(nn.Module):
    """Adds an input to what a softmax reads, and computes with it too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + x).softmax(-1)


def test_an_input_of_a_product_is_no_mask() -> None:
    policy = Policy(level="O2", dtype=BF16, loss_scale=NoLossScale())
    amp = ampgraph.convert(Gated(), (torch.randn(2, LENGTH),), policy=policy)
    assert "linear: bf16" in cast_map(amp)
    assert "may mask" not in str(ampgraph.explain(amp))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_clamped_mask_keeps_minus_infinity_apart(level: str, dtype: torch.dtype) -> None:
    """Two masks of the least number add up to -inf where both mask; a row attends to the rest alone."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        causal = torch.full((LENGTH, LENGTH), MIN).triu(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask + causal)

    mask = torch.zeros(2, LENGTH, LENGTH)
    mask[0, 0] = MIN
    amp = converted(attend, mask, level=level, dtype=dtype)
    found, true = amp(X, mask), amp.source(X, mask)
    assert (found - true).norm() < 0.01 * true.norm()
