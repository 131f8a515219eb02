"""Keeps what a buffer held before forward assigned another tensor to it.

In the source the old tensor stays as it is. A graph copies the new values into it.
"""

from __future__ import annotations

import itertools
from collections.abc import Container
from operator import attrgetter

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from ..guards import FP32, set_guard
from ..passes.analysis.alias import DETACH, SOURCES, AliasSets, written_args
from ..passes.analysis.gradient_flow import carrying_gradients, matter_to_gradients, writes_to_sources

aten = torch.ops.aten


def keep_before_assignment(graph_module: fx.GraphModule, assigned: Container[int]) -> None:
    """Lets a graph read copies of assigned buffers, if an output or a gradient depends on the old values.

    Args:
        graph_module: A captured graph over live buffers; edited in place.
        assigned: The ids of the buffers that forward assigned.
    """
    graph = graph_module.graph
    values = {n: attrgetter(str(n.target))(graph_module) for n in graph.find_nodes(op="get_attr")}
    buffers = [node for node, value in values.items() if id(value) in assigned]
    _keep(graph_module, buffers)
    trained = {n.name for n, value in values.items() if getattr(value, "requires_grad", False)}
    if buffers and _end_histories(graph, [b for b in buffers if not values[b]._is_view()], trained):
        graph_module.recompile()


def keep_before_assignment_in(program: ExportedProgram, source: nn.Module, assigned: Container[int]) -> None:
    """Does the same for a program, whose buffers are inputs of its graph.

    Args:
        program: A captured program of ``source``; edited in place.
        source: The model.
        assigned: The ids of the buffers that forward assigned.
    """
    paths = program.graph_signature.inputs_to_buffers
    inputs = [n for n in program.graph.find_nodes(op="placeholder") if n.name in paths]
    _keep(program.graph_module, [n for n in inputs if id(attrgetter(paths[n.name])(source)) in assigned])


def _keep(graph_module: fx.GraphModule, buffers: list[fx.Node]) -> None:
    graph = graph_module.graph
    if not buffers:
        return
    aliases, matters = AliasSets(graph), matter_to_gradients(graph)
    outputs = set(graph.output_node().all_input_nodes)
    for buffer in buffers:
        same = aliases.of(buffer)
        writers = [n for n in graph.nodes if any(arg in same for arg in written_args(n))]
        if len(writers) != 1 or writers[0].target is not aten.copy_.default:
            continue  # written in place, too
        readers = {user for n in same for user in n.users if user is not writers[0]}
        if outputs.isdisjoint(same) and matters.isdisjoint(readers):
            continue
        _read_copy(graph, buffer, writers[0])
    graph_module.recompile()


def _end_histories(graph: fx.Graph, buffers: list[fx.Node], trained: Container[str]) -> bool:
    """Detaches buffers before they get new values with gradients; returns whether there are any.

    A tensor that was assigned has no gradients of the one before. A copy into the same tensor keeps them.
    """
    writes, carrying = writes_to_sources(graph), carrying_gradients(graph, trained)
    found = False
    for buffer in buffers:
        calls = writes.get(buffer, ())
        if len(calls) != 1 or calls[0].target is not aten.copy_.default or calls[0].args[0] is not buffer:
            continue
        if calls[0].args[1] in carrying:
            with graph.inserting_before(calls[0]):
                graph.call_function(DETACH, (buffer,)).meta.update(buffer.meta)
            found = True
    return found


def _read_copy(graph: fx.Graph, buffer: fx.Node, writer: fx.Node) -> None:
    sources = itertools.takewhile(lambda node: node.op in SOURCES, graph.nodes)
    with graph.inserting_after(max([buffer, *sources])):  # passes expect no call before a source
        old = graph.create_node("call_function", aten.clone.default, (buffer,), name=f"{buffer.name}_before")
    old.meta.update({key: value for key, value in buffer.meta.items() if key != "val"})
    old.meta["val"] = buffer.meta["val"].clone()
    set_guard(old, FP32)
    buffer.replace_all_uses_with(old, lambda user: user not in (old, writer))
    writer.replace_all_uses_with(old)  # an output that is the old tensor
