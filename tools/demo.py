"""Trains one small network twice on real handwritten digits, in float32 and converted, with the same loop.

    python tools/demo.py [--epochs 8] [--out out/demo]

The loop is plain PyTorch; the only differences are the line that calls ``ampgraph.convert`` and, for the loss
scale that float16 needs, the one that attaches its scaler. Low is float16 on CUDA and bfloat16 elsewhere.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ampgraph
from ampgraph.drawing import can_render
from ampgraph.report.explanation import Explanation
from ampgraph.report.graph_view import human_bytes
from ampgraph.testing import cast_map

BATCH = 64


class Digits(nn.Module):
    """Two convolutions, a hidden layer, ten classes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Sequential(
            nn.Flatten(), nn.Linear(2 * width * 16, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images))


def digits(device: torch.device) -> tuple[TensorDataset, TensorDataset]:
    """Returns 1,437 training and 360 test images of 8x8 pixels, split with a fixed seed."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(data.target, device=device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(device)
    test, training = order[:360], order[360:]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[test], labels[test])


def train(model: nn.Module, training: TensorDataset, test: TensorDataset, epochs: int, name: str) -> float:
    """The plain loop, the same for both; returns the accuracy on the test images."""
    torch.manual_seed(0)
    loader = DataLoader(training, BATCH, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if isinstance(model, ampgraph.AmpModule):
        model.scaler.attach(optimizer)  # skips steps that overflow; in bfloat16 it does nothing
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, epochs + 1):
        start, total = time.perf_counter(), 0.0
        model.train()
        for images, labels in loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        right = accuracy(model, test)
        seconds = time.perf_counter() - start
        loss_text = f"loss {total / len(loader):.4f}  accuracy {right:6.2%}"
        print(f"  {name}  epoch {epoch}/{epochs}  {loss_text}  {seconds:.1f} s", flush=True)
    return right


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Returns the share of test images that the model classifies correctly."""
    model.eval()
    images, labels = test.tensors
    return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # of torch, about torch
    torch.set_num_threads(1)  # images of 8x8 pixels: more threads cost more than they do
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, test = digits(device)
    example = (training.tensors[0][:BATCH],)

    print(f"{len(training)} training and {len(test)} test images, on {device}")
    results = {}
    low = torch.float16 if device.type == "cuda" else torch.bfloat16
    low_name = str(low).removeprefix("torch.")
    for name in ("float32", low_name):
        torch.manual_seed(0)
        model: nn.Module = Digits().to(device)
        if name == low_name:
            model = ampgraph.convert(model, example, dtype=low)
        results[name] = train(model, training, test, options.epochs, f"{name:<8}")

    model.train()
    model(*example)
    explanation = ampgraph.explain(model)
    text = summary(results, explanation)
    print(f"\n{text}")
    write(model, explanation, text, options.out)


def summary(results: dict[str, float], explanation: Explanation) -> str:
    """Returns the accuracies side by side, and the cost of the casts of one training forward."""
    totals, autocast = explanation.totals, explanation.baselines["autocast"]
    rows = [f"accuracy  {name:<9} {value:.2%}" for name, value in results.items()]
    for name, found in (("here", totals), ("autocast", autocast)):
        moved = human_bytes(found.activation_cast_bytes)
        rows.append(f"casts     {name:<9} {found.casts} ({found.activation_casts} of activations, {moved})")
    return "\n".join(rows)


def write(model: nn.Module, explanation: Explanation, text: str, out: Path) -> None:
    """Writes the graph as text and as a picture (as a page where no picture can be made)."""
    out.mkdir(parents=True, exist_ok=True)
    code = model.graph_module.print_readable(print_output=False)
    parts = {"cast map": cast_map(model), "explanation": str(explanation), "graph": code}
    pages = "\n\n".join(f"== {title} ==\n{part}" for title, part in parts.items())
    (out / "graph.txt").write_text(pages + "\n")
    (out / "summary.txt").write_text(text + "\n")
    picture = ampgraph.draw(model, out / ("graph.svg" if can_render() else "graph.html"))
    print(f"wrote {out / 'graph.txt'} and {picture}")


if __name__ == "__main__":
    main()
