"""Tunes models to budgets, beside bisection and greedy choice by own error.

Usage:
    python tools/bench_tune.py --output docs/results/tune.md    # about 20 minutes
    python tools/bench_tune.py --names 'trained/*'
    python tools/bench_tune.py --retune --output docs/results/tune.md    # the tuner alone, 5 minutes

The trained models are trained here, for seconds. A record per model is appended to ``--records`` (JSON
lines), so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
from provenance import commit, written_by  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import ampgraph  # noqa: E402
from ampgraph import Policy  # noqa: E402
from ampgraph.numerics.neighbours import is_changeable  # noqa: E402
from ampgraph.numerics.run_model import ModelRunner, Part  # noqa: E402
from ampgraph.passes.placement.amounts import moved  # noqa: E402
from ampgraph.tune_model import tuned  # noqa: E402
from ampgraph.tuning.result_error import ResultError  # noqa: E402
from ampgraph.tuning.sensitivity import EqualDraws  # noqa: E402
from tests.zoo import models as zoo  # noqa: E402

Record = dict[str, Any]
Built = tuple[nn.Module, tuple, dict[str, Any]]
BUDGETS = (0.7, 0.35)
# Evaluations that bisection and greedy choice may take.
MOST = 60


class Blocks(nn.Module):
    """A small transformer over characters."""

    def __init__(self, width: int = 48, layers: int = 2, letters: int = 32) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(letters, width), nn.Parameter(torch.randn(32, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, letters)

    def forward(self, letters: Tensor) -> Tensor:
        y = self.embed(letters) + self.place
        for block in self.blocks:
            y = block(y)
        return self.head(y)


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 64), nn.SiLU(), nn.Linear(64, 10)
    )


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def _digits(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns noisy patterns of ten classes."""
    classes = torch.randint(10, (256,))
    patterns = torch.randn(10, 64, generator=torch.Generator().manual_seed(1))
    return (patterns[classes] + 0.7 * torch.randn(256, 64)).reshape(256, *shape), classes


def _sequences() -> tuple[Tensor, Tensor]:
    """Returns periodic letters; the next letter is the target."""
    start, step = torch.randint(32, (32, 1)), torch.randint(1, 5, (32, 1))
    letters = (start + step * torch.arange(33)) % 32
    return letters[:, :-1], letters[:, 1:]


def _trained(build: Callable[[], nn.Module], data: Callable[[], tuple[Tensor, Tensor]], steps: int) -> Built:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(steps):
        x, target = data()
        loss = F.cross_entropy(model(x).flatten(0, -2), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), (data()[0],), {}


def _random(name: str) -> Built:
    model, args, kwargs = zoo.get(name).seeded()
    return model.eval(), args, kwargs


MODELS: dict[str, Callable[[], Built]] = {
    "trained/perceptron": lambda: _trained(_perceptron, lambda: _digits((64,)), 150),
    "trained/convolutions": lambda: _trained(_convolutions, lambda: _digits((1, 8, 8)), 80),
    "trained/characters": lambda: _trained(Blocks, _sequences, 120),
    "trained/deep characters": lambda: _trained(lambda: Blocks(32, 4), _sequences, 120),
    "random/perceptron": lambda: _trained(_perceptron, lambda: _digits((64,)), 0),
    "random/characters": lambda: _trained(Blocks, _sequences, 0),
    **{
        f"random/{name}": lambda name=name: _random(name)  # type: ignore[misc]
        for name in (
            "transformers/gpt2",
            "transformers/bert",
            "transformers/llama",
            "timm/vit_tiny_patch16_224",
            "timm/convnext_atto",
            "torchvision/resnet18",
        )
    },
}


