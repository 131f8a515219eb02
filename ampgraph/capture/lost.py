"""Detects the parts of the backward that a capture ahead of time loses.

Tracing records the ops of a custom ``autograd.Function``'s forward and loses its backward. It also loses
hooks on tensors inside forward, backward hooks of modules, hooks that change the tensors saved for the
backward, and gradients of tensors that are neither inputs nor parameters of the model.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from .._compat import (
    MODULE_CALL,
    AppliedFunction,
    FakeTensor,
    float32_forward,
    function_of,
    native_apply,
    replaced,
)
from ..guards import fp32_guard
from ..own_files import is_users
from ..proxy.all_parameters import all_parameters
from .user_code import frames

# ``graph_module.meta`` of a captured graph holds under this key what it lost, in words.
LOST_KEY = "ampgraph_lost"

# Functions that torch applies while it traces; those of the model's own layers are elsewhere.
_TRACING = ("torch._", "torch.fx.", "torch.export.", "torch.utils.checkpoint")
_BETWEEN = ("watched", "__torch_function__")
_TENSOR_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


@contextlib.contextmanager
def noting_lost_backwards(
    model: nn.Module, inputs: Any, is_capturing: Callable[[], bool]
) -> Iterator[LostBackwards]:
    """Yields what collects the parts of the model's backward that the capture inside loses."""
    lost = LostBackwards(model, inputs, is_capturing)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_patched(AppliedFunction, "apply", lost.apply, classmethod))
        stack.enter_context(_patched(BackwardCFunction, "__init__", lost.make_context))
        for name in _TENSOR_HOOKS:
            stack.enter_context(_patched(torch.Tensor, name, lost.hook))
        stack.enter_context(_patched(saved_tensors_hooks, "__enter__", lost.enter_saved_hooks))
        stack.enter_context(_patched(nn.Module, MODULE_CALL, lost.call_module))
        yield lost


def _is_models(function: type) -> bool:
    """Whether a custom function is the model's, and no tool of tracing."""
    return not function.__module__.startswith(_TRACING) and function.__name__ != "BackwardHookFunction"


