"""What a capture ahead of time cannot keep of a model: each check raises an error that says what helps."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from ..errors import AheadOfTimeError
from ..origin import op_name, user_line
from ..passes.analysis.facts import tensors
from .kept_tensors import KeptTensors
from .side_effects import named_arguments

_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

OR_JUST_IN_TIME = 'or capture it just in time: ampgraph.convert(model, capture="just in time")'


def advice_of(error: Exception) -> str:
    """Returns what helps against an error of a capture ahead of time, or ``""``."""
    advice, known, _ = "\n".join(str(error).splitlines()[1:]).partition(f", {OR_JUST_IN_TIME}")
    return advice if known else ""


def _refused(model: nn.Module, what: str, advice: str) -> AheadOfTimeError:
    text = f"{type(model).__name__}: {what}\n{advice}, {OR_JUST_IN_TIME}."
    return AheadOfTimeError(text).because(is_known=True)


def check_opaque(model: nn.Module, found: list[str]) -> None:
    """Raises an error if forward's code names an object whose state no call could compare."""
    if found:
        what = f"forward uses {', '.join(found[:3])}, whose state no graph follows"
        raise _refused(model, what, "Use a number, a buffer or a list")


def check_caught(model: nn.Module, failed: list[str]) -> None:
    """Raises an error if forward caught an error of a read of values: a call may not raise it."""
    if failed:
        what = f"forward catches an error of {failed[0]}, which may come from the capture alone"
        raise _refused(model, what, "Ask without try")


def check_replaced(model: nn.Module, replaced: list[str]) -> None:
    """Raises an error if forward replaces buffers, parameters or submodules: a graph replaces nothing."""
    if replaced:
        what = f"forward replaces {', '.join(dict.fromkeys(replaced))}, which a graph cannot"
        raise _refused(model, what, "Write to buffers in place")


def check_kept(model: nn.Module, kept: KeptTensors) -> None:
    """Raises an error if forward keeps results of a call for a later one outside of the model."""
    if kept.depends:
        what = f"forward keeps results in {', '.join(kept.depends)}, which a graph cannot"
        raise _refused(model, what, "Return such values")


def check_written(model: nn.Module, written: list[str]) -> None:
    """Raises an error if forward changes a container argument: the caller of a graph would not see it."""
    if written:
        names, noun = ", ".join(map(repr, written)), "arguments" if len(written) > 1 else "argument"
        what = f"forward changes what its {noun} {names} holds, which a graph cannot"
        raise _refused(model, what, "Return the new values, write to tensors in place")


def check_random_numbers(model: nn.Module, found: list[str]) -> None:
    """Raises an error if forward draws numbers that a graph cannot draw: every call would have the same."""
    if found:
        what = f"forward {' and '.join(found)}, which a graph cannot"
        raise _refused(model, what, "Draw with torch from its default generator")


def check_nested(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises an error if an argument has nested tensors without sizes (of ``torch.strided`` layout)."""
    for name, value in named_arguments(model, args, kwargs):
        leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if any(leaf.is_nested and leaf.layout == torch.strided for leaf in leaves):
            what = f"the argument {name!r} has a nested tensor without sizes, which a graph cannot take"
            raise _refused(model, what, "Pass a padded tensor")


def check_sparse(model: nn.Module, graph: fx.Graph) -> None:
    """Raises an error if a graph for a compiling backend has sparse tensors, which Dynamo does not take."""
    held = (*model.named_parameters(), *model.named_buffers())  # Dynamo looks at all that a module holds
    for name, tensor in held:
        if tensor.layout in _SPARSE:
            what = f"it has a sparse tensor, {name!r}, which no compiling backend takes"
            raise _refused(model, what, 'Convert with backend="eager"')
    for node in graph.nodes:
        is_sparse = any(tensor.layout in _SPARSE for tensor in tensors(node))
        if is_sparse and node.users:
            what = f"forward uses a sparse tensor, {_described(node)}, which no compiling backend takes"
            raise _refused(model, what, 'Convert with backend="eager"')


def _described(node: fx.Node) -> str:
    if node.op != "call_function":
        return f"{'the argument ' if node.op == 'placeholder' else ''}{str(node.target)!r}"
    line = user_line(node)
    return f"a result of {op_name(node)}{f' at {line}' if line else ''}"


def check_inference_tensors(model: nn.Module) -> None:
    """Raises an error if a capture failed and parameters are inference tensors, which no trace can take."""
    if torch.is_inference_mode_enabled():
        return
    parameters = ((name, p) for name, p in model.named_parameters() if not is_lazy(p))
    found = [name for name, p in parameters if p.is_inference() and p.requires_grad]
    if found:
        what = (
            f"{found[0]} was made in inference mode, and no capture outside of it can trace such parameters"
        )
        raise _refused(model, what, "Make them outside of inference mode")
