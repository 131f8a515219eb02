"""Finds the op class of every node and the rule of each of its operands.

Analysis only. `PropagatePrecision` and `PlaceCasts` use the result, `Facts`:

- a node is *managed* if it produces a float32 or low tensor; later passes decide its label (low or float32);
- an *operand* is one argument through which a node reads a managed tensor. Its `OperandRule` gives the dtypes
  that the kernel accepts.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch.fx import GraphModule, Node

from ampgraph._compat import OpOverload
from ampgraph.marks import input_mark
from ampgraph.ops import kernels
from ampgraph.ops.lists import OpClass
from ampgraph.policy.policy import LOW_DTYPES, Policy

from .analysis.alias import returned_views, strided_memory, viewed, written_args, written_memory
from .analysis.arguments import argument, argument_name, tensor_arguments
from .analysis.facts import (
    DECIDED,
    Facts,
    NodeFacts,
    Operand,
    OperandRule,
    element_count,
    has_kernel,
    is_cast,
    is_dense,
    is_on_cpu,
    tensors,
)
from .analysis.low_dtype_probe import probe_low_dtype
from .base import Pass, workspace

_CASTS_LIKE = (torch.ops.aten.type_as.default, torch.ops.aten.to.other)


class _Shared(NamedTuple):
    """Memory that other code can see: see the attributes of `NodeFacts`."""

    written: set[Node]
    strided: set[Node]
    returned: set[Node]

    def of(self, node: Node) -> tuple[bool, bool, bool]:
        return node in self.written, node in self.strided, node in self.returned


@dataclass(frozen=True)
class ClassifyOps(Pass):
    """Looks every op up in the op lists and every argument up in the kernel facts.

    Attributes:
        policy: Op lists, low dtype, and whether graph outputs read their tensors in the source's dtype.
    """

    policy: Policy
    name: ClassVar[str] = "classify"
    edits: ClassVar[bool] = False

    def run(self, graph_module: GraphModule) -> bool:
        graph, facts = graph_module.graph, Facts()
        shared = _Shared(written_memory(graph), strided_memory(graph), returned_views(graph))
        for node in graph.nodes:
            facts[node] = self._facts(node, facts, shared)
        workspace(graph_module).facts = facts
        return False

    def _facts(self, node: Node, facts: Facts, shared: _Shared) -> NodeFacts:
        low_dtype, values = self.policy.low_dtype, tensors(node)
        fact = NodeFacts(self._dtype(node, values), node, elements=_elements(values, low_dtype))
        fact.mutated, fact.reads_whole_storage, fact.returned_input_view = shared.of(node)
        if node.target is operator.getitem and isinstance(node.args[0], Node) and _is_sequence(node.args[0]):
            # An op that returns float32 and low tensors keeps them all. Each is then its own dtype source,
            # as is what stays float32 beside low results.
            whole = facts[node.args[0]]
            if whole.dtype and node.args[1] not in whole.wide_results:
                fact.dtype_source = whole.dtype_source
            return fact
        if not fact.keeps_memory:
            fact.dtype_source = _dtype_giver(node, facts)
        # A managed tensor is dense, and float32 or low.
        read = [t for n in node.all_input_nodes if facts[n].dtype is None for t in tensors(n)]
        fact.reads_sparse = not all(map(is_dense, read))
        fact.reads_other_low = any(t.dtype in LOW_DTYPES and t.dtype != low_dtype for t in read)
        if isinstance(node.target, OpOverload):
            fact.op = kernels.op_of(node.target)
            fact.op_class, fact.class_reason = self.policy.ops.classify(node, low_dtype)
            if "dtype" in fact.op.arguments:
                fact.fixed_dtype = _explicit_dtype(node)
            memory = viewed(node)
            fact.moves_data = not memory
            source = written_args(node) if fact.op.written else memory
            fact.is_parameter = bool(source) and facts[source[0]].is_parameter
        else:
            fact.is_parameter = node.op == "get_attr" or input_mark(node).is_parameter
        fact.operands = [
            self._operand(node, fact, path, tensor)
            for path, tensor in tensor_arguments(node)
            if facts[tensor].dtype
        ]
        self._note_low_limits(node, fact)
        return fact

    def _note_low_limits(self, node: Node, fact: NodeFacts) -> None:
        """Records whether the op refuses low operands, and which of its results stay float32."""
        if (
            fact.dtype_source is not node
            or fact.dtype != torch.float32
            or not fact.op_class
            or not fact.moves_data
        ):
            return
        if fact.op is None or fact.op.is_opaque or not has_kernel(node, self.policy.low_dtype):
            return
        operands = (operand.tensor for operand in fact.operands if operand.rule in DECIDED)
        fact.refuses_low, fact.wide_results = probe_low_dtype(node, operands, self.policy.low_dtype)
        fact.elements -= sum(element_count(node.meta["val"][i]) for i in fact.wide_results)

    def _dtype(self, node: Node, values: list[torch.Tensor]) -> torch.dtype | None:
        if not all(map(is_dense, values)) or _is_nested(node):
            return None
        dtypes = {v.dtype for v in values}
        managed = dtypes & {torch.float32, self.policy.low_dtype}
        if len(managed) != 1 or any(d.is_floating_point or d.is_complex for d in dtypes - managed):
            return None
        return managed.pop()

    def _operand(self, node: Node, fact: NodeFacts, path: tuple[int | str, ...], tensor: Node) -> Operand:
        rule = self._rule(node, fact, path, tensor)
        follow = rule in DECIDED
        if follow and fact.op is not None and fact.op.follow_slots is not None:
            follow = argument_name(node, path) in fact.op.follow_slots
        return Operand(path, tensor, rule, follow)

    def _rule(self, node: Node, fact: NodeFacts, path: tuple[int | str, ...], tensor: Node) -> OperandRule:
        target, op = node.target, fact.op
        if node.op == "output":
            return OperandRule.SOURCE_DTYPE if self.policy.keep_io_dtypes else OperandRule.EITHER
        if op is None or op.is_opaque or _is_sequence(tensor) or fact.reads_sparse:
            return OperandRule.SOURCE_DTYPE
        name = argument_name(node, path)
        if fact.keeps_memory and target in _CASTS_LIKE:
            return OperandRule.SOURCE_DTYPE
        if is_cast(node) or target in _CASTS_LIKE or name in op.any_slots:
            return OperandRule.EITHER
        if name in op.fp32_slots or (name in op.statistics_slots and _holds_statistics(node, tensor)):
            return OperandRule.SOURCE_DTYPE
        if op.written and (written := written_args(node)):
            converts = op.promotes and tensor not in written
            return OperandRule.EITHER if converts else OperandRule.SOURCE_DTYPE
        if fact.dtype is None:
            is_free = self._only_tells(node, fact) and not self._compares_low(node)
            return OperandRule.EITHER if is_free else OperandRule.SOURCE_DTYPE
        if fact.fixed_dtype is not None:
            computes = op.dtype_arg and _takes_dtype(node)
            return OperandRule.EITHER if computes else OperandRule.SOURCE_DTYPE
        if self._mixes(node, fact, path, tensor):
            return OperandRule.SOURCE_DTYPE
        if op.promotes:
            return OperandRule.EITHER if _is_bystander(node, path, tensor) else OperandRule.PROMOTED
        if op.dtype_arg and _takes_dtype(node):
            return OperandRule.DTYPE_ARG
        return OperandRule.NODE_DTYPE

    def _mixes(self, node: Node, fact: NodeFacts, path: tuple[int | str, ...], tensor: Node) -> bool:
        """Whether the source reads a float32 tensor here and returns low: the kernel accepts both.

        Matrix products never accept both, although FakeTensor may.
        """
        if fact.dtype != self.policy.low_dtype or fact.op_class is OpClass.WHITE:
            return False
        if fact.op is not None and fact.op.wants_one_dtype:
            return False
        wide = tensor.meta["val"].dtype == torch.float32
        return wide and not _is_bystander(node, path, tensor)

    def _only_tells(self, node: Node, fact: NodeFacts) -> bool:
        """Whether the op returns integers or booleans and accepts operands of any dtype."""
        if fact.op_class is None or not has_kernel(node, self.policy.low_dtype):
            return False
        if any(v.dtype.is_floating_point or v.dtype.is_complex for v in tensors(node)):
            return False
        return kernels.promotes(node.target) or len(self._managed(node)) == 1

    def _compares_low(self, node: Node) -> bool:
        """Whether an op compares tensors that are low in the source, and a placement may round one of them.

        It would tell a value in float32 from the same value rounded. At O1 a placement rounds neither.
        """
        dtypes = self._managed(node)
        return self.policy.level != "O1" and len(dtypes) > 1 and {*dtypes} == {self.policy.low_dtype}

    def _managed(self, node: Node) -> list[torch.dtype]:
        """Returns the dtypes of the tensors that a node reads and a plan may change."""
        found = (self._dtype(t, tensors(t)) for _, t in tensor_arguments(node))
        return [dtype for dtype in found if dtype is not None]


def _holds_statistics(node: Node, tensor: Node) -> bool:
    """Whether weight or bias of a CPU norm stays float32 beside a low input; CUDA's kernels need one dtype.

    A bias alone does not: the backward on a CPU takes the dtype of the statistics from the weight.
    """
    if not is_on_cpu(node):
        return False
    if argument(node, "weight") is None:
        return False
    return tensors(tensor)[0].dtype == torch.float32


def _dtype_giver(node: Node, facts: Facts) -> Node:
    """Returns the node whose label decides: ``other`` for ``x.type_as(other)``."""
    if node.target not in _CASTS_LIKE:
        return node
    other = facts[node.args[1]]  # type: ignore[index]
    return other.dtype_source if other.dtype else node


def _explicit_dtype(node: Node) -> torch.dtype | None:
    dtype = argument(node, "dtype")
    return dtype if isinstance(dtype, torch.dtype) else None


def _is_bystander(node: Node, path: tuple[int | str, ...], tensor: Node) -> bool:
    """0-dim operands do not take part in type promotion beside floating operands that have dimensions.

    Operands in a list (``column_stack``) take part, because they get dimensions first.
    """
    if tensor.meta["val"].dim() > 0 or len(path) > 1:
        return False
    floats = [v for _, n in tensor_arguments(node) for v in tensors(n) if v.is_floating_point()]
    return any(v.dim() > 0 for v in floats)


def _is_sequence(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (list, tuple))


def _takes_dtype(node: Node) -> bool:
    """Whether the op's backward, too, computes in float32 when its dtype argument says so."""
    name, values = kernels.dtype_arg_needs(node.target) or ("", ())  # type: ignore[arg-type]
    return not name or argument(node, name) in values


def _is_nested(node: Node) -> bool:
    """Whether the op returns a list within its tuple; casts of its results are not followed."""
    return _is_sequence(node) and any(isinstance(v, (list, tuple)) for v in node.meta["val"])


def _elements(values: list[torch.Tensor], low_dtype: torch.dtype) -> int:
    return sum([element_count(v) for v in values if v.dtype in (torch.float32, low_dtype)])
