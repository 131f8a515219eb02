"""The rules that decide a node's dtype: the tuple `PRECEDENCE`, tried in order, highest first.

Two facts take precedence over every preference: an op without a low-precision kernel, and a value that the
low dtype cannot hold. Guards, rules, hazards and op lists follow. `PlaceCasts` chooses the dtype of nodes
that the last rule leaves free.

A rule may assume that no rule above it applied: below "a call that is not an ATen op", each target is an ATen
op.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch.fx import GraphModule, Node

from ampgraph._compat import OpOverload
from ampgraph.guards import FP16, FP32, LISTS, guard_of, is_of_guarded_model
from ampgraph.ops import kernels
from ampgraph.ops.lists import OpClass
from ampgraph.origin import module_paths_of
from ampgraph.policy.policy import Policy
from ampgraph.policy.rules import RuleBook

from .analysis.alias import SOURCES
from .analysis.arguments import argument
from .analysis.facts import NodeFacts, has_kernel
from .analysis.graph_walk import is_zero_dim
from .analysis.precision import Precision
from .analysis.problem import Hazard, Variable


@dataclass
class Case:
    """The inputs of the rules besides the node and its facts; one for each graph.

    Attributes:
        policy: Level, lists and guards; ``use_fp16_guard`` is settled (see `settle_guard_scope`).
        rules: The policy's rules, for this model.
        ranges: For each op that the low dtype's range keeps in float32, the reason.
        flips: Labels by node name, for what-if questions.
        hazards: The result of `find_hazards`; available after all rules above hazards.
    """

    policy: Policy
    rules: RuleBook
    ranges: Mapping[Node, str] = field(default_factory=dict)
    flips: Mapping[str, Precision] = field(default_factory=dict)
    hazards: Mapping[Node, Hazard] = field(default_factory=dict)


Decide = Callable[[Node, NodeFacts, Case], "Variable | None"]


@dataclass(frozen=True)
class Rule:
    """One line of the precedence.

    Attributes:
        name: The nodes that it decides, in the words of the table in the documentation.
        by: The `Decision.by` of these nodes.
        dtype: The dtype of these nodes, for the table.
        decide: Returns the variable of a node, or None if the rule does not apply.
    """

    name: str
    by: str
    dtype: str
    decide: Decide


def settle_by(rules: tuple[Rule, ...], node: Node, fact: NodeFacts, case: Case) -> Variable | None:
    """Returns the variable of the first of ``rules`` that applies; None if no rule applies."""
    for rule in rules:
        if (variable := rule.decide(node, fact, case)) is not None:
            return variable
    return None


def settle_guard_scope(graph_module: GraphModule, policy: Policy) -> Policy:
    """Settles ``use_fp16_guard=None`` for a graph and its sub-graphs together."""
    if policy.use_fp16_guard is not None:
        return policy
    return policy.replace(use_fp16_guard=is_of_guarded_model(graph_module))


def _keep(name: str, by: str, reason: str, applies: Callable[[Node, NodeFacts, Case], object]) -> Rule:
    """Returns a rule that keeps the source's dtype if ``applies`` holds."""

    def decide(node: Node, fact: NodeFacts, case: Case) -> Variable | None:
        return Variable(_source(fact, case), by, reason) if applies(node, fact, case) else None

    return Rule(name, by, "the source's", decide)


Why = Callable[[Node, NodeFacts, Case], str | None]


def _pin(precision: Precision, dtype: str, name: str, by: str, why: Why) -> Rule:
    """Returns a rule that pins a precision if ``why`` returns a reason."""

    def decide(node: Node, fact: NodeFacts, case: Case) -> Variable | None:
        reason = why(node, fact, case)
        return Variable(precision, by, reason) if reason else None

    return Rule(name, by, dtype, decide)


_fp32 = partial(_pin, Precision.FP32, "float32")
_low = partial(_pin, Precision.LOW, "low")


def _source(fact: NodeFacts, case: Case) -> Precision:
    return Precision.of(fact.dtype, case.policy.low_dtype)


def _of_source(node: Node, fact: NodeFacts, case: Case) -> Variable | None:
    if node.op not in SOURCES:
        return None
    return Variable(_source(fact, case), "source", f"{node.op} of the source model")


def _sparse_gradient(node: Node, fact: NodeFacts, case: Case) -> object:
    sparse = kernels.sparse_gradient_arg(node.target)  # type: ignore[arg-type]
    return sparse and argument(node, sparse)


def _flip(node: Node, fact: NodeFacts, case: Case) -> Variable | None:
    asked = case.flips.get(node.name)
    return None if asked is None else Variable(asked, "what if", "flipped, to see what changes")


def _fp16_guard(node: Node, fact: NodeFacts, case: Case) -> str | None:
    return "inside fp16_guard" if case.policy.use_fp16_guard and guard_of(node) == FP16 else None


def _outside_guards(node: Node, fact: NodeFacts, case: Case) -> str | None:
    return "outside fp16_guard" if case.policy.use_fp16_guard and guard_of(node) != LISTS else None


def _by_rules(node: Node, fact: NodeFacts, case: Case) -> Variable | None:
    match = case.rules.match(node.name, module_paths_of(node))
    if match is None:
        return None
    reason = f"rule {match.pattern!r}: {match.value!r} matches {match.name!r}"
    return Variable(Precision(match.value), "rule", reason)


