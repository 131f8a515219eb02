"""Names in the byte code of functions: globals, what ``getattr`` asks for by text, imports."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator
from types import CodeType

# What reads or sets a global; inside a class body also what reads a name.
_OF_GLOBALS = {name for name in dis.opmap if "GLOBAL" in name} | {"LOAD_NAME"}
_ASKING = ("getattr", "hasattr")
_SETTING = ("STORE_GLOBAL", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_ATTR")
_BETWEEN = ("PUSH_NULL", "PRECALL", "CACHE", "EXTENDED_ARG")


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yields the code of a function and of those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


@functools.lru_cache(maxsize=4096)
def global_names(code: CodeType) -> frozenset[str]:
    """Returns the names of globals in a function and those inside it, without names of attributes."""
    own = (step.argval for step in dis.get_instructions(code) if step.opname in _OF_GLOBALS)
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(own).union(*map(global_names, inner))


@functools.lru_cache(maxsize=4096)
def names_set(code: CodeType) -> frozenset[str]:
    """Returns the names of globals and attributes that a function, or one inside it, sets or deletes."""
    steps = (step for own in codes_in(code) for step in dis.get_instructions(own))
    return frozenset(step.argval for step in steps if step.opname in _SETTING)


@functools.lru_cache(maxsize=4096)
def asked_for(code: CodeType) -> tuple[tuple[tuple[str, ...], str], ...]:
    """Returns what code asks for by text: (settings, run), "scale" of ``hasattr(settings.run, "scale")``."""
    return tuple([found for own in codes_in(code) for found in _asked_for(own)])


def _asked_for(code: CodeType) -> Iterator[tuple[tuple[str, ...], str]]:
    path: list[str] = []
    is_asking = False
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL" and step.argval in _ASKING:
            path, is_asking = [], True
        elif is_asking and step.opname in ("LOAD_GLOBAL", "LOAD_ATTR"):
            path.append(step.argval)
        elif is_asking and step.opname not in _BETWEEN:
            is_asking = False
            if path and step.opname == "LOAD_CONST" and isinstance(step.argval, str):
                yield (*path,), step.argval


@functools.lru_cache(maxsize=4096)
def imported(code: CodeType) -> tuple[str, ...]:
    """Returns the Python modules that code imports when it runs."""
    steps = (step for own in codes_in(code) for step in dis.get_instructions(own))
    return tuple(str(step.argval) for step in steps if step.opname == "IMPORT_NAME")


@functools.lru_cache(maxsize=4096)
def only_calls(code: CodeType, name: str) -> bool:
    """Whether code, without functions inside it, calls a global and does nothing else with it."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _BETWEEN]
    uses = [i for i, step in enumerate(steps) if step.argval == name and step.opname != "LOAD_CONST"]
    return bool(uses) and all(_is_call(steps, i) for i in uses)


def _is_call(steps: list[dis.Instruction], index: int) -> bool:
    """Whether a global is loaded to be called; from Python 3.11 on, the instruction says so."""
    step = steps[index]
    if step.opname != "LOAD_GLOBAL":
        return False
    if sys.version_info >= (3, 11):
        return bool((step.arg or 0) & 1)
    return steps[index + 1].opname.startswith("LOAD_") and steps[index + 1].opname not in (
        "LOAD_ATTR",
        "LOAD_CONST",
    )
