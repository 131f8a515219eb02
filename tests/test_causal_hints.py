"""Encoders and decoders of torch are captured with a mask and without a hint; nothing looks at the mask."""

import pytest
import torch
from torch import nn
from torch.nn.modules import transformer

import ampgraph

X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
MASK = nn.Transformer.generate_square_subsequent_mask(6)
TORCHS = transformer._detect_is_causal_mask
OPTIONS = {"d_model": 16, "nhead": 2, "dim_feedforward": 24, "dropout": 0.0, "batch_first": True}


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(**OPTIONS), 2, enable_nested_tensor=False)


class Language(nn.Module):
    """Makes its mask, as torch's tutorials do."""

    def __init__(self):
        super().__init__()
        self.encoder = encoder()

    def forward(self, x):
        return self.encoder(x, nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**OPTIONS), 2)

    def forward(self, x, mask):
        return self.decoder(x, x, mask)


@pytest.mark.parametrize("is_ahead", [True, False])
@pytest.mark.parametrize(
    ("make", "args"),
    [(Language, (X,)), (encoder, (X, MASK)), (Decoder, (X, MASK))],
    ids=lambda v: str(v)[:20],
)
def test_all_layers_are_low_in_one_graph(make, args, is_ahead):
    torch.manual_seed(0)
    model = make()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(*args).float()
    amp = ampgraph.convert(model, args if is_ahead else None, policy="O1", dtype=torch.bfloat16)
    found = amp(*args)
    [graph] = amp.graph_modules
    attention = torch.ops.aten.scaled_dot_product_attention.default
    calls = (graph.graph_module if hasattr(graph, "graph_module") else graph).graph.find_nodes(
        op="call_function", target=attention
    )
    assert len(calls) == (4 if make is Decoder else 2)
    assert {node.meta["val"].dtype for node in calls} == {torch.bfloat16}
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)
    found.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert transformer._detect_is_causal_mask is TORCHS


@pytest.mark.parametrize("is_ahead", [True, False])
def test_another_mask_hides_other_positions(is_ahead):
    """The mask of a later call counts, whatever the first one was."""
    torch.manual_seed(0)
    model = encoder()
    amp = ampgraph.convert(model, (X, MASK) if is_ahead else None, policy="O1", dtype=torch.bfloat16)
    for mask in (MASK, MASK.T, torch.zeros(6, 6), MASK):
        torch.testing.assert_close(amp(X, mask), model(X, mask), rtol=0.03, atol=0.03)


def test_torch_looks_at_masks_outside_of_a_capture():
    torch.manual_seed(0)
    amp = ampgraph.convert(encoder(), dtype=torch.bfloat16)
    amp(X, MASK)
    assert TORCHS(MASK) is True
    assert transformer._detect_is_causal_mask(MASK.T) is False
