"""Every private torch API that ampgraph uses, in one place. Tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
import logging
import operator
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import LocalSource
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import py_sym_types
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.nn import Module, RNNBase
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

__all__ = [
    "INFERENCE_MODE_CALLS",
    "VERSION",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "LocalSource",
    "OpOverload",
    "accept_real_constants",
    "active_data_parallel",
    "aot_eager",
    "compiled_by_dynamo",
    "errors_raised_not_logged",
    "evaluate",
    "fake_mode_of",
    "in_transform",
    "is_exporting",
    "keep_dynamo_out",
    "keep_versions",
    "no_ambient_autocast",
    "no_saved_tensor_hooks",
    "outside_transforms",
    "result_dtypes",
    "set_calling_convention",
    "size_hint",
    "storage_key",
    "with_dtypes",
    "wrap_grad_modes",
]


# What Dynamo makes of ``with torch.inference_mode()``.
INFERENCE_MODE_CALLS = (_enter_inference_mode, _exit_inference_mode)


def fake_mode_of(graph: Graph) -> FakeTensorMode | None:
    """Returns the fake mode that the graph was captured under, or None for a graph without tensors."""
    for node in graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else (values,):
            if isinstance(value, FakeTensor):
                return value.fake_mode
    return None


def evaluate(node: Node, mode: FakeTensorMode | None, one_step: bool = False) -> Any:
    """Runs one call_function node on its arguments' fake values; the authority on dtypes and shapes.

    With ``one_step``, recurrent layers run over one element of their sequence: enough to tell dtypes.
    """
    args, kwargs = tree_map_only(Node, lambda n: n.meta["val"], (node.args, dict(node.kwargs)))
    shape_env = mode.shape_env if mode else None
    fresh = shape_env.ignore_fresh_unbacked_symbols() if shape_env else contextlib.nullcontext()
    with (
        mode or contextlib.nullcontext(),
        enable_python_dispatcher(),
        fresh,
        no_ambient_autocast(),
        no_saved_tensor_hooks(),
    ):
        if one_step and node.target in _RECURRENT:
            batch_first = args[-1]
            args = (args[0].narrow(1 if batch_first else 0, 0, 1), *args[1:])
        return node.target(*args, **kwargs)  # type: ignore[operator]


_aten = torch.ops.aten
_RECURRENT = (_aten.lstm.input, _aten.gru.input, _aten.rnn_tanh.input, _aten.rnn_relu.input)


_dtype_cache: dict[Any, tuple[torch.dtype | None, ...]] = {}


def result_dtypes(node: Node, mode: FakeTensorMode | None) -> tuple[torch.dtype | None, ...]:
    """Returns the dtypes of what a call_function node yields, as FakeTensor finds them.

    A result's dtype follows from the op, its arguments' dtypes, which of them are 0-dim, and its
    non-tensor arguments, never from sizes; so one evaluation serves every node with the same key
    (sizes only tell how many results ``split`` has).
    """
    if node.target is operator.getitem:
        value = node.args[0].meta["val"][node.args[1]]  # type: ignore[union-attr,index]
        return _dtypes(value)
    value = node.meta.get("val")
    if isinstance(value, (*py_sym_types, bool, int, float)):
        return (None,)  # what ``item`` reads is not known to FakeTensor
    count = len(value) if isinstance(value, (list, tuple)) else 1
    key = (node.target, count, _dtype_key(node.args), _dtype_key(node.kwargs))
    if key not in _dtype_cache:
        # A dtype has nothing to do with gradients; a parameter written under no_grad must be allowed to be.
        with torch.no_grad():
            values = evaluate(node, mode, one_step=True)
        _dtype_cache[key] = _dtypes(values)
    return _dtype_cache[key]


def _dtypes(value: Any) -> tuple[torch.dtype | None, ...]:
    values = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(v.dtype if isinstance(v, torch.Tensor) else None for v in values)


def _dtype_key(argument: Any) -> Any:
    """Returns what an argument, a container included, can tell of a result's dtype."""
    if isinstance(argument, (list, tuple)):
        return type(argument), tuple([_dtype_key(item) for item in argument])
    if isinstance(argument, dict):
        return tuple([(name, _dtype_key(item)) for name, item in argument.items()])
    if isinstance(argument, Node):
        return _dtype_key(argument.meta.get("val"))
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.dim() == 0
    if isinstance(argument, (bool, str, torch.dtype)) or argument is None:
        return argument
    return type(argument)


