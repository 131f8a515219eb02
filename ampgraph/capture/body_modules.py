"""Names the modules around ops in bodies of ``torch.cond`` and of loops by their paths in the model."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule, Node

from ..passes.analysis.bodies import bodies_of


def name_modules_of_bodies(graph_module: GraphModule, model: nn.Module) -> None:
    """Completes the module stacks of the ops in bodies.

    Dynamo captures the bodies. It names modules from the closures of their functions, with keys made of their
    ``id``, and leaves out the modules around the op that runs the body.
    """
    paths = {str(id(module)): path for path, module in model.named_modules()}
    for part in graph_module.modules():
        bodies = bodies_of(part) if isinstance(part, GraphModule) else {}
        for body, (caller, *_) in bodies.items():
            _complete_body(body, caller, paths)


def _complete_body(body: GraphModule, caller: Node, paths: dict[str, str]) -> None:
    for node in body.graph.nodes:
        if node.op == "call_function":
            _complete(node, caller, paths)


def _complete(node: Node, caller: Node, paths: dict[str, str]) -> None:
    around, inside = (n.meta.get("nn_module_stack") or {} for n in (caller, node))
    named = {key: (paths.get(key, path), cls) for key, (path, cls) in inside.items()}
    node.meta["nn_module_stack"] = {**around, **named}
