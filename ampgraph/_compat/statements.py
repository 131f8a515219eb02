"""Reads in the source of a running function where a value comes from. Uses no private API."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from types import FrameType, ModuleType, NoneType

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

_NO_FILES = ("<string>", "<stdin>")


def passes_result_of(frame: FrameType, method: str) -> bool | None:
    """Whether the statement that a frame runs now names a method, or reads a variable that holds its result.

    Of several assignments to a variable, the nearest one above counts, and those below, which a loop may have
    run before.

    Returns:
        The answer; None without source, and if a value that may be such a result comes from somewhere else: a
        loop, a container, an argument.
    """
    file = frame.f_code.co_filename
    # Python 3.13 keeps the code of ``python -c`` under the name that all code of ``exec`` has, too.
    lines = [] if file in _NO_FILES else linecache.getlines(file, frame.f_globals)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return None
    line, first = frame.f_lineno, frame.f_code.co_firstlineno
    last = max(number or 0 for _, _, number in frame.f_code.co_lines())
    statements = [s for s in _simple_statements(tree) if first <= s.lineno <= last]
    reached = [s for s in statements if s.lineno <= line <= (s.end_lineno or s.lineno)]
    if not reached:
        return None
    is_known = True
    for statement in reached:  # grows
        if _has_attribute(statement, method):
            return True
        for name in _names(statement):
            sources = _sources(name, statement, statements)
            reached += [source for source in sources if source not in reached]
            is_known &= not _may_hold_result(_value(frame, name), is_assigned=bool(sources))
    return False if is_known else None


def _sources(name: str, read_in: ast.stmt, statements: list[ast.stmt]) -> list[ast.stmt]:
    """Returns the assignments from which a statement may read a variable."""
    assigning = [s for s in statements if name in _targets(s) and s is not read_in]
    above = (s for s in assigning if s.lineno < read_in.lineno)
    nearest = max(above, key=lambda s: s.lineno, default=None)
    return [s for s in assigning if s is nearest or s.lineno >= read_in.lineno]


def _simple_statements(tree: ast.AST) -> Iterator[ast.stmt]:
    return (s for s in ast.walk(tree) if isinstance(s, ast.stmt) and not hasattr(s, "body"))


def _has_attribute(statement: ast.stmt, name: str) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(statement))


def _value(frame: FrameType, name: str) -> object:
    """Returns what a variable or attribute holds now, without running code; None if that is not known."""
    first, *rest = name.split(".")
    value = {**frame.f_globals, **frame.f_locals}.get(first)
    for part in rest:
        value = getattr(value, "__dict__", {}).get(part)
    return value


def _may_hold_result(value: object, is_assigned: bool) -> bool:
    """Whether a value is a computed tensor that no statement assigns, or an object that may hold one."""
    if isinstance(value, Tensor):
        return not is_assigned and value.grad_fn is not None
    plain = (NoneType, str, int, float, type, ModuleType, nn.Module, torch.dtype, torch.device, Optimizer)
    return not (isinstance(value, (*plain, GradScaler)) or callable(value))


def _names(statement: ast.stmt) -> set[str]:
    """Returns the variables and attributes that a statement reads: ``loss``, ``self.loss``."""
    read = {ast.unparse(node) for node in _places(statement) if isinstance(node.ctx, ast.Load)}
    return read | (_targets(statement) if isinstance(statement, ast.AugAssign) else set())


def _targets(statement: ast.stmt) -> set[str]:
    """Returns what a statement assigns."""
    return {ast.unparse(node) for node in _places(statement) if isinstance(node.ctx, ast.Store)}


def _places(statement: ast.stmt) -> Iterator[ast.Name | ast.Attribute]:
    return (node for node in ast.walk(statement) if isinstance(node, (ast.Name, ast.Attribute)))
