"""Measures the conversion time after capture, on synthetic graphs of growing size and on whole models.

Usage:
    python tools/bench_convert.py                       # prints two Markdown tables
    python tools/bench_convert.py --output docs/results/conversion.md

Seconds are CPU seconds of this process (one thread), because wall time on a shared machine is unreliable.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
from provenance import written_by  # noqa: E402
from torch import fx, nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from ampgraph import Policy  # noqa: E402
from ampgraph._compat import code_written_late  # noqa: E402
from ampgraph.capture import capture_program, unlift  # noqa: E402
from ampgraph.passes.pipeline import rewrite  # noqa: E402
from tests.zoo import models as zoo  # noqa: E402

aten = torch.ops.aten

COMMAND = "python tools/bench_convert.py --output docs/results/conversion.md"
SIZES = (1_000, 5_000, 20_000, 100_000)
LEVELS = ("O1", "O2")
MODELS = (
    "timm/resnet50",
    "timm/densenet121",
    "timm/swin_tiny_patch4_window7_224",
    "torchvision/mobilenet_v2",
    "transformers/bert",
    "transformers/gpt2",
    "transformers/llama",
    "transformers/t5",
    "transformers/mixtral",
)
WIDTH = 16


def synthetic_graph(nodes: int) -> fx.GraphModule:
    """Returns a chain of blocks of linear, gelu, softmax, mul, add, layer_norm, relu, its values fake.

    Args:
        nodes: About how many nodes; a block has eleven, four of them its own parameters.
    """
    mode, root, graph = FakeTensorMode(), nn.Module(), fx.Graph()

    def fake(*shape: int) -> torch.Tensor:  # separate memory for each, or they would count as views
        with mode:
            return torch.empty(shape)

    def parameter(name: str, *shape: int) -> fx.Node:
        root.register_parameter(name, nn.Parameter(torch.randn(shape)))
        node = graph.get_attr(name)
        node.meta["val"] = fake(*shape)
        return node

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["val"] = fake(4, WIDTH)
        return node

    value = graph.placeholder("x")
    value.meta["val"] = fake(4, WIDTH)
    for block in range(nodes // 11):
        weight, bias = parameter(f"weight{block}", WIDTH, WIDTH), parameter(f"bias{block}", WIDTH)
        scale, shift = parameter(f"scale{block}", WIDTH), parameter(f"shift{block}", WIDTH)
        hidden = call(aten.gelu.default, call(aten.linear.default, value, weight, bias))
        gated = call(aten.mul.Tensor, hidden, call(aten.softmax.int, hidden, -1))
        normed = call(aten.layer_norm.default, call(aten.add.Tensor, gated, value), [WIDTH], scale, shift)
        value = call(aten.relu.default, normed)
    graph.output(value)
    return fx.GraphModule(root, graph)


def seconds_by_pass(nodes: int, level: str) -> dict[str, float]:
    """Returns the seconds of each pass over a synthetic graph, and their total."""
    graph_module = synthetic_graph(nodes)
    found: dict[str, float] = {}
    gc.collect()
    start = time.process_time()
    with code_written_late(), mock.patch.object(time, "perf_counter", time.process_time):
        rewrite(
            graph_module,
            Policy(level, dtype=torch.float16),
            hook=lambda step, *_: found.update({step.name: _[-1]}),
        )
    return {"total": time.process_time() - start, **found}


def synthetic_rows() -> Iterable[list[str]]:
    """Yields a row a size and level, with the three passes that take longest."""
    for nodes in SIZES:
        for level in LEVELS:
            found = seconds_by_pass(nodes, level)
            total = found.pop("total")
            slowest = sorted(found, key=found.__getitem__, reverse=True)[:3]
            parts = ", ".join(f"{name} {found[name]:.2f}" for name in slowest)
            yield [f"{nodes:,}", level, f"{total:.2f}", f"{1e6 * total / nodes:.0f}", parts]


def model_rows() -> Iterable[list[str]]:
    """Yields a row a model: for each level capture, rewriting, and their ratio."""
    for name in MODELS:
        model, args, kwargs = zoo.get(name).seeded()
        model.eval()
        cells = []
        for level in LEVELS:
            start = time.process_time()
            with code_written_late():  # as `convert` does
                program = capture_program(model, args, kwargs)
                captured = time.process_time()
                gc.collect()
                clean = time.process_time()
                graph_module, _ = unlift(program, model)
                plan = rewrite(graph_module, Policy(level, dtype=torch.float16))
                ended = time.process_time()
            capture, rewriting = captured - start, ended - clean
            cells += [f"{capture:.2f}", f"{rewriting:.2f}", f"{rewriting / capture:.0%}"]
        yield [name, str(len(plan.decisions)), *cells]


def table(columns: list[str], rows: Iterable[list[str]]) -> str:
    """Returns a Markdown table, printing its rows as they come."""
    text = f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n"
    for row in rows:
        line = f"| {' | '.join(row)} |\n"
        print(line, end="", flush=True)
        text += line
    return text


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="where to write the page; default: only print")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    seconds_by_pass(200, "O1")  # caches of schemas and op lists are filled once a process
    synthetic = table(["nodes", "level", "seconds", "µs a node", "slowest passes"], synthetic_rows())
    columns = [
        "model",
        "nodes",
        "O1: capture s",
        "rewrite s",
        "of capture",
        "O2: capture s",
        "rewrite s",
        "of capture",
    ]
    models = table(columns, model_rows())
    page = (
        "# How long conversion takes\n\n"
        f"{written_by(COMMAND, 'networkx')} One thread, CPU seconds, after capture.\n\n"
        "## Synthetic graphs\n\nBlocks of linear, gelu, softmax, mul, add, layer_norm and relu, float16.\n\n"
        f"{synthetic}\n## Whole models\n\nCapture is `torch.export`; the rest is everything `convert` does "
        f"after it.\n\n{models}"
    )
    if options.output:
        options.output.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
