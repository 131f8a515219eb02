"""Counts the bytes of training steps: in Inductor's scheduled kernels, and op by op in eager mode.

Usage:
    python tools/bench_bytes.py                                  # every model, printed
    python tools/bench_bytes.py bert unet                        # these
    python tools/bench_bytes.py --records out/bytes.json --output docs/results/bytes.md
    python tools/bench_bytes.py --records out/bytes.json --at 0123abcd --output docs/results/bytes.md

Nothing runs: Inductor lowers and fuses for a CPU and generates no code. The eager step runs on fake tensors.
Records are kept after each model, and models that they hold at the same commit are not measured again. With
``--at`` nothing is measured: the page is written from the records of that commit. A model takes about a
minute of one core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bytes_models import MODELS, made
from provenance import commit, written_by

import ampgraph
from ampgraph import NoLossScale, OpLists, Policy
from ampgraph.cli.torchvision_shim import allow_torchvision
from ampgraph.errors import AmpGraphError
from ampgraph.passes import is_inserted_cast
from ampgraph.step.trace_step import trace_step
from ampgraph.step.whole_step import Rates
from tests.eager_bytes import eager_step
from tests.inductor_schedule import scheduled

# Bytes that the refresh of a low copy moves for each element: it reads float32 and writes low.
REFRESH = 6
# Bytes that a low copy takes.
COPY = 2
# Bytes that SGD moves for each element: it reads the gradient, and reads and writes the parameter.
SGD = 12
Record = dict[str, dict[str, list[int]]]


@dataclass(frozen=True)
class Variant:
    """One way to run a model.

    Attributes:
        policy: Its policy for bfloat16.
        backends: Where it is counted: op by op, in fused kernels, or in those of a whole step.
        shares: Whether one cast serves all readers of an activation in eager mode.
    """

    policy: Policy
    backends: tuple[str, ...] = ("fused", "eager", "step")
    shares: bool = True


def _policy(copies: bool = False, **given: Any) -> Policy:
    return Policy(dtype=torch.bfloat16, loss_scale=NoLossScale(), weight_copies=copies, **given)


TORCH = OpLists.torch()
VARIANTS = {
    "autocast": Variant(_policy(ops=TORCH, placement="autocast"), shares=False),
    "lists": Variant(_policy(placement="autocast"), ("fused", "eager"), shares=False),
    "sharing": Variant(_policy(placement="autocast"), ("eager",)),
    "placement": Variant(_policy(), ("fused", "eager")),
    "O1": Variant(_policy(copies=True)),
    "O2": Variant(_policy(copies=True, level="O2")),
    "O1, torch's lists": Variant(_policy(ops=TORCH)),
}


def measured(name: str) -> Record:
    """Returns, by variant, [forward, backward, saved, refresh] bytes by backend; of a step [all, SGD]."""
    model, args = made(name)
    known: dict[str, list[int]] = {}
    record: Record = {}
    for label, variant in VARIANTS.items():
        record[label] = {}
        for backend in variant.backends:
            start = time.perf_counter()
            try:
                record[label][backend] = _measured(model, args, variant, backend, known)
            except AmpGraphError as error:
                if backend != "step":
                    raise
                print(f"{name}, {label}: no graph of a whole step: {error}", file=sys.stderr)
            print(f"{name}, {label}, {backend}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return record


def _measured(model: Any, args: tuple, variant: Variant, backend: str, known: dict) -> list[int]:
    objective = "traffic" if backend == "eager" else "fused"
    policy = variant.policy.replace(objective=objective)
    runs_on = "inductor" if backend == "step" else "eager"
    amp = ampgraph.convert(model, args, policy=policy, backend=runs_on)
    graph_module = amp.training_graph
    if backend == "step":
        return _whole_step(amp, args, known)
    refreshed = _low_copies(amp, graph_module)
    if backend == "eager":
        if not variant.shares:
            _cast_at_every_use(graph_module)
        return [*eager_step(graph_module, args), refreshed]
    key = _key(graph_module)
    if key not in known:
        schedule = scheduled(_called(graph_module), *args)
        known[key] = [*schedule.bytes, schedule.saved]
    return [*known[key], refreshed]


def _whole_step(amp: ampgraph.AmpModule, args: tuple, known: dict[str, list[int]]) -> list[int]:
    """Returns the bytes of a step as `ampgraph.compile_step` captures it, and those of SGD alone."""
    parameters = [p for p in amp.source.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # creates the state
    optimizer.zero_grad()
    step = trace_step(amp, optimizer, lambda amp, *args: amp(*args), None, args, {})
    key = _key(step.graph_module)
    if key not in known:
        with torch.no_grad():
            schedule = scheduled(_called(step.graph_module), *Rates(optimizer)(), *args)
        alone = SGD * sum(p.numel() for p in parameters)
        known[key] = [sum(schedule.bytes), alone]
    return known[key]


def _key(graph_module: torch.fx.GraphModule) -> str:
    lines = (f"{n.format_node()} {getattr(n.meta.get('val'), 'dtype', '')}" for n in graph_module.graph.nodes)
    return hashlib.sha1("\n".join(lines).encode()).hexdigest()


def _called(graph_module: torch.fx.GraphModule) -> Callable:
    return lambda *args: graph_module(*args)


def _low_copies(amp: ampgraph.AmpModule, graph_module: torch.fx.GraphModule) -> int:
    """Returns the bytes that one refresh of the low copies moves."""
    names = {n.target for n in graph_module.graph.find_nodes(op="get_attr")}
    copies = [n for n in names if str(n).startswith("_shadows.")]
    return sum(REFRESH * _attribute(graph_module, str(n)).numel() for n in copies)


def _attribute(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name)
    return root


def _cast_at_every_use(graph_module: torch.fx.GraphModule) -> None:
    """Gives every reader of an activation its own cast, as ``torch.autocast`` does."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if not is_inserted_cast(node) or node.args[0].op == "get_attr":
            continue
        for user in list(node.users)[1:]:
            with graph.inserting_before(user):
                user.replace_input_with(node, graph.node_copy(node))
    graph_module.recompile()


