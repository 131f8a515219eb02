"""Copies of graphs, with the names of the nodes."""

from __future__ import annotations

from torch import fx

from .._compat import calling_convention
from ..proxy.module_parts import TABLES


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Returns a copy with the same names and signature; ``copy.deepcopy`` warns and copies more."""
    copied = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = copied.graph_copy(graph, values)
    node = copied.output(result)
    node.meta.update(graph.output_node().meta)
    copied.set_codegen(calling_convention(graph))
    keep_names(graph, copied)
    return copied


def copy_graph_module(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Returns a graph module with a copied graph over the same live modules and tensors."""
    copied = fx.GraphModule({}, fx.Graph())
    for name in TABLES:
        copied.__dict__[name] = graph_module.__dict__[name]
    for name, value in graph_module.__dict__.items():
        if name.startswith("_constant_"):
            copied.__dict__[name] = value
    copied.graph = copy_graph(graph_module.graph)
    return copied


def keep_names(source: fx.Graph, copied: fx.Graph) -> None:
    """Names the nodes of a copy like the originals; torch renames those that shadow a builtin (``input``)."""
    for old, new in zip(source.nodes, copied.nodes, strict=True):
        new.name = old.name
