"""Trains real models in float32 and in float16, same seeds and same loop, and draws the curves side by side.

    python tools/train_curves.py --output docs/results/training.md    # and its picture; about 6 minutes

Three tasks: handwritten digits (scikit-learn's), a small GPT on the characters of Python's own reference
documentation (it ships with every Python), and a digits autoencoder with a loss so small that its float16
gradients vanish without a loss scale.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from demo import Digits, digits
from provenance import written_by
from torch import Tensor, nn
from torch.nn import functional as F

import ampgraph

Batches = Iterator[tuple[Tensor, Tensor]]
SCALED = ampgraph.DynamicLossScale(growth_interval=200)


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        title: Title of its panel and section.
        model: Makes the model.
        batches: Yields so many batches of inputs and targets, the same each time.
        loss: Of outputs and targets.
        score: Figure of merit of a trained model on held-out data, by name.
        optimizer: Made for the parameters.
        steps: How many.
        runs: Policies by name; None is float32 without conversion.
    """

    title: str
    model: Callable[[], nn.Module]
    batches: Callable[[int], Batches]
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[nn.Module], dict[str, float]]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    steps: int
    runs: dict[str, ampgraph.Policy | None]


def fp16(level: str, scale: ampgraph.LossScale = SCALED) -> ampgraph.Policy:
    """Returns a float16 policy."""
    return ampgraph.Policy(level, dtype=torch.float16, loss_scale=scale)


LEVELS = {"float32": None, "float16 O1": fp16("O1"), "float16 O2": fp16("O2")}


# -- digits ------------------------------------------------------------------------------------------------


def digit_batches(steps: int, size: int = 64) -> Batches:
    """Yields shuffled batches of the training images."""
    images, labels = digits(torch.device("cpu"))[0].tensors
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        chosen = torch.randint(len(labels), (size,), generator=generator)
        yield images[chosen], labels[chosen]


def digit_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy, labels smoothed: without that it soon is zero, and ratios say nothing."""
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


@torch.no_grad()
def digit_score(model: nn.Module) -> dict[str, float]:
    """Returns loss and accuracy on the test images."""
    images, labels = digits(torch.device("cpu"))[1].tensors
    model.eval()
    output = model(images)
    model.train()
    right = (output.argmax(1) == labels).float().mean().item()
    return {"test loss": digit_loss(output, labels).item(), "accuracy": right}


# -- GPT ---------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A pre-norm Transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(2, 3)
        attended = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Embeddings, blocks, and logits tied to the embedding."""

    def __init__(self, vocabulary: int, length: int, width: int = 64, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


LENGTH = 64


@functools.cache
def text() -> tuple[Tensor, Tensor, int]:
    """Returns training text, held-out text (the last tenth) and the size of the alphabet."""
    from pydoc_data.topics import topics

    characters = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    alphabet, codes = torch.tensor(list(characters)).unique(return_inverse=True)
    border = len(codes) * 9 // 10
    return codes[:border], codes[border:], len(alphabet)


def text_batches(steps: int, size: int = 16) -> Batches:
    """Yields random windows of the training text, and the same shifted by one character."""
    codes, _, _ = text()
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(codes) - LENGTH - 1, (size, 1), generator=generator)
        window = codes[starts + torch.arange(LENGTH + 1)]
        yield window[:, :-1], window[:, 1:]


def text_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross-entropy, in nats a character."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def text_score(model: nn.Module) -> dict[str, float]:
    """Returns loss and accuracy of the next character on 16,384 held-out characters."""
    _, codes, _ = text()
    windows = codes[: 256 * (LENGTH + 1)].view(256, LENGTH + 1)
    model.eval()
    logits = torch.cat([model(part[:, :-1]) for part in windows.split(16)])
    model.train()
    right = (logits.argmax(-1) == windows[:, 1:]).float().mean().item()
    return {"test loss": text_loss(logits, windows[:, 1:]).item(), "accuracy": right}


# -- a loss whose gradients vanish -------------------------------------------------------------------------


def autoencoder() -> nn.Module:
    """Sixty-four pixels through a bottleneck of twelve."""
    widths = (64, 48, 12, 48, 64)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*layers)


def pixel_batches(steps: int) -> Batches:
    """Yields flat images as inputs and targets."""
    for images, _ in digit_batches(steps, 128):
        yield images.flatten(1), images.flatten(1)


def weak_loss(output: Tensor, target: Tensor) -> Tensor:
    """Returns the mean square error with a weight of 1e-4, as an auxiliary term would have it."""
    return 1e-4 * F.mse_loss(output, target)