# -- the page ----------------------------------------------------------------------------------------------


def moved(record: Record, label: str, backend: str) -> int:
    """Returns the bytes of forward, backward and refresh."""
    forward, backward, _, refresh = record[label][backend]
    return forward + backward + refresh


def around(record: Record, label: str, backend: str) -> int:
    """Returns the bytes of a whole step without those of the optimizer alone."""
    whole, optimizer = record[label][backend]
    return whole - optimizer


def saved(record: Record, label: str, backend: str) -> int:
    """Returns the bytes saved for the backward."""
    return record[label][backend][2]


def kept(record: Record, label: str, backend: str) -> int:
    """Returns the bytes saved for the backward, and the bytes of the low copies."""
    saved_bytes, refresh = record[label][backend][2:]
    return saved_bytes + refresh // REFRESH * COPY


# Title, count, variant, goal for the geometric mean and for the highest ratio.
Column = tuple[str, Callable, str, float | None, float | None]


def _columns(goals: tuple[float | None, ...]) -> tuple[Column, ...]:
    o1, o2, saved_o1, saved_o2 = goals
    return (
        ("O1", moved, "O1", o1, 1.0),
        ("O2", moved, "O2", o2, 1.0),
        ("O1, torch's lists", moved, "O1, torch's lists", None, 1.0),
        ("saved O1", saved, "O1", saved_o1, None),
        ("saved O2", saved, "O2", saved_o2, None),
        ("saved + copies O1", kept, "O1", None, None),
        ("saved + copies O2", kept, "O2", None, None),
    )


