"""Models of transformers by name: how each is captured, in one line, and what it computes."""

import pytest
import torch

import ampgraph
from tests.helpers import close


@pytest.fixture
def transformers():
    """Imported by the tests alone: collection needs no library."""
    return pytest.importorskip("transformers")


def _messages(recwarn):
    return [str(w.message) for w in recwarn if w.filename == __file__]


@pytest.mark.exhaustive
def test_gpt2_with_its_cache_falls_back_with_one_line(transformers, recwarn):
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model, ids = transformers.GPT2LMHeadModel(config).eval(), torch.randint(50, (2, 7))
    amp = ampgraph.convert(model, (), {"input_ids": ids}, dtype=torch.bfloat16, backend="eager")
    with torch.no_grad():
        out, wanted = amp(input_ids=ids), model(input_ids=ids)
        close(out.logits, wanted.logits)
        after = [
            m(input_ids=ids[:, :1], past_key_values=o.past_key_values)
            for m, o in ((amp, out), (model, wanted))
        ]
    close(after[0].logits, after[1].logits)
    (told,) = _messages(recwarn)
    assert told.startswith("GPT2LMHeadModel could not be captured")
    assert "DynamicCache" in told
    assert "just in time instead" in told


def test_detr_is_captured_whole(transformers, recwarn):
    backbone = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config={**backbone, "out_features": ["stage2"]},
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=5,
    )
    model, pixels = transformers.DetrForObjectDetection(config).eval(), torch.randn(1, 3, 32, 32)
    amp = ampgraph.convert(model, (pixels,), dtype=torch.bfloat16, backend="eager")
    with torch.no_grad():
        out, wanted = amp(pixels), model(pixels)
    close(out.logits, wanted.logits)
    close(out.pred_boxes, wanted.pred_boxes)
    assert not amp.is_just_in_time
    assert not _messages(recwarn)


def test_bert_decides_what_problem_it_solves_and_does_not_warn(transformers, recwarn):
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
    )
    model = transformers.BertForSequenceClassification(config).eval()
    batch = {"input_ids": torch.randint(50, (2, 7)), "labels": torch.tensor([0, 2])}
    amp = ampgraph.convert(model, (), batch, dtype=torch.bfloat16, backend="eager")
    close(amp(**batch).loss, model(**batch).loss)
    assert not amp.is_just_in_time
    assert not _messages(recwarn)