@torch.no_grad()
def pixel_score(model: nn.Module) -> dict[str, float]:
    """Returns the loss on the test images."""
    images = digits(torch.device("cpu"))[1].tensors[0].flatten(1)
    return {"test loss": weak_loss(model(images), images).item()}


TASKS = (
    Task(
        "Digits, a convolutional network",
        Digits,
        digit_batches,
        digit_loss,
        digit_score,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        400,
        LEVELS,
    ),
    Task(
        "Characters, a small GPT",
        lambda: GPT(text()[2], LENGTH),
        text_batches,
        text_loss,
        text_score,
        lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        600,
        LEVELS,
    ),
    Task(
        "Digits, an autoencoder with a weak loss",
        autoencoder,
        pixel_batches,
        weak_loss,
        pixel_score,
        lambda parameters: torch.optim.Adam(parameters, lr=2e-3, eps=1e-12),
        400,
        {
            "float32": None,
            "float16 O1": fp16("O1"),
            "float16 O1, no loss scale": fp16("O1", ampgraph.NoLossScale()),
        },
    ),
)


# -- training ----------------------------------------------------------------------------------------------


def train(task: Task, policy: ampgraph.Policy | None) -> dict[str, Any]:
    """Trains one run with the plain loop; returns its losses, its score, and how often a step was skipped."""
    torch.manual_seed(0)
    model = task.model()
    batches = task.batches(task.steps)
    if policy is not None:
        example = next(task.batches(1))[0]
        model = ampgraph.convert(model, (example,), policy=policy)
    optimizer = task.optimizer(model.parameters())
    if isinstance(model, ampgraph.AmpModule):
        model.scaler.attach(optimizer)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=task.steps)
    losses, start = [], time.perf_counter()
    for inputs, targets in batches:
        loss = task.loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    gradient = max(float(p.grad.abs().max()) for p in model.parameters())
    final = sum(losses[-50:]) / 50
    seconds = time.perf_counter() - start
    figures = {"final loss": final, **task.score(model), "largest gradient": gradient}
    return {"losses": losses, "figures": figures, "seconds": seconds}


def report(results: dict[str, dict[str, Any]]) -> str:
    """Returns the page."""
    lines = [
        "# Training curves: float16 against float32",
        "",
        written_by("python tools/train_curves.py --output docs/results/training.md")
        + " One thread. Same seeds, same batches, same plain loop; the converted "
        "models have one line more, `amp.scaler.attach(optimizer)`. *Final loss*: mean of the last 50 "
        "training steps.",
        "",
        "![curves](training.svg)",
    ]
    for title, runs in results.items():
        names = list(next(iter(runs.values()))["figures"])
        lines += ["", f"## {title}", "", f"| run | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
        for run, result in runs.items():
            base = next(iter(runs.values()))["figures"]
            cells = [_cell(name, result["figures"][name], base[name]) for name in names]
            lines.append(f"| {run} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(name: str, value: float, base: float) -> str:
    if name == "accuracy":
        return f"{value:.2%} ({(value - base) * 100:+.2f} points)"
    return f"{value:.4g}" + (f" ({value / base - 1:+.2%})" if "loss" in name else "")


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Draws one panel a task, the losses averaged over 10 steps."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ampgraph"
    from matplotlib import pyplot

    styles = {"float32": ("#222222", "-", 3.0)}
    others = [("#0072b2", "-", 1.4), ("#e69f00", "--", 1.4), ("#cc79a7", "-", 1.8)]
    figure, axes = pyplot.subplots(1, len(results), figsize=(5 * len(results), 3.6), layout="constrained")
    for axis, (title, runs) in zip(axes, results.items(), strict=True):
        for index, (run, result) in enumerate(runs.items()):
            default = others[2] if "no loss scale" in run else others[index - 1]
            color, line, width = styles.get(run, default)
            losses = torch.tensor(result["losses"])
            smooth = losses[: len(losses) // 10 * 10].view(-1, 10).mean(1)
            axis.plot(range(10, 10 * len(smooth) + 1, 10), smooth, line, color=color, lw=width, label=run)
        axis.set(title=title, xlabel="step", ylabel="training loss", yscale="log")
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path("out/training.md"), help="page; the picture beside it"
    )
    parser.add_argument("--steps", type=int, help="fewer steps, for a quick look")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, Any]] = {}
    for task in TASKS:
        if options.steps:
            task = Task(**{**vars(task), "steps": options.steps})
        for run, policy in task.runs.items():
            result = results.setdefault(task.title, {})[run] = train(task, policy)
            print(
                f"{task.title}, {run}: {json.dumps(result['figures'])}, {result['seconds']:.0f} s", flush=True
            )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(report(results))
    draw(results, options.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
