"""Ties a captured graph to the live source model, so that both always read the same tensors."""

from __future__ import annotations

import torch
from torch import fx, nn


def bind(graph_module: fx.GraphModule, source: nn.Module) -> dict[str, torch.Tensor]:
    """Makes ``graph_module`` resolve every name of ``source`` in ``source`` itself.

    Submodules are the source's own objects and the root's parameter and buffer dicts are shared, so
    ``source.to(...)``, ``load_state_dict`` or a replaced buffer need no update here. What only the capture
    made (constants) stays on the graph module as plain attributes.

    Returns:
        The constants by name.
    """
    constants = {
        node.target: value
        for node in graph_module.graph.nodes
        if node.op == "get_attr" and isinstance(value := _get(graph_module, node.target), torch.Tensor)
        and _get(source, node.target) is not value
    }
    graphs = {name: child for name, child in graph_module._modules.items() if isinstance(child, fx.GraphModule)}
    graph_module._parameters = source._parameters
    graph_module._buffers = source._buffers
    graph_module._modules = {**source._modules, **graphs}
    renamed = {name: "_constant_" + str(name).replace(".", "_") for name in constants}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" and node.target in renamed:
            node.target = renamed[node.target]
    for name, value in constants.items():
        object.__setattr__(graph_module, renamed[name], value)
    graph_module.recompile()
    return {renamed[name]: value for name, value in constants.items()}


def _get(root: nn.Module, path: str) -> object:
    value: object = root
    for part in path.split("."):
        value = getattr(value, part, None)
    return value
