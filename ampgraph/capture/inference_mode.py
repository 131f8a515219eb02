"""Captures inference mode in a model as ``torch.no_grad``.

Tracing sees only grad modes. The fake results of real inference mode could not be evaluated outside of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._compat import SET_GRAD_ENABLED, replaced


@contextlib.contextmanager
def traced_as_no_grad(is_capturing: Callable[[], bool]) -> Iterator[None]:
    """Makes ``with torch.inference_mode()`` set the grad mode instead, in threads that are capturing."""
    enter, leave = torch.inference_mode.__enter__, torch.inference_mode.__exit__

    def entered(self: torch.inference_mode) -> None:
        # torch sometimes turns inference mode off internally; this is not a grad mode of the model.
        outer = torch.is_grad_enabled() if self.mode and is_capturing() else None
        self._outer = outer  # type: ignore[attr-defined]
        if outer is None:
            enter(self)
        else:
            SET_GRAD_ENABLED(False)

    def left(self: torch.inference_mode, *error: Any) -> None:
        if (outer := getattr(self, "_outer", None)) is None:
            leave(self, *error)
        else:
            SET_GRAD_ENABLED(outer)

    with (
        replaced(torch.inference_mode, "__enter__", entered),
        replaced(torch.inference_mode, "__exit__", left),
    ):
        yield
