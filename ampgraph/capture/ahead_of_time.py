"""Ahead-of-time capture of a whole graph by ``torch.export`` (non-strict)."""

from __future__ import annotations

import contextlib
import inspect
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram, ShapesCollection
from torch.fx import traceback as fx_traceback

from .._compat import (
    cheap_source_lines,
    distributions_unchecked,
    errors_raised_not_logged,
    is_untraced_generator,
    no_ambient_autocast,
    no_copies_into_buffers,
    no_global_hooks,
    no_saved_tensor_hooks,
    quiet_export,
    scripts_not_optimized,
    sizes_written_as_numbers,
    telling_no_export,
    traced_nodes_forgotten,
    tracing_lock,
    whole_grad_regions,
)
from ..errors import AheadOfTimeError, CaptureError, warn_user
from ..training.distributed import sharded_error
from .batch_norm import with_cumulative_average
from .body_modules import name_modules_of_bodies
from .causal_masks import masks_unseen
from .converted_parts import ANOTHER_POLICY
from .distinct import distinct
from .held_containers import HeldContainers
from .held_objects import noting_set_attributes
from .inference_mode import traced_as_no_grad
from .kept_tensors import KeptTensors
from .lost import LOST_KEY, noting_lost_backwards
from .opaque_state import opaque_objects
from .random_numbers import noting_random_numbers, values_named
from .reads import Reads
from .real_types import real_types
from .real_writes import RealWrites
from .refusals import (
    OR_JUST_IN_TIME,
    check_caught,
    check_inference_tensors,
    check_kept,
    check_opaque,
    check_random_numbers,
    check_replaced,
    check_written,
)
from .replaced import Replaced
from .side_effects import noting_written_containers, without_new_state
from .user_code import user_line
from .watched_calls import WatchedCalls
from .watched_modules import recorded

_here = threading.local()

_DATA_DEPENDENT = ("data-dependent", "data dependent", "DataDependent", "is_nonzero", "unbacked")
_VALUE_SIZED = ("DynamicOutputShape", "DataDependentOutput")  # aten.linalg_lstsq, aten._ctc_loss
# (part of the name or message of the error, function it came through or "", what helps); the first that fits.
_HINTS = (
    (
        ANOTHER_POLICY,
        "",
        "Give both one policy, convert the whole from unconverted parts (amp.source, blocks.restore()), "
        f"{OR_JUST_IN_TIME}.",
    ),
    (
        "Couldn't swap",
        "module.py:_apply",
        f"Convert parameters before the call, not in forward (module.to(..), .float()), {OR_JUST_IN_TIME}.",
    ),
    *(
        (cause, "rnn.py:forward", "Lengths of packed sequences are tensor values: pass the padded batch.")
        for cause in ("got FakeTensor", *_DATA_DEPENDENT)
    ),
    *(
        (
            cause,
            "",
            f"What the op returns depends on tensor values: leave it out of the model, {OR_JUST_IN_TIME}.",
        )
        for cause in _VALUE_SIZED
    ),
    *(
        (cause, "", f"Control flow depends on tensor values: use torch.cond, {OR_JUST_IN_TIME}.")
        for cause in _DATA_DEPENDENT
    ),
    *(
        (
            cause,
            function,
            "Make a dataclass among inputs or outputs known with torch.export.register_dataclass(TheClass); "
            "of other types (caches, for instance), take and return their tensors, turn them off "
            f"(use_cache=False), {OR_JUST_IN_TIME}.",
        )
        for cause, function in (
            ("in output, which is not a known type", ""),
            ("Unsupported input type", ""),
            ("unhashable type", "weakref.py:__contains__"),  # torch 2.11, of an output
        )
    ),
    *(
        (cause, "", f"Gradients inside forward: take them outside of the model, {OR_JUST_IN_TIME}.")
        for cause in (
            "fake tensor in the exported program constant's list",
            "functorch tensor",
            "Expected FakeTensor, got <class 'torch.Tensor'>",  # torch 2.11
        )
    ),
)


