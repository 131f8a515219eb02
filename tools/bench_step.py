"""Time, memory, syncs and kernels of a training step beside autocast with GradScaler.

    python tools/bench_step.py                                    # small models, the device that is there
    python tools/bench_step.py --model "9 x Linear 8192" --compiled
    python tools/bench_step.py --all --json steps.json
    python tools/bench_step.py --read steps.json other.json --page steps.md --picture steps.svg

The ways run in turns, in another order each round; each figure is a median. A step is split into forward
with loss, backward, finite check, and optimizer with the update of the scale; `compile_step` is one part.
Syncs are reads of a value by the host, counted below autograd. On CUDA alone: peak memory is that of the
allocator, less what was there before the model was made, and kernels are those that the profiler sees in one
step, copies included. The last column is the largest distance of the loss from the first way's over the
steps, relative to its first loss.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench_step_report import PARTS, page, picture, table
from provenance import commit, machine
from step_models import MODELS, SMALL, made
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ampgraph

Timer = Callable[[], None]
WAYS = ("float32", "autocast", "to(low)", "O1", "O2", "O1, one graph", "O2, one graph")
MOST_KERNELS, LEAST_ROUNDS = 14, 3


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
    kernels: int | None
    agreement: float
    longest_kernels: list[tuple[str, int, float]]


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

    def __init__(self, name: str, title: str, device: str, low: torch.dtype, compiled: bool) -> None:
        self.name, self.low, self.compiled = name, low, compiled
        model, self.args = made(title, device)
        self.run: nn.Module | Callable = model
        self.scaler: Any = None
        if name == "to(low)":
            model.to(low)
            self.args = tuple(a.to(low) if a.is_floating_point() else a for a in self.args)
        if name.startswith("O"):
            backend = "inductor" if compiled else "eager"
            self.run = ampgraph.convert(model, self.args, policy=name[:2], dtype=low, backend=backend)
            self.scaler = self.run.scaler
        elif compiled:
            self.run = torch.compile(model)
        if name == "autocast":
            self.scaler = torch.amp.GradScaler(device, enabled=low == torch.float16)
        self.device = torch.device(device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.step: Callable | None = None
        if name.endswith("one graph"):
            assert isinstance(self.run, ampgraph.AmpModule)
            self.step = ampgraph.compile_step(self.run, self.optimizer, lambda amp, *args: amp(*args))

    def __call__(self, tick: Timer = lambda: None) -> Tensor:
        if self.step is not None:
            loss: Tensor = self.step(*self.args)
            for _ in PARTS:
                tick()
            return loss
        with torch.autocast(self.device.type, self.low, enabled=self.name == "autocast"):
            loss = self.run(*self.args)
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
    is_cuda, times = way.device.type == "cuda", [0.0]

    def tick() -> None:
        if is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    tick()
    way(tick)
    return [(b - a) * 1e3 for a, b in pairwise(times[1:])]


def whole(way: Way) -> float:
    """Returns the milliseconds of one step; a device is waited for at its end alone."""
    start = time.perf_counter()
    way()
    if way.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def kernels_of(way: Way) -> list[tuple[str, int, float]] | None:
    """Returns the kernels of one step, their number and milliseconds, the longest first; None on a CPU."""
    if way.device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        way()
        torch.cuda.synchronize()
    counts: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            counts[event.name] += 1
            times[event.name] += event.time_range.elapsed_us()
    return [(name, counts[name], us / 1e3) for name, us in times.most_common()]


def first_figures(
    name: str, title: str, options: argparse.Namespace, low: torch.dtype
) -> tuple[Way, dict[str, Any]]:
    """Makes a way; trains it for the losses; returns it with what one step shows."""
    is_cuda = options.device == "cuda"
    before = torch.cuda.memory_allocated() if is_cuda else 0
    way = Way(name, title, options.device, low, options.compiled)
    losses = [float(way()) for _ in range(options.steps)]
    peak = None
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
        way()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    kernels = kernels_of(way)
    figures = {
        "peak_memory": peak,
        "kernels": sum(count for _, count, _ in kernels) if kernels else None,
        "longest_kernels": [(k[:120], c, t) for k, c, t in (kernels or [])[:MOST_KERNELS]],
    }
    return way, figures | {"losses": losses}


def measure(title: str, options: argparse.Namespace) -> list[Row]:
    """Measures all ways on one model, in turns."""
    low = getattr(torch, options.dtype)
    ways: dict[str, Way] = {}
    figures: dict[str, dict[str, Any]] = {}
    end = time.perf_counter() + options.seconds
    for name in options.ways:
        start = time.perf_counter()
        if start > end:
            print(f"{title}, {name}: no time left", file=sys.stderr, flush=True)
            continue
        ways[name], figures[name] = first_figures(name, title, options, low)
        print(f"{title}, {name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    parts: dict[str, list[list[float]]] = {name: [] for name in ways}
    totals: dict[str, list[float]] = {name: [] for name in ways}
    for index, names in enumerate(_rounds(ways, options.rounds)):
        if index > LEAST_ROUNDS and time.perf_counter() > end:
            break
        for name in names:
            parts[name].append(parts_of(ways[name]))
            totals[name].append(whole(ways[name]))
    rows = []
    exact = next(iter(figures.values()))["losses"]
    for name, shown in figures.items():
        losses = shown.pop("losses")
        apart = max(abs(a - b) for a, b in zip(losses, exact, strict=True)) / exact[0]
        medians = [statistics.median(column) for column in zip(*parts[name], strict=True)]
        split = dict(zip(PARTS, medians, strict=True))
        with Syncs() as syncs:  # last: torch.compile never again runs what it has compiled
            ways[name]()
        shown["syncs"] = syncs.count
        rows.append(Row(way=name, total=statistics.median(totals[name]), agreement=apart, **split, **shown))
    return rows


def _rounds(ways: Iterable[str], count: int) -> Iterator[list[str]]:
    """Yields the ways in the order of their turns, round by round.

    A GPU is faster after a way that takes less power, such as float32 without tensor cores. So the order
    differs in each round. float32 runs alone, in the first round.
    """
    low = [way for way in ways if way != "float32"]
    if len(low) < len([*ways]):
        yield ["float32"] * min(count, LEAST_ROUNDS)
    draw = random.Random(0)
    for _ in range(count):
        yield draw.sample(low, len(low))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="the small ones by default")
    parser.add_argument("--all", action="store_true", help="all models")
    parser.add_argument("--ways", type=lambda text: text.split(";"), default=list(WAYS), help="; between")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--compiled", action="store_true", help="torch.compile, and backend='inductor'")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=math.inf, help="time for each model, roughly")
    parser.add_argument("--steps", type=int, default=50, help="for the agreement of losses, and as warm-up")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--read", type=Path, nargs="+", help="measures nothing: figures written before")
    parser.add_argument("--page", type=Path, help="the page to write, of --read's figures")
    parser.add_argument("--picture", type=Path, help="the picture to draw, of --read's figures")
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.read:
        runs = [json.loads(path.read_text()) for path in options.read]
        if options.page:
            options.page.write_text(page(runs, str(__doc__), options.picture), encoding="utf-8")
        if options.picture:
            picture(runs, options.picture)
        return
    warnings.filterwarnings("ignore")
    if options.device == "cpu":
        torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU, one thread"
    run = {
        "commit": commit(),
        "machine": f"{where}; {machine()}",
        "dtype": options.dtype,
        "compiled": options.compiled,
        "models": {},
    }
    for title in options.model or list(MODELS if options.all else SMALL):
        rows = run["models"][title] = [asdict(row) for row in measure(title, options)]
        gc.collect()
        print("\n".join(table(title, rows)), flush=True)
        if options.json:
            options.json.write_text(json.dumps(run, indent=1))


if __name__ == "__main__":
    main()
