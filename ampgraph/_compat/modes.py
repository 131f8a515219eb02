"""The modes of torch: disables and queries them. Tried on torch 2.11, 2.13, 2.14 and 2.15.

`path_inside_wrappers` and `is_compiled` as they are now: on 2.13 alone. `is_of_transform`: on 2.11, 2.13 and
2.14. Where a function names its versions, these hold.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

# Functions that captured graphs call when the model enters or leaves a mode.
SET_GRAD_ENABLED = torch._C._set_grad_enabled
ENTER_AUTOCAST, EXIT_AUTOCAST = autocast_mode._enter_autocast, autocast_mode._exit_autocast
INFERENCE_MODE_CALLS = (_enter_inference_mode, _exit_inference_mode)

_SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
# Where activation wrappers and ``torch.compile`` hold the module.
_WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod")

is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_is_tracing = torch._C._is_tracing
_transforms = torch._C._functorch.peek_interpreter_stack


@contextlib.contextmanager
def no_ambient_autocast() -> Iterator[None]:
    """Hides every enabled ``torch.autocast`` from the code inside."""
    with torch._C._DisableAutocast():
        yield


def no_dispatch_modes() -> contextlib.AbstractContextManager[None]:
    """Hides the dispatch modes of the caller: selective checkpointing, counters of ops, loggers.

    They record or replace the ops of the model; modes of a capture do not count. Modes of tracing stay.
    """
    return _without_modes(lambda mode: not mode.is_infra_mode())


def no_modes() -> contextlib.AbstractContextManager[object]:
    """Runs the code inside on real tensors, also in the middle of a trace (tried on torch 2.13 and 2.15)."""
    return _python_dispatch._disable_current_modes()


def has_dispatch_modes() -> bool:
    """Whether any dispatch mode is active in this thread."""
    return bool(torch._C._len_torch_dispatch_stack())


def has_modes_of_callers() -> bool:
    """Whether a dispatch mode of the caller is active (a counter of ops, a logger), which sees each op.

    Dynamo compiles nothing inside one: from torch 2.13 on it raises for a whole graph, and on 2.11 it never
    again runs the code that it had compiled before.
    """
    return has_dispatch_modes() and bool(_modes_of_callers())


def _modes_of_callers() -> list[TorchDispatchMode]:
    stack = _python_dispatch._get_current_dispatch_mode_stack()
    return [mode for mode in stack if not mode.is_infra_mode()]


class _Aside(threading.local):
    modes: Sequence[TorchDispatchMode] = ()


_aside = _Aside()


@contextlib.contextmanager
def modes_of_callers_aside() -> Iterator[None]:
    """Hides the modes of the caller from Dynamo; `modes_of_callers_back` shows them to graphs that run."""
    before, _aside.modes = _aside.modes, _modes_of_callers()
    try:
        with no_dispatch_modes():
            yield
    finally:
        _aside.modes = before


def has_modes_aside() -> bool:
    """Whether this code runs inside `modes_of_callers_aside`."""
    return bool(_aside.modes)


@contextlib.contextmanager
def modes_of_callers_back() -> Iterator[None]:
    """Shows the modes that are set aside."""
    modes, _aside.modes = _aside.modes, ()
    for mode in modes:
        _python_dispatch._push_mode(mode)
    try:
        yield
    finally:
        for _ in modes:
            _python_dispatch._pop_mode()
        _aside.modes = modes


def no_selective_checkpoint() -> contextlib.AbstractContextManager[None]:
    """Hides the modes of selective checkpointing, which number the ops of forward and of its second run."""
    return _without_modes(lambda mode: isinstance(mode, _SELECTIVE))


@contextlib.contextmanager
def _without_modes(is_hidden: Callable[[TorchDispatchMode], bool]) -> Iterator[None]:
    stack = _python_dispatch._get_current_dispatch_mode_stack()
    if not any(map(is_hidden, stack)):
        yield
        return
    popped = [_python_dispatch._pop_mode() for _ in stack]
    kept = [mode for mode in reversed(popped) if not is_hidden(mode)]
    for mode in kept:
        _python_dispatch._push_mode(mode)
    try:
        yield
    finally:
        for mode in reversed(kept):
            _python_dispatch._pop_mode(mode._mode_key if mode.is_infra_mode() else None)
        for mode in reversed(popped):
            _python_dispatch._push_mode(mode)


def no_saved_tensor_hooks() -> contextlib.AbstractContextManager[None]:
    """Hides every ``saved_tensors_hooks`` from the code inside, as AOTAutograd does while it traces.

    ``torch.utils.checkpoint`` counts with them the tensors that a region saves; tracing must not count.
    """
    hidden: contextlib.AbstractContextManager[None]
    hidden = torch._dynamo.utils._disable_saved_tensors_hooks_during_tracing()
    return hidden


def has_saved_tensor_hooks() -> bool:
    """Whether the caller is inside hooks for the tensors that autograd saves (torch 2.11, 2.13, 2.15)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


