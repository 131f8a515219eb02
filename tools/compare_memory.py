"""Peak memory of `ampgraph.compare` beside that of the forwards (and backwards) that it replaces.

Counts what torch's CPU allocator hands out, so every temporary of every kernel is in it.
Usage: python tools/compare_memory.py [--output docs/results/compare-memory.md]
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
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

TITLE = "# Memory of a comparison"


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


def gpt2() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """GPT-2 of 24 layers, 128 wide, 2 sequences of 96 tokens."""
    import transformers

    config = transformers.GPT2Config(n_layer=24, n_embd=128, n_head=4, vocab_size=512, use_cache=False)
    return transformers.GPT2LMHeadModel(config), (torch.randint(0, 512, (2, 96)),)


def resnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """ResNet-152, two images of 64 by 64."""
    import torchvision

    return torchvision.models.resnet152(), (torch.randn(2, 3, 64, 64),)


def square_mean(result: object) -> Tensor:
    """A loss of any model's result."""
    leaves = [v for v in torch.utils._pytree.tree_leaves(result) if isinstance(v, Tensor)]
    return sum((v.float().square().mean() for v in leaves if v.is_floating_point()), torch.zeros(()))


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


def main() -> None:
    """Measures and prints, or writes, a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    allow_torchvision()
    lines = [
        "| model | nodes | run | float32 | converted | both | compare | of both | keeping every value |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
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
            lines.append(f"| {make.__name__} | {count} | {words} | {sizes} | {ratio:.2f} | {kept} |")
            print(lines[-1], flush=True)
    if options.output:
        head = written_by(
            f"python tools/compare_memory.py --output {options.output}", "transformers", "torchvision"
        )
        options.output.write_text("\n".join([TITLE, "", head, "", *lines, ""]))


if __name__ == "__main__":
    main()
