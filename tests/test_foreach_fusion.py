"""Inductor must not fuse what several parts of a kernel over lists read into one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ampgraph._compat import sound_foreach_fusion


def node(makes: str, *reads: str) -> Any:
    outputs = [SimpleNamespace(get_name=lambda: makes)]
    read = SimpleNamespace(reads=[SimpleNamespace(name=name) for name in reads])
    return SimpleNamespace(get_outputs=lambda: outputs, read_writes=read)


def part_for(producer: Any, *parts: Any) -> Any:
    """Asks Inductor for the part of a kernel into which a producer may go."""
    from torch._inductor.scheduler import ForeachKernelSchedulerNode as Kernel

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
    from torch._inductor.scheduler import ForeachKernelSchedulerNode as Kernel

    before = Kernel.reorder_loops_by_dep_pair
    with sound_foreach_fusion():
        assert Kernel.reorder_loops_by_dep_pair(SimpleNamespace(), None, None) is False
    assert Kernel.reorder_loops_by_dep_pair is before
