"""Host time of a call on the backend "eager": float32, torch.autocast, O1, O2 and a low model, in turns.

A step of a converted model also runs as one graph, by ``ampgraph.compile_step``.

    python tools/bench_host.py --output docs/results/host.md

Small tensors, so that the time is that of Python and the dispatcher, as in a network that waits for launches.
A step is a forward, a backward, and AdamW with ``fused=True``. In float16 it has a loss scale, too: that of
``torch.amp.GradScaler`` for autocast.
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
WARM = 3  # steps before the first is one graph
LOW = torch.bfloat16
FLOOR = "low"  # the whole model in LOW: what the kernels take when nothing is cast
WAYS = ("float32", "autocast", "O1", "O2", FLOOR)
GRAPHS = {"O1": "O1, one graph", "O2": "O2, one graph"}
SCALED = ("autocast", "O1", "O2")
RATIOS = tuple((way, base) for base in ("autocast", "float32") for way in ("O1", "O2", FLOOR))


class Way:
    """One way to run a model; all have models with the same weights."""

    def __init__(
        self, name: str, make: Callable[[], nn.Module], x: Tensor, device: str, dtype: torch.dtype = LOW
    ) -> None:
        torch.manual_seed(0)
        self._device, self._dtype, self._is_autocast = device, dtype, name == "autocast"
        self._model, self._x = make().to(device), x.to(device)
        x = self._x
        if name in ("O1", "O2"):
            self._model = ampgraph.convert(self._model, (x,), policy=name, dtype=dtype, backend="eager")
        if name == FLOOR:
            self._model = copy.deepcopy(self._model).to(LOW)
            self._x = x.to(LOW) if x.is_floating_point() else x
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-6, fused=True)
        self._scaler = torch.amp.GradScaler(device, enabled=self._is_autocast and dtype is torch.float16)
        if name in ("O1", "O2"):
            self._model.scaler.attach(self._optimizer)

    def forward(self) -> Tensor:
        """Calls the model."""
        if not self._is_autocast:
            return self._model(self._x)
        with torch.autocast(self._device, self._dtype):
            return self._model(self._x)

    def backward(self) -> None:
        """Calls the model and goes back from a loss."""
        loss = self.forward().float().square().mean()
        self._scaler.scale(loss).backward()

    def step(self) -> None:
        """Takes a training step."""
        self.backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()

    def step_as_one_graph(self) -> Callable[[], object]:
        """Returns what takes the step as one graph; the model must be a converted one."""
        step = ampgraph.compile_step(
            self._model, self._optimizer, lambda amp, x: amp(x).float().square().mean()
        )
        for _ in range(WARM):
            step(self._x)
        if step.reason is not None:
            raise SystemExit(f"the step is not one graph: {step.reason}")
        return lambda: step(self._x)


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


def rows(titles: Sequence[str], device: str = "cpu") -> tuple[list[str], list[str]]:
    """Measures models: forwards, a forward with backward, a step, and one as one graph."""
    lines, graphs = [], []
    ratios: dict[str, dict[tuple[str, str], list[float]]] = {}
    graph_ratios: dict[str, list[float]] = {way: [] for way in GRAPHS.values()}
    for title in titles:
        make, x = MODELS[title]
        ways = {name: Way(name, make, x, device) for name in WAYS}
        empty = {name: Way(name, make, x[:0], device) for name in WAYS}
        found = {}
        with torch.no_grad():
            found["forward, no gradients"] = microseconds({n: w.forward for n, w in ways.items()})
            found["forward, empty batch"] = microseconds({n: w.forward for n, w in empty.items()})
        found["forward + backward"] = microseconds({n: w.backward for n, w in ways.items()})
        wholes = {GRAPHS[n]: Way(n, make, x, device).step_as_one_graph() for n in GRAPHS}
        found["step"] = steps = microseconds({**{n: w.step for n, w in ways.items()}, **wholes})
        for kind, times in found.items():
            row = [times[way] / times[base] for way, base in RATIOS]
            for ratio, value in zip(RATIOS, row, strict=True):
                ratios.setdefault(kind, {}).setdefault(ratio, []).append(value)
            cells = [f"{times[way]:,.0f}" for way in WAYS] + [f"{ratio:.2f}" for ratio in row]
            lines.append(f"| {title} | {kind} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
        for way in GRAPHS.values():
            graph_ratios[way].append(steps[way] / steps["autocast"])
        cells = [f"{steps[way]:,.0f}" for way in ("autocast", *GRAPHS, *GRAPHS.values())]
        cells += [f"{values[-1]:.2f}" for values in graph_ratios.values()]
        graphs.append(f"| {title} | {' | '.join(cells)} |")
        print(graphs[-1], flush=True)
    lines.append("")
    for kind, found_ratios in ratios.items():
        parts = [
            f"{way} / {base} {statistics.median(values):.2f} ({max(values):.2f})"
            for (way, base), values in found_ratios.items()
        ]
        lines.append(f"- {kind}, median (largest): {', '.join(parts)}")
        print(lines[-1])
    parts = [f"{way} / autocast {statistics.median(v):.2f} ({max(v):.2f})" for way, v in graph_ratios.items()]
    graphs += ["", f"- median (largest): {', '.join(parts)}"]
    print(graphs[-1])
    return lines, graphs


def scaled_rows(titles: Sequence[str], device: str = "cpu") -> list[str]:
    """Measures steps in float16 with a loss scale."""
    lines, ratios = [], {way: [] for way in SCALED[1:]}  # type: ignore[var-annotated]
    for title in titles:
        ways = {name: Way(name, *MODELS[title], device, torch.float16) for name in SCALED}
        times = microseconds({name: way.step for name, way in ways.items()})
        for way, found in ratios.items():
            found.append(times[way] / times["autocast"])
        cells = [f"{times[way]:,.0f}" for way in SCALED] + [f"{found[-1]:.2f}" for found in ratios.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    parts = [f"{way} / autocast {statistics.median(v):.2f} ({max(v):.2f})" for way, v in ratios.items()]
    lines += ["", f"- median (largest): {', '.join(parts)}"]
    print(lines[-1])
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="all by default")
    parser.add_argument("--output", type=Path, help="the page to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    text = page(
        "Host time of a call",
        written_by("python tools/bench_host.py --output docs/results/host.md"),
        "whose time is that of the CPU's bfloat16 kernels.\n"
        "With an empty batch, without gradients, a forward makes the same calls on tensors without elements. "
        "Its time is that of Python and the dispatcher alone; only casts of weights have elements.",
        *rows(options.model or list(MODELS)),
        scaled_rows(options.model or list(MODELS)),
    )
    if options.output:
        options.output.write_text(text, encoding="utf-8")


def page(title: str, source: str, remark: str, loops: list[str], graphs: list[str], scaled: list[str]) -> str:
    """Returns the page with the lines of `rows` and `scaled_rows`."""
    columns = ["model", "what", *WAYS, *(f"{way} / {base}" for way, base in RATIOS)]
    lines = [
        f"# {title}",
        "",
        source,
        f"One thread, microseconds of CPU time, medians of {ROUNDS} rounds in turns, bfloat16, backend "
        '`"eager"`, small tensors. A step is forward, backward, and AdamW with `fused=True`.',
        f"`{FLOOR}` is `model.to(torch.bfloat16)` with a bfloat16 input: a plain module that casts nothing, "
        + remark,
        "",
        f"| {' | '.join(columns)} |",
        "|" + " --- |" * len(columns),
        *loops,
        "",
        "## A step as one graph",
        "",
        "`ampgraph.compile_step` on the same backend, measured in turns with the steps above: forward, "
        "backward and update as one Python function without autograd. `autocast` is the plain loop.",
        "",
        f"| model | {' | '.join(('autocast', *GRAPHS, *GRAPHS.values()))} | "
        f"{' | '.join(f'{way} / autocast' for way in GRAPHS.values())} |",
        "|" + " --- |" * (2 + 3 * len(GRAPHS)),
        *graphs,
        "",
        "## A step in float16 with a loss scale",
        "",
        "The plain loop. `autocast` has `torch.amp.GradScaler`; O1 and O2 have `amp.scaler`, attached.",
        "",
        f"| model | {' | '.join(SCALED)} | {' | '.join(f'{way} / autocast' for way in SCALED[1:])} |",
        "|" + " --- |" * (2 * len(SCALED)),
        *scaled,
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
