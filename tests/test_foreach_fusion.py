"""Inductor must not fuse what several parts of a kernel over lists read into one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.scheduler import ForeachKernelSchedulerNode as Kernel

import ampgraph
from ampgraph._compat import compiling_lists_soundly, sound_foreach_fusion


def node(makes: str, *reads: str) -> Any:
    outputs = [SimpleNamespace(get_name=lambda: makes)]
    read = SimpleNamespace(reads=[SimpleNamespace(name=name) for name in reads])
    return SimpleNamespace(get_outputs=lambda: outputs, read_writes=read)


def part_for(producer: Any, *parts: Any) -> Any:
    """Asks Inductor for the part of a kernel into which a producer may go."""
    reads = {read.name: part for part in parts for read in part.read_writes.reads}
    return Kernel.get_consumer_subnode_for(SimpleNamespace(snodes=[*parts], read_to_node=reads), producer)


FIRST, SECOND, THIRD = node("a", "x", "found"), node("b", "y", "found"), node("c", "z")


def test_what_two_parts_read_goes_into_none() -> None:
    assert part_for(node("found"), FIRST, SECOND, THIRD) is SECOND, "torch has mended it: drop the mend"
    with sound_foreach_fusion():
        assert part_for(node("found"), FIRST, SECOND, THIRD) is None
        assert part_for(node("z"), FIRST, SECOND, THIRD) is THIRD
        assert part_for(node("other"), FIRST, SECOND, THIRD) is None
    assert part_for(node("found"), FIRST, SECOND, THIRD) is SECOND


def test_loops_of_lists_are_not_reordered() -> None:
    before = Kernel.reorder_loops_by_dep_pair
    with sound_foreach_fusion():
        assert Kernel.reorder_loops_by_dep_pair(SimpleNamespace(), None, None) is False
    assert Kernel.reorder_loops_by_dep_pair is before


class Counted(CustomGraphPass):
    """A pass of the user's."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.calls += 1

    def uuid(self) -> str:
        return "counted"


def test_kernels_cached_without_the_mend_have_another_key() -> None:
    with sound_foreach_fusion():
        alone = config.post_grad_custom_post_pass.uuid()
    own = Counted()
    with config.patch(post_grad_custom_post_pass=own):
        with sound_foreach_fusion():
            config.post_grad_custom_post_pass(torch.fx.Graph())
            both = config.post_grad_custom_post_pass.uuid()
        assert config.post_grad_custom_post_pass is own
    assert own.calls == 1
    assert alone in both
    assert "counted" in both
    assert config.post_grad_custom_post_pass is None


def test_each_compilation_of_a_step_has_the_mend() -> None:
    """Dynamo compiles a step again if a setting of torch has changed."""
    plain, seen = Kernel.get_consumer_subnode_for, []

    def backend(graph_module: torch.fx.GraphModule, inputs: list) -> Any:
        seen.append(Kernel.get_consumer_subnode_for is not plain)
        return graph_module

    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    amp = ampgraph.convert(model, (x,), dtype=torch.bfloat16, backend=backend)
    step = ampgraph.compile_step(amp, torch.optim.SGD(amp.parameters(), fused=True), lambda m, x: m(x).sum())
    step(x), step(x)
    seen.clear()
    torch._dynamo.reset()
    step(x)
    assert seen == [True]
    assert Kernel.get_consumer_subnode_for is plain


def test_a_backend_gets_its_options() -> None:
    found = compiling_lists_soundly(lambda graph_module, inputs, **options: options)(None, [], mode="x")
    assert found == {"mode": "x"}
