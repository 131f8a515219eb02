"""The minimum cut against every cut there is."""

from __future__ import annotations

import itertools
import random

import networkx as nx
import pytest

from ampgraph.passes.placement.min_cut import SINK, SOURCE, CutNetwork

Arcs = list[tuple[object, object, int]]


def network_of(vertices: range, arcs: Arcs) -> CutNetwork:
    network = CutNetwork()
    for v in vertices:
        network.add_vertex(v)
    for arc in arcs:
        network.add_arc(*arc)
    return network


def price(arcs: Arcs, sides: dict) -> int:
    sides = {**sides, SOURCE: True, SINK: False}
    return sum(c for u, v, c in arcs if sides[u] and not sides[v])


def all_cuts(vertices: range) -> list[dict[int, bool]]:
    return [
        dict(zip(vertices, s, strict=True)) for s in itertools.product([True, False], repeat=len(vertices))
    ]


def maximal_source_side(vertices: range, arcs: Arcs) -> dict[int, bool]:
    """The union of the source sides of all minimum cuts, which is one itself."""
    cuts = all_cuts(vertices)
    least = min(price(arcs, c) for c in cuts)
    minimal = [c for c in cuts if price(arcs, c) == least]
    return {v: any(c[v] for c in minimal) for v in vertices}


def random_arcs(seed: int) -> tuple[range, Arcs]:
    rng = random.Random(seed)
    vertices = range(rng.randint(1, 8))
    density = rng.choice([0.15, 0.4, 0.8])
    top = rng.choice([2, 5, 40])  # few distinct capacities make many ties
    ends = [SOURCE, *vertices, SINK]
    arcs: Arcs = [
        (u, v, 10_000 if rng.random() < 0.05 else rng.randint(0, top))
        for u in ends
        for v in ends
        if rng.random() < density
    ]
    arcs = [(u, v, c) for u, v, c in arcs if u != SINK and v != SOURCE]
    return vertices, arcs


@pytest.mark.parametrize("block", range(8))
def test_equals_brute_force_with_the_largest_source_side(block):
    for seed in range(block * 100, block * 100 + 100):
        vertices, arcs = random_arcs(seed)
        assert network_of(vertices, arcs).minimum_cut() == maximal_source_side(vertices, arcs), f"seed {seed}"


def test_order_of_vertices_and_arcs_does_not_matter():
    for seed in range(100):
        vertices, arcs = random_arcs(seed)
        expected = network_of(vertices, arcs).minimum_cut()
        rng = random.Random(seed)
        shuffled = [*arcs]
        rng.shuffle(shuffled)
        network = CutNetwork()
        for v in rng.sample(vertices, len(vertices)):
            network.add_vertex(v)
        for arc in shuffled:
            network.add_arc(*arc)
        assert network.minimum_cut() == expected, f"seed {seed}"


def hard_core(size: int) -> tuple[range, Arcs]:
    """A ring with heavy arcs between neighbours and weak, opposed pulls: no vertex decides by itself."""
    vertices = range(size)
    arcs: Arcs = []
    for v in vertices:
        arcs += [(v, (v + 1) % size, 7), ((v + 1) % size, v, 7)]
        arcs.append((SOURCE, v, 3) if v % 2 else (v, SINK, 2))
    return vertices, arcs


@pytest.fixture
def core_sizes(monkeypatch):
    """The sizes of the networks that are left for networkx."""
    sizes: list[int] = []
    solve = nx.minimum_cut

    def spy(graph, *args, **kwargs):
        sizes.append(graph.number_of_nodes() - 2)
        return solve(graph, *args, **kwargs)

    monkeypatch.setattr(nx, "minimum_cut", spy)
    return sizes


def test_hard_core_reaches_networkx_whole(core_sizes):
    vertices, arcs = hard_core(8)
    assert network_of(vertices, arcs).minimum_cut() == maximal_source_side(vertices, arcs)
    assert core_sizes == [8]


def test_chain_is_solved_without_networkx(core_sizes):
    vertices = range(50)
    arcs: Arcs = [(SOURCE, 0, 100), (49, SINK, 5), *((v, v + 1, 10) for v in range(49))]
    assert all(network_of(vertices, arcs).minimum_cut().values())
    assert core_sizes == []


def test_presolved_and_core_parts_join(core_sizes):
    """A decided vertex hangs on a ring that only networkx can decide."""
    vertices, arcs = hard_core(6)
    arcs = [*arcs, (SOURCE, 6, 50), (6, 0, 1), (5, 7, 1), (7, SINK, 50)]
    vertices = range(8)
    assert network_of(vertices, arcs).minimum_cut() == maximal_source_side(vertices, arcs)
    assert core_sizes == [6]


def test_ties_go_to_the_source_side():
    assert network_of(range(1), [(SOURCE, 0, 4), (0, SINK, 4)]).minimum_cut() == {0: True}
    assert network_of(range(2), [(0, 1, 3), (1, 0, 3)]).minimum_cut() == {0: True, 1: True}
    assert network_of(range(1), [(SOURCE, 0, 4), (0, SINK, 5)]).minimum_cut() == {0: False}


def test_parallel_arcs_add_and_loops_do_not_count():
    arcs: Arcs = [(SOURCE, 0, 2), (SOURCE, 0, 2), (0, SINK, 3), (0, 0, 100), (SOURCE, SINK, 9)]
    assert network_of(range(1), arcs).minimum_cut() == {0: True}


def test_empty_network():
    assert CutNetwork().minimum_cut() == {}


def test_a_vertex_decides_once_its_producer_has(core_sizes):
    """With the producer on the sink side nothing pulls the consumer to the source side any more."""
    arcs: Arcs = [(0, SINK, 5), (0, 1, 10), (1, SINK, 3)]
    assert network_of(range(2), arcs).minimum_cut() == {0: False, 1: False}
    assert core_sizes == []
