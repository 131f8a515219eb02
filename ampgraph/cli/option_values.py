"""The values of options: the errors of illegal ones, and the policy that options describe."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import AmpGraphError, did_you_mean
from ..ops.lists import OpClass, OpLists
from ..policy.policy import RULE_VALUES, Policy

# The options that name files to write.
FILES = ("output", "draw", "histogram", "save_policy")
# The options that move ops between lists.
CLASSES = {cls.value: f"move these ops to the {cls} list" for cls in OpClass}


class UsageError(Exception):
    """An option has an illegal value; the message gives the legal ones."""


@contextlib.contextmanager
def given(option: str, reads: bool = True) -> Iterator[None]:
    """Runs code that uses an option's value and turns its errors into a `UsageError`.

    Args:
        option: The option and its value, as the message names them.
        reads: Whether the code only reads the value. Then any `ValueError` is the user's. In code that does
            more, such an error is a fault of ampgraph and is not caught.

    Raises:
        UsageError: The code inside refused the value.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"{option}: {error.strerror or error}") from error
    except AmpGraphError as error:
        raise UsageError(f"{option}: {error}") from error
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:
        if not reads:
            raise
        raise UsageError(f"{option}: {_cause(error)}") from error


def _cause(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deep."
    if isinstance(error, MemoryError):
        return "there is not enough memory for it."
    return f"not valid JSON: {error}" if isinstance(error, json.JSONDecodeError) else str(error)


def check_files(options: argparse.Namespace) -> None:
    """Checks, before the work, that the files to write can be written; creates nothing.

    Raises:
        UsageError: A file cannot be written.
    """
    for name in FILES:
        if path := getattr(options, name, None):
            _check_file("-o" if name == "output" else f"--{name.replace('_', '-')}", Path(path))


def _check_file(option: str, path: Path) -> None:
    if path.is_dir():
        raise UsageError(f"{option} {path}: Is a directory.")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {str(path.parent)!r}.")
    place = path if path.exists() else path.parent
    if not os.access(place, os.W_OK):
        raise UsageError(f"{option} {path}: no permission to write to {str(place)!r}.")


def write_file(option: str, path: str, text: str) -> None:
    """Writes a text file.

    Raises:
        UsageError: It cannot be written.
    """
    with given(f"{option} {path}"):
        Path(path).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")


def policy_of(options: argparse.Namespace) -> Policy:
    """Returns the policy that the options describe: ``--policy``, changed by the other options.

    Raises:
        UsageError: A value is not legal.
    """
    with given("--policy"):
        policy = Policy.of(options.policy or options.default_policy)
    values = {name: getattr(options, name) for name in ("level", "dtype", "placement", "objective")}
    changes: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    if options.rules:
        changes["rules"] = {**policy.rules, **_rules(options.rules)}
    ops = OpLists.preset(options.lists) if options.lists else policy.ops
    _check_classes(options)
    for cls in CLASSES:
        with given(f"--{cls}"):
            ops = getattr(ops, f"with_{cls}")(*getattr(options, cls))
    return policy.replace(ops=ops, **changes)


def _check_classes(options: argparse.Namespace) -> None:
    seen: dict[str, str] = {}
    for cls in CLASSES:
        for op in getattr(options, cls):
            if seen.setdefault(op, cls) != cls:
                raise UsageError(f"{op!r} is given both as --{seen[op]} and as --{cls}.")


def _rules(texts: list[str]) -> dict[str, str]:
    rules: dict[str, str] = {}
    for pattern, value in map(_rule, texts):
        if rules.setdefault(pattern, value) != value:
            raise UsageError(f"--rules: {pattern!r} is given both as {rules[pattern]} and as {value}.")
    return rules


def _rule(text: str) -> tuple[str, str]:
    pattern, equals, value = text.rpartition("=")
    if not equals or value not in RULE_VALUES:
        hint = did_you_mean(value, RULE_VALUES)
        raise UsageError(f"--rules {text!r}: expected GLOB=low or GLOB=fp32, such as 'head.*=fp32'.{hint}")
    return pattern, value
