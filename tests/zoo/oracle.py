"""torch's own CUDA autocast as an oracle that needs no GPU.

The Autocast dispatch keys are part of every torch build, so a pre-dispatch ATen graph that is run on tensors
that only *say* they are on CUDA goes through the very kernels that decide about casts on a GPU. Nothing is
computed; what comes back is the dtype of every node and the list of casts that autocast made.

What counts as a cast of autocast's: a float-to-float ``aten._to_copy`` that a node dispatches with autocast
on and does not dispatch with autocast off (the counterfactual run). So neither casts that the graph itself
holds nor casts in a composite kernel's own decomposition count. Where autocast only sets an op's ``dtype``
argument (softmax, sum, norms), the counterfactual has that argument too: converting while reading is the
kernel's work, not a cast.

Parameters and buffers do not require gradients here, so autocast's weight cache is off; it is imitated by
counting every (parameter, dtype) pair once. A view of a parameter counts as one.

Where the two branches of a ``torch.cond`` differ, the first one speaks for both.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export._tree_utils import reorder_kwargs
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

from tests.zoo.casts import OracleCast, OracleResult

aten = torch.ops.aten
hop = torch.ops.higher_order

CUDA = torch.device("cuda", 0)

_RECURRENT = frozenset({aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input})


def autocast_oracle(
    gm: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any] | None, dtype: torch.dtype | None
) -> OracleResult:
    """Runs a pre-dispatch ATen graph under torch's CUDA autocast, on fake tensors.

    Args:
        gm: A graph such as ``torch.export.export(...).module()``, or one made from it. It is not changed.
        args: Positional inputs, on any device; only their shapes and dtypes are used.
        kwargs: Keyword inputs.
        dtype: autocast's low dtype; None runs without autocast, so that ``own_casts`` is a census of the
            casts in the graph.

    Returns:
        The dtype of every node and the casts made.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_low_precision_math_attention())
        stack.enter_context(FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True))
        stack.enter_context(_autocast(dtype is not None, dtype))
        runner = _Runner(_Recorder())
        stack.enter_context(runner.recorder)
        twins = [runner.twin(value) for value in _flat_inputs(gm, args, kwargs or {})]
        _OracleInterpreter(gm, runner).run(*twins, enable_io_processing=False)
    return runner.result


class _Twin(torch.Tensor):
    """Says that it is a CUDA tensor, so that dispatch reaches autocast's CUDA kernels; holds a fake CPU one.

    A fake tensor on CUDA does not do: torch's fake kernels are Python that asks for a device guard, which
    only a CUDA build has.
    """

    inner: FakeTensor

    @staticmethod
    def __new__(cls, inner: FakeTensor) -> _Twin:
        twin = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=CUDA
        )
        twin.inner = inner
        return twin

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise NotImplementedError(f"{func} outside the recorder")


class _Recorder(TorchDispatchMode):
    """Runs what reaches the backend on the fake tensors inside; notes float-to-float ``aten._to_copy``."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[_Twin, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        twins = {id(leaf.inner): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Twin)}
        inner_args, inner_kwargs = tree_map(_inner, (args, kwargs or {}))
        if func is aten.view.default:
            func = aten.reshape.default  # attention's strides here are not those that were captured
        out = func(*inner_args, **inner_kwargs)
        out = tree_map_only(FakeTensor, lambda inner: twins.get(id(inner), inner), out)
        out = tree_map_only(FakeTensor, _Twin, out)
        if func is aten._to_copy.default and _is_float_cast(args[0].dtype, out.dtype):
            self.seen.append((args[0], out.dtype))
        return out

    def take(self) -> list[tuple[_Twin, torch.dtype]]:
        """Returns what was noted since the last call."""
        taken, self.seen = self.seen, []
        return taken


class _Runner:
    """State shared by the interpreters of a graph and of its sub-graphs."""

    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder
        self.result = OracleResult()
        self._twins: dict[int, tuple[torch.Tensor, _Twin]] = {}
        self._parameter_storages: set[int] = set()
        self._parameter_casts: set[tuple[Any, ...]] = set()

    def twin(self, value: Any, is_parameter: bool = False) -> Any:
        """Returns a tensor's twin, the same one each time; other values as they are."""
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._twins:
            inner = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
            self._twins[id(value)] = (value, inner)
        twin = self._twins[id(value)][1]
        if is_parameter:
            self._parameter_storages.add(_storage(twin))
        return twin

    def call(self, name: str, run: Callable[[], Any], run_without_autocast: Callable[[], Any]) -> Any:
        """Runs a node and files its casts under autocast or under the node's own."""
        self.recorder.take()
        out = run()
        seen = self.recorder.take()
        if not seen:
            return out
        own = self._counterfactual(run_without_autocast)
        for tensor, dst in seen:
            key = (tensor.dtype, dst, tensor.numel())
            is_own = own[key] > 0
            own[key] -= is_own
            self._file(name, tensor, dst, is_own)
        return out

    def _counterfactual(self, run: Callable[[], Any]) -> Counter[tuple[torch.dtype, torch.dtype, int]]:
        logger = logging.getLogger(FakeTensorMode.__module__)
        with _autocast(False, None), mock.patch.object(logger, "disabled", True), suppress(RuntimeError):
            run()  # operands of mixed dtypes are an error without autocast
        return Counter((tensor.dtype, dst, tensor.numel()) for tensor, dst in self.recorder.take())

    def _file(self, name: str, tensor: _Twin, dst: torch.dtype, is_own: bool) -> None:
        is_parameter = _storage(tensor) in self._parameter_storages
        cast = OracleCast(name, tensor.dtype, dst, tensor.numel(), is_parameter)
        if is_own:
            self.result.own_casts.append(cast)
            return
        key = (_storage(tensor), tensor.storage_offset(), tensor.size(), tensor.stride(), dst)
        if is_parameter and key in self._parameter_casts:
            return
        if is_parameter:
            self._parameter_casts.add(key)
        self.result.casts.append(cast)


