"""Counts the bytes of an eager training step on fake tensors, op by op; runs no kernel."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Ops that move nothing.
_FREE = {"detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh", "is_same_size", "device"}
_FREE |= {"empty", "empty_strided", "new_empty", "empty_like", "new_empty_strided", "sym_size"}
_SOFTMAX = (torch.ops.aten.softmax.int, torch.ops.aten.log_softmax.int)


class EagerStep(NamedTuple):
    """Bytes of a forward, of its backward, and of what autograd saves between them without inputs."""

    forward: int
    backward: int
    saved: int


class _Traffic(TorchDispatchMode):
    """Adds up what every op reads and writes.

    ``softmax`` with a ``dtype`` is one kernel on a GPU, forward and backward. The CPU converts before and
    after, which is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.in_softmax = False
        self.softmax_reads = 0
        self.kept: list[Tensor] = []
        self._converting: dict[int, Tensor] = {}
        self._fused: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if func.is_view or name in _FREE:
            return out
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.bytes += self._moved(name, _distinct(tree_leaves((args, kwargs))), made, args)
        return out

    def _moved(self, name: str, read: list[Tensor], made: list[Tensor], args: tuple) -> int:
        reads, writes = sum(map(_bytes, read)), sum(map(_bytes, made))
        if self.in_softmax and name == "_to_copy":
            self.softmax_reads = reads
            return 0
        if self.in_softmax and self.softmax_reads and name in ("_softmax", "_log_softmax"):
            self._keep(made[0], self._fused)
            return self.softmax_reads + writes
        if name in ("_softmax_backward_data", "_log_softmax_backward_data") and _key(args[1]) in self._fused:
            self._converting = {_key(made[0]): made[0]}
        elif name == "_to_copy" and _key(read[0]) in self._converting:
            self._converting = {}
            return writes - reads
        if name == "embedding":
            reads = writes
        if name == "embedding_dense_backward":
            reads = _bytes(args[0])
        return writes if name in ("zero_", "fill_") else reads + writes

    def _keep(self, tensor: Tensor, keys: set[int]) -> None:
        self.kept.append(tensor)  # so that no other tensor gets its key
        keys.add(_key(tensor))


class _OnFakes(fx.Interpreter):
    def __init__(self, graph_module: fx.GraphModule, traffic: _Traffic, fakes: dict[str, Any]) -> None:
        super().__init__(graph_module)
        self.traffic, self.fakes = traffic, fakes

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.fakes[target]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        self.traffic.in_softmax, self.traffic.softmax_reads = target in _SOFTMAX, 0
        try:
            return super().call_function(target, args, kwargs)
        finally:
            self.traffic.in_softmax = False


def eager_step(graph_module: fx.GraphModule, args: tuple[Tensor, ...]) -> EagerStep:
    """Returns the bytes of forward and backward of a graph that returns a loss."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Tensor] = {}

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in memo:
            made = mode.from_tensor(value.detach(), static_shapes=True)
            memo[id(value)] = made.requires_grad_(value.requires_grad and value.is_leaf)
        return memo[id(value)]

    attributes = graph_module.graph.find_nodes(op="get_attr")
    fakes = {n.target: fake(operator.attrgetter(n.target)(graph_module)) for n in attributes}
    inputs = [fake(value) for value in args]
    given = {_key(t) for t in [*memo.values(), *inputs]}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if _key(tensor) not in given:
            saved.setdefault(_key(tensor), tensor)
        return tensor

    with mode, (traffic := _Traffic()):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = tree_leaves(_OnFakes(graph_module, traffic, fakes).run(*inputs))[0]
        forward = traffic.bytes
        loss.backward()
    kept = sum(t.untyped_storage().nbytes() for t in saved.values())
    return EagerStep(forward, traffic.bytes - forward, kept)


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _distinct(leaves: list[Any]) -> list[Tensor]:
    found = {}
    for t in leaves:
        if isinstance(t, Tensor):
            found.setdefault((_key(t), t.storage_offset(), tuple(t.shape), tuple(t.stride())), t)
    return list(found.values())


def _bytes(tensor: Tensor) -> int:
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride or size == 1:  # an expanded dimension is read once
            count *= size
    return count * tensor.element_size()
