"""Op lists: the operators that run low, run in float32, follow their inputs, or only move values.

``OpLists`` is an immutable value. Start from a preset and move single ops:

    ops = OpLists.default().with_black("aten.gelu").with_white("mylib.fused_mlp")

Write ``"aten.softmax"`` for every overload or ``"aten.softmax.int"`` for one overload, which overrides its
packet. ``torch.ops`` objects work too. An op in no list has no class and runs in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cache, partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import dtype, float16
from torch.fx import Node

from ampgraph.errors import PolicyError, did_you_mean
from ampgraph.ops import default_lists, peer_lists
from ampgraph.ops.default_lists import OpGroup
from ampgraph.ops.kernels import lookup_names
from ampgraph.ops.op_versions import is_in_torch, where_it_is
from ampgraph.ops.predicates import PREDICATES

from .._compat import OpOverload, OpOverloadPacket, all_op_names

OpName: TypeAlias = "str | OpOverload | OpOverloadPacket"


class OpClass(str, Enum):
    """The class of an op in the op lists.

    Attributes:
        WHITE: Runs in the low dtype.
        BLACK: Runs in float32.
        GRAY: Arithmetic that is safe in the low dtype if its inputs are low.
        CLEAR: Moves or selects values, exact in either dtype.
    """

    WHITE = "white"
    BLACK = "black"
    GRAY = "gray"
    CLEAR = "clear"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True)
class OpRule:
    """The row of one op.

    Attributes:
        cls: The class.
        reason: The reason, in a few words.
        when: Name of a predicate on the node (see ``op_predicates``), or an empty string.
        otherwise: The class if the predicate is false.
    """

    cls: OpClass
    reason: str
    when: str = ""
    otherwise: OpClass | None = None


class OpLists:
    """An immutable assignment of operators to classes.

    Args:
        white: Ops that run in the low dtype.
        black: Ops that run in float32.
        gray: Ops that follow their inputs.
        clear: Ops that only move or select values.

    Attributes:
        preset_name: The preset that it started from, see `preset`; ``""`` without a preset.

    Raises:
        PolicyError: An op does not exist, or is given in two classes.
    """

    __slots__ = ("_cache", "_expression", "_rules", "preset_name")

    _rules: Mapping[str, OpRule]
    _expression: str
    _cache: dict[OpOverload, OpRule | None]
    preset_name: str

    def __init__(
        self,
        *,
        white: Iterable[OpName] = (),
        black: Iterable[OpName] = (),
        gray: Iterable[OpName] = (),
        clear: Iterable[OpName] = (),
    ) -> None:
        given = {OpClass.WHITE: white, OpClass.BLACK: black, OpClass.GRAY: gray, OpClass.CLEAR: clear}
        for cls, ops in given.items():
            if isinstance(ops, str) or not isinstance(ops, Iterable):
                raise PolicyError(f"{cls} is a list of ops; write [{ops!r}].")
        names = {cls: _checked_names(ops) for cls, ops in given.items()}
        rules = _merge((name, OpRule(cls, f"listed {cls}")) for cls, ops in names.items() for name in ops)
        arguments = ", ".join(f"{cls}={ops!r}" for cls, ops in names.items() if ops)
        self._fill(rules, f"OpLists({arguments})")

    def _fill(self, rules: Mapping[str, OpRule], expression: str, preset_name: str = "") -> None:
        object.__setattr__(self, "preset_name", preset_name)
        object.__setattr__(self, "_rules", MappingProxyType(dict(rules)))
        object.__setattr__(self, "_expression", expression)
        object.__setattr__(self, "_cache", {})

    # -- presets ---------------------------------------------------------------------------------------------

    @classmethod
    @cache
    def default(cls) -> OpLists:
        """The recommended lists: torch's, corrected for kernels that are safer or less safe."""
        return _make(_from_rows(default_lists.DEFAULT), "OpLists.default()", "default")

    @classmethod
    @cache
    def torch(cls) -> OpLists:
        """Exactly the lists of torch's CUDA autocast; unlisted ops follow their inputs."""
        rules = _with_unlisted(peer_lists.TORCH, peer_lists.TORCH_UNLISTED)
        return _make(rules, "OpLists.torch()", "torch")

    @classmethod
    def paddle(cls, level: str = "O1") -> OpLists:
        """Paddle's static AMP lists.

        Args:
            level: ``"OD"`` (white list only), ``"O1"``, or ``"O2"``, where only a few ops stay float32.

        Raises:
            PolicyError: Paddle has no such level.
        """
        if level not in _PADDLE_LEVELS:
            known = ", ".join(map(repr, _PADDLE_LEVELS))
            raise PolicyError(f"paddle has no list level {level!r}; the levels are {known}.")
        return _make(_PADDLE_LEVELS[level](), f"OpLists.paddle({level!r})", f"paddle:{level}")

    @classmethod
    @cache
    def mindspore(cls) -> OpLists:
        """MindSpore's lists for level ``auto``; what they do not name follows its inputs."""
        rules = _with_unlisted(peer_lists.MINDSPORE, peer_lists.MINDSPORE_UNLISTED)
        return _make(rules, "OpLists.mindspore()", "mindspore")

    @classmethod
    @cache
    def oneflow(cls) -> OpLists:
        """OneFlow's ``nn.Graph`` lists; what they do not name stays float32."""
        return _make(_from_rows(peer_lists.ONEFLOW), "OpLists.oneflow()", "oneflow")

    @classmethod
    def preset(cls, name: str) -> OpLists:
        """Returns a preset by its name.

        Args:
            name: ``"default"``, ``"torch"``, ``"paddle"`` (or ``"paddle:OD"``, ``"paddle:O1"``,
                ``"paddle:O2"``), ``"mindspore"`` or ``"oneflow"``.

        Raises:
            PolicyError: There is no such preset.
        """
        if not isinstance(name, str) or name not in PRESETS:
            legal, hint = ", ".join(PRESETS), did_you_mean(str(name), PRESETS)
            raise PolicyError(f"there are no op lists {name!r}; legal: {legal}.{hint}")
        return PRESETS[name]()

    # -- derived values --------------------------------------------------------------------------------------

    def with_white(self, *ops: OpName) -> OpLists:
        """Returns new lists with ``ops`` moved to white."""
        return self._moved(OpClass.WHITE, ops)

    def with_black(self, *ops: OpName) -> OpLists:
        """Returns new lists with ``ops`` moved to black."""
        return self._moved(OpClass.BLACK, ops)

    def with_gray(self, *ops: OpName) -> OpLists:
        """Returns new lists with ``ops`` moved to gray."""
        return self._moved(OpClass.GRAY, ops)

    def with_clear(self, *ops: OpName) -> OpLists:
        """Returns new lists with ``ops`` moved to clear."""
        return self._moved(OpClass.CLEAR, ops)

    def _moved(self, cls: OpClass, ops: tuple[OpName, ...]) -> OpLists:
        names = _checked_names(ops)
        if not names:
            return self
        # Moving a packet moves all its overloads: their own rows go.
        kept = {name: rule for name, rule in self._rules.items() if _packet(name) not in names}
        kept.update((name, OpRule(cls, f"listed {cls}")) for name in names)
        return _make(kept, f"{self._expression}.with_{cls}({', '.join(map(repr, names))})", self.preset_name)

    # -- reading ---------------------------------------------------------------------------------------------

    def lookup(self, target: OpOverload) -> OpRule | None:
        """Returns the rule for an op: its overload's, its packet's, or its functional form's."""
        if target not in self._cache:
            found = (self._rules.get(name) for name in lookup_names(target))
            self._cache[target] = next((rule for rule in found if rule), None)
        return self._cache[target]

    def classify(self, node: Node, low_dtype: dtype = float16) -> tuple[OpClass | None, str]:
        """Returns the class of a node and the reason.

        Args:
            node: A node of an ATen graph.
            low_dtype: The low dtype, for predicates that ask what fits in it.

        Returns:
            The class, or None for a node that no list names, and why.
        """
        if not isinstance(node.target, OpOverload):
            return None, "not an operator"
        rule = self.lookup(node.target)
        if rule is None:
            return None, "in no op list"
        objection = PREDICATES[rule.when](node, low_dtype) if rule.when else None
        if objection is None:
            return rule.cls, rule.reason
        return rule.otherwise, objection

    def rules(self) -> Mapping[str, OpRule]:
        """Returns every row, by op name, read-only."""
        return self._rules

    # -- being a value ---------------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"OpLists is immutable: cannot set {name!r}; use with_white, with_black, ...")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"OpLists is immutable: cannot delete {name!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OpLists):
            return NotImplemented
        return self._rules == other._rules

    def __hash__(self) -> int:
        return hash(frozenset(self._rules.items()))

    def __repr__(self) -> str:
        return self._expression

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (dict(self._rules), self._expression, self.preset_name)


