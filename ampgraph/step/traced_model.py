"""Runs a converted model on fake tensors while `compile_step` traces a step."""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

from .._compat import flat_inputs, graph_being_traced, no_ambient_autocast, storage_key
from ..errors import AmpGraphError
from ..module import AmpModule
from ..passes.analysis.alias import written_memory
from ..runtime.captured_graph import CapturedGraph


class _Joined(Function):
    """Identity whose backward has a gradient for each tensor if it has one for any."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in outputs)  # a view would refuse in-place writes such as loss /= 4

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def _is_of_custom_function(tensor: Tensor) -> bool:
    """Whether a custom function made a tensor, which AOTAutograd then takes for one with its own memory."""
    return isinstance(tensor.grad_fn, BackwardCFunction)


class TracedModel:
    """Runs the graphs of a model on fake tensors, as its calls run them on its own.

    Args:
        amp: The model.
        fakes: The fake tensors by the identity of the real ones, in the order of the inputs of the trace.

    Attributes:
        used: The captured graphs that ran.
        outputs: The results of the last call with gradients.
        shares_memory: Whether results of a compiled call share memory, so that nothing joins their gradients.
    """

    def __init__(self, amp: AmpModule, fakes: dict[int, Tensor]) -> None:
        self.used: list[CapturedGraph] = []
        self.outputs: list[Tensor] = []
        self.shares_memory = False
        self._amp, self._fakes, self._inputs = amp, fakes, [*fakes]
        shadows = amp._graphs.shadows
        self._masters = {} if shadows is None else {id(c): id(m) for c, m in shadows.pairs()}
        self._has_parameters_of_copies = amp._graphs.is_in_place()
        self._places = [held for m in amp.source.modules() for held in (m._parameters, m._buffers)]
        self._real = [dict(held) for held in self._places]
        self._given = [
            {name: None if value is None else fakes[id(value)] for name, value in held.items()}
            for held in self._real
        ]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the fake tensors in place, and `_call` in the place of ``forward``."""
        attributes = vars(self._amp)
        forward = attributes["forward"]
        try:
            attributes["forward"] = self._call
            self._put(self._given)
            yield
        finally:
            self._put(self._real)
            attributes["forward"] = forward

    def _put(self, values: list[dict[str, Any]]) -> None:
        for held, others in zip(self._places, values, strict=True):
            held.update(others)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        captured = self._amp._graphs.known(args, kwargs)
        graph_module = captured.made_graph(self._is_in_place()) if captured is not None else None
        if captured is None or graph_module is None or captured.lost:
            raise AmpGraphError("the model is not captured for these arguments")
        self.used.append(captured)
        with no_ambient_autocast():
            outputs = self._run(graph_module, args, kwargs)
        if torch.is_grad_enabled():
            if self._amp.options.backend != "eager":
                outputs = self._joined(outputs)
            self.outputs = [x.detach() for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
        return graph_module.graph.process_outputs(outputs)

    def _joined(self, outputs: Any) -> Any:
        """Lets a gradient of one output run the backward of all, as in a compiled graph.

        AOTAutograd takes zeros for the gradients of outputs that the loss does not use. So parameters of
        their branches have gradients of zeros, and an optimizer decays them.
        """
        leaves, spec = pytree.tree_flatten(outputs)
        trained = {id(x): x for x in leaves if isinstance(x, Tensor) and x.grad_fn is not None}
        keys = Counter(map(storage_key, (*trained.values(), *self._fakes.values())))
        own = [x for x in trained.values() if keys[storage_key(x)] == 1 or _is_of_custom_function(x)]
        self.shares_memory |= len(own) < len(trained)
        joined = dict(zip(map(id, own), _Joined.apply(*own), strict=True)) if len(own) > 1 else {}
        return pytree.tree_unflatten([joined.get(id(x), x) for x in leaves], spec)

    def _is_in_place(self) -> bool:
        """Whether low copies are of the parameters in place; ``functional_call`` puts others there."""
        pairs = zip(self._places, self._given, strict=True)
        return self._has_parameters_of_copies and all(
            held.get(name) is fake for held, given in pairs for name, fake in given.items()
        )

    def _run(self, graph_module: fx.GraphModule, args: tuple, kwargs: dict[str, Any]) -> Any:
        values: dict[fx.Node, Any] = {}
        given = iter(flat_inputs(graph_module, args, kwargs))
        written = self._written()
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = self._held(operator.attrgetter(str(node.target))(graph_module), written)
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], values.__getitem__)
            else:
                inner = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*inner[0], **inner[1])
        return None

    def _held(self, value: Any, written: set[int]) -> Any:
        """Returns the fake tensor of a tensor that a graph holds; of an old low copy, a new one."""
        fake = self._fakes.get(id(value), value)
        if (master := self._masters.get(id(value))) in written:
            return self._fakes[master].detach().to(fake.dtype)
        return fake

    def _written(self) -> set[int]:
        """Returns the identities of the real tensors whose memory the trace has written so far."""
        graph = graph_being_traced()
        written = written_memory(graph)
        nodes = graph.find_nodes(op="placeholder")
        return {key for key, node in zip(self._inputs, nodes, strict=False) if node in written}