class _OracleInterpreter(fx.Interpreter):
    """Runs a graph node by node on fake CUDA tensors."""

    def __init__(self, gm: fx.GraphModule, runner: _Runner, prefix: str = "") -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self._runner = runner
        self._prefix = prefix
        self._node_name = ""

    def run_node(self, n: fx.Node) -> Any:
        self._node_name = self._prefix + n.name
        out = super().run_node(n)
        dtypes = _dtypes(out)
        if dtypes is not None:
            self._runner.result.node_dtypes[self._prefix + n.name] = dtypes
        return out

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._runner.twin(super().get_attr(target, args, kwargs), is_parameter=True)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return None if target == "_guards_fn" else super().call_module(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten._assert_tensor_metadata.default:
            return None
        if target is hop.wrap_with_autocast:
            _, dtype, enabled, _, body, *rest = args
            with _autocast(enabled, dtype):
                return self._run_graph(body, rest)
        if target is hop.wrap_with_set_grad_enabled:
            return self._run_graph(args[1], args[2:])
        if target is hop.cond:
            return self._run_graph(args[1], args[3])
        args, kwargs = tree_map_only(torch.device, _as_cuda, (args, kwargs))
        name = self._node_name
        if target in _RECURRENT:
            return self._runner.call(name, lambda: _cudnn(target, args), lambda: None)
        return self._runner.call(
            name,
            lambda: target(*args, **kwargs),
            lambda: target(*args, **_with_autocast_dtype(target, args, kwargs)),
        )

    def _run_graph(self, body: fx.GraphModule, args: Any) -> Any:
        inner = _OracleInterpreter(body, self._runner, prefix=f"{self._node_name}.")
        return inner.run(*args, enable_io_processing=False)


def _flat_inputs(gm: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    codegen = gm.graph._codegen
    if not isinstance(codegen, fx.graph._PyTreeCodeGen):
        return [*args, *kwargs.values()]
    return tree_flatten((args, reorder_kwargs(kwargs, codegen.pytree_info.in_spec)))[0]


def _cudnn(target: Any, args: Any) -> Any:
    """Runs a recurrent network as autocast does on a GPU: cuDNN's one kernel, with every operand narrowed."""
    if torch.is_autocast_enabled("cuda"):
        low = torch.get_autocast_dtype("cuda")
        args = tree_map_only(_Twin, lambda twin: aten.to.dtype(twin, low), args)
    with _pop_mode_temporarily():
        out = target(*tree_map(_inner, args))
    return tree_map_only(FakeTensor, _Twin, out)


def _with_autocast_dtype(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns kwargs with ``dtype=float32`` where autocast's only act is to set that argument."""
    if not isinstance(target, torch._ops.OpOverload):
        return kwargs
    names = [argument.name for argument in target._schema.arguments]
    if "dtype" not in names or names.index("dtype") < len(args) or kwargs.get("dtype") is not None:
        return kwargs
    if not torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "AutocastCUDA"):
        return kwargs
    return {**kwargs, "dtype": torch.float32}


@contextlib.contextmanager
def _autocast(enabled: bool, dtype: torch.dtype | None) -> Iterator[None]:
    """``torch.autocast("cuda")`` that does not ask whether there is a GPU."""
    was_enabled, was_dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype or was_dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", was_enabled)
        torch.set_autocast_dtype("cuda", was_dtype)


@contextlib.contextmanager
def _low_precision_math_attention() -> Iterator[None]:
    """Keeps the reference attention, the only one without a GPU, from widening as fused kernels never do."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def _inner(value: Any) -> Any:
    if isinstance(value, _Twin):
        return value.inner
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _as_cuda(device: torch.device) -> torch.device:
    return CUDA if device.type == "cpu" else device


def _is_float_cast(src: torch.dtype, dst: torch.dtype) -> bool:
    return src != dst and src.is_floating_point and dst.is_floating_point


def _storage(twin: _Twin) -> int:
    return twin.inner.untyped_storage()._cdata


def _dtypes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(tree_map(lambda leaf: getattr(leaf, "dtype", None), value))
    return None