class LostBackwards:
    """Collects the lost parts of a backward, in words.

    Args:
        model: The model.
        inputs: The arguments of its call.
        is_capturing: Whether this thread captures.

    Attributes:
        found: The parts so far.
    """

    def __init__(self, model: nn.Module, inputs: Any, is_capturing: Callable[[], bool]) -> None:
        self.found = [
            f"the backward hooks of {_module(name, model)}"
            for name, module in model.named_modules()
            if module._backward_hooks or module._backward_pre_hooks
        ]
        self._model, self._is_capturing = model, is_capturing
        self._names = {id(module): name for name, module in model.named_modules()}
        self._own = {id(v) for v in (*all_parameters(model), *model.buffers(), *tree_leaves(inputs))}
        self._leaves: list[tuple[weakref.ref[torch.Tensor], str]] = []
        self._applied: list[type] = []  # functions that run now, and whose arguments are known

    def _note(self, what: str, where: str | None = None) -> None:
        text = f"{what}{self._place() if where is None else where}"
        if self._is_capturing() and torch.is_grad_enabled() and text not in self.found:
            self.found.append(text)

    def _place(self) -> str:
        return _place(self._names, self._model)

    # -- in the place of methods of torch --------------------------------------------------------

    def apply(self, original: Callable, cls: type, *args: Any, **kwargs: Any) -> Any:
        """Applies a custom function; a reentrant checkpoint, which runs without gradients, is inlined."""
        if not self._is_capturing():
            return native_apply(cls)(*args, **kwargs)
        if cls is CheckpointFunction:
            run, _, *values = args
            return run(*values)
        tensors = (x for x in tree_leaves(args) if isinstance(x, torch.Tensor))
        if _is_models(cls) and any(x.is_floating_point() or x.is_complex() for x in tensors):
            self._note(f"the backward of {cls.__qualname__}")
        self._applied.append(cls)
        try:
            with fp32_guard() if float32_forward(cls) else contextlib.nullcontext():
                return native_apply(cls)(*args, **kwargs)
        finally:
            self._applied.pop()

    def make_context(self, original: Callable, context: BackwardCFunction) -> None:
        """Makes the context of a function whose native ``apply`` the code has stored before the capture."""
        cls = function_of(context)
        if self._is_capturing() and cls not in self._applied and _is_models(cls):
            self._note(f"the backward of {cls.__qualname__}")
        original(context)

    def hook(self, original: Callable, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Registers a hook on a tensor."""
        self._note(f"{original.__name__}()")
        return original(tensor, *args, **kwargs)

    def enter_saved_hooks(self, original: Callable, hooks: saved_tensors_hooks) -> Any:
        """Enters hooks for saved tensors; checkpoints and saving on the CPU do not change the values."""
        if type(hooks) is not save_on_cpu and not type(hooks).__module__.startswith(_TRACING):
            self._note(type(hooks).__name__)
        return original(hooks)

    def call_module(self, original: Callable, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Calls a module."""
        result = original(module, *args, **kwargs)
        if module is self._model and self._is_capturing():
            self._note_returned(result)
        return result

    # -- what others tell ------------------------------------------------------------------------

    def note_read(self, tensors: Iterable[torch.Tensor]) -> None:
        """Records tensors with gradients that are no parameters of the model: a graph has copies of those."""
        for tensor in tensors:
            is_of_graph = isinstance(tensor, FakeTensor) or id(tensor) in self._own
            if not is_of_graph and tensor.requires_grad:
                self._note(f"the gradient of a tensor of the size {tuple(tensor.shape)} outside of the model")

    def note_required(
        self, tensor: torch.Tensor, requires_grad: bool = True, *, is_made: bool = False
    ) -> None:
        """Records that the model's code lets a tensor require gradients: the caller's tensor would not.

        Args:
            tensor: The tensor.
            requires_grad: Whether it requires gradients from now on.
            is_made: Whether forward has made it. It is lost only if forward returns it.
        """
        if not requires_grad or tensor.requires_grad or not is_users(_asking_file()):
            return
        if is_made:
            self.note_made(tensor)
        else:
            self._note("requires_grad_() of an input")

    def note_made(self, leaf: torch.Tensor) -> None:
        """Records a tensor without history that forward has made and that requires gradients."""
        self._leaves.append((weakref.ref(leaf), self._place()))

    def _note_returned(self, result: Any) -> None:
        """Records what the model returns: a graph returns no leaves of autograd."""
        returned = set(map(id, tree_leaves(result)))
        for reference, place in self._leaves:
            leaf = reference()
            if leaf is not None and leaf.requires_grad and id(leaf) in returned:
                self._note("requires_grad_() of a tensor that forward returns", place)

    def watched(self, node: Any) -> Any:
        """Returns a ``grad_fn`` that the model's code reads in a form that records hooks on it."""
        if node is None:
            return None
        return _WatchedNode(node, self._note) if is_users(_asking_file()) else node


class _WatchedNode:
    """A node of autograd's graph that records the registration of hooks."""

    def __init__(self, node: Any, note: Callable[[str], None]) -> None:
        self._node, self._note = node, note

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook"):
            self._note(f"grad_fn.{name}()")
        return getattr(self._node, name)


def _patched(
    owner: type, name: str, function: Callable, kind: Callable = lambda f: f
) -> contextlib.AbstractContextManager[None]:
    """Replaces a method by ``function``, which gets the original as its first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def instead(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    return replaced(owner, name, kind(instead))


def _asking_file() -> str:
    """Returns the file of the code that calls through this one and torch's modes."""
    files = ((f.f_code.co_filename, f.f_code.co_name) for f in frames())
    return next(file for file, name in files if file != __file__ and name not in _BETWEEN)


def _place(names: dict[int, str], model: nn.Module) -> str:
    """Returns the current line of the user's code and the innermost module around it."""
    line = module = ""
    for frame in frames():
        if not line and is_users(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        name = names.get(id(frame.f_locals.get(arguments[0]))) if arguments else None
        if name is not None:
            module = _module(name, model)
            break
    return f" ({', '.join(filter(None, (module, line)))})" if module or line else ""


def _module(name: str, model: nn.Module) -> str:
    return f"module {name!r}" if name else type(model).__name__
