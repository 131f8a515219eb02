"""What measuring costs: peak memory of `ampgraph.compare`, and the time of a step under `ampgraph.watch`.

Memory: counts what torch's CPU allocator hands out, so every temporary of every kernel is in it. Time: steps
of training take turns, unwatched, watched and unwatched after a watch, and medians are compared.

Usage: python tools/numerics_cost.py [--output docs/results/numerics-cost.md]
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from provenance import written_by
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import ampgraph
from ampgraph._compat import storage_key
from ampgraph.cli.torchvision_shim import allow_torchvision
from ampgraph.report import graph_view
from ampgraph.report.replan import without_casts

TITLE = "# Cost of measuring"
Made = tuple[nn.Module, tuple[Tensor, ...]]
# Rounds of the three kinds of step.
ROUNDS = 15


def peak_of(work: Callable[[], object]) -> int:
    """Returns the most bytes that were allocated at a time while ``work`` ran, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    del result
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def gpt2(layers: int = 24) -> Made:
    """GPT-2 of 24 layers, 128 wide, 2 sequences of 96 tokens."""
    import transformers

    config = transformers.GPT2Config(n_layer=layers, n_embd=128, n_head=4, vocab_size=512, use_cache=False)
    return transformers.GPT2LMHeadModel(config), (torch.randint(0, 512, (2, 96)),)


def resnet() -> Made:
    """ResNet-152, two images of 64 by 64."""
    import torchvision

    return torchvision.models.resnet152(), (torch.randn(2, 3, 64, 64),)


def small_resnet() -> Made:
    """ResNet-18, four images of 64 by 64."""
    import torchvision

    return torchvision.models.resnet18(), (torch.randn(4, 3, 64, 64),)


def square_mean(result: object) -> Tensor:
    """A loss of any model's result."""
    leaves = [v for v in torch.utils._pytree.tree_leaves(result) if isinstance(v, Tensor)]
    return sum((v.float().square().mean() for v in leaves if v.is_floating_point()), torch.zeros(()))


# -- memory of compare -----------------------------------------------------------------------------


def trained(graph_module: nn.Module, args: tuple) -> Callable[[], object]:
    """Returns a forward and backward that stores no gradients."""

    def step() -> object:
        parameters = [p for p in graph_module.parameters() if p.requires_grad]
        return torch.autograd.grad(square_mean(graph_module(*args)), parameters, allow_unused=True)

    return step


@torch.no_grad()
def forward_row(amp: ampgraph.AmpModule, args: tuple) -> tuple[int, int, int]:
    """Peaks of float32's forward, of the converted forward, and of a comparison."""
    source = without_casts(amp.graph_module, amp.plan)
    return (
        peak_of(lambda: source(*args)),
        peak_of(lambda: amp.graph_module(*args)),
        peak_of(lambda: ampgraph.compare(amp, args)),
    )


def training_row(amp: ampgraph.AmpModule, args: tuple) -> tuple[int, int, int]:
    """The same of a step of training each."""
    source = without_casts(amp.graph_module, amp.plan)
    return (
        peak_of(trained(source, args)),
        peak_of(trained(amp.graph_module, args)),
        peak_of(lambda: ampgraph.compare(amp, args, loss=square_mean)),
    )


def all_activations(amp: ampgraph.AmpModule) -> int:
    """Bytes of all values of both graphs: what a comparison that keeps everything would hold."""
    total = 0
    for graph_module in (without_casts(amp.graph_module, amp.plan), amp.graph_module):
        nodes = [node for node in graph_module.graph.nodes if node.op == "call_function"]
        values = [v for node in nodes for v in graph_view.values(node)]
        total += sum({storage_key(v): v.untyped_storage().nbytes() for v in values}.values())
    return total


