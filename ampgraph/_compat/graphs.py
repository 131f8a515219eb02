"""Graphs, their sizes and their memory. Tried on torch 2.11, 2.13, 2.14 and 2.15.

`storage_key` as it is now: on 2.11 and 2.13. `size_expression`, `is_same_shape`, `without_new_guards`,
`size_conditions`: on 2.13 alone. Where a function names its versions, these hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx._pytree import tree_flatten_spec
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.fx.graph import CodeGen, _PyTreeCodeGen, _PyTreeInfo

from .fake_tensors import fake_mode_of
from .modes import SET_GRAD_ENABLED, without_transforms
from .replaced_attribute import replaced


def size_hint(size: int | torch.SymInt, fallback: int = 1) -> int:
    """Returns a number for a possibly symbolic size; ``fallback`` if it has no hint."""
    if isinstance(size, int):
        return size
    node = size.node
    hint = node.hint if node.has_hint() else None
    return int(hint) if hint is not None else fallback


def size_expression(size: int | torch.SymInt) -> int | str:
    """Returns a size as a number, or as a Python expression of the names of its symbols."""
    if isinstance(size, int):
        return size
    expression = size.node.expr  # with what the capture knows by now: a symbol may be a number
    return int(expression) if expression.is_number else _python(expression)


def is_same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape for all sizes that a capture allows; it binds none."""
    return [*map(size_expression, a.shape)] == [*map(size_expression, b.shape)]


def without_new_guards(graph: Graph) -> AbstractContextManager:
    """While active, a question about a symbolic size of the graph does not bind the capture to the answer."""
    mode = fake_mode_of(graph)
    environment = mode.shape_env if mode else None
    return environment.suppress_guards() if environment else nullcontext()


def size_conditions(sizes: Iterable[int | torch.SymInt], ranges: Mapping[Any, Any]) -> list[str]:
    """Returns what a capture assumes of the sizes of its inputs, as Python expressions of their symbols.

    Args:
        sizes: The sizes of all inputs.
        ranges: The bounds of symbols, see ``ExportedProgram.range_constraints``.
    """
    symbolic = [size.node for size in sizes if isinstance(size, torch.SymInt)]
    if not symbolic:
        return []
    environment, names = symbolic[0].shape_env, set().union(*(node.expr.free_symbols for node in symbolic))
    assumed = [environment.replace(guard.expr) for guard in environment.guards]
    found = [_python(expression) for expression in assumed if expression.free_symbols <= names]
    for symbol in names & ranges.keys():
        lower, upper = ranges[symbol].lower, ranges[symbol].upper
        found += [f"{lower} <= {symbol}"] if lower.is_Integer else []
        found += [f"{symbol} <= {upper}"] if upper.is_Integer else []
    return [text for text in dict.fromkeys(found) if text != "True"]


def _python(expression: Any) -> str:
    from torch.utils._sympy.printers import PythonPrinter

    return PythonPrinter().doprint(expression)


def storage_key(value: torch.Tensor) -> int | None:
    """Returns a number that two (fake) tensors share if and only if they share memory."""
    value = without_transforms(value)
    if value.layout != torch.strided:
        return None
    return value.untyped_storage()._cdata


def set_calling_convention(graph_module: GraphModule, program: ExportedProgram) -> None:
    """Gives an unlifted graph the source model's arguments and output type."""
    signature = program.module_call_graph[0].signature
    in_spec, out_spec = signature.in_spec, signature.out_spec
    positional, keyword = in_spec.children()
    names = getattr(signature, "forward_arg_names", None)
    names = names or [*(f"arg_{i}" for i in range(positional.num_children)), *keyword.context]
    graph_module.graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(list(names), in_spec, out_spec)))


def calling_convention(graph: Graph) -> CodeGen:
    """Returns what writes the head and the end of a graph's code; ``Graph.set_codegen`` takes it."""
    return graph._codegen


