"""The attributes of one node, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import GraphModule, Node

from ..guards import guard_of
from ..marks import BoundaryMark, CastMark, Mark, mark_of
from ..origin import clean_path, module_stack
from ..plan import Plan
from ..report import graph_view as view

LOW_DTYPES = ("float16", "bfloat16")
_CASTS = ("aten._to_copy", "aten.to.dtype", "prims.convert_element_type")
_GUARDS = {"fp16": "fp16_guard", "fp32": "fp32_guard", "lists": "autocast"}


def node_attributes(node: Node, plan: Plan | None) -> dict[str, Any]:
    """Returns a node's attributes as `to_networkx` documents them, except its scope.

    Args:
        node: A node with ``meta["val"]``.
        plan: The plan of its graph, or None for a graph that ampgraph has not planned.
    """
    kind = _kind(node, plan)
    decision = plan.decisions.get(node.name) if plan else None
    meta: Mapping[str, Any] = (mark_of(node, Mark) or {}) if kind in ("cast", "clamp") else {}
    returns = kind != "output"
    dtype = view.dtype_of(node) if returns else ""
    return {
        "label": _parameter_path(node) or view.label_of(node),
        "kind": kind,
        "op": view.op_name(node),
        "module": next(iter(reversed(modules_around(node, {}))), ""),
        "scope": "",
        "guard": _GUARDS.get(guard_of(node) or "", ""),
        "boundary": boundary_role(node),
        "dtype": dtype,
        "shape": view.shape_of(node) if returns else "",
        "type": view.type_of(node) if returns else "",
        "precision": _precision(dtype, plan),
        "op_class": (decision.op_class or "") if decision else "",
        "by": meta.get("inserted") or meta.get("clamped") or (decision.by if decision else ""),
        "reason": meta.get("reason") or (decision.reason if decision else ""),
        "bytes": view.cast_bytes(node) if kind == "cast" else 0,
        "is_parameter": _reads_parameter(node) if kind == "cast" else kind == "parameter",
        "line": view.user_line(node),
    }


def called_modules(graph_module: GraphModule) -> dict[str, tuple[str, ...]]:
    """Returns the enclosing calls of every module in the graph, outermost first."""
    called: dict[str, tuple[str, ...]] = {}
    for node in graph_module.graph.nodes:
        paths = module_stack(node)
        for depth, path in enumerate(paths):
            called.setdefault(path, paths[: depth + 1])
    return called


def modules_around(node: Node, called: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the paths of the modules around a node, or around a parameter's owner, outermost first."""
    parameter = _parameter_path(node)
    if not parameter:
        return module_stack(node)
    owner = parameter.rpartition(".")[0]
    if not owner or owner in called:
        return called.get(owner, ())
    # A parameter whose module is never called itself (nn.MultiheadAttention's out_proj).
    around = max((path for path in called if owner.startswith(path + ".")), key=len, default="")
    return (*called.get(around, ()), owner)


def boundary_role(node: Node) -> str:
    """Returns a node's role in the loss scaling, ``"shadow"`` for a low copy of a parameter, or ``""``."""
    mark = mark_of(node, BoundaryMark)
    return mark.boundary if mark else ""


def _kind(node: Node, plan: Plan | None) -> str:
    kind = view.kind_of(node)
    if plan is None and kind == "op" and _changes_dtype(node):
        return "cast"
    if kind == "graph" and not isinstance(body_of(node), GraphModule):
        return "parameter"  # a tensor without a fake value, such as the loss scale
    return "parameter" if kind == "input" and _parameter_path(node) else kind


def body_of(node: Node) -> object:
    """Returns the value of the attribute that a node reads: a higher-order op reads the body that it runs."""
    return getattr(node.graph.owning_module, str(node.target), None)


def _changes_dtype(node: Node) -> bool:
    """Whether the node is a cast from one floating dtype to another."""
    if view.op_name(node) not in _CASTS or not isinstance(node.args[0], Node):
        return False
    dtypes = {value.dtype for n in (node, node.args[0]) for value in view.values(n)}
    return len(dtypes) == 2 and all(dtype.is_floating_point for dtype in dtypes)


def _parameter_path(node: Node) -> str:
    """Returns the path of the parameter, buffer or constant behind the node, or ``""``."""
    if node.op == "get_attr":
        return clean_path(str(node.target)) if not isinstance(body_of(node), GraphModule) else ""
    # AOTAutograd describes its inputs: ParamAOTInput(target="layer1.weight").
    described = node.meta.get("desc") if node.op == "placeholder" else None
    return clean_path(str(getattr(described, "target", "")))


def _precision(dtype: str, plan: Plan | None) -> str:
    low = (view.dtype_name(plan.low_dtype),) if plan else LOW_DTYPES
    dtypes = dtype.split(",")
    if not set(low).isdisjoint(dtypes):
        return "low"
    return "fp32" if "float32" in dtypes else "other"


def _reads_parameter(cast: Node) -> bool:
    if (mark := mark_of(cast, CastMark)) is not None:
        return mark.is_parameter
    source = cast.args[0]
    return isinstance(source, Node) and _kind(source, None) == "parameter"
