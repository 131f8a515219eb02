"""Counts the bytes of training steps: in Inductor's scheduled kernels, and op by op in eager mode.

Usage:
    python tools/bench_bytes.py                                  # every model, printed
    python tools/bench_bytes.py bert unet                        # these
    python tools/bench_bytes.py --records out/bytes.json --output docs/results/bytes.md

Nothing runs: Inductor lowers and fuses for a CPU and generates no code. The eager step runs on fake tensors.
Records are kept after each model, and models that they hold at the same commit are not measured again.
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
from ampgraph.passes import is_inserted_cast
from tests.eager_bytes import eager_step
from tests.inductor_schedule import scheduled

# Bytes that the refresh of a low copy moves for each element: it reads float32 and writes low.
REFRESH = 6
Record = dict[str, dict[str, list[int]]]


@dataclass(frozen=True)
class Variant:
    """One way to run a model.

    Attributes:
        policy: Its policy for bfloat16.
        backends: Where it is counted.
        shares: Whether one cast serves all readers of an activation in eager mode.
    """

    policy: Policy
    backends: tuple[str, ...] = ("fused", "eager")
    shares: bool = True


def _policy(copies: bool = False, **given: Any) -> Policy:
    return Policy(dtype=torch.bfloat16, loss_scale=NoLossScale(), weight_copies=copies, **given)


TORCH = OpLists.torch()
VARIANTS = {
    "autocast": Variant(_policy(ops=TORCH, placement="autocast"), shares=False),
    "lists": Variant(_policy(placement="autocast"), shares=False),
    "sharing": Variant(_policy(placement="autocast"), ("eager",)),
    "placement": Variant(_policy()),
    "O1": Variant(_policy(copies=True)),
    "O2": Variant(_policy(copies=True, level="O2")),
    "O1, torch's lists": Variant(_policy(ops=TORCH)),
}


def measured(name: str) -> Record:
    """Returns, by variant, [forward, backward, saved, refresh] bytes by backend."""
    model, args = made(name)
    known: dict[str, list[int]] = {}
    record: Record = {}
    for label, variant in VARIANTS.items():
        record[label] = {}
        for backend in variant.backends:
            start = time.perf_counter()
            record[label][backend] = _measured(model, args, variant, backend, known)
            print(f"{name}, {label}, {backend}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return record


def _measured(model: Any, args: tuple, variant: Variant, backend: str, known: dict) -> list[int]:
    objective = "fused" if backend == "fused" else "traffic"
    policy = variant.policy.replace(objective=objective)
    amp = ampgraph.convert(model, args, policy=policy, backend="eager")
    graph_module = amp.training_graph
    refreshed = _low_copies(amp, graph_module)
    if backend == "eager":
        if not variant.shares:
            _cast_at_every_use(graph_module)
        return [*eager_step(graph_module, args), refreshed]
    lines = (f"{n.format_node()} {getattr(n.meta.get('val'), 'dtype', '')}" for n in graph_module.graph.nodes)
    key = hashlib.sha1("\n".join(lines).encode()).hexdigest()
    if key not in known:
        schedule = scheduled(_called(graph_module), *args)
        known[key] = [*schedule.bytes, schedule.saved]
    return [*known[key], refreshed]


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


def saved(record: Record, label: str, backend: str) -> int:
    """Returns the bytes saved for the backward."""
    return record[label][backend][2]


COLUMNS: tuple[tuple[str, Callable, str, str], ...] = (
    ("O1", moved, "O1", "fused"),
    ("O2", moved, "O2", "fused"),
    ("O1, torch's lists", moved, "O1, torch's lists", "fused"),
    ("saved O1", saved, "O1", "fused"),
    ("saved O2", saved, "O2", "fused"),
)
EAGER: tuple[tuple[str, Callable, str, str], ...] = (
    ("O1", moved, "O1", "eager"),
    ("O2", moved, "O2", "eager"),
    ("O1, torch's lists", moved, "O1, torch's lists", "eager"),
    ("saved O1", saved, "O1", "eager"),
    ("saved O2", saved, "O2", "eager"),
)
STEPS = (
    ("lists", "autocast", "lists"),
    ("sharing", "lists", "sharing"),
    ("placement", "sharing", "O1"),
)


def table(records: dict[str, Record], columns: tuple) -> str:
    """Returns the ratios to the autocast rule, and their geometric mean."""
    titles = [title for title, *_ in columns]
    lines = [f"| model | {' | '.join(titles)} |", "|---|" + "---|" * len(titles)]
    rows = {
        name: [
            count(record, label, backend) / count(record, "autocast", backend)
            for _, count, label, backend in columns
        ]
        for name, record in records.items()
    }
    lines += [f"| {name} | {' | '.join(f'{x:.3f}' for x in row)} |" for name, row in rows.items()]
    means = [statistics.geometric_mean(column) for column in zip(*rows.values(), strict=True)]
    highest = [max(column) for column in zip(*rows.values(), strict=True)]
    lines.append(f"| **geometric mean** | {' | '.join(f'**{x:.3f}**' for x in means)} |")
    lines.append(f"| highest | {' | '.join(f'{x:.3f}' for x in highest)} |")
    return "\n".join(lines)


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
    refresh = [1 - r["O2"]["fused"][3] / moved(r, "O2", "fused") for r in records.values()]
    kept = statistics.geometric_mean(refresh)
    lines += ["", f"The refresh of low copies is {1 - kept:.1%} of the bytes of a fused step at O2."]
    return "\n".join(lines)


def _fused_name(label: str) -> str:
    return "lists" if label == "sharing" else label  # a compiler shares all casts


def page(records: dict[str, Record], failed: dict[str, str], command: str) -> str:
    """Returns the page."""
    parts = [
        "# Bytes of a training step",
        written_by(command, "timm", "transformers"),
        f"{len(records)} models of two or more layers, training mode, loss inside, bfloat16, no loss scale. "
        "Every figure is a ratio to the rule of `torch.autocast` with torch's lists on the same graph. "
        "Nothing is timed. No figure is from a GPU.",
        "## Compiled",
        "Forward and backward, as Inductor schedules them for a CPU: bytes that each fused kernel and each "
        "library kernel reads and writes. The refresh of low copies after the optimizer's step is included. "
        "Saved: what the forward keeps for the backward, without inputs and parameters.",
        table(records, COLUMNS),
        "## Eager",
        "Forward and backward, op by op; each cast of an activation counts at each use under the rule of "
        "`torch.autocast`. The refresh is included.",
        table(records, EAGER),
        "## Shares",
        "Geometric means of the factors from the rule of `torch.autocast` to O1.",
        shares(records),
    ]
    if failed:
        parts += ["## Not counted", "\n".join(f"- {name}: {why}" for name, why in failed.items())]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", help="names of models; default: all")
    parser.add_argument("--records", type=Path, help="JSON file to which every model's figures go")
    parser.add_argument("--output", type=Path, help="page to write")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"unknown models {sorted(unknown)}; legal: {', '.join(MODELS)}")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    allow_torchvision()
    kept = json.loads(options.records.read_text()) if options.records and options.records.exists() else {}
    at = commit()
    records: dict[str, Record] = kept.get(at, {})
    failed: dict[str, str] = {}
    for name in options.models or MODELS:
        if name in records:
            continue
        try:
            records[name] = measured(name)
        except Exception as error:  # the page names it
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            print(f"{name}: {failed[name]}", file=sys.stderr)
        if options.records:
            options.records.parent.mkdir(parents=True, exist_ok=True)
            options.records.write_text(json.dumps({at: records}))
    command = f"python tools/bench_bytes.py --output {options.output or 'docs/results/bytes.md'}"
    text = page(records, failed, command)
    if options.output:
        options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