PRESETS: Mapping[str, Callable[[], OpLists]] = MappingProxyType(
    {
        "default": OpLists.default,
        "torch": OpLists.torch,
        "paddle": OpLists.paddle,
        **{f"paddle:{level}": partial(OpLists.paddle, level) for level in ("OD", "O1", "O2")},
        "mindspore": OpLists.mindspore,
        "oneflow": OpLists.oneflow,
    }
)


def _make(rules: Mapping[str, OpRule], expression: str, preset_name: str = "") -> OpLists:
    """Builds lists from rules that are known to be valid."""
    made = object.__new__(OpLists)
    made._fill(rules, expression, preset_name)
    return made


def _from_rows(rows: Iterable[OpGroup]) -> dict[str, OpRule]:
    return _merge(
        (f"aten.{name}", _rule(row)) for row in rows for name in row.ops.split() if is_in_torch(name)
    )


def _with_unlisted(rows: Iterable[OpGroup], reason: str) -> dict[str, OpRule]:
    """Returns the rows plus every other op we know: clear if it only moves values, else gray."""
    rules = _from_rows(rows)
    for name, rule in _from_rows(default_lists.DEFAULT).items():
        if _packet(name) in rules:
            continue
        cls = OpClass.CLEAR if rule.cls is OpClass.CLEAR else OpClass.GRAY
        rules.setdefault(name, OpRule(cls, reason))
    return rules


