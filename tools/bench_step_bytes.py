"""Counts kernels and bytes of a training step as one graph beside those of the plain loop, and compares both.

Usage:
    python tools/bench_step_bytes.py                              # every model, printed
    python tools/bench_step_bytes.py "3 linears" bert             # these
    python tools/bench_step_bytes.py --output docs/results/step.md

Eager: all ops of a real step, counted below autograd. Compiled: the kernels that Inductor schedules for a
CPU, and the ops that run after them in a real step. Equality: 100 real steps, an overflow at every ninth.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bytes_models
import small_models
from provenance import written_by

import ampgraph
from ampgraph import DynamicLossScale, Policy
from ampgraph.cli.torchvision_shim import allow_torchvision
from ampgraph.step import trace_step
from ampgraph.step.whole_step import Rates, scale_inputs
from tests.inductor_schedule import Kernel, scheduled

SMALL = ("3 linears", "30 linears", "language model", "ConvNeXt", "residual network", "U-Net")
LARGE = ("vit",)
# Without batch norm, for which AOTAutograd takes other kernels in the plain loop.
COMPARED = ("3 linears", "30 linears", "language model", "ConvNeXt")
COMPILED_TOO = ("3 linears",)
STEPS = 100
BAD = 9
# Ops that run no kernel.
_FREE = {"detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh", "_local_scalar_dense"}
_FREE |= {"empty", "empty_strided", "new_empty", "empty_like", "new_empty_strided"}


class Count(NamedTuple):
    """Kernels, and the bytes that they read and write."""

    kernels: int = 0
    bytes: int = 0

    def __add__(self, other: object) -> Count:
        assert isinstance(other, Count)
        return Count(self.kernels + other.kernels, self.bytes + other.bytes)


class Counted(TorchDispatchMode):
    """Counts the ops that run inside; a fused or foreach op is one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Count()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        space, _, name = func._schema.name.partition("::")
        if space == "aten" and not func.is_view and name not in _FREE:
            self.count += Count(1, _moved(func, args, kwargs, out))
        return out

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Counts nothing inside."""
        before = self.count
        yield
        self.count = before


def _moved(func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> int:
    """Returns the bytes of the arguments that an op reads, of its results, and of what it only writes."""
    read = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
    written = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
    if not written:  # the fused optimizers and foreach copies; the optimizers do not write gradients
        schema = [
            (a, args[i] if i < len(args) else kwargs.get(a.name))
            for i, a in enumerate(func._schema.arguments)
        ]
        changed = [v for a, v in schema if a.alias_info and a.alias_info.is_write and a.name != "grads"]
        written = [t for t in tree_leaves(changed) if isinstance(t, Tensor)]
    if "copy_" in func._schema.name:
        read = {key: t for key, t in read.items() if all(t is not w for w in written)}
    return sum(t.numel() * t.element_size() for t in (*read.values(), *written))


class Job:
    """A model with its optimizer, that trains by one graph or by the plain loop."""

    def __init__(self, name: str, backend: Any, dtype: torch.dtype, level: str = "O2") -> None:
        self.loss_fn: Callable
        if name in LARGE:
            model, self.args = bytes_models.made(name)
            self.loss_fn = lambda amp, *args: amp(*args)
            example = self.args
        else:
            torch.manual_seed(0)
            make, x = small_models.MODELS[name]
            model, example = make().train(), (x,)
            self.loss_fn = lambda amp, x, weight: amp(x).square().mean() * weight
            self.args = (x, torch.ones(()))
        self.model: nn.Module = model
        policy = Policy(level, dtype=dtype, loss_scale=DynamicLossScale())  # type: ignore[arg-type]
        self.amp = ampgraph.convert(model, example, policy=policy, backend=backend)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.step = ampgraph.compile_step(self.amp, self.optimizer, self.loss_fn)

    def loop(self, *args: Tensor) -> Tensor:
        """Takes a step of the plain loop."""
        loss = self.loss_fn(self.amp, *args)
        loss.backward()
        self.after_backward()
        return loss.detach()

    def after_backward(self) -> None:
        """Takes the rest of the step."""
        self.amp.scaler.step(self.optimizer)
        self.amp.scaler.update()
        self.optimizer.zero_grad()


def eager(name: str) -> tuple[Count, Count]:
    """Returns the counts of a step of the loop and of one graph, eager."""
    loop, whole = (Job(name, "eager", torch.bfloat16) for _ in range(2))
    for _ in range(4):  # the third creates the graph
        loop.loop(*loop.args)
        whole.step(*whole.args)
    with Counted() as in_loop:
        loop.loop(*loop.args)
    with Counted() as in_graph:
        whole.step(*whole.args)
    assert whole.step.reason is None, whole.step.reason
    return in_loop.count, in_graph.count


def compiled(name: str) -> tuple[Count, Count]:
    """Returns the counts of a step of the loop and of one graph on Inductor, with what runs after."""
    whole = Job(name, _as_it_is, torch.bfloat16)
    with _as_inductor():
        for _ in range(4):
            whole.step(*whole.args)
    (graph_module,) = whole.step.graph_modules
    counted = Counted()

    def run(*args: Any) -> Any:
        with counted.paused():
            return graph_module(*args)

    (taken,) = (state for kind in whole.step._kinds.values() for state in kind.states)
    taken._run = run  # Dynamo refuses to run under a dispatch mode
    with counted:
        whole.step(*whole.args)
    assert whole.step.reason is None, whole.step.reason
    inputs = [*Rates(whole.optimizer)(), *scale_inputs(whole.amp), *whole.args]
    with torch.no_grad():
        graph = scheduled(lambda *args: graph_module(*args), *inputs)
    return _compiled_loop(name), _sum(graph.forward) + counted.count


def _as_inductor() -> AbstractContextManager[Any]:
    """Captures steps for `_as_it_is` as for Inductor."""
    return mock.patch.object(trace_step, "FUSING", ("inductor", _as_it_is))


def _as_it_is(graph_module: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
    """A backend of Dynamo that compiles nothing."""
    return graph_module


def _compiled_loop(name: str) -> Count:
    """Returns the count of the loop: forward, backward, the rest of the step, and the refresh."""
    job = Job(name, _as_it_is, torch.bfloat16)
    job.loop(*job.args)
    training_graph = job.amp.training_graph
    if name in LARGE:
        schedule = scheduled(lambda *args: training_graph(*args), *job.args)
    else:
        schedule = scheduled(lambda x, weight: training_graph(x).square().mean() * weight, *job.args)
    job.loss_fn(job.amp, *job.args).backward()
    with Counted() as rest:
        job.after_backward()
        shadows = job.amp._graphs.shadows
        if shadows is not None:
            shadows.refresh()
    return _sum([*schedule.forward, *schedule.backward]) + rest.count


def _sum(kernels: list[Kernel]) -> Count:
    return Count(len(kernels), sum(kernel.bytes for kernel in kernels))


def compare(name: str, backend: str) -> tuple[int, float]:
    """Returns the number of skipped steps, and the largest relative difference after `STEPS` steps."""
    loop, whole = (Job(name, backend, torch.float16) for _ in range(2))
    skipped, apart = 0, 0.0
    x = whole.args[0]
    for i in range(STEPS):
        weight = torch.tensor(1e38 if i % BAD == BAD // 2 else 1.0)
        given = x + i / STEPS if x.is_floating_point() else (x + i) % 16
        mine, theirs = whole.step(given, weight), loop.loop(given, weight)
        apart = max(apart, _apart(mine, theirs))
    assert whole.step.reason is None, whole.step.reason
    skipped = STEPS - int(_steps(whole))
    assert skipped == STEPS - int(_steps(loop))
    for a, b in zip(_state(whole), _state(loop), strict=True):
        apart = max(apart, _apart(a, b))
    assert whole.amp.scaler.state_dict() == loop.amp.scaler.state_dict()
    return skipped, apart


def _steps(job: Job) -> Tensor:
    return next(iter(job.optimizer.state.values()))["step"]


def _state(job: Job) -> list[Tensor]:
    return [*job.model.state_dict().values(), *(t for s in job.optimizer.state.values() for t in s.values())]


def _apart(a: Tensor, b: Tensor) -> float:
    if torch.equal(a, b):
        return 0.0
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


# -- the page ----------------------------------------------------------------------------------------------


def table(rows: dict[str, tuple[Count, Count]]) -> str:
    """Returns kernels and bytes of the loop and of one graph, and their ratios."""
    lines = [
        "| model | kernels, loop | one graph | ratio | MiB, loop | one graph | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, (loop, whole) in rows.items():
        kernels, moved = whole.kernels / loop.kernels, whole.bytes / loop.bytes
        sizes = f"{loop.bytes / 2**20:.2f} | {whole.bytes / 2**20:.2f}"
        lines.append(f"| {name} | {loop.kernels} | {whole.kernels} | {kernels:.2f} | {sizes} | {moved:.3f} |")
    means = [
        statistics.geometric_mean(getattr(whole, what) / getattr(loop, what) for loop, whole in rows.values())
        for what in Count._fields
    ]
    lines.append(f"| **geometric mean** | | | {means[0]:.2f} | | | {means[1]:.3f} |")
    return "\n".join(lines)


def page(command: str, names: list[str], compared: list[tuple[str, str]]) -> str:
    """Measures, and returns the page."""
    counts: dict[str, dict[str, tuple[Count, Count]]] = {"eager": {}, "compiled": {}}
    for name in names:
        for title, measure in (("eager", eager), ("compiled", compiled)):
            counts[title][name] = measure(name)
            print(name, title, *counts[title][name], file=sys.stderr)
    equal = ["| model | backend | steps | skipped | largest relative difference |", "|---|---|---|---|---|"]
    for name, backend in compared:
        skipped, apart = compare(name, backend)
        print(name, backend, skipped, apart, file=sys.stderr)
        equal.append(f"| {name} | {backend} | {STEPS} | {skipped} | {f'{apart:.1e}' if apart else 'none'} |")
    parts = [
        "# A training step as one graph, beside the loop",
        written_by(command, "timm", "transformers"),
        "O2 with a dynamic loss scale and `AdamW(fused=True)`. The loop: forward, loss, `backward`, "
        "`scaler.step`, `scaler.update`, `zero_grad`. One graph: `ampgraph.compile_step`. Nothing is timed. "
        "No figure is from a GPU.",
        "## Equality",
        f"float16; at every {BAD}th step the loss overflows. Compared are the losses, parameters, buffers "
        "and the optimizer's state; the states of the scalers are equal.",
        "\n".join(equal),
        "## Eager",
        "All ops of a step that read or write memory. A fused or foreach op is one kernel. bfloat16. On a "
        "CPU the finite check of the loop has a kernel for each gradient, which takes less time than torch's "
        "one kernel for all.",
        table(counts["eager"]),
        "## Compiled",
        "Kernels and bytes as Inductor schedules them for a CPU, and the ops that run after the graphs. In "
        "the loop these are the finite check, the scale, the optimizer's fused kernel and the copy of the "
        "weights. One graph has the update in ops: it reads gradients as the backward made them, and writes "
        "the low copies with the parameters. On a CPU each parameter has a kernel for that, and one for its "
        "number of steps; compilers for GPUs join them. The check of the loop copies each gradient on a CPU, "
        "and on a GPU none: there the loop has two kernels fewer for each gradient. bfloat16.",
        table(counts["compiled"]),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="*", help="names of models; default: all")
    parser.add_argument("--output", type=Path, help="page to write")
    options = parser.parse_args()
    legal = [*SMALL, *LARGE]
    if unknown := set(options.models) - set(legal):
        parser.error(f"unknown models {sorted(unknown)}; legal: {', '.join(legal)}")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    allow_torchvision()
    names = options.models or legal
    compared = [(name, backend) for name in COMPARED if name in names for backend in ("eager", "aot_eager")]
    compared += [(name, "inductor") for name in COMPILED_TOO if name in names]
    words = [f'"{name}"' if " " in name else name for name in options.models]
    output = options.output or "docs/results/step.md"
    command = " ".join(["python tools/bench_step_bytes.py", *words, f"--output {output}"])
    text = page(command, names, compared)
    if options.output:
        options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