FUSED = _columns((0.95, 0.90, 0.92, 0.82))
EAGER = _columns((0.84, 0.75, None, None))
STEP: tuple[Column, ...] = (
    ("O1", around, "O1", 0.95, 1.0),
    ("O2", around, "O2", 0.90, 1.0),
    ("O1, torch's lists", around, "O1, torch's lists", None, 1.0),
)
STEPS = (
    ("lists", "autocast", "lists"),
    ("sharing", "lists", "sharing"),
    ("placement, saved norms", "sharing", "placement"),
    ("low copies", "placement", "O1"),
)


def table(records: dict[str, Record], columns: tuple[Column, ...], backend: str) -> str:
    """Returns the ratios to the autocast rule, their geometric mean and highest, and the goals for both."""
    lines = [f"| model | {' | '.join(title for title, *_ in columns)} |", "|---|" + "---|" * len(columns)]
    rows = {
        name: [
            count(record, label, backend) / count(record, "autocast", backend)
            for _, count, label, _, _ in columns
        ]
        for name, record in records.items()
    }
    ratios = list(zip(*rows.values(), strict=True))
    below = {
        **rows,
        "**geometric mean**": [statistics.geometric_mean(ratio) for ratio in ratios],
        "goal: at most": [goal for *_, goal, _ in columns],
        "**highest**": [max(ratio) for ratio in ratios],
        "goal for the highest: at most": [goal for *_, goal in columns],
    }
    lines += [f"| {name} | {' | '.join(map(_cell, row))} |" for name, row in below.items()]
    return "\n".join(lines)


def above(records: dict[str, Record], columns: tuple[Column, ...], backend: str) -> str:
    """Returns the ratios that are above their goal for the highest, with all digits that matter."""
    found = [
        f"{name}, {title}: {ratio:.5f}"
        for name, record in records.items()
        for title, count, label, _, most in columns
        if most is not None
        and (ratio := count(record, label, backend) / count(record, "autocast", backend)) > most
    ]
    return f"Above 1: {'; '.join(found)}." if found else "No model is above 1."


def beside_loop(records: dict[str, Record]) -> str:
    """Returns the bytes of one graph over those of the plain loop: forward, backward, refresh, optimizer."""
    labels = ("autocast", "O1", "O2")
    lines = [f"| model | {' | '.join(labels)} |", "|---|---|---|---|"]
    rows = {name: [_beside_loop(record, label) for label in labels] for name, record in records.items()}
    ratios = list(zip(*rows.values(), strict=True))
    rows["**geometric mean**"] = [statistics.geometric_mean(ratio) for ratio in ratios]
    rows["**highest**"] = [max(ratio) for ratio in ratios]
    lines += [f"| {name} | {' | '.join(map(_cell, row))} |" for name, row in rows.items()]
    return "\n".join(lines)


def _beside_loop(record: Record, label: str) -> float:
    whole, optimizer = record[label]["step"]
    return whole / (moved(record, label, "fused") + optimizer)


