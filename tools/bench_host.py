"""Host time of a call on the backend "eager": float32, torch.autocast, O1 and O2, in turns.

    python tools/bench_host.py --output docs/results/host.md

Small tensors, so that the time is that of Python and the dispatcher, as in a network that waits for launches.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from provenance import written_by
from torch import Tensor, nn

import ampgraph

ROUNDS = 15
SECONDS = 0.04  # of each measurement
LOW = torch.bfloat16
WAYS = ("float32", "autocast", "O1", "O2")


class Block(nn.Module):
    """A transformer block with a pre-norm."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.out(attended.reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "3 linears": (lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), torch.randn(4, 16)),
    "30 linears": (lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(30))), torch.randn(4, 16)),
    "300 linears": (lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(300))), torch.randn(4, 16)),
    "12 blocks": (lambda: nn.Sequential(*(Block() for _ in range(12))), torch.randn(1, 8, 32)),
}


def calls(make: Callable[[], nn.Module], x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Returns a forward for each of `WAYS`, over models with the same weights."""
    torch.manual_seed(0)
    model = make()

    def autocast() -> Tensor:
        with torch.autocast("cpu", LOW):
            return model(x)

    found: dict[str, Callable[[], Tensor]] = {"float32": lambda: model(x), "autocast": autocast}
    for level in ("O1", "O2"):
        amp = ampgraph.convert(model, (x,), policy=level, dtype=LOW, backend="eager")
        found[level] = lambda amp=amp: amp(x)  # type: ignore[misc]
    return found


def step(forward: Callable[[], Tensor]) -> Callable[[], None]:
    """Returns forward and backward; gradients are freed."""

    def run() -> None:
        forward().float().sum().backward()

    return run


def microseconds(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the median CPU time of a call of each, measured in turns."""
    counts, found = {}, {name: [] for name in functions}  # type: ignore[var-annotated]
    for name, function in functions.items():
        for _ in range(3):
            function()
        start = time.process_time()
        function()
        counts[name] = max(1, int(SECONDS / max(time.process_time() - start, 1e-6)))
    for _ in range(ROUNDS):
        for name, function in functions.items():
            start = time.process_time()
            for _ in range(counts[name]):
                function()
            found[name].append((time.process_time() - start) / counts[name] * 1e6)
    return {name: statistics.median(values) for name, values in found.items()}


def rows() -> list[str]:
    """Measures every model, without gradients and with a backward."""
    lines = []
    for title, (make, x) in MODELS.items():
        forwards = calls(make, x)
        with torch.no_grad():
            inference = microseconds(forwards)
        training = microseconds({name: step(forward) for name, forward in forwards.items()})
        for kind, found in (("forward, no gradients", inference), ("forward + backward", training)):
            times = " | ".join(f"{found[way]:,.0f}" for way in WAYS)
            ratios = f"{found['O1'] / found['autocast']:.2f} | {found['O2'] / found['float32']:.2f}"
            lines.append(f"| {title} | {kind} | {times} | {ratios} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="the page to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    lines = [
        "# Host time of a call",
        "",
        written_by("python tools/bench_host.py --output docs/results/host.md"),
        f"One thread, microseconds of CPU time a call, medians of {ROUNDS} rounds in turns, bfloat16, "
        'backend `"eager"`, small tensors.',
        "",
        f"| model | what | {' | '.join(WAYS)} | O1 / autocast | O2 / float32 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows(),
    ]
    if options.output:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
