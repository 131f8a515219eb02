"""Reads in the source of a running function where a value comes from. Uses no private API."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from types import FrameType


def passes_result_of(frame: FrameType, method: str) -> bool | None:
    """Whether the statement that a frame runs now calls a method, or reads a variable that holds its result.

    Of several assignments to a variable, the nearest one above counts.

    Returns:
        The answer; None without source.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))
    except (SyntaxError, ValueError):
        return None
    line, first = frame.f_lineno, frame.f_code.co_firstlineno
    statements = [s for s in _simple_statements(tree) if first <= s.lineno <= line]
    reached = [s for s in statements if line <= (s.end_lineno or s.lineno)]
    if not reached:
        return None
    for statement in reached:  # grows
        if _calls(statement, method):
            return True
        for name in _names(statement):
            above = (s for s in statements if s.lineno < statement.lineno and name in _targets(s))
            source = max(above, key=lambda s: s.lineno, default=None)
            if source is not None and source not in reached:
                reached.append(source)
    return False


def _simple_statements(tree: ast.AST) -> Iterator[ast.stmt]:
    return (s for s in ast.walk(tree) if isinstance(s, ast.stmt) and not hasattr(s, "body"))


def _calls(statement: ast.stmt, method: str) -> bool:
    calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Attribute) and called.attr == method for called in calls)


def _names(statement: ast.stmt) -> set[str]:
    """Returns the variables and attributes that a statement reads: ``loss``, ``self.loss``."""
    read = {ast.unparse(node) for node in _places(statement) if isinstance(node.ctx, ast.Load)}
    return read | (_targets(statement) if isinstance(statement, ast.AugAssign) else set())


def _targets(statement: ast.stmt) -> set[str]:
    """Returns what a statement assigns."""
    return {ast.unparse(node) for node in _places(statement) if isinstance(node.ctx, ast.Store)}


def _places(statement: ast.stmt) -> Iterator[ast.Name | ast.Attribute]:
    return (node for node in ast.walk(statement) if isinstance(node, (ast.Name, ast.Attribute)))