def _cell(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def shares(records: dict[str, Record]) -> str:
    """Returns the factor of each step from the autocast rule to O1: geometric means."""
    lines = ["| step | eager | fused |", "|---|---|---|"]
    for title, before, after in STEPS:
        cells = []
        for backend in ("eager", "fused"):
            pair = [_fused_name(x) if backend == "fused" else x for x in (before, after)]
            factors = [moved(r, pair[1], backend) / moved(r, pair[0], backend) for r in records.values()]
            cells.append(f"{statistics.geometric_mean(factors):.3f}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    for level in ("O1", "O2"):
        shared = [r[level]["fused"][3] / moved(r, level, "fused") for r in records.values()]
        lines += ["", f"The refresh of low copies at {level}: {statistics.mean(shared):.1%} of a fused step."]
    return "\n".join(lines)


def _fused_name(label: str) -> str:
    return "lists" if label == "sharing" else label  # a compiler shares all casts


def page(records: dict[str, Record], failed: dict[str, str], command: str, at: str) -> str:
    """Returns the page; models are in the order of their file."""
    records = {name: records[name] for name in MODELS if name in records}
    missing = [name for name in MODELS if name not in records and name not in failed]
    whole = {name: r for name, r in records.items() if "step" in r["autocast"]}
    loops = [name for name in records if name not in whole]
    parts = [
        "# Bytes of a training step",
        written_by(command, "timm", "transformers", at=at),
        f"{len(records)} models of two or more layers, training mode, loss inside, bfloat16, no loss scale. "
        "Every figure is a ratio to the rule of `torch.autocast` with torch's lists on the same graph. "
        "Nothing is timed. No figure is from a GPU.",
        "## Compiled",
        "Forward and backward of the plain loop, as Inductor schedules them for a CPU: bytes that each fused "
        "kernel and each library kernel reads and writes. One refresh of the low copies, a kernel that moves "
        "6 bytes a parameter, is included at each level that has them, so a loop with one forward an update "
        "is counted. Saved: what the forward "
        "keeps for the backward, without inputs, parameters and low copies. Casts of weights count as saved "
        "under the rule of `torch.autocast`; *saved + copies* counts the low copies beside them.",
        table(records, FUSED, "fused"),
        above(records, FUSED, "fused"),
        "## A whole compiled step",
        "Forward, backward and optimizer as one graph, as `ampgraph.compile_step` captures it, on Inductor. "
        "The rule of `torch.autocast` is captured in the same way: its graph casts weights and has no low "
        "copies. The kernels of the update read low gradients and write low copies (2 bytes a parameter). "
        f"The bytes of the optimizer alone are subtracted everywhere: {SGD} a parameter for SGD, which reads "
        "the gradient, and reads and writes the parameter. Forward and backward fuse here, and nothing "
        "divides them into saved and computed values, so more than the refresh differs from the table above.",
        table(whole, STEP, "step"),
        above(whole, STEP, "step"),
        *([f"`compile_step` runs the plain loop for: {', '.join(loops)}."] if loops else []),
        "Bytes of the same graphs over those of the plain loop (forward, backward, refresh and SGD, each "
        "counted alone). Networks of convolutions may move more: Inductor keeps the activations of a forward "
        "by itself with their channels next to each other, and asks this of the whole graph of a step, "
        "gradients included.",
        beside_loop(whole),
        "## Eager",
        "Forward and backward, op by op; each cast of an activation counts at each use under the rule of "
        "`torch.autocast`. The refresh is included.",
        table(records, EAGER, "eager"),
        above(records, EAGER, "eager"),
        "## Shares",
        "Geometric means of the factors from the rule of `torch.autocast` to O1.",
        shares(records),
    ]
    if failed:
        parts += ["## Not counted", "\n".join(f"- {name}: {why}" for name, why in failed.items())]
    if missing:
        parts.append(f"Not measured for this page: {', '.join(missing)}.")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", help="names of models; default: all")
    parser.add_argument("--records", type=Path, help="JSON file to which every model's figures go")
    parser.add_argument("--output", type=Path, help="page to write")
    parser.add_argument("--at", help="commit whose records the page shows; nothing is measured")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"unknown models {sorted(unknown)}; legal: {', '.join(MODELS)}")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    allow_torchvision()
    known = json.loads(options.records.read_text()) if options.records and options.records.exists() else {}
    at = options.at or commit()
    records: dict[str, Record] = known.get(at, {})
    if options.at and not records:
        parser.error(f"no records of commit {at!r}; there are those of {', '.join(known) or 'none'}")
    failed: dict[str, str] = {}
    wanted = [] if options.at else [name for name in options.models or MODELS if name not in records]
    for number, name in enumerate(wanted, 1):
        print(f"{number}/{len(wanted)} {name}", file=sys.stderr)
        try:
            records[name] = measured(name)
        except Exception as error:  # the page names it
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            print(f"{name}: {failed[name]}", file=sys.stderr)
        if options.records:
            options.records.parent.mkdir(parents=True, exist_ok=True)
            options.records.write_text(json.dumps({at: records}))
    command = f"python tools/bench_bytes.py --output {options.output or 'docs/results/bytes.md'}"
    text = page(records, failed, command, at)
    if options.output:
        options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
