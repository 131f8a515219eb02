"""Whether one graph can take a whole step: the reasons against it, and the key of a call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from .._compat import is_any_autocast_enabled, storage_key
from ..errors import PolicyError
from ..module import AmpModule
from ..proxy.all_parameters import all_parameters
from ..runtime.signature import signature_of
from ..training.distributed import is_distributed
from ..training.optimizer_step import parameters_of
from ..training.untaken_gradients import has_hooks

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def reason_for_the_loop(
    amp: AmpModule, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]
) -> str | None:
    """Returns why a step with these cannot be one graph; None if it can. Runs at every step."""
    name = type(optimizer).__name__
    if amp.is_just_in_time:
        return "the model is captured just in time; pass example inputs to ampgraph.convert"
    if is_distributed():
        return "gradients of several processes are averaged outside the graph"
    if not type(optimizer).__module__.startswith("torch.optim."):
        return f"{name} is not an optimizer of torch"
    if not all(group.get("fused") for group in optimizer.param_groups):
        return f"{name} is not fused; where torch has a fused form of it, pass fused=True"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has hooks"
    if is_any_autocast_enabled() or not torch.is_grad_enabled():
        return "it is called under torch.autocast, or without gradients"
    if amp._forward_hooks or amp._forward_pre_hooks or amp._backward_hooks or amp._backward_pre_hooks:
        return "the converted model has hooks"
    held = parameters_of(optimizer)
    trained = [p for p in all_parameters(amp.source) if p.requires_grad]
    if {id(p) for p in held if p.requires_grad} != {id(p) for p in trained}:
        return "the optimizer does not hold exactly the model's parameters that require gradients"
    if any(map(has_hooks, held)):
        return "a parameter has hooks"
    if any(type(p.data) is not Tensor for p in held):
        return "a parameter is a subclass of Tensor"
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if any(x.requires_grad or type(x) is not Tensor for x in tensors):
        return "an argument requires gradients or is a subclass of Tensor"
    return None


def key_of(
    amp: AmpModule, optimizer: Optimizer, loss_fn: Callable, args: tuple, kwargs: dict[str, Any]
) -> Hashable:
    """Returns what must be the same for two steps that run one graph. Runs at every step."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    first: dict[object, int] = {}
    sharing = tuple(first.setdefault(storage_key(x), i) for i, x in enumerate(tensors))
    return (
        signature_of(args, kwargs),
        tuple((x.stride(), x.storage_offset()) for x in tensors),
        sharing,
        amp._graphs.modes(),
        amp.scaler.config,
        tuple((id(p), p.requires_grad, p.dtype, p.device) for p in all_parameters(amp.source)),
        tuple(map(id, amp.source.buffers())),
        tuple(_settings(group) for group in optimizer.param_groups),
        tuple(id(x) for p in parameters_of(optimizer) for x in optimizer.state.get(p, {}).values()),
        tuple(_identity(name, value) for name, value in values_of(loss_fn)),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _settings(group: dict[str, Any]) -> Hashable:
    found: list[Hashable] = [tuple(map(id, group["params"]))]
    for name, value in group.items():
        if name == "params":
            continue
        if isinstance(value, Tensor):
            found.append((name, id(value)))
        elif name == "lr":
            found.append((name, type(value)))  # an input of the graph
        else:
            found.append((name, value if _is_hashable(value) else repr(value)))
    return tuple(found)


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def values_of(function: Any) -> Iterator[tuple[str, object]]:
    """Yields what a function refers to by name, but for builtins."""
    while isinstance(function, functools.partial):
        yield from _numbered(function.args)
        yield from function.keywords.items()
        function = function.func
    if inspect.ismethod(function):
        yield from getattr(function.__self__, "__dict__", {}).items()
        function = function.__func__
    elif not inspect.isfunction(function):  # a module or another object that is called
        yield from getattr(function, "__dict__", {}).items()
        function = getattr(type(function), "forward", None) or type(function).__call__
    code = getattr(function, "__code__", None)
    if code is None:
        return
    yield from _numbered(function.__defaults__ or ())
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield name, _content(cell)
    for name in code.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


def _numbered(values: tuple) -> Iterator[tuple[str, object]]:
    """Yields values with their position as name."""
    for index, value in enumerate(values):
        yield str(index), value


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _identity(name: str, value: object) -> Hashable:
    """Returns a value that a graph would hold; of an object, its identity."""
    return (name, type(value), value) if isinstance(value, _PLAIN) else (name, id(value))


def loss_of(result: Any) -> Tensor:
    """Returns the loss of what ``loss_fn`` returned.

    Raises:
        PolicyError: It is not one number.
    """
    loss = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise PolicyError(
            f"compile_step: loss_fn returned {what}; expected the loss, a tensor of one number."
        )
    return loss