class Evaluator:
    """Measures sets of pins of one model at O2 in float16."""

    def __init__(self, built: Built) -> None:
        model, args, kwargs = built
        policy = Policy("O2", torch.float16)
        self.amp = ampgraph.convert(model, args, kwargs, policy=policy, backend="eager")
        self._runner, self._error = ModelRunner(self.amp, args, kwargs), ResultError(None)
        self._reference = self._result(lambda part: part.float32)
        part = self._runner.parts[0]
        self.nodes = [n.name for n in part.float32.graph.nodes if is_changeable(n, part.plan)]
        self.runs = 0
        self.float32 = part.plan.baselines["fp32"].traffic

    def __call__(self, pins: list[str]) -> tuple[float, int]:
        """Returns error and traffic with these nodes in float32."""
        self.runs += 1
        policy = self.amp.policy.replace(rules={f"node:{name}": "fp32" for name in pins})
        traffic = 0

        def planned(part: Part) -> torch.fx.GraphModule:
            nonlocal traffic
            graph, plan = part.under(policy)
            traffic = moved(plan.cost, stores_low=True)
            return graph

        result = self._result(planned)
        return self._error.of([result], [self._reference]), traffic

    def _result(self, graph_of: Callable[[Part], torch.fx.GraphModule]) -> Any:
        def run_part(part: Part, inputs: list[Any]) -> Any:
            run = EqualDraws(graph_of(part), inputs)
            for _ in run:
                pass
            return run.outputs

        return self._runner(run_part)


def greedy(evaluate: Evaluator, order: list[str], budget: float) -> tuple[float, int]:
    """Pins nodes of the largest own error first, until the budget is met."""
    pins: list[str] = []
    error, traffic = evaluate(pins)
    for name in order:
        if error <= budget or evaluate.runs >= MOST:
            break
        pins.append(name)
        error, traffic = evaluate(pins)
    return error, traffic


