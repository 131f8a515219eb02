"""Writes the generated parts of docs/explaining.md: what the command line prints for ResNet-18.

    python tools/explaining.py

A part stands between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``; tests/test_explaining.py compares.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path

from readme import with_section

from ampgraph.cli.main import main as command_line

PAGE = Path(__file__).resolve().parent.parent / "docs/explaining.md"
MODEL = ("torchvision:resnet18", "--input", "8x3x224x224", "--dtype", "float16", "-q")
WIDTH, HEAD = 110, 14


def printed(command: str, *options: str) -> str:
    """Returns what the command prints for ResNet-18."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = command_line([command, *MODEL, *options])
    if status:
        raise SystemExit(f"ampgraph {command} {' '.join(options)}: exit status {status}")
    text = re.sub(r"(?m)^  at \S*/(\S+/\S+)$", r"  at .../\1", out.getvalue().rstrip())  # no machine's paths
    return "\n".join(line[:WIDTH].rstrip() for line in text.splitlines())


def report() -> str:
    """The report without the middle of its long tables."""
    parts = printed("explain", "--peers").split("\n\n")
    return "\n\n".join(_cut(part) for part in parts)


def _cut(part: str) -> str:
    lines = part.splitlines()
    if len(lines) <= HEAD + 4:
        return part
    return "\n".join([*lines[: HEAD - 6], "...", *lines[-2:]])


SECTIONS: dict[str, Callable[[], str]] = {
    "report": report,
    "why": lambda: printed("explain", "--black", "aten.batch_norm", "--why", "relu_"),
    "diff": lambda: printed("explain", "--black", "aten.batch_norm", "--diff", "O1"),
    "policies": lambda: printed("compare-policies"),
}


def updated(text: str) -> str:
    """Returns the page with all its parts remade."""
    for name, make in SECTIONS.items():
        text = with_section(text, name, f"```text\n{make()}\n```")
    return text


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
