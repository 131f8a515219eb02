"""Time, memory and syncs of a whole training step: float32, autocast + GradScaler, ``model.to(low)``, O1, O2.

    python tools/bench_step.py                                    # small models, the device that is there
    python tools/bench_step.py --model "9 x Linear 8192" --compiled
    python tools/bench_step.py --json steps.json --output steps.md

The ways run in turns; each figure is a median. A step is split into forward with loss, backward, finite
check, and optimizer with the update of the scale; `compile_step` is one part. Peak memory is that of the
device's allocator, on CUDA alone. Syncs are reads of a value by the host, counted below autograd. Agreement
is the largest distance of the loss from float32's over the steps, relative to float32's first loss.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from provenance import written_by
from small_models import Block
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import ampgraph

PARTS = ("forward", "backward", "check", "optimizer")
Timer = Callable[[], None]

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "30 linears": (lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(30))), (32, 64)),
    "6 blocks": (lambda: nn.Sequential(*(Block(64) for _ in range(6))), (4, 32, 64)),
    "9 x Linear 8192": (lambda: nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(9))), (8192, 8192)),
}


@dataclass
class Row:
    """The figures of one way; milliseconds, MiB."""

    way: str
    total: float
    forward: float
    backward: float
    check: float
    optimizer: float
    peak_memory: float | None
    syncs: int
    agreement: float


class Syncs(TorchDispatchMode):
    """Counts reads of a tensor's value by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


class Way:
    """One way to train a model; a call takes a step and returns the loss."""

    def __init__(self, name: str, make: Callable[[], nn.Module], x: Tensor, low: torch.dtype, compiled: bool):
        torch.manual_seed(0)
        self.name, self.x, self.low = name, x, low
        self.model: nn.Module = make().to(x.device)
        self.scaler: Any = None
        run: nn.Module = self.model
        if name == "to(low)":
            self.model.to(low)
        if name.startswith("O"):
            backend = "inductor" if compiled else "eager"
            run = ampgraph.convert(self.model, (x,), policy=name[:2], dtype=low, backend=backend)
            self.scaler = run.scaler
        elif compiled:
            run = torch.compile(self.model)  # type: ignore[assignment]
        if name == "autocast":
            self.scaler = torch.amp.GradScaler(x.device.type, enabled=low == torch.float16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.run = run
        self.step: Callable | None = None
        if name.endswith("one graph"):
            assert isinstance(run, ampgraph.AmpModule)
            self.step = ampgraph.compile_step(run, self.optimizer, lambda amp, x: F.mse_loss(amp(x), x))

    def __call__(self, tick: Timer = lambda: None) -> Tensor:
        if self.step is not None:
            loss: Tensor = self.step(self.x)
            for _ in PARTS:
                tick()
            return loss
        x = self.x.to(self.low) if self.name == "to(low)" else self.x
        with torch.autocast(x.device.type, self.low, enabled=self.name == "autocast"):
            loss = F.mse_loss(self.run(x).float(), self.x)
        tick()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        tick()
        if self.scaler is None:
            tick()
            self.optimizer.step()
        else:
            self.scaler.unscale_(self.optimizer)
            tick()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        tick()
        return loss.detach()


def parts_of(way: Way) -> list[float]:
    """Returns the milliseconds of the parts of one step; a device is waited for after each."""
    is_cuda, times = way.x.is_cuda, [0.0]

    def tick() -> None:
        if is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    tick()
    way(tick)
    return [(b - a) * 1e3 for a, b in pairwise(times[1:])]


def peak_of(way: Way) -> float | None:
    """Returns the largest memory of a step in MiB; None where the allocator does not tell."""
    if not way.x.is_cuda:
        return None
    torch.cuda.reset_peak_memory_stats()
    way()
    return torch.cuda.max_memory_allocated() / 2**20


def measure(title: str, options: argparse.Namespace) -> list[Row]:
    """Measures all ways on one model; memory is that of one way at a time, so they are made twice."""
    make, shape = MODELS[title]
    low = torch.float16 if options.dtype == "float16" else torch.bfloat16
    names = ["float32", "autocast", "to(low)", "O1", "O2", "O2, one graph"]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(options.device)
    made: dict[str, Way] = {}
    losses: dict[str, list[float]] = {}
    facts: dict[str, tuple[float | None, int]] = {}
    for name in names:
        made[name] = way = Way(name, make, x, low, options.compiled)
        losses[name] = [float(way()) for _ in range(options.steps)]
        peak = peak_of(way)
        with Syncs() as syncs:
            way()
        facts[name] = peak, syncs.count
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name, way in made.items():
            found[name].append(parts_of(way))
    rows = []
    for name, measured in found.items():
        parts = [statistics.median(column) for column in zip(*measured, strict=True)]
        total = statistics.median(map(sum, measured))
        apart = max(abs(a - b) for a, b in zip(losses[name], losses["float32"], strict=True))
        rows.append(Row(name, total, *parts, *facts[name], apart / losses["float32"][0]))
    return rows


def table(title: str, rows: list[Row]) -> list[str]:
    """Returns the Markdown table of one model."""
    base = rows[0].total
    lines = [
        f"## {title}",
        "",
        f"| way | step, ms | {' | '.join(PARTS)} | float32 / way | peak MiB | syncs | loss apart |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = ["" if "one graph" in row.way else f"{getattr(row, part):.2f}" for part in PARTS]
        parts = " | ".join(cells)
        peak = "" if row.peak_memory is None else f"{row.peak_memory:,.0f}"
        lines.append(
            f"| {row.way} | {row.total:.2f} | {parts} | {base / row.total:.2f} | {peak} | {row.syncs} | "
            f"{row.agreement:.1e} |"
        )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="all but the largest by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--compiled", action="store_true", help="torch.compile, and backend='inductor'")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=50, help="for the agreement of losses, and as warm-up")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--output", type=Path, help="the page to write")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    if options.device == "cpu":
        torch.set_num_threads(1)
    found = {title: measure(title, options) for title in options.model or list(MODELS)[:-1]}
    lines = [line for title, rows in found.items() for line in table(title, rows)]
    print("\n".join(lines))
    if options.json:
        options.json.write_text(
            json.dumps({t: [asdict(r) for r in rows] for t, rows in found.items()}, indent=1)
        )
    if options.output:
        head = ["# Time of a training step", "", written_by("python tools/bench_step.py"), ""]
        options.output.write_text("\n".join([*head, *lines]), encoding="utf-8")


if __name__ == "__main__":
    main()