_PADDLE_LEVELS: Mapping[str, Callable[[], dict[str, OpRule]]] = {
    "OD": lambda: _from_rows(peer_lists.PADDLE_OD),
    "O1": lambda: _from_rows(peer_lists.PADDLE_O1),
    "O2": lambda: _with_unlisted(peer_lists.PADDLE_O2, peer_lists.PADDLE_O2_UNLISTED),
}


def _rule(row: OpGroup) -> OpRule:
    otherwise = OpClass(row.otherwise) if row.otherwise else None
    return OpRule(OpClass(row.cls), row.reason, row.when, otherwise)


def _merge(pairs: Iterable[tuple[str, OpRule]]) -> dict[str, OpRule]:
    rules: dict[str, OpRule] = {}
    for name, rule in pairs:
        if name in rules:
            raise PolicyError(f"op {name!r} is in two classes: {rules[name].cls} and {rule.cls}; keep one.")
        rules[name] = rule
    return rules


def _packet(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _checked_names(ops: Iterable[OpName]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(_checked_name, ops)))


def _checked_name(op: OpName) -> str:
    """Returns ``namespace.op`` or ``namespace.op.overload``; raises PolicyError if torch has no such op."""
    if isinstance(op, (OpOverload, OpOverloadPacket)):
        return str(op).replace("::", ".")
    if not isinstance(op, str):
        raise PolicyError(f"an op is a string such as 'aten.softmax' or a torch.ops object, not {op!r}.")
    name = op.replace("::", ".")
    if _exists(name):
        return name
    aten = f"aten.{name.rpartition('.')[2]}"  # of torch.nn.functional.gelu, torch.gelu
    near = f" Did you mean {aten!r}?" if _exists(aten) else did_you_mean(name, _known_names())
    elsewhere = where_it_is(name.removeprefix("aten.")) if name.startswith("aten.") else ""
    raise PolicyError(f"torch has no op {op!r}{elsewhere and f' ({elsewhere} has)'}.{near}")


def _exists(name: str) -> bool:
    namespace, _, rest = name.partition(".")
    operator, _, overload = rest.partition(".")
    if not namespace or not operator:
        return False
    packet = getattr(getattr(torch.ops, namespace), operator, None)
    if not isinstance(packet, OpOverloadPacket):
        return False
    return not overload or overload in packet.overloads()


def _known_names() -> set[str]:
    names = all_op_names()
    return names | set(map(_packet, names))
