"""`SideRun`: one of two runs that go side by side, with or without a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from .._compat import HigherOrderOperator
from ..errors import AmpGraphError
from ..passes.analysis.alias import written_args, written_memory
from ..runtime.run_graph import Draws, GraphRun, is_random
from .gradient_tape import OUTPUT, GradientTape, Key

Loss = Callable[[Any], Tensor]


class SideRun(GraphRun):
    """A run of a graph, apart from the model's own gradients.

    Args:
        graph_module: The graph.
        inputs: One value for each placeholder.
        draws: What both runs draw.
        tape: Records the backward; None: values need no gradients.

    Attributes:
        wide: Does what the next node does, in the dtypes of the other graph; None where there is none. Random
            numbers depend on their dtype.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        inputs: Sequence[Any],
        draws: Draws,
        tape: GradientTape | None = None,
    ):
        super().__init__(graph_module, inputs, draws)
        self.draws, self.tape = draws, tape
        self.wide: Callable[[], Any] | None = None
        self._memory = written_memory(graph_module.graph) if tape is not None else set()

    def finish(self) -> Any:
        """Returns what the graph returns, once it has run."""
        if self.tape is not None:
            read, _ = self.tape.edges(self.outputs)
            self.outputs = self.tape.record(OUTPUT, read, self.outputs)
        return self.result()

    def output_gradients(self, loss: Loss) -> tuple[float, dict[Key, Tensor]]:
        """Returns a loss of the result and its gradients by tensor; after `finish`."""
        assert self.tape is not None
        value = checked_loss(loss(self.result()))
        keys = {self.tape.key_of(leaf): leaf for leaf in pytree.tree_leaves(self.outputs)}
        keys.pop(None, None)
        self.outputs = ()
        found = torch.autograd.grad(value.sum(), list(keys.values()), allow_unused=True)
        gradients = zip(keys, found, strict=True)
        return float(value.detach()), {key: g for key, g in gradients if key is not None and g is not None}

    def call(self, node: Node, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs one node on its arguments, or on others; nothing is recorded."""
        assert callable(node.target)
        if not is_random(node):
            return node.target(*args, **kwargs)
        self.draws.start(node.name)
        result = node.target(*args, **kwargs)
        fixed = isinstance(node.target, HigherOrderOperator) or written_args(node)
        if self.wide is None or fixed or not self.draws.moved(node.name):
            return result
        self.draws.start(node.name)
        return in_dtypes_of(self.wide(), result)

    def _call(self, node: Node, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.tape is None:
            return self.call(node, args, kwargs)
        read, _ = self.tape.edges(args, kwargs)
        return self.tape.record(node.name, read, self.call(node, args, kwargs), node in self._memory)

    def _source(self, node: Node, value: Any) -> Any:
        value = super()._source(node, value)
        if not isinstance(value, Tensor):
            return value
        return value.detach() if self.tape is None else self.tape.cut_source(node.name, value)


def check_is_loss(loss: object) -> None:
    """Checks a loss function before the model runs.

    Raises:
        AmpGraphError: It is not a function.
    """
    if loss is not None and not callable(loss):
        raise AmpGraphError(
            f"loss={loss!r}: expected a function that returns one number for the model's result."
        )


def checked_loss(value: Any) -> Tensor:
    """Returns what a loss function returned, one number that a backward can start from.

    Raises:
        AmpGraphError: It is something else.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
        return value
    what = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        what = "a constant" if value.numel() == 1 else f"a tensor of {value.numel()} elements"
    raise AmpGraphError(f"loss returned {what}; expected one number that depends on the model's output.")


def in_dtypes_of(value: Any, like: Any) -> Any:
    """Returns a value with its floating-point tensors in the dtypes of those of another."""
    leaves, spec = pytree.tree_flatten(value)
    others = pytree.tree_leaves(like)
    return pytree.tree_unflatten([_in_dtype_of(a, b) for a, b in zip(leaves, others, strict=True)], spec)


def _in_dtype_of(value: Any, like: Any) -> Any:
    if not isinstance(value, Tensor) or not isinstance(like, Tensor) or not value.is_floating_point():
        return value
    return value.to(like.dtype)