def bisection(evaluate: Evaluator, budget: float) -> tuple[float, int]:
    """Starts in float32; gives halves, then quarters .. of the nodes to the low dtype if the budget holds."""
    order, pins = evaluate.nodes, set(evaluate.nodes)
    best = evaluate(order)
    size = max(1, len(order) // 2)
    while evaluate.runs < MOST:
        for start in range(0, len(order), size):
            trial = pins - set(order[start : start + size])
            if trial == pins or evaluate.runs >= MOST:
                continue
            found = evaluate(sorted(trial))
            if found[0] <= budget:
                pins, best = trial, found
        if size == 1:
            break
        size //= 2
    return best


def measured(name: str) -> Record:
    """Tunes one model in all three ways."""
    built = MODELS[name]()
    _, args, kwargs = built
    evaluate = Evaluator(built)
    error, traffic = evaluate([])
    comparison = ampgraph.compare(evaluate.amp, args, kwargs)
    own = {row.node: math.inf if row.own_nonfinite else row.own or 0.0 for row in comparison.rows}
    order = sorted(evaluate.nodes, key=lambda node: -own.get(node, 0.0))
    record: Record = {
        "model": name,
        "nodes": len(evaluate.nodes),
        "error": error,
        "traffic": traffic / evaluate.float32,
        "others_at": commit(),
        "tuned_at": commit(),
        "budgets": [],
    }
    for share in BUDGETS:
        row: Record = {"share": share, **_tuned(built, share, error, evaluate.float32)}
        for label, search in (
            ("bisection", lambda budget: bisection(evaluate, budget)),
            ("greedy", lambda budget: greedy(evaluate, order, budget)),
        ):
            evaluate.runs = 0
            other, bytes_ = search(share * error)
            row[label] = [other / error, bytes_ / evaluate.float32, evaluate.runs]
        record["budgets"].append(row)
    return record


def retuned(record: Record) -> Record:
    """Tunes one model again. What does not use the tuner stays as the record has it."""
    built = MODELS[record["model"]]()
    evaluate = Evaluator(built)
    error, traffic = evaluate([])
    if [error, traffic / evaluate.float32] != [record["error"], record["traffic"]]:
        raise SystemExit(f"{record['model']}: O2 has changed since the record; measure everything again.")
    rows = [row | _tuned(built, row["share"], error, evaluate.float32) for row in record["budgets"]]
    return record | {"budgets": rows, "tuned_at": commit()}


def _tuned(built: Built, share: float, error: float, float32: int) -> Record:
    model, args, kwargs = built
    start = time.process_time()
    found = tuned(model, [kwargs or args], share * error, torch.float16)
    tune = [found.error / error, found.traffic / float32, *found.runs]
    return {"seconds": time.process_time() - start, "tune": tune}


def report(records: list[Record]) -> str:
    """Returns the page."""
    rows = [(record, row) for record in records for row in record["budgets"]]
    met = sum(row["tune"][0] <= row["share"] for _, row in rows)
    least = {
        label: sum(
            row["tune"][1] <= row[label][1] * 1.0005 or row[label][0] > row["share"] for _, row in rows
        )
        for label in ("bisection", "greedy")
    }
    lines = [
        "# Tuning to a budget",
        "`ampgraph.tune` at O2 in float16, with budgets of 0.7 and 0.35 of O2's own error, beside "
        "bisection (float32 "
        "everywhere, then ever smaller ranges of nodes low, as long as the budget holds) and "
        "greedy choice (nodes of "
        f"the largest own error first, as `compare` measures it), each with up to {MOST} "
        f"evaluations. Traffic is "
        "modelled, relative to float32; weights are read from their low copies. Trained models are "
        "trained by the "
        "script for a few steps.",
        written_by("python tools/bench_tune.py --output docs/results/tune.md") + _others(records),
        f"{len(records)} models, {len(rows)} budgets: met by `tune` in {met}. Its traffic is at "
        f"most that of bisection "
        f"in {least['bisection']}, and of greedy choice in {least['greedy']}. It took at most "
        f"{max((row['tune'][2] for _, row in rows), default=0)} runs of the model and "
        f"{max((row['tune'][3] for _, row in rows), default=0)} backwards.",
        "| model | nodes | O2 | budget | tune | runs | bisection | evaluations | greedy | evaluations |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for record, row in rows:
        cells = [record["model"], record["nodes"], f"{record['traffic']:.3f}", row["share"]]
        cells += [_traffic(row, "tune"), row["tune"][2]]
        for label in ("bisection", "greedy"):
            cells += [_traffic(row, label), row[label][2]]
        lines[-1] += f"\n| {' | '.join(map(str, cells))} |"
    lines.append("*: the budget is not met within the evaluations.")
    return "\n\n".join(lines) + "\n"


def _others(records: list[Record]) -> str:
    tuned = sorted({record["tuned_at"] for record in records} - {commit()})
    others = sorted({record["others_at"] for record in records} - {commit()})
    text = f" `tune` is of commit {', '.join(tuned)}." if tuned else ""
    if others:
        text += f" Bisection and greedy choice are of commit {', '.join(others)}; `--retune` keeps them."
    return text


def _traffic(row: Record, label: str) -> str:
    error, traffic = row[label][:2]
    return f"{traffic:.3f}" + ("" if error <= row["share"] else "*")


def main(argv: list[str] | None = None) -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--names", nargs="+", default=["*"], metavar="GLOB", help="which models")
    parser.add_argument("--records", type=Path, default=ROOT / "out" / "tune.jsonl", help="read and extended")
    parser.add_argument("--output", type=Path, help="where to write the page; default: print it")
    parser.add_argument("--retune", action="store_true", help="tune the models of the records again, no more")
    parser.add_argument("--report-only", action="store_true", help="the page of what the records hold")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    options.records.parent.mkdir(parents=True, exist_ok=True)
    kept = options.records.read_text().splitlines() if options.records.exists() else []
    records = {r["model"]: r for r in map(json.loads, kept)}
    names = [n for n in MODELS if any(fnmatchcase(n, p) for p in options.names)]
    for name in [n for n in names if (n in records) == options.retune and not options.report_only]:
        records[name] = retuned(records[name]) if options.retune else measured(name)
        with options.records.open("a") as file:
            file.write(json.dumps(records[name]) + "\n")
        print(json.dumps(records[name]), flush=True)
    page = report([records[n] for n in names if n in records])
    if options.output:
        options.output.write_text(page)
    else:
        print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
