"""Warns of ops that a policy lists by a name that the graphs spell in another way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.fx import GraphModule

from .._compat import OpOverload
from ..errors import warn_user
from ..ops.kernels import lookup_names
from ..policy.policy import Policy


def warn_of_absent_ops(model: str, graphs: Iterable[GraphModule], policy: Policy) -> None:
    """Warns of ops that the user listed and no graph has, if the graphs have their usual form.

    Captured graphs have ``aten.softmax.int`` where later ones have ``aten._softmax``, and ``aten.add`` for
    most ``aten.add_``.
    """
    listed = {name: rule for name, rule in policy.ops.rules().items() if rule.reason == f"listed {rule.cls}"}
    if not listed or policy.level == "O0":
        return
    held = set(_names(graphs))
    for name, rule in listed.items():
        usual = next((form for form in _usual_forms(name) if form in held), None)
        others = (other.split(".")[:2] for other in listed if other != name)
        if name in held or usual is None or usual.split(".") in others:
            continue
        warn_user(
            f"{model}: the policy lists {name!r} as {rule.cls}, and the model's graph has no such op. It has "
            f"{usual!r}: list that one."
        )


def _names(graphs: Iterable[GraphModule]) -> Iterator[str]:
    parts = [part for graph in graphs for part in graph.modules() if isinstance(part, GraphModule)]
    for node in (node for part in parts for node in part.graph.nodes):
        if isinstance(node.target, OpOverload):
            yield from lookup_names(node.target)


def _usual_forms(name: str) -> list[str]:
    """Returns an op without the marks of other forms: ``aten.add`` for ``aten.add_`` and ``aten.add.out``."""
    namespace, op, *overload = name.split(".")
    plain = op if op.startswith("__") else op.strip("_")
    forms = [f"{namespace}.{form}" for form in (plain, plain.removeprefix("native_"))]
    is_out = bool(overload) and overload[0].endswith("out")
    return [form for form in forms if is_out or form != f"{namespace}.{op}"]
