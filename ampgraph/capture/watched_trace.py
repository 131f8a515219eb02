"""A trace by ``torch.export`` and what watches it: what forward reads, sets, writes, draws and keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram, ShapesCollection

from .._compat import (
    cheap_source_lines,
    distributions_unchecked,
    is_untraced_generator,
    no_copies_into_buffers,
    quiet_export,
    sizes_written_as_numbers,
    traced_nodes_forgotten,
    whole_grad_regions,
)
from ..errors import AheadOfTimeError
from ..training.distributed import sharded_error
from .batch_norm import with_cumulative_average
from .capture_mode import capturing, is_capturing_here
from .causal_masks import masks_unseen
from .distinct import distinct
from .export_errors import explained
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
    check_caught,
    check_kept,
    check_opaque,
    check_random_numbers,
    check_replaced,
    check_written,
)
from .replaced import Replaced
from .side_effects import noting_written_containers, without_new_state
from .watched_calls import WatchedCalls
from .watched_modules import recorded


class WatchedTrace:
    """One trace of a call of a model, and what its watchers find.

    Args:
        model: The model; it holds after the trace what it held before.
        args: Example positional arguments.
        kwargs: Example keyword arguments.
        dynamic_shapes: As for ``torch.export.export``.
        reads: Records the Python state that forward reads.
        gradients: The grad mode to trace in.

    Raises:
        AheadOfTimeError: Forward names an object whose state no call could compare.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
        dynamic_shapes: Any,
        reads: Reads,
        gradients: bool,
    ) -> None:
        self._model, self._args, self._kwargs, self._reads = model, args, kwargs, reads
        self._dynamic_shapes, self._gradients = dynamic_shapes, gradients
        self._replaced, self._real_writes = Replaced(model), RealWrites()
        self._containers = HeldContainers(model)
        check_opaque(model, opaque_objects(model, reads.code))
        self._kept = KeptTensors([*reads.code.places.values(), *reads.held()], self._containers.visible)

    @traced_nodes_forgotten()
    def run(self, told: contextlib.AbstractContextManager[None]) -> ExportedProgram:
        """Traces the call.

        Args:
            told: Decides what ``torch.compiler.is_exporting`` says inside.

        Raises:
            AheadOfTimeError: The call cannot be traced, or a graph would lose something that it does.
        """
        try:
            program = self._exported(told)
        except BaseException as error:
            self._clean()
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            raise self._explained(error) from error
        self._clean()
        self._check(program)
        self._note(program)
        return program

    def _exported(self, told: contextlib.AbstractContextManager[None]) -> ExportedProgram:
        model, reads, replaced, shapes = self._model, self._reads, self._replaced, self._dynamic_shapes
        if isinstance(shapes, ShapesCollection):  # it identifies tensors by object
            shapes = shapes.dynamic_shapes(model, self._args, self._kwargs)
        args, kwargs = distinct(self._args, self._kwargs)
        with (
            capturing(self._gradients),
            self._real_writes.undone(),
            told,
            _traced_as_it_runs(),
            self._kept.aging(),
            quiet_export(is_capturing_here) as self._set_tensors,
            noting_lost_backwards(model, (args, kwargs), is_capturing_here) as self._lost,
            whole_grad_regions(is_capturing_here, self._lost.found.append),
            without_new_state(model),
            replaced.noted(reads.was_set),
            noting_set_attributes(model) as self._set_attributes,
            noting_written_containers(model) as self._written,
            noting_random_numbers(values_named(model, reads.code), is_capturing_here) as self._draws,
            WatchedCalls(
                reads, replaced, self._kept, self._lost, self._draws, self._real_writes
            ) as self._calls,
            recorded(reads, is_capturing_here),
            real_types(reads.code, is_capturing_here),
            cheap_source_lines(),
        ):
            return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)

    def _clean(self) -> None:
        """Leaves no tensor of the trace in what the model and its code hold."""
        self._containers.empty()
        try:
            self._kept.remove((*self._reads.records(), *self._containers.records()))
        finally:
            self._containers.put_back()

    def _explained(self, error: Exception) -> AheadOfTimeError:
        """Returns the error that names the cause; raises that of a check which knows it better."""
        self._check_replaced()
        if is_untraced_generator(error):
            check_random_numbers(self._model, self._draws.found)
        return explained(self._model, self._args, self._kwargs, error)

    def _check(self, program: ExportedProgram) -> None:
        """Raises an error if the graph lacks something that forward does."""
        model = self._model
        if refusal := sharded_error(model, [node.meta.get("val") for node in program.graph.nodes]):
            raise refusal
        check_caught(model, self._calls.failed)
        self._check_replaced()
        check_kept(model, self._kept)
        check_written(model, self._written)
        check_random_numbers(model, self._draws.found)

    def _check_replaced(self) -> None:
        check_replaced(self._model, [*self._replaced.paths, *self._reads.outside.changed])

    def _note(self, program: ExportedProgram) -> None:
        """Completes the record of reads, and leaves the lost parts of the backward with the graph."""
        reads = self._reads
        reads.code.follow(*reads.elsewhere.values())
        reads.code.add_settings(*reads.ran.found())
        reads.asks.note_program(program, reads.code.names)
        reads.note_only_set(self._set_tensors, self._set_attributes)
        program.graph_module.meta[LOST_KEY] = tuple(self._lost.found)


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