def _by_hazard(node: Node, fact: NodeFacts, case: Case) -> Variable | None:
    """Keeps an exact node in the source's dtype, unless the lists do so anyway."""
    hazard = case.hazards.get(node)
    if hazard is None:
        return None
    source, listed = _source(fact, case), settle_by(LISTED, node, fact, case)
    assert listed is not None
    follows = listed.follows and source is Precision.FP32 and not hazard.fed_low
    if listed.pinned is source or follows:
        return None
    return Variable(source, "hazard", hazard.reason, because=hazard.because)


def _white(node: Node, fact: NodeFacts, case: Case) -> str | None:
    return f"white{_why(fact)}" if fact.op_class is OpClass.WHITE else None


def _black_at_o3(node: Node, fact: NodeFacts, case: Case) -> str | None:
    low = fact.op_class is OpClass.BLACK and case.policy.level == "O3"
    return "O3 runs everything low" if low else None


def _black(node: Node, fact: NodeFacts, case: Case) -> str | None:
    return f"black{_why(fact)}" if fact.op_class is OpClass.BLACK else None


def _why(fact: NodeFacts) -> str:
    return f": {fact.class_reason}" if fact.class_reason else ""


def _free(node: Node, fact: NodeFacts, case: Case) -> Variable | None:
    assert fact.op_class is not None
    # A number of fewer bits saves no bytes. A product of two vectors would widen the one for the other.
    is_number = is_zero_dim(node) and sum(not is_zero_dim(o.tensor) for o in fact.operands) <= 1
    follows = case.policy.level == "O1" or is_number
    return Variable(None, "placement", fact.op_class.value, follows=follows)


ABOVE_HAZARDS = (
    _keep("every node, at level O0", "source", "O0 changes nothing", lambda n, f, c: c.policy.level == "O0"),
    Rule("an input, a parameter, a buffer or a constant", "source", "the source's", _of_source),
    _keep(
        "an op whose dtype the model's code names (a cast)",
        "user cast",
        "the source names this dtype",
        lambda n, f, c: f.fixed_dtype is not None,
    ),
    _keep(
        "memory that is written in place",
        "alias",
        "its memory is written in place",
        lambda n, f, c: f.mutated,
    ),
    _keep(
        "memory that `as_strided` reads beyond a view",
        "alias",
        "as_strided reads its memory beyond a view of it",
        lambda n, f, c: f.reads_whole_storage,
    ),
    _keep(
        "a view of an input, which the model returns",
        "alias",
        "a view of the caller's own memory, returned",
        lambda n, f, c: f.returned_input_view,
    ),
    _keep(
        "a result whose dtype does not depend on the op's precision",
        "kernel",
        "this result has one dtype at any precision of the op",
        lambda n, f, c: n.target is operator.getitem,
    ),
    _keep(
        "a call that is not an ATen op",
        "kernel",
        "not an ATen op",
        lambda n, f, c: not isinstance(n.target, OpOverload),
    ),
    _keep(
        "an op that reads a sparse or nested tensor",
        "kernel",
        "reads a sparse or nested tensor",
        lambda n, f, c: f.reads_sparse,
    ),
    _keep(
        "an op that reads the other low dtype",
        "kernel",
        "reads another low dtype; the two promote to float32",
        lambda n, f, c: f.reads_other_low,
    ),
    _keep(
        "an op that FakeTensor cannot run again",
        "kernel",
        "FakeTensor cannot run it again in other dtypes",
        lambda n, f, c: kernels.is_opaque(n.target),
    ),
    _fp32(
        "an op without a low-precision kernel",
        "kernel",
        lambda n, f, c: None if has_kernel(n, c.policy.low_dtype) else "no low-precision kernel",
    ),
    _fp32("an op that fails or widens with low operands", "kernel", lambda n, f, c: f.refuses_low),
    _keep(
        "an op whose weight gets a sparse gradient",
        "kernel",
        "the gradient of its weight is sparse",
        _sparse_gradient,
    ),
    _fp32("an op with a value that the low dtype cannot hold", "range", lambda n, f, c: c.ranges.get(n)),
    _keep(
        "an op that reads no floating-point input",
        "source",
        "makes its values from no floating input",
        lambda n, f, c: not any(s.follow for s in f.operands),
    ),
    Rule("a node that `Explanation.flip` asks about", "what if", "the other one", _flip),
    _fp32(
        "inside `fp32_guard`, or in a disabled autocast region",
        "guard",
        lambda n, f, c: "inside fp32_guard (or a disabled autocast region)" if guard_of(n) == FP32 else None,
    ),
    _low("inside `fp16_guard`", "guard", _fp16_guard),
    _fp32("outside every `fp16_guard`, in a model that has one", "guard", _outside_guards),
    Rule(
        "a node that a rule names, by its name or by its innermost module",
        "rule",
        "the rule's",
        _by_rules,
    ),
)

HAZARD = Rule(
    "positions, arithmetic on inputs, angles, decisions and results that rounding would spoil, targets of "
    "losses, state that a graph keeps for its next call, values that may leave the low range; at O2, ops on "
    "losses and what leads from black ops into ops that magnify a rounding; at O3, black ops on what the "
    "model's code casts to float32",
    "hazard",
    "the source's",
    _by_hazard,
)

LISTED = (
    _fp32("an op in no list", "list", lambda n, f, c: "in no op list" if f.op_class is None else None),
    _low("a white op", "list", _white),
    _low("a black op, at level O3", "list", _black_at_o3),
    _fp32("a black op", "list", _black),
    Rule(
        "a gray or clear op",
        "placement",
        "the cheaper one; at O1, or as a number, it follows its inputs",
        _free,
    ),
)

PRECEDENCE = (*ABOVE_HAZARDS, HAZARD, *LISTED)
