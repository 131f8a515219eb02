"""Just-in-time capture: lowers the graphs that the front end of ``torch.compile`` (Dynamo) produces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx, py_sym_types
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from .._compat import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    INFERENCE_MODE_CALLS,
    SET_GRAD_ENABLED,
    FakeTensor,
    FakeTensorMode,
    accept_real_constants,
    autocast_values,
    evaluate,
    fake_mode_of_dynamo,
    in_float32_forward,
    is_module_tensor,
    is_of_transform,
    outside_tracing,
    rename,
    without_wait,
)
from ..errors import CaptureError
from ..guards import FP32, set_guard
from ..marks import InputMark, set_input_mark
from ..ops.kernels import computes_on_tensors
from ..passes.analysis.ranges import peak_of
from ..passes.inline_transforms import InlineTransforms
from .capture_mode import capturing
from .split import is_custom_function

_CARRIED = ("_dynamo_source", "tensor_dict", "grapharg")


def lower_dynamo_graph(graph_module: fx.GraphModule, inputs: list) -> fx.GraphModule:
    """Lowers Dynamo's torch-level graph to the common IR: pre-dispatch ATen, parameters as placeholders.

    Args:
        graph_module: The graph module that a ``torch.compile`` backend receives.
        inputs: The real inputs that come with it, in placeholder order.

    Returns:
        A graph module with the same placeholders; those that are tensors of the model have an `InputMark`.

    Raises:
        CaptureError: A part of the graph cannot be lowered.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    fakes = [without_wait(node.meta["example_value"]) for node in placeholders]
    mode = next((f.fake_mode for f in fakes if isinstance(f, FakeTensor)), None) or fake_mode_of_dynamo()
    grad_mode = torch.is_grad_enabled()
    try:
        with capturing(), accept_real_constants(mode):
            # If the lowering fails, the graph with these plain calls still runs correctly.
            for part in [m for m in graph_module.modules() if isinstance(m, fx.GraphModule)]:
                InlineTransforms("example_value").run(part)

            def lowered_part(*values: Any) -> Any:  # its name is the graph module's
                return _Lowering(graph_module, mode, grad_mode).run(*values)

            lowered = make_fx(
                lowered_part,
                pre_dispatch=True,
                tracing_mode="real",
                _allow_non_fake_inputs=True,
            )(*fakes)
        _refuse_fake_constants(lowered)
    except Exception as error:
        raise CaptureError(f"it cannot be lowered to ATen: {type(error).__name__}: {error}") from error
    lowered.meta.update(graph_module.meta)
    _mark_inputs(lowered, placeholders, inputs)
    _use_one_fake_mode(lowered, mode)
    for node in lowered.graph.nodes:
        if in_float32_forward(node.meta.get("stack_trace") or ""):
            set_guard(node, FP32)
    lowered.recompile()
    return lowered


def _mark_inputs(lowered: fx.GraphModule, placeholders: list[fx.Node], inputs: list) -> None:
    """Gives the inputs their names in Dynamo's graph, and marks those that are tensors of the model."""
    for old, new, value in zip(placeholders, lowered.graph.find_nodes(op="placeholder"), inputs, strict=True):
        new.meta.update({key: old.meta[key] for key in _CARRIED if key in old.meta})
        rename(new, old.name)
        if isinstance(value, torch.nn.Parameter):
            set_input_mark(new, InputMark(is_parameter=True, peak=peak_of(value)))
        elif is_module_tensor(old):
            set_input_mark(new, InputMark(is_table=True))


def _refuse_fake_constants(graph_module: fx.GraphModule) -> None:
    for node in graph_module.graph.find_nodes(op="get_attr"):
        value = getattr(graph_module, node.target)
        if isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and is_of_transform(value)):
            raise NotImplementedError(f"{node.target} was computed in a way that tracing does not see")