def with_dtypes(value: Any, dtypes: tuple[torch.dtype | None, ...]) -> Any:
    """Returns the fake value(s) with other dtypes; the very same object where nothing differs."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    if len(values) != len(dtypes):
        raise ValueError(f"expected {len(values)} results, FakeTensor finds {len(dtypes)}")
    if all(not isinstance(v, torch.Tensor) or v.dtype == d for v, d in zip(values, dtypes, strict=True)):
        return value
    changed = [_with_dtype(v, d) for v, d in zip(values, dtypes, strict=True)]
    return type(value)(changed) if isinstance(value, (list, tuple)) else changed[0]


def _with_dtype(value: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(value, FakeTensor) or dtype is None or value.dtype == dtype:
        return value
    sizes = (*value.shape, *value.stride())
    if all(isinstance(s, int) for s in sizes):
        # The same as value.to(dtype) under the mode, at a tenth of the price.
        meta = torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="meta")
        return FakeTensor(value.fake_mode, meta, value.device)
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)


@contextlib.contextmanager
def accept_real_constants(mode: FakeTensorMode | None) -> Iterator[None]:
    """Lets real tensors (constants in model code) mix with the fake ones of ``mode``."""
    if mode is None:
        yield
        return
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


@contextlib.contextmanager
def no_ambient_autocast() -> Iterator[None]:
    """Hides every enabled ``torch.autocast`` from the code inside."""
    with torch._C._DisableAutocast():
        yield


@contextlib.contextmanager
def no_saved_tensor_hooks() -> Iterator[None]:
    """Hides every ``saved_tensors_hooks`` from the code inside, as AOTAutograd does while it traces.

    ``torch.utils.checkpoint`` counts with them what a region saves; what tracing saves is not part of that.
    """
    with torch._dynamo.utils._disable_saved_tensors_hooks_during_tracing():
        yield


@contextlib.contextmanager
def errors_raised_not_logged(is_here: Callable[[], bool]) -> Iterator[None]:
    """Keeps fake tensors from logging, traceback and all, the errors that they raise as well.

    Args:
        is_here: Whether what is logged comes from the code inside; other threads log as ever.
    """
    logger = logging.getLogger(fake_tensor.__name__)

    def keep(record: logging.LogRecord) -> bool:
        return record.exc_info is None or not is_here()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def aot_eager(keep: Callable[[str, GraphModule], None]) -> Callable:
    """Returns torch.compile's backend ``"aot_eager"``, which tells ``keep`` of the graphs it makes.

    They come as ``"forward"`` and ``"backward"``, or as ``"inference"`` where nothing needs a gradient.
    """
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    def compiler(kind: str) -> Callable:
        def compile_graph(graph_module: GraphModule, inputs: list) -> Callable:
            keep(kind, graph_module)
            return make_boxed_func(graph_module.forward)

        return compile_graph

    return aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )


# Past the limit Dynamo runs code as it is, in float32 without a word. Layers behind graph breaks share their
# code, and each of a class of its own (parametrizations make one) counts; torch's default is 8.
RECOMPILE_LIMIT = 64


def compiled_by_dynamo(model: Module, backend: str | Callable, **given: Any) -> Callable:
    """Returns ``torch.compile(model, backend=backend, **given)``, apart from what else is compiled.

    Dynamo keeps what it compiled with the code of ``forward``, which all models of one class share, and
    gives up after eight entries. torch 2.13 has an option against that; 2.11 gets a function of its own to
    compile, which helps up to the first graph break.

    torch 2.11 also leaves out the guards on parameters where a module's dict did not change, and
    ``requires_grad_()`` does not change it: what ran frozen once then never gets gradients. 2.13 notices.
    """
    if any(isinstance(module, RNNBase) for module in model.modules()):
        # Dynamo skips them by default.
        return torch._dynamo.config.patch(allow_rnn=True)(_compiled_apart(model, backend, **given))
    return _compiled_apart(model, backend, **given)


def _compiled_apart(model: Module, backend: str | Callable, **given: Any) -> Callable:
    if VERSION >= (2, 13):
        apart = {"isolate_recompiles": True, "recompile_limit": RECOMPILE_LIMIT}
        before = set(model.__dict__)
        compiled = torch.compile(model, backend=backend, **apart, **given)  # type: ignore[call-overload]
        # What is set on the result lands on the model: torch's mark, Lightning's arguments (the backend
        # among them, which nothing can pickle).
        for name in set(model.__dict__) - before:
            del model.__dict__[name]
        return compiled
    # In torch 2.11 each call with fullgraph sets a switch of the process and sets it back; calls from several
    # threads leave it set, and then Dynamo skips code everywhere.
    given["fullgraph"] = False
    own = FunctionType(_call_module.__code__.replace(), globals())
    compiled = torch.compile(own, backend=backend, **given)

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return compiled(model, *args, **kwargs)
        with _parameter_guards:
            return compiled(model, *args, **kwargs)

    return call


def _call_module(self: Module, *args: Any, **kwargs: Any) -> Any:
    return self(*args, **kwargs)


class _ParameterGuards:
    """An option of Dynamo, which is the process's own, as long as any thread is inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._before = 0, True

    def __enter__(self) -> None:
        config = torch._dynamo.config
        with self._lock:
            if self._inside == 0:
                self._before = config.skip_tensor_guards_with_matching_dict_tags
                config.skip_tensor_guards_with_matching_dict_tags = False
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags = self._before


VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
_parameter_guards = _ParameterGuards()


def keep_versions(tensors: list[torch.Tensor]) -> contextlib.AbstractContextManager:
    """Lets ``tensors`` be written inside without autograd's version counters moving."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def active_data_parallel() -> DistributedDataParallel | None:
    """Returns the DistributedDataParallel whose forward runs now, or None."""
    return DistributedDataParallel._get_active_ddp_module()


def keep_dynamo_out(function: Callable) -> None:
    """Lets Dynamo inline ``function`` into what it captures, but never compile it as a frame of its own."""
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def size_hint(size: int | torch.SymInt, fallback: int = 1) -> int:
    """Returns a number for a possibly symbolic size; ``fallback`` where nothing is known about it."""
    if isinstance(size, int):
        return size
    node = size.node
    hint = node.hint if node.has_hint() else None
    return int(hint) if hint is not None else fallback


def storage_key(value: torch.Tensor) -> int | None:
    """Returns a number that two (fake) tensors share if and only if they share memory."""
    if value.layout != torch.strided:
        return None
    return value.untyped_storage()._cdata


def set_calling_convention(graph_module: GraphModule, program: ExportedProgram) -> None:
    """Gives an unlifted graph the source model's arguments and output type."""
    signature = program.module_call_graph[0].signature
    in_spec, out_spec = signature.in_spec, signature.out_spec
    positional, keyword = in_spec.children()
    names = getattr(signature, "forward_arg_names", None)
    names = names or [*(f"arg_{i}" for i in range(positional.num_children)), *keyword.context]
    graph_module.graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(list(names), in_spec, out_spec)))


def wrap_grad_modes(graph_module: GraphModule) -> GraphModule:
    """Returns a graph module with a sub-graph for each region between ``_set_grad_enabled`` calls.

    That is how ``torch.export`` writes ``with torch.no_grad()``, and what decomposition expects.
    """
    from torch._export.passes.replace_set_grad_with_hop_pass import replace_set_grad_with_hop_pass

    return replace_set_grad_with_hop_pass(graph_module, None)[0]


def is_exporting() -> bool:
    """Whether ``torch.export`` traces in this thread; torch's own flag is the process's.

    Dynamo in torch 2.11 takes ``torch.compiler.is_exporting()`` for true wherever it is asked.
    """
    flag = torch.compiler._is_exporting_flag
    return flag and (torch.compiler.is_dynamo_compiling() or _has_modes())


def _has_modes() -> bool:
    """Whether this thread traces: has dispatch modes, or sends its ops to those of the process."""
    pre_dispatch = torch._C.DispatchKey.PreDispatch
    return bool(
        torch._C._len_torch_dispatch_stack() or torch._C._dispatch_tls_is_dispatch_key_included(pre_dispatch)
    )


def in_transform() -> bool:
    """Whether the code runs inside ``torch.func.grad``, ``vmap`` or another of torch's transforms."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> contextlib.AbstractContextManager:
    """Lets code run as it does outside of all transforms of ``torch.func``."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()
