"""Host time of a call on the backend "eager": float32, torch.autocast, O1, O2 and a low model, in turns.

    python tools/bench_host.py --output docs/results/host.md

Small tensors, so that the time is that of Python and the dispatcher, as in a network that waits for launches.
A step is a forward, a backward, and AdamW with ``fused=True``.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from provenance import written_by
from small_models import MODELS
from torch import Tensor, nn

import ampgraph

ROUNDS = 15
SECONDS = 0.04  # of each measurement
LOW = torch.bfloat16
FLOOR = "low"  # the whole model in LOW: what the kernels take when nothing is cast
WAYS = ("float32", "autocast", "O1", "O2", FLOOR)
RATIOS = tuple((way, base) for base in ("autocast", "float32") for way in ("O1", "O2", FLOOR))


class Way:
    """One way to run a model; all have models with the same weights."""

    def __init__(self, name: str, make: Callable[[], nn.Module], x: Tensor) -> None:
        torch.manual_seed(0)
        self._model, self._x, self._is_autocast = make(), x, name == "autocast"
        if name in ("O1", "O2"):
            self._model = ampgraph.convert(self._model, (x,), policy=name, dtype=LOW, backend="eager")
        if name == FLOOR:
            self._model = copy.deepcopy(self._model).to(LOW)
            self._x = x.to(LOW) if x.is_floating_point() else x
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=True)

    def forward(self) -> Tensor:
        """Calls the model."""
        if not self._is_autocast:
            return self._model(self._x)
        with torch.autocast("cpu", LOW):
            return self._model(self._x)

    def backward(self) -> None:
        """Calls the model and goes back from a loss."""
        self.forward().float().square().mean().backward()

    def step(self) -> None:
        """Takes a training step."""
        self.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


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


def rows(titles: Sequence[str]) -> list[str]:
    """Measures models: a forward without gradients, a forward with backward, and a step."""
    lines = []
    ratios: dict[str, dict[tuple[str, str], list[float]]] = {}
    for title in titles:
        ways = {name: Way(name, *MODELS[title]) for name in WAYS}
        with torch.no_grad():
            found = {"forward, no gradients": microseconds({n: w.forward for n, w in ways.items()})}
        found["forward + backward"] = microseconds({n: w.backward for n, w in ways.items()})
        found["step"] = microseconds({n: w.step for n, w in ways.items()})
        for kind, times in found.items():
            row = [times[way] / times[base] for way, base in RATIOS]
            for ratio, value in zip(RATIOS, row, strict=True):
                ratios.setdefault(kind, {}).setdefault(ratio, []).append(value)
            cells = [f"{times[way]:,.0f}" for way in WAYS] + [f"{ratio:.2f}" for ratio in row]
            lines.append(f"| {title} | {kind} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    lines.append("")
    for kind, found_ratios in ratios.items():
        parts = [
            f"{way} / {base} {statistics.median(values):.2f} ({max(values):.2f})"
            for (way, base), values in found_ratios.items()
        ]
        lines.append(f"- {kind}, median (largest): {', '.join(parts)}")
        print(lines[-1])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="all by default")
    parser.add_argument("--output", type=Path, help="the page to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    columns = ["model", "what", *WAYS, *(f"{way} / {base}" for way, base in RATIOS)]
    lines = [
        "# Host time of a call",
        "",
        written_by("python tools/bench_host.py --output docs/results/host.md"),
        f"One thread, microseconds of CPU time, medians of {ROUNDS} rounds in turns, bfloat16, backend "
        '`"eager"`, small tensors. A step is forward, backward, and AdamW with `fused=True`.',
        f"`{FLOOR}` is `model.to(torch.bfloat16)` with a bfloat16 input: a plain module that casts nothing, "
        "whose time is that of the CPU's bfloat16 kernels.",
        "",
        f"| {' | '.join(columns)} |",
        "|" + " --- |" * len(columns),
        *rows(options.model or list(MODELS)),
    ]
    if options.output:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