class _Lowering(fx.Interpreter):
    """Runs Dynamo's graph under tracing and inlines checkpointed regions.

    Nodes of these regions keep their mark, so AOTAutograd's partitioner recomputes them in the backward. The
    plain eager backend runs them once and keeps their saved tensors.
    """

    def __init__(self, graph_module: fx.GraphModule, mode: FakeTensorMode | None, grad_mode: bool) -> None:
        super().__init__(graph_module)
        self._mode, self._grad_mode = mode, grad_mode
        self._regions: list[contextlib.ExitStack] = []
        self._numbers: dict[int, torch.Tensor] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run(*args, **kwargs)
        finally:
            while self._regions:
                self._regions.pop().close()

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if is_custom_function(target):
            raise NotImplementedError(
                "a custom autograd.Function or a hook, whose backward tracing would lose"
            )
        if getattr(target, "__name__", "") == "_get_data_attr":  # tracing does not see ``x.data``
            return args[0].detach()
        if target in INFERENCE_MODE_CALLS:
            return self._inference_mode(target, *args)
        if target is SET_GRAD_ENABLED:
            self._grad_mode = args[0]
        if target is ENTER_AUTOCAST:
            self._regions.append(contextlib.ExitStack())
            self._regions[-1].enter_context(autocast_values(*args))
        if target is EXIT_AUTOCAST:
            self._regions.pop().close()
        if target is not torch.ops.higher_order.tag_activation_checkpoint:
            if self._is_of_numbers(getattr(target, "__name__", ""), args, kwargs):
                return self._computed(partial(super().call_function, target, args, kwargs))
            # ``module.to(..)`` sets data of parameters; only graphs with gradients have its no_grad.
            of_data = target is torch.Tensor.set_ and not self._grad_mode
            with self._mode_for(args, kwargs), torch.no_grad() if of_data else contextlib.nullcontext():
                return super().call_function(target, args, kwargs)
        body, *operands = args
        for node in body.graph.nodes:
            if node.op not in ("placeholder", "output"):
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
                node.meta["ac_graph_id"] = id(body)
        return _Lowering(body, self._mode, self._grad_mode).run(*operands)

    def call_method(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self._is_of_numbers(target, args, kwargs):
            return self._computed(partial(super().call_method, target, args, kwargs))
        with self._mode_for(args, kwargs):
            return super().call_method(target, args, kwargs)

    def _is_of_numbers(self, name: str, *arguments: Any) -> bool:
        """Whether a tensor op reads only numbers: ``torch.div(64, 8, rounding_mode="trunc")``.

        Ops that read results of such ops count too.
        """
        leaves = tree_leaves(arguments)
        if any(isinstance(leaf, torch.Tensor) and id(leaf) not in self._numbers for leaf in leaves):
            return False
        if any(isinstance(leaf, py_sym_types) for leaf in leaves):
            return False
        return computes_on_tensors(name)

    def _computed(self, call: Callable[[], Any]) -> Any:
        """Computes a value that depends only on numbers, so that it can be a size; a traced value cannot."""
        with outside_tracing():
            result = call()
        self._numbers |= {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        return result

    def _inference_mode(self, target: Any, argument: bool) -> bool:
        """Enters inference mode and returns the earlier grad mode, or restores that mode."""
        outer = self._grad_mode
        self._grad_mode = not argument if target is INFERENCE_MODE_CALLS[0] else argument
        SET_GRAD_ENABLED(self._grad_mode)
        return outer

    def _mode_for(self, *arguments: Any) -> contextlib.AbstractContextManager:
        """Makes tensors of a dynamic size fake: ``torch.arange(n)``, the mask inside causal attention.

        Without the mode they would be made for one value of the size, or not at all. Constants
        (``torch.tensor(1.0)``) have to stay real.
        """
        if self._mode and any(map(_is_dynamic, tree_leaves(arguments))):
            return self._mode
        return contextlib.nullcontext()


def _is_dynamic(value: object) -> bool:
    """Whether a value is a symbol, or a tensor with one among its sizes."""
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, py_sym_types)


def _use_one_fake_mode(graph_module: fx.GraphModule, mode: FakeTensorMode | None) -> None:
    """Moves constants from the fake mode of tracing into the fake mode of the graph, also in its bodies."""
    if mode is None:
        return
    for part in [m for m in graph_module.modules() if isinstance(m, fx.GraphModule)]:
        for node in part.graph.nodes:
            fakes = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, FakeTensor)]
            if any(fake.fake_mode is not mode for fake in fakes):
                node.meta["val"] = _in_mode(node, part, mode)


def _in_mode(node: fx.Node, part: fx.GraphModule, mode: FakeTensorMode) -> Any:
    """Returns the fake value of a node in a mode; what it reads is in this mode already."""
    if node.op == "get_attr":
        return mode.from_tensor(getattr(part, str(node.target)))
    if node.op == "call_function":
        return evaluate(node, mode)
    value = node.meta["val"]  # a constant that a loop carries
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
