"""Suppresses torch's logs and prints during a capture, because ampgraph's error is clearer.

Tried on torch 2.11, 2.13, 2.14 and 2.15. Where a function names its versions, these hold.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor

from .replaced_attribute import replaced

_OF_DEFECTS = (AssertionError, AttributeError, LookupError, NotImplementedError, TypeError)
_DYNAMO = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "")  # importing it takes seconds


def is_dynamo_error(error: BaseException) -> bool:
    """Whether ``torch.compile``'s front end raised this, perhaps around another error, or failed with it."""
    if isinstance(error, torch._dynamo.exc.TorchDynamoException):
        return True
    last = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][-1:]
    return isinstance(error, _OF_DEFECTS) and any(name.startswith(_DYNAMO) for name in last)


def is_backend_error(error: BaseException) -> bool:
    """Whether the backend of ``torch.compile`` raised this, before a graph has run."""
    return isinstance(error, torch._dynamo.exc.BackendCompilerFailed)


@contextlib.contextmanager
def errors_raised_not_logged(is_here: Callable[[], bool]) -> Iterator[None]:
    """Stops fake tensors from logging, with traceback, errors that they also raise.

    Args:
        is_here: Whether a log record comes from the code inside; other threads log normally.
    """
    with _filtered([_fake_tensor_log], lambda record: record.exc_info is None or not is_here()):
        yield


def never_log_raised_errors(is_here: Callable[[], bool]) -> None:
    """As `errors_raised_not_logged`, permanently; for code that runs too often to be wrapped."""
    _fake_tensor_log.addFilter(lambda record: record.exc_info is None or not is_here())


def ignore_warnings_of_dynamo() -> None:
    """Ignores what Dynamo warns of inside a trace, which would fail where a user turns warnings into errors.

    It makes an instance of ``autograd.Function`` itself as the context of each custom function (seen on torch
    2.13). On Python 3.13.0 it says at each guard of a module's dict that guards are slow (seen on 2.14).
    """
    if warnings.filters[: len(_OF_DYNAMO)] == _OF_DYNAMO:
        return
    for _, pattern, category, _, _ in reversed(_OF_DYNAMO):
        warnings.filterwarnings("ignore", pattern.pattern, category)


@contextlib.contextmanager
def quiet_export(is_here: Callable[[], bool]) -> Iterator[list[str]]:
    """Stops ``torch.export`` from logging warnings and errors, and from printing a failed graph.

    Yields a list that collects, in place of its warning, the attributes of modules that hold another tensor
    after forward, as paths from the model. The name of an item in a container stands for the container.

    Logs that a user turned on, for example with ``TORCH_LOGS``, are below the warning level and still appear.
    """
    from torch._functorch._aot_autograd import frontend_utils
    from torch.export import _trace

    told: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING or not is_here()

    def print_elsewhere(*args: Any, **kwargs: Any) -> None:
        if not is_here():
            print(*args, **kwargs)

    def warn_later(message: str, *args: Any, **kwargs: Any) -> None:
        if is_here():
            told.extend(_assigned(message))
        else:
            warnings.warn(message, *args, **kwargs)

    known = list(logging.root.manager.loggerDict.items())
    loggers = [log for name, log in known if name.startswith("torch") and isinstance(log, logging.Logger)]
    with (
        replaced(_trace, "print", print_elsewhere),
        replaced(frontend_utils, "warnings", types.SimpleNamespace(warn=warn_later)),
        _filtered(loggers, keep),
    ):
        yield told


def _assigned(message: str) -> list[str]:
    found = _ASSIGNED.fullmatch(message)
    if found is None:  # words of another version
        warnings.warn(message, stacklevel=2)
        return []
    paths = (path.partition("[")[0].removeprefix("self.") for path in found[1].split(", self."))
    return list(dict.fromkeys(paths))


_ASSIGNED = re.compile(r"The tensor attributes? (.*) w(?:as|ere) assigned during export\..*", re.DOTALL)
_TOLD_IN_TRACES = (
    (f"{torch.autograd.Function} should not be instantiated", DeprecationWarning),
    ("Guards may run slower on Python 3.13.0", RuntimeWarning),
)
_OF_DYNAMO: list[tuple] = [
    ("ignore", re.compile(re.escape(text), re.IGNORECASE), category, None, 0)
    for text, category in _TOLD_IN_TRACES
]
_fake_tensor_log = logging.getLogger(fake_tensor.__name__)


@contextlib.contextmanager
def _filtered(loggers: list[logging.Logger], keep: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)