def memory_rows() -> Iterator[str]:
    """Yields the rows of the table on memory."""
    yield "| model | nodes | run | float32 | converted | both | compare | of both | keeping every value |"
    yield "|---|--:|---|--:|--:|--:|--:|--:|--:|"
    for make in (gpt2, resnet):
        torch.manual_seed(0)
        model, args = make()
        amp = ampgraph.convert(model.eval(), args, policy="O2", dtype=torch.bfloat16, backend="eager")
        for words, measure in (("forward", forward_row), ("forward and backward", training_row)):
            first, second, found = measure(amp, args)
            sizes = " | ".join(f"{size / 2**20:.1f} MiB" for size in (first, second, first + second, found))
            kept = f"{all_activations(amp) / 2**20:.0f} MiB"
            count = len(amp.graph_module.graph.nodes)
            ratio = found / (first + second)
            yield f"| {make.__name__} | {count} | {words} | {sizes} | {ratio:.2f} | {kept} |"


# -- time of watch ---------------------------------------------------------------------------------


class Loop:
    """Steps of training of a converted model."""

    def __init__(self, made: Made):
        model, self.args = made
        policy = ampgraph.Policy("O2", torch.float16)
        self.amp = ampgraph.convert(model.train(), self.args, policy=policy, backend="eager")
        self.optimizer = torch.optim.SGD(self.amp.parameters(), lr=1e-6)
        self.amp.scaler.attach(self.optimizer)

    def step(self) -> None:
        """Takes one."""
        self.optimizer.zero_grad()
        square_mean(self.amp(*self.args)).backward()
        self.optimizer.step()

    def seconds(self, watched: bool) -> float:
        """Returns the processor time of one step."""
        with ampgraph.watch(self.amp) if watched else nullcontext():
            start = time.process_time()
            self.step()
            return time.process_time() - start


def time_rows() -> Iterator[str]:
    """Yields the rows of the table on time."""
    yield "| model | nodes | not watched | watched | ratio | after a watch | ratio |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    makers = {"gpt2 of 6 layers": lambda: gpt2(6), "resnet18": small_resnet}
    for name, make in makers.items():
        torch.manual_seed(0)
        never, once = Loop(make()), Loop(make())
        once.seconds(watched=True)
        for loop in (never, once):
            loop.step()
        rounds = [(never.seconds(False), once.seconds(True), once.seconds(False)) for _ in range(ROUNDS)]
        plain, watched, after = (statistics.median(column) for column in zip(*rounds, strict=True))
        count = len(never.amp.training_graph.graph.nodes)
        yield (
            f"| {name} | {count} | {plain * 1e3:.1f} ms | {watched * 1e3:.1f} ms | {watched / plain:.2f} | "
            f"{after * 1e3:.1f} ms | {after / plain:.2f} |"
        )


MEMORY = """## Memory of `compare`

Peaks of what torch's CPU allocator hands out, beyond weights and inputs: of the float32 forward, of the
converted one (O2, bfloat16), and of a comparison, which runs both. The second row of each model has a
backward too. The last column is what a comparison would hold that keeps every value of both graphs."""

TIME = """## Time of `watch`

Processor time of a step of training (forward, backward, SGD; O2, float16, backend eager, one thread), medians
of {rounds} rounds in which the three kinds of step take turns. A watched step runs node by node and leaves a
flag for each value and gradient. The last columns are of steps between watched ones."""


def main() -> None:
    """Measures and prints, or writes, the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    allow_torchvision()
    torch.set_num_threads(1)
    parts = []
    for words, rows in ((MEMORY, memory_rows()), (TIME.format(rounds=ROUNDS), time_rows())):
        lines = []
        for line in rows:
            lines.append(line)
            print(line, flush=True)
        parts += [words, "\n".join(lines)]
    if options.output:
        command = f"python tools/numerics_cost.py --output {options.output}"
        head = written_by(command, "transformers", "torchvision")
        options.output.write_text("\n\n".join([TITLE, head, *parts]) + "\n")


if __name__ == "__main__":
    main()