def capture_program(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    reads: Reads | None = None,
    gradients: bool = True,
) -> ExportedProgram:
    """Captures ``model`` whole for the given example inputs.

    Args:
        model: Any ``nn.Module``, a ``torch.fx.GraphModule`` included; not changed.
        args: Example positional arguments; only their structure, shapes, dtypes and devices matter.
        kwargs: Example keyword arguments.
        dynamic_shapes: As for ``torch.export.export``.
        reads: Records the Python state that forward reads.
        gradients: The grad mode to capture in.

    Raises:
        CaptureError: The model cannot be captured for these inputs; the message names the user's source line.

    The graph's ``meta`` lists the lost parts of the model's backward under `LOST_KEY`.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"{type(model).__name__} is a TorchScript module, which has no Python code to capture; "
            "convert the nn.Module it was made from."
        )
    kwargs, reads = kwargs or {}, Reads(model) if reads is None else reads
    if refusal := sharded_error(model, args, kwargs):
        raise refusal
    program = _exported(model, args, kwargs, dynamic_shapes, reads, gradients)
    if reads.has_only_decided():
        again = Reads(model)
        with reads.decided():
            other = _exported(model, args, kwargs, dynamic_shapes, again, gradients)
        if not (again.lost or again.only_set) and _code(other) == _code(program):
            reads.forget_decisions()
    if gradients and _has_op(program, "associative_scan"):
        warn_user(
            f"{type(model).__name__}: forward runs associative_scan, whose backward in torch leaves out"
            " gradients between its tensors (pytorch/pytorch#172568). Where it has several, run a loop."
        )
    return program


def _code(program: ExportedProgram) -> list[str]:
    return [part.code for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)]


def _exported(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    reads: Reads,
    gradients: bool,
) -> ExportedProgram:
    """Captures a call of the model; where the sizes may change, or a call cannot be captured, an export.

    Code that is compiled but not exported may run a scan of ``torch.func``, or on a GPU the op
    ``associative_scan``, in place of the loop of a call. Then an export has the loop too.
    """
    given = model, args, kwargs, dynamic_shapes, reads, gradients
    asked: list[str] = []
    program = None
    if dynamic_shapes is None:
        try:
            program = _traced(*given, telling_no_export(is_capturing_here, asked.append))
        except AheadOfTimeError:
            if not asked:
                raise
    if program is not None and not (asked and _has_scans(program)):
        return program
    other = _traced(*given, contextlib.nullcontext())
    return program if program is not None and _has_scans(other) else other


def _has_scans(program: ExportedProgram) -> bool:
    """Whether a graph enters transforms of ``torch.func``, or runs the op ``associative_scan``.

    The backward of the op takes no gradient from one tensor of several to another: with ``(a, b)`` of a
    recurrence ``a * state + b``, the gradient of ``a`` is zero (torch 2.11; pytorch/pytorch#172568).
    """
    return _has_op(program, "associative_scan") or _has_op(program, "_increment_nesting")


def _has_op(program: ExportedProgram, ending: str) -> bool:
    """Whether an op whose name ends so is in a graph of a program, also in bodies of loops and branches."""
    graphs = (part.graph for part in program.graph_module.modules() if isinstance(part, fx.GraphModule))
    return any(getattr(n.target, "__name__", "").endswith(ending) for graph in graphs for n in graph.nodes)


@traced_nodes_forgotten()
def _traced(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    reads: Reads,
    gradients: bool,
    told: contextlib.AbstractContextManager[None],
) -> ExportedProgram:
    replaced, real_writes = Replaced(model), RealWrites()
    containers = HeldContainers(model)
    check_opaque(model, opaque_objects(model, reads.code))
    kept = KeptTensors([*reads.code.places.values(), *reads.held()], containers.visible)
    try:
        if isinstance(dynamic_shapes, ShapesCollection):  # it identifies tensors by object
            dynamic_shapes = dynamic_shapes.dynamic_shapes(model, args, kwargs)
        args, kwargs = distinct(args, kwargs)
        watching = noting_lost_backwards(model, (args, kwargs), is_capturing_here)
        quiet = quiet_export(is_capturing_here)
        with (
            capturing(gradients),
            real_writes.undone(),
            told,
            _traced_as_it_runs(),
            kept.aging(),
            quiet as set_tensors,
            watching as lost,
            whole_grad_regions(is_capturing_here, lost.found.append),
            without_new_state(model),
            replaced.noted(reads.was_set),
            noting_set_attributes(model) as set_attributes,
            noting_written_containers(model) as written,
            noting_random_numbers(values_named(model, reads.code), is_capturing_here) as random_numbers,
            WatchedCalls(reads, replaced, kept, lost, random_numbers, real_writes) as calls,
            recorded(reads, is_capturing_here),
            real_types(reads.code, is_capturing_here),
            cheap_source_lines(),
        ):
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except BaseException as error:
        _clean(kept, containers, reads)
        if not isinstance(error, Exception):  # Ctrl-C
            raise
        check_replaced(model, [*replaced.paths, *reads.outside.changed])
        if is_untraced_generator(error):
            check_random_numbers(model, random_numbers.found)
        raise _error_of(model, args, kwargs, error) from error
    _clean(kept, containers, reads)
    if refusal := sharded_error(model, [node.meta.get("val") for node in program.graph.nodes]):
        raise refusal
    check_caught(model, calls.failed)
    check_replaced(model, [*replaced.paths, *reads.outside.changed])
    check_kept(model, kept)
    check_written(model, written)
    check_random_numbers(model, random_numbers.found)
    reads.code.follow(*reads.elsewhere.values())
    reads.code.add_settings(*reads.ran.found())
    reads.asks.note_program(program, reads.code.names)
    reads.note_only_set(set_tensors, set_attributes)
    program.graph_module.meta[LOST_KEY] = tuple(lost.found)
    _complete(program, model)
    return program


def _clean(kept: KeptTensors, containers: HeldContainers, reads: Reads) -> None:
    """Leaves no tensor of a capture in what the model and its code hold."""
    containers.empty()
    try:
        kept.remove((*reads.records(), *containers.records()))
    finally:
        containers.put_back()


def _complete(program: ExportedProgram, model: nn.Module) -> None:
    """Adds what ``torch.export`` leaves out of its graphs: users, and the modules of nodes in bodies."""
    for module in program.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            _complete_users(module.graph)
    name_modules_of_bodies(program.graph_module, model)


@contextlib.contextmanager
def _traced_as_it_runs() -> Iterator[None]:
    """Lets a trace record sizes, buffers, inference modes and averages as a call has them.

    It leaves out the checks of distributions, as ``torch.compile`` does.
    """
    with (
        distributions_unchecked(is_capturing_here),
        sizes_written_as_numbers(is_capturing_here),
        no_copies_into_buffers(is_capturing_here),
        traced_as_no_grad(is_capturing_here),
        with_cumulative_average(is_capturing_here),
        masks_unseen(),
    ):
        yield


def _complete_users(graph: fx.Graph) -> None:
    """Registers every reader as a user of the nodes that it reads.

    ``torch.export`` omits readers without users next to a grad-mode region; torch.fx then fails to edit them.
    """
    for node in graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)


@contextlib.contextmanager
def capturing(gradients: bool = True) -> Iterator[None]:
    """Prepares a capture: keeps metadata, sets the grad mode, hides ambient modes, allows one at a time."""
    with (
        tracing_lock(),  # torch.fx.traceback keeps its state in globals
        fx_traceback.preserve_node_meta(),
        torch.set_grad_enabled(gradients),
        no_ambient_autocast(),
        no_global_hooks(),
        no_saved_tensor_hooks(),
        scripts_not_optimized(is_capturing_here),
        errors_raised_not_logged(is_capturing_here),
    ):
        outer, _here.is_capturing = is_capturing_here(), True
        try:
            yield
        finally:
            _here.is_capturing = outer


def is_capturing_here() -> bool:
    """Whether this thread is capturing a model."""
    return getattr(_here, "is_capturing", False)


def _error_of(model: nn.Module, args: tuple, kwargs: dict[str, Any], error: Exception) -> AheadOfTimeError:
    """Returns the error that explains why a trace failed."""
    if isinstance(error, TypeError) and (mismatch := _mismatch(model, args, kwargs)):
        return AheadOfTimeError(mismatch)
    check_inference_tensors(model)
    return AheadOfTimeError(_explain(model, error)).because(is_known=bool(_hint(error)))


def _mismatch(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> str:
    """Returns how these arguments differ from those that forward takes; ``""`` if it takes them."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as mismatch:
        named = [f"{n}={type(v).__name__}" for n, v in kwargs.items()]
        given = [*(type(value).__name__ for value in args), *named]
        return (
            f"{type(model).__name__}.forward takes {signature}, but the example inputs are "
            f"({', '.join(given)}): {mismatch}."
        )
    return ""


def _explain(model: nn.Module, error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    what = lines[0].partition(". If this type holds tensors")[0]  # the hint says what to do
    where = user_line(error)
    return (
        f"{type(model).__name__} could not be captured{f' at {where}' if where else ''}: "
        f"{type(error).__name__}: {what}{_hint(error)}"
    )


def _hint(error: BaseException) -> str:
    """Returns advice for causes that torch's message does not name."""
    frames = traceback.extract_tb(error.__traceback__)
    through = {f"{Path(frame.filename).name}:{frame.name}" for frame in frames}
    for cause, function, hint in _HINTS:
        if cause in f"{type(error).__name__}: {error}" and (not function or function in through):
            return f"\n{hint}"
    return ""