def pytree_info(graph: Graph) -> _PyTreeInfo | None:
    """Returns the structure of a graph's arguments and results; None if they are flat tensors."""
    codegen = graph._codegen
    return codegen.pytree_info if isinstance(codegen, _PyTreeCodeGen) else None


def flat_inputs(graph_module: GraphModule, args: tuple, kwargs: dict[str, Any] | None = None) -> list[Any]:
    """Returns the values of a graph's placeholders for a call with these arguments."""
    info = pytree_info(graph_module.graph)
    if info is None:
        return list(args)
    return tree_flatten_spec((tuple(args), dict(kwargs or {})), info.in_spec)


def wrap_grad_modes(graph_module: GraphModule) -> GraphModule:
    """Returns a graph module with a sub-graph for each region between ``_set_grad_enabled`` calls.

    ``torch.export`` writes ``with torch.no_grad()`` in this form, and decomposition expects it.
    """
    from torch._export.passes.replace_set_grad_with_hop_pass import replace_set_grad_with_hop_pass

    return replace_set_grad_with_hop_pass(graph_module, None)[0]


def whole_grad_regions(
    is_here: Callable[[], bool], lose: Callable[[str], None]
) -> AbstractContextManager[None]:
    """Makes ``torch.export`` keep regions of a grad mode inside ``torch.autocast``, which it drops.

    It takes a part of the graph for such a region only if the part starts with the change of the mode. Inside
    autocast, the call that enters autocast comes first. Sub-graphs come first too, and torch cannot keep such
    a region (tried on torch 2.11, 2.13 and 2.14).

    Args:
        is_here: Whether the code inside runs, and not another thread.
        lose: Called with a description of each region that is lost.
    """
    from torch._export.passes import replace_set_grad_with_hop_pass as regions

    def is_region(node: Node, omit_if_same_with_ambient: bool = False) -> bool:
        if node.op != "call_module":
            return False
        body = getattr(node.graph.owning_module, str(node.target)).graph
        switches = body.find_nodes(op="call_function", target=SET_GRAD_ENABLED)
        if not switches or (omit_if_same_with_ambient and switches[0].args[0] == torch.is_grad_enabled()):
            return False
        sub_graphs = body.find_nodes(op="get_attr")
        if sub_graphs and is_here():
            ops = {str(user.target) for reference in sub_graphs for user in reference.users}
            lose(f"the grad mode of the region around {', '.join(sorted(ops))}")
        return not sub_graphs

    return replaced(regions, "_is_set_grad_enabled_sub_mod", is_region)


def rename(node: Node, name: str) -> None:
    """Gives a node a name; a number follows if the graph has such a name already."""
    node._rename(name)


def all_op_names() -> set[str]:
    """Returns every registered op as ``namespace.op`` or ``namespace.op.overload``."""
    return {name.replace("::", ".") for name in torch._C._dispatch_get_all_op_names()}


def is_untraced_generator(error: BaseException) -> bool:
    """Whether a trace failed at an op that draws from a ``torch.Generator``.

    torch 2.11 fails there. Later versions put the generator into the graph (tried on torch 2.13 and 2.14).
    """
    return isinstance(error, NotImplementedError) and str(error).startswith(
        f"argument of type: {torch.Generator}"
    )


def is_read_of_a_value(error: BaseException) -> bool:
    """Whether a trace failed because Python asked a tensor for its value, which it does not have there."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # imports sympy

    return isinstance(error, (GuardOnDataDependentSymNode, DataDependentOutputException))


def outside_tracing() -> AbstractContextManager[object]:
    """Runs the code inside for real in the middle of ``make_fx``, without nodes."""
    return disable_proxy_modes_tracing()


def graph_being_traced() -> Graph:
    """Returns the graph that ``make_fx`` makes now in this thread."""
    mode = get_proxy_mode()
    assert mode is not None, "only inside make_fx"
    return mode.tracer.graph  # type: ignore[union-attr]
