"""The errors ampgraph raises; every message says who, what, and what would be legal."""

from __future__ import annotations

import contextlib
import difflib
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch


class AmpGraphError(Exception):
    """Base of every error that ampgraph raises on purpose."""


class CaptureError(AmpGraphError):
    """The model could not be turned into a graph; the model is unchanged."""


class AheadOfTimeError(CaptureError):
    """The model could not be captured ahead of time; just in time it may be.

    Attributes:
        is_known: Whether the cause is known to be the capture's own limits, and not the model or its inputs.
    """

    is_known = False

    def because(self, is_known: bool) -> AheadOfTimeError:
        """Returns this error, with `is_known` set."""
        self.is_known = is_known
        return self


class NoGraphError(CaptureError, AttributeError):
    """A converted model has no such graph (yet); to ``hasattr`` and ``inspect`` that is no attribute."""


class PolicyError(AmpGraphError, ValueError):
    """A policy, an op list or a rule does not make sense."""


class LoopError(AmpGraphError, RuntimeError):
    """A training loop asks its loss scaler for what makes no sense at this point."""


class NumericsError(AmpGraphError, FloatingPointError):
    """A watched model made a value or a gradient that is not finite; names the node."""


class PassError(AmpGraphError):
    """A pass broke its contract; names the pass."""


class VerifyError(PassError):
    """The rewritten graph violates an invariant; names the node."""


def did_you_mean(word: str, legal: Iterable[str], count: int = 3) -> str:
    """Returns ``" Did you mean 'a' or 'b'?"`` for the nearest legal words, or an empty string."""
    by_lower = {name.lower(): name for name in reversed(list(legal))}  # the first of a spelling wins
    near = [by_lower[n] for n in difflib.get_close_matches(word.lower(), list(by_lower), n=count, cutoff=0.6)]
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


_INSIDE = (str(Path(__file__).parent), str(Path(torch.__file__).parent), contextlib.__file__)


def warn_user(message: str) -> None:
    """Issues a `UserWarning` at the innermost line that is neither ampgraph's nor torch's."""
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
