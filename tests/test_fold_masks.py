"""Attention gets no mask that it would read in vain: constant masks become ``is_causal`` or nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampgraph
from ampgraph import NoLossScale, Policy
from ampgraph.passes import FoldMasks
from passes.analysis.constants import computed, constant_nodes
from passes.fold_masks import _kind

aten = torch.ops.aten

X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
LEAST = torch.finfo(torch.float32).min


@torch.library.custom_op("ampgraph_tests::past", mutates_args=())
def past_of_a_custom_op(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


@past_of_a_custom_op.register_fake
def _(length: int) -> Tensor:
    return torch.empty(length, length, dtype=torch.bool)


class Attends(nn.Module):
    """Attends under a mask that ``make`` makes of the module and the queries."""

    def __init__(self, make: Callable[[Attends, Tensor], Tensor], keys: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make, self.keys, self.layer = make, keys, nn.Linear(8, 8)
        self.register_buffer("past", ones().tril())

    def forward(self, x: Tensor) -> Tensor:
        others = x.repeat(1, 2, 1)[:, : self.keys]
        return F.scaled_dot_product_attention(self.layer(x), others, others, attn_mask=self.make(self, x))


def ones(*sizes: int) -> Tensor:
    return torch.ones(*(sizes or (4, 4)), dtype=torch.bool)


def by_positions(_model: Attends, x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[1])
    return (positions <= positions[:, None]).expand(2, 4, 4)


def packed(_model: Attends, x: Tensor) -> Tensor:
    """How transformers finds packed sequences, here always one."""
    positions = torch.arange(x.shape[1]).expand(2, -1)
    sequence = (positions.diff(prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return by_positions(_model, x) & (sequence[:, :, None] == sequence[:, None])


def written(_model: Attends, _x: Tensor) -> Tensor:
    mask = ones().tril().t()
    mask[:, 0] = True
    return mask


FUTURE = {
    "lower triangle": lambda model, x: ones().tril(),
    "positions": by_positions,
    "packed": packed,
    "infinity": lambda model, x: torch.full((4, 4), -torch.inf).triu(1),
    "least number": lambda model, x: torch.full((2, 4, 4), LEAST).triu(1),
}
NOTHING = {
    "ones": lambda model, x: ones(2, 1, 4),
    "zeros": lambda model, x: torch.zeros(4, 4),
}
KEPT = {
    "window": lambda model, x: ones().tril().triu(-1),
    "without the diagonal": lambda model, x: ones().tril(-1) | ones().triu(3),
    "upper triangle": lambda model, x: ones().triu(),
    "numbers": lambda model, x: torch.arange(4.0).expand(4, 4),
    "buffer": lambda model, x: model.past,
    "values of an input": lambda model, x: ones().tril() & (x[0, :, :1] < 9),
    "random": lambda model, x: ones().tril() & (torch.rand(4, 1) < 2),
    "custom op": lambda model, x: past_of_a_custom_op(4),
    "written": written,
    "one of the batch": lambda model, x: torch.stack([ones().tril(), ones()]),
}


def converted(
    make: Callable[[Attends, Tensor], Tensor], level: str = "O2", keys: int = 4
) -> ampgraph.AmpModule:
    policy = Policy(level, dtype=torch.bfloat16, loss_scale=NoLossScale())  # type: ignore[arg-type]
    return ampgraph.convert(Attends(make, keys), (X,), policy=policy)


def attention(graph_module: torch.fx.GraphModule) -> list[tuple[bool, bool]]:
    """Returns for each call whether it has a mask, and whether it is causal."""
    calls = [n for n in graph_module.graph.nodes if "scaled_dot_product" in str(n.target)]
    read = [{**dict(zip(("q", "k", "v", "attn_mask"), n.args, strict=False)), **n.kwargs} for n in calls]
    return [(kwargs.get("attn_mask") is not None, kwargs.get("is_causal", False)) for kwargs in read]


def with_masks(make: Callable[[Attends, Tensor], Tensor]) -> ampgraph.AmpModule:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FoldMasks, "run", lambda self, graph_module: False)
        return converted(make)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        *((make, (False, True)) for make in FUTURE.values()),
        *((make, (False, False)) for make in NOTHING.values()),
    ],
    ids=[*FUTURE, *NOTHING],
)
def test_folded(make, expected):
    """The result stays, within bfloat16, and nothing of the mask is left in the graph."""
    amp = converted(make)
    assert attention(amp.graph_module) == [expected]
    left = {str(n.target) for n in amp.graph_module.graph.nodes}
    assert not left & {"aten.tril.default", "aten.triu.default", "aten.arange.default", "aten.le.Tensor"}
    torch.testing.assert_close(amp(X), with_masks(make)(X), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("make", KEPT.values(), ids=KEPT)
def test_kept(make):
    amp = converted(make)
    assert attention(amp.graph_module) == [(True, False)]


def test_a_buffer_may_change():
    amp = converted(KEPT["buffer"])
    amp.get_buffer("past").fill_(True)
    expected = F.scaled_dot_product_attention(amp.get_submodule("layer")(X), X, X)
    torch.testing.assert_close(amp(X), expected, rtol=0, atol=0.02)


def test_more_keys_than_queries():
    """The lower triangle of a rectangle is not what ``is_causal`` means to all kernels."""
    amp = converted(lambda model, x: ones(4, 6).tril(), keys=6)
    assert attention(amp.graph_module) == [(True, False)]


def test_a_mask_that_a_cpu_cannot_compute_is_kept():
    graph = torch.fx.Graph()
    whole = graph.call_function(aten.ones.default, ([4, 4],), {"dtype": torch.uint16})
    past = graph.call_function(aten.tril.default, (whole,))
    whole.meta["val"] = past.meta["val"] = torch.empty(4, 4, dtype=torch.uint16, device="meta")
    assert computed(constant_nodes(whole, ())).sum() == 16
    assert computed(constant_nodes(past, ())) is None


@pytest.mark.parametrize(
    ("scale", "folds"), [(None, True), (0.5, True), (2, True), (0.0, False), (-0.5, False)]
)
def test_kernels_hide_the_future_for_positive_scales_alone(scale, folds):
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, attn_mask=ones().tril(), scale=scale)

    amp = ampgraph.convert(Scaled(), (X,), policy=Policy("O1", dtype=torch.bfloat16))
    assert attention(amp.graph_module) == [(not folds, folds)]
    torch.testing.assert_close(amp(X), Scaled()(X), rtol=2**-6, atol=2**-6)


def test_another_default_device():
    amp = converted(FUTURE["packed"])
    with torch.device("meta"):
        other = ampgraph.convert(
            Attends(FUTURE["packed"]).to("meta"), (X.to("meta"),), capture="ahead of time"
        )
    assert attention(other.graph_module) == attention(amp.graph_module)


def test_equal_masks_of_layers_are_computed_once(monkeypatch):
    counted = []
    monkeypatch.setitem(
        FoldMasks.run.__globals__, "computed", lambda nodes: counted.append(nodes) or computed(nodes)
    )

    class Layers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for diagonal in (0, 0, 0, 1):
                mask = torch.ones(4, 4).tril(diagonal) > 0
                x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
            return x

    amp = ampgraph.convert(Layers(), (X,), policy=Policy("O1", dtype=torch.bfloat16))
    assert attention(amp.graph_module) == [(False, True)] * 3 + [(True, False)]
    assert len(counted) == 2


def test_nothing_changes_at_o0():
    assert attention(converted(FUTURE["packed"], "O0").graph_module) == [(True, False)]


def test_dynamic_sizes_keep_the_mask():
    """A sliding window of 4 hides the same as ``is_causal`` in a sequence of 4, and more in longer ones."""
    window = lambda model, x: torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-3)  # noqa: E731
    model = Attends(window)
    amp = ampgraph.convert(model, (X,), policy=Policy("O1", dtype=torch.bfloat16))
    assert attention(amp.graph_module) == [(False, True)]
    for length in (4, 6, 7, 4):
        x = torch.randn(2, length, 8)
        model.keys = length
        torch.testing.assert_close(amp(x), model(x), rtol=0, atol=0.03)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 3), (2, 3)])
def test_all_small_masks(sizes):
    """Brute force: the kernel without the mask gives what it gives with it."""
    q, k = torch.randn(sizes[0], 4), torch.randn(sizes[1], 4)
    found = []
    for bits in itertools.product([False, True], repeat=sizes[0] * sizes[1]):
        mask = torch.tensor(bits).reshape(sizes)
        kind = _kind(mask)
        if kind is None:
            continue
        found.append(kind)
        assert _kind(torch.zeros(sizes).masked_fill(~mask, -torch.inf)) == kind
        ours = F.scaled_dot_product_attention(q, k, k, is_causal=kind == "the future")
        torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, k, attn_mask=mask))
    assert found == ["the future", "nothing"][sizes == (2, 3) :]


def causal_lm(**options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "use_cache": False}
    return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, **heads, **options))


TOKENS = torch.arange(2 * 12).reshape(2, 12)


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead of time", "just in time"])
def test_a_causal_language_model_reads_no_mask(ahead):
    """As under torch.autocast, to the bit."""
    model = causal_lm(sliding_window=None)
    policy = Policy("O1", dtype=torch.bfloat16, loss_scale=NoLossScale())
    amp = ampgraph.convert(model, (TOKENS,) if ahead else None, policy=policy)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(TOKENS).logits
    torch.testing.assert_close(amp(TOKENS).logits, expected.float(), rtol=0, atol=0)
    assert [call for g in amp.graph_modules for call in attention(g)] == [(False, True)] * 2


@pytest.mark.parametrize("given", ["a window", "position_ids", "attention_mask"])
def test_a_causal_language_model_keeps_what_a_call_may_change(given):
    model = causal_lm(sliding_window=4 if given == "a window" else None)
    more = {
        "a window": {},
        "position_ids": {"position_ids": torch.arange(12).expand(2, -1)},
        "attention_mask": {"attention_mask": torch.ones(2, 12, dtype=torch.long)},
    }[given]
    amp = ampgraph.convert(model, (TOKENS,), more, policy=Policy("O1", dtype=torch.bfloat16))
    assert attention(amp.graph_module) == [(True, False)] * 2
    more = {name: torch.cat([value[:, :6], value[:, :6] * 0], 1) for name, value in more.items()}
    torch.testing.assert_close(amp(TOKENS, **more).logits, model(TOKENS, **more).logits, rtol=0, atol=0.02)
