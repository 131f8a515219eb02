"""Measures the checks of a call before its graph runs, in microseconds, for models of growing size.

Usage:
    python tools/bench_calls.py                              # this checkout
    python tools/bench_calls.py --against ../old-checkout    # and another, in turns with this one
    python tools/bench_calls.py --against ../old-checkout --output docs/results/calls.md

CPU time of one thread; medians of rounds that alternate between the checkouts.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from provenance import commit, written_by

ROOT = Path(__file__).resolve().parent.parent
SIZES = (10, 100, 1_000)
ROUNDS = 15
CALLS = {10: 2_000, 100: 500, 1_000: 60}
WIDTH = 8
TITLE = "# What a call checks"


class _Checkout(importlib.abc.MetaPathFinder):
    """Imports ampgraph from a checkout, not from the installation."""

    def __init__(self, root: Path) -> None:
        self._homes = {"ampgraph": root / "ampgraph", "ampgraph.passes": root / "passes"}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        home = self._homes.get(name)
        if home is None:
            return None
        return importlib.util.spec_from_file_location(
            name, home / "__init__.py", submodule_search_locations=[str(home)]
        )


def model_of(modules: int) -> Any:
    """Returns a chain of blocks of linear, layer norm, dropout and GELU with about so many modules."""
    from torch import nn

    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1), nn.GELU())

    return nn.Sequential(*(block() for _ in range(max(1, modules // 5)))).eval()


def work(root: Path) -> None:
    """Measures in this process, one round for each line on the standard input."""
    sys.meta_path.insert(0, _Checkout(root))
    import torch

    import ampgraph

    torch.set_num_threads(1)
    x = torch.randn(1, WIDTH)
    ampgraph.convert(model_of(1), (x,))  # what is imported or set up once
    models, captures = {}, {}
    for size in SIZES:
        model = model_of(size)
        start = time.process_time()
        models[size] = ampgraph.convert(model, (x,), policy="O1", dtype=torch.bfloat16, backend="eager")
        captures[size] = time.process_time() - start
    print(json.dumps(captures), flush=True)
    with torch.no_grad():
        for _ in sys.stdin:
            print(json.dumps([_microseconds(models[size], x, CALLS[size]) for size in SIZES]), flush=True)


def _microseconds(amp: Any, x: Any, calls: int) -> tuple[float, float]:
    """Returns the microseconds of finding the graph, and of the whole call."""
    find = amp._graphs.find
    start = time.process_time()
    for _ in range(calls):
        find((x,), {})
    middle = time.process_time()
    for _ in range(max(1, calls // 10)):
        amp(x)
    end = time.process_time()
    return (middle - start) / calls * 1e6, (end - middle) / max(1, calls // 10) * 1e6


class _Worker:
    def __init__(self, root: Path) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--work", str(root)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name = commit(root)
        self.captures = self._answer()
        self.rounds: list[list[tuple[float, float]]] = []

    def measure(self) -> None:
        """Runs one round."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.rounds.append(self._answer())

    def end(self) -> None:
        """Lets the process end."""
        self._process.communicate()

    def median(self, size: int, what: int) -> float:
        """Returns the median over the rounds: of finding the graph (0), of the whole call (1)."""
        return statistics.median(one[SIZES.index(size)][what] for one in self.rounds)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"bench_calls: the process for {self.name} ended, see its message above.")
        return json.loads(line)


def table(workers: list[_Worker]) -> str:
    """Returns the Markdown page."""
    lines = [
        TITLE,
        "",
        written_by("python tools/bench_calls.py --against ../old-checkout --output docs/results/calls.md"),
        f"One thread, CPU time, medians of {ROUNDS} rounds, in turns between the commits. *Checks*: finding",
        "the graph for a call (structure, training modes, what forward read, arguments). *Call*: all",
        "of it, on backend `eager`, one row. Both in microseconds. *Conversion* runs once. Times scatter",
        "by a third between processes.",
        "",
        "| modules | commit | checks | call | conversion s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for size in SIZES:
        for worker in workers:
            checks, call = worker.median(size, 0), worker.median(size, 1)
            seconds = worker.captures[str(size)]
            lines.append(f"| {size:,} | {worker.name} | {checks:.1f} | {call:,.0f} | {seconds:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--output", type=Path, help="page to write the table to, at its end")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work.resolve())
        return
    workers = [_Worker(root.resolve()) for root in (options.against, ROOT) if root]
    for _ in range(ROUNDS):
        for worker in workers:
            worker.measure()
    for worker in workers:
        worker.end()
    text = table(workers)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
