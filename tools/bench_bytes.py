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
import copy
import hashlib
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bytes_models import CONVOLUTIONAL, MODELS, Made, channels_last, made
from bytes_report import ALL_LOW, LAID_OUT, REFRESH, SGD, WHOLE, Record, page
from provenance import commit

import ampgraph
from ampgraph import NoLossScale, OpLists, Policy
from ampgraph.cli.torchvision_shim import allow_torchvision
from ampgraph.errors import AmpGraphError
from ampgraph.passes import is_inserted_cast
from ampgraph.step.trace_step import trace_step
from ampgraph.step.whole_step import Rates
from tests.eager_bytes import eager_step
from tests.inductor_schedule import scheduled


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
    record = {ALL_LOW: {"fused": all_low(model, args)}}
    known: dict[str, list[int]] = {}
    for label, variant in VARIANTS.items():
        title = f"{name}, {label}"
        record[label] = counted(title, (model, args), variant.policy, variant.backends, known, variant.shares)
    if name in CONVOLUTIONAL:
        laid_out, known = channels_last(model, args), {}
        for label in WHOLE:
            title, policy = f"{name}, {label}, channels last", VARIANTS[label].policy
            record[LAID_OUT + label] = counted(title, laid_out, policy, ("fused", "step"), known)
    return record


def counted(
    title: str,
    given: Made,
    policy: Policy,
    backends: tuple[str, ...],
    known: dict[str, list[int]],
    shares: bool = True,
) -> dict[str, list[int]]:
    """Returns the bytes of a model under a policy, by backend.

    Args:
        title: Says in the progress what is counted.
        given: The model and its inputs.
        policy: The policy; each backend has its own objective.
        backends: As in `Variant`.
        known: The counts of compiled graphs so far.
        shares: As in `Variant`.
    """
    found = {}
    for backend in backends:
        start = time.perf_counter()
        try:
            found[backend] = _measured(*given, policy, backend, known, shares)
        except AmpGraphError as error:
            if backend != "step":
                raise
            print(f"{title}: no graph of a whole step: {error}", file=sys.stderr)
        print(f"{title}, {backend}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return found


def all_low(model: Any, args: tuple) -> list[int]:
    """Returns the bytes of ``model.to(torch.bfloat16)``: forward, backward, saved; and its parameters.

    It casts its inputs, because a loader makes float32 images.
    """
    low = copy.deepcopy(model).to(torch.bfloat16)

    def called(*args: torch.Tensor) -> Any:
        return low(*(a.bfloat16() if a.is_floating_point() else a for a in args))

    schedule = scheduled(called, *args)
    return [*schedule.bytes, schedule.saved, sum(p.numel() for p in low.parameters())]


def _measured(
    model: Any, args: tuple, policy: Policy, backend: str, known: dict[str, list[int]], shares: bool
) -> list[int]:
    policy = policy.replace(objective="traffic" if backend == "eager" else "fused")
    runs_on = "inductor" if backend == "step" else "eager"
    amp = ampgraph.convert(model, args, policy=policy, backend=runs_on, capture="ahead of time")
    graph_module = amp.training_graph
    if backend == "step":
        return _whole_step(amp, args, known)
    refreshed = _low_copies(graph_module)
    if backend == "eager":
        if not shares:
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


def _called(module: torch.nn.Module) -> Callable:
    return lambda *args: module(*args)


def _low_copies(graph_module: torch.fx.GraphModule) -> int:
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
            options.records.write_text(json.dumps({**known, at: records}))
    command = f"python tools/bench_bytes.py --output {options.output or 'docs/results/bytes.md'}"
    text = page(records, failed, command, at)
    if options.output:
        options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
