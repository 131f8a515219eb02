"""What torch logs and prints while it captures a model, kept from who gets an error that says it better."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses import fake_tensor


def is_dynamo_error(error: BaseException) -> bool:
    """Whether ``torch.compile``'s front end raised this, perhaps around another error."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException)


@contextlib.contextmanager
def errors_raised_not_logged(is_here: Callable[[], bool]) -> Iterator[None]:
    """Keeps fake tensors from logging, traceback and all, the errors that they raise as well.

    Args:
        is_here: Whether what is logged comes from the code inside; other threads log as ever.
    """
    with _filtered([_fake_tensor_log], lambda record: record.exc_info is None or not is_here()):
        yield


def never_log_raised_errors(is_here: Callable[[], bool]) -> None:
    """As `errors_raised_not_logged`, from now on; for what runs too often to be wrapped."""
    _fake_tensor_log.addFilter(lambda record: record.exc_info is None or not is_here())


@contextlib.contextmanager
def quiet_export(is_here: Callable[[], bool]) -> Iterator[None]:
    """Keeps ``torch.export`` from logging warnings and errors, and from printing the graph that it gave up.

    What a user turned on, by ``TORCH_LOGS`` for instance, is below the level of warnings and is logged.
    """
    from torch.export import _trace

    def keep(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING or not is_here()

    def print_elsewhere(*args: Any, **kwargs: Any) -> None:
        if not is_here():
            print(*args, **kwargs)

    known = list(logging.root.manager.loggerDict.items())
    loggers = [log for name, log in known if name.startswith("torch") and isinstance(log, logging.Logger)]
    _trace.print = print_elsewhere  # type: ignore[attr-defined]
    try:
        with _filtered(loggers, keep):
            yield
    finally:
        vars(_trace).pop("print", None)


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


# What every custom ``autograd.Function`` extends, and what ``apply`` of each ends in.
SingleLevelFunction = torch.autograd.function._SingleLevelFunction
