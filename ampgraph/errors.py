"""The errors of ampgraph. Every message names the object, the fault and the legal values."""

from __future__ import annotations

import contextlib
import difflib
import sys
import warnings
from collections.abc import Iterable

from .own_files import AMPGRAPH, TORCH


class AmpGraphError(Exception):
    """Base of every error that ampgraph raises on purpose."""


class CaptureError(AmpGraphError):
    """The model could not be turned into a graph; the model is unchanged."""


class AheadOfTimeError(CaptureError):
    """The model could not be captured ahead of time; a capture just in time may work.

    Attributes:
        is_known: Whether a known limit of the capture is the cause, rather than the model or its inputs.
    """

    is_known = False

    def because(self, is_known: bool) -> AheadOfTimeError:
        """Returns this error, with `is_known` set."""
        self.is_known = is_known
        return self


class NoGraphError(CaptureError, AttributeError):
    """A converted model does not have this graph yet. ``hasattr`` and ``inspect`` see a missing attribute."""


class PolicyError(AmpGraphError, ValueError):
    """A policy, an op list or a rule is not legal."""


class NoStateError(AmpGraphError):
    """The optimizer creates state in this step; the graph of a step can only read it."""

    def __init__(self) -> None:
        super().__init__("the optimizer creates state in this step")


class LoopError(AmpGraphError, RuntimeError):
    """A training loop calls its loss scaler in an illegal order."""


class NumericsError(AmpGraphError, FloatingPointError):
    """A watched model made a value or a gradient that is not finite; names the node."""


class PassError(AmpGraphError):
    """A pass broke its contract; the message names the pass."""


class VerifyError(PassError):
    """The rewritten graph violates an invariant; the message names the node."""


def did_you_mean(word: object, legal: Iterable[str]) -> str:
    """Returns ``" Did you mean 'a' or 'b'?"`` for the nearest legal words, or an empty string."""
    by_lower = {name.lower(): name for name in reversed(list(legal))}  # the first spelling wins
    near = [
        by_lower[n] for n in difflib.get_close_matches(str(word).lower(), list(by_lower), n=3, cutoff=0.6)
    ]
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


_INSIDE = (AMPGRAPH, TORCH, contextlib.__file__)


def warn_user(message: str) -> None:
    """Issues a `UserWarning` at the innermost line outside ampgraph and torch."""
    passes = sys.modules.get(f"{__package__}.passes")  # beside the package in a clone
    inside = (*_INSIDE, *getattr(passes, "__path__", ()))
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
