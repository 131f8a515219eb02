"""Hugging Face's Trainer with a converted BERT: two extra lines, and a callback for the scaler's state.

    python examples/hf_trainer.py

The Trainer checks the model's class when it saves. `convert_blocks(model, "")` converts in place, so the
model stays a PreTrainedModel and `from_pretrained` reads its checkpoints. Leave the Trainer's ``fp16`` and
``bf16`` off. The callback saves the loss scale beside the checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

import ampgraph

STEPS, LENGTH, WORDS = 24, 12, 64
SCALE = ampgraph.DynamicLossScale(2.0**10, growth_interval=8)
POLICY = ampgraph.Policy(dtype=torch.float16, loss_scale=SCALE)


def made_up_data() -> list[dict]:
    """Returns sentences; class 0 uses the first half of the vocabulary, class 1 the second half."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, WORDS // 2, (64, LENGTH), generator=generator)
    return [{"input_ids": ids + WORDS // 2 * (i % 2), "labels": i % 2} for i, ids in enumerate(words)]


class ScalerState(TrainerCallback):
    """Writes the scaler's state into each of the Trainer's checkpoints."""

    def __init__(self, scaler):
        self.scaler = scaler

    def on_save(self, args, state, control, **_):
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        torch.save(self.scaler.state_dict(), folder / "amp.pt")


def trainer(folder: str, converted: bool) -> tuple[Trainer, Any]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model, data = BertForSequenceClassification(BertConfig(vocab_size=WORDS, **sizes)), made_up_data()
    quiet = {"report_to": [], "disable_tqdm": True}
    training = {"max_steps": STEPS, "learning_rate": 5e-3, "max_grad_norm": 1.0, "save_steps": STEPS // 2}
    args = TrainingArguments(folder, use_cpu=True, **training, **quiet)
    made = Trainer(model, args, train_dataset=data, eval_dataset=data)
    if not converted:
        return made, None
    blocks = ampgraph.convert_blocks(model, "", policy=POLICY)
    blocks.scaler.attach(made.create_optimizer())
    made.add_callback(ScalerState(blocks.scaler))
    return made, blocks.scaler


def main() -> dict[str, float]:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with TemporaryDirectory() as folder:
        exact, _ = trainer(folder, converted=False)
        exact.train()
    with TemporaryDirectory() as folder:
        amp, scaler = trainer(folder, converted=True)
        amp.train()
        resumed, its_scaler = trainer(folder, converted=True)
        saved = f"{folder}/checkpoint-{STEPS // 2}"
        its_scaler.load_state_dict(torch.load(f"{saved}/amp.pt"))
        resumed.train(resume_from_checkpoint=saved)
        reloaded = BertForSequenceClassification.from_pretrained(f"{folder}/checkpoint-{STEPS}")
        reloaded = Trainer(reloaded, exact.args, eval_dataset=exact.eval_dataset)
    return {
        "loss float32": exact.evaluate()["eval_loss"],
        "loss float16": amp.evaluate()["eval_loss"],
        "loss float16, resumed": resumed.evaluate()["eval_loss"],
        "loss reloaded": reloaded.evaluate()["eval_loss"],
        "scale": scaler.get_scale(),
        "scale, resumed": its_scaler.get_scale(),
    }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:22} {value:.6g}")