_KERNEL_SETTINGS = (
    torch._C._get_cudnn_enabled,
    torch._C._get_mkldnn_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
)


def kernel_settings() -> tuple[bool, ...]:
    """Returns the settings by which composite ops choose their kernels, also while they are traced.

    Tried on torch 2.11, 2.13 and 2.15.
    """
    return tuple([is_enabled() for is_enabled in _KERNEL_SETTINGS])


@contextlib.contextmanager
def autocast_values(
    device: str, dtype: torch.dtype | None = None, enabled: bool = True, *_: object
) -> Iterator[None]:
    """Gives ops their results under ``torch.autocast``, invisible to code that traces modes."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_dtype(device, dtype or before[1])
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def is_exporting() -> bool:
    """Whether ``torch.export`` traces in this thread; torch's own flag is the process's.

    Dynamo in torch 2.11 always treats ``torch.compiler.is_exporting()`` as true.
    """
    flag = torch.compiler._is_exporting_flag
    return flag and (torch.compiler.is_dynamo_compiling() or is_traced())


def is_compiling() -> bool:
    """Whether this thread compiles or traces; torch's own flag is the process's."""
    return torch.compiler.is_compiling() and (torch.compiler.is_dynamo_compiling() or is_traced())


def is_traced() -> bool:
    """Whether this thread traces: it has dispatch modes or uses those of the process."""
    pre_dispatch = torch._C.DispatchKey.PreDispatch
    return has_dispatch_modes() or torch._C._dispatch_tls_is_dispatch_key_included(pre_dispatch)


def is_plain_call() -> bool:
    """Whether this code runs outside export, tracing, autocast and the transforms of ``torch.func``."""
    return not (
        torch.compiler._is_exporting_flag
        or _is_tracing()
        or is_any_autocast_enabled()
        or _transforms() is not None
        or forward_ad._current_level >= 0
    )


def in_transform() -> bool:
    """Whether the code runs inside ``torch.func.grad``, ``vmap``, forward-mode AD or another transform."""
    return _transforms() is not None or forward_ad._current_level >= 0


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether the tensor belongs to vmap or to the older vmap behind ``is_grads_batched=True``."""
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(tensor) or functorch.is_batchedtensor(tensor)


def is_of_transform(tensor: torch.Tensor) -> bool:
    """Whether the tensor is one that a transform of ``torch.func`` wraps."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor inside one that transforms of ``torch.func`` wrap: of vmap, the whole batch."""
    while is_of_transform(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def outside_transforms() -> contextlib.AbstractContextManager:
    """Runs code as if it were outside all transforms of ``torch.func``."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def active_data_parallel() -> DistributedDataParallel | None:
    """Returns the DistributedDataParallel whose forward runs now, or None."""
    return DistributedDataParallel._get_active_ddp_module()


def expects_uneven_inputs(wrapper: DistributedDataParallel) -> bool:
    """Whether the wrapper is inside its ``join()``, where ranks may run out of inputs before others."""
    return bool(wrapper._join_config.enable)


def is_in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return torch._C._current_graph_task_id() != -1


def next_node_number() -> int:
    """Returns the number of the next node of autograd in this thread (tried on torch 2.11, 2.13 and 2.15)."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def node_number(node: Any) -> int:
    """Returns the number that autograd gave to a node (tried on the same)."""
    return node._sequence_nr()  # type: ignore[no-any-return]


def running_node() -> Any:
    """Returns the node that autograd runs now in this thread, also in a hook before it (the same)."""
    return torch._C._current_autograd_node()


def path_inside_wrappers(module: torch.nn.Module) -> str:
    """Returns the path to the module inside activation wrappers and ``torch.compile``; else empty.

    Activation wrappers remove their name from the parameters' names, so no capture finds these.
    """
    inner: dict[type, str] = {ActivationWrapper: _WRAPPED[0]}
    if (optimized := _optimized_module()) is not None:
        inner[optimized] = _WRAPPED[1]
    names: list[str] = []
    while name := next((name for cls, name in inner.items() if isinstance(module, cls)), None):
        names.append(name)
        module = getattr(module, name)
    return ".".join(names)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` or ``Module.compile`` was called on a module or one inside it."""
    optimized = _optimized_module()
    if optimized is None:
        return False
    return any(
        isinstance(part, optimized) or part._compiled_call_impl is not None for part in module.modules()
    )


def _optimized_module() -> Any:
    """Returns the class of compiled modules; None where Dynamo is not, or not quite, loaded."""
    return getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", None)


def without_wrappers(name: str) -> str:
    """Returns the name of a parameter without the parts that these wrappers add, as before they came."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def after_backward(function: Callable[[], None]) -> None:
    """Calls a function when the backward that runs now, in whose hook this is called, has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)  # type: ignore[attr-defined]
