"""One capture for several conversions of the same code."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.export import ExportedProgram

from ampgraph.capture import capture_program


class LastCapture:
    """Keeps the last capture, of a model without parameters and buffers.

    Conversions inside ``of(key)`` take a copy of it if the key is the same. The copies record nothing of what
    forward reads of Python's state: call the model as it was captured.
    """

    def __init__(self) -> None:
        self._key: Hashable = None
        self._program: ExportedProgram | None = None

    @contextmanager
    def of(self, key: Hashable) -> Iterator[None]:
        """The key says all that the captured graph depends on, but for the inputs' dtypes and gradients."""

        def capture(model: Any, args: tuple, *rest: Any) -> ExportedProgram:
            held = next(model.parameters(), next(model.buffers(), None))
            assert held is None, "a capture belongs to the tensors of one model object"
            whole = (key, *((t.dtype, t.requires_grad) for t in args))
            if self._program is None or self._key != whole:
                self._key, self._program = whole, capture_program(model, args, *rest)
            program = copy.copy(self._program)
            program._graph_module = copy.deepcopy(program.graph_module)
            return program

        with mock.patch("ampgraph.runtime.export_call.capture_program", capture):
            yield
