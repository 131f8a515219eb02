"""`Finding`: the first bad value that `ampgraph.check_numerics` found, and the rules that fix it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"
# As many names and rules as a text shows.
_SHOWN = 6


class Range(NamedTuple):
    """One tensor that a node reads: its name, dtype, and least and largest finite value."""

    name: str
    dtype: str
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} [{self.least:.3g}, {self.most:.3g}]"


@dataclass(frozen=True)
class Finding:
    """The first node with a value that is not finite, and its fix. ``str()`` has at most ten lines.

    Attributes:
        node: The node of `AmpModule.graph_module`; ``""`` if the loss itself is not finite.
        module: Path of the module that the node is in.
        op: Its op, such as ``"aten.mul.Tensor"``.
        line: ``file:line`` of the model's code.
        direction: ``"forward"``, or ``"backward"`` if the gradients that the node produces are not finite.
        reason: The cause, with the numbers.
        inputs: The tensors that the node reads, with their ranges.
        remedy: Tested rules for ``Policy(rules=...)`` that fix it, including the policy's present rules.
            Empty if there is nothing to fix (`settles_at`), if no rule helps (`in_float32`), or if none was
            found.
        pinned: The nodes that `remedy` keeps in float32.
        modules: The modules that it keeps in float32: for ops in branches of ``torch.cond`` and in loops.
        least_scale: For a gradient, the loss scale of the test of the remedy; else None.
        settles_at: The loss scale that a dynamic scale reaches without a change of the policy. There the
            gradients are finite, and most of them stay nonzero. None if a lower scale is not enough.
        in_float32: Whether the float32 model has the same fault. No policy fixes that.
    """

    node: str
    module: str
    op: str
    line: str
    direction: str
    reason: str
    inputs: tuple[Range, ...] = ()
    remedy: Mapping[str, str] = field(default_factory=dict)
    pinned: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    least_scale: float | None = None
    settles_at: float | None = None
    in_float32: bool = False

    def __str__(self) -> str:
        name = f"{self.node} ({self.op})" if self.node else "the loss"
        lines = [f"{self.direction}: {name} is not finite: {self.reason}"]
        lines += [f"  module: {self.module}"] if self.module else []
        lines += [f"  line:   {self.line}"] if self.line else []
        if self.inputs:
            lines.append(f"  reads:  {_listed([str(one) for one in self.inputs])}")
        return "\n".join([*lines, *self._advice()])

    def _advice(self) -> list[str]:
        if self.in_float32:
            return ["  remedy: none; the float32 model is not finite there either"]
        if self.settles_at is not None:
            return [f"  nothing to fix: the loss scale falls to {self.settles_at:g}, and most gradients stay"]
        if not self.remedy:
            return [
                "  remedy: none found; a guard, a cast of the model's own or a kernel may stand above rules"
            ]
        patterns = [*(f"node:{name}" for name in self.pinned), *self.modules]
        counts = [_count(self.pinned, "node")] if self.pinned else []
        counts += [_count(self.modules, "module")] if self.modules else []
        rules = _listed([f"{pattern!r}: 'fp32'" for pattern in patterns])
        return [
            f"  remedy: {' and '.join(counts)} in float32, tried: {rules}",
            "  to use it: ampgraph.convert(model, args, policy=amp.policy.replace(rules=finding.remedy))",
        ]

    def to_dict(self) -> dict[str, object]:
        """Returns plain dicts, lists, strings and numbers."""
        lists = {"pinned": list(self.pinned), "modules": list(self.modules)}
        inputs = [one._asdict() for one in self.inputs]
        return {**vars(self), "inputs": inputs, "remedy": dict(self.remedy), **lists}


def _count(items: tuple[str, ...], what: str) -> str:
    return f"{len(items)} {what}{'s' * (len(items) != 1)}"


def _listed(items: list[str]) -> str:
    rest = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
