"""Notes on standard error, and colours on terminals."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO, TypeVar

from ..report.tables import printable

COLOURS = ("auto", "always", "never")
# The terminal colours nearest to Okabe and Ito's blue and orange, which colour-blind users can distinguish.
_PAINT = (
    (re.compile(r"^(-[- ]*-)$", re.MULTILINE), "2"),
    (re.compile(r"\b(float16|bfloat16)\b"), "34"),
    (re.compile(r"\b(float32)\b"), "33"),
    (re.compile(r"^(\+ .*?)(?=  )", re.MULTILINE), "32"),
    (re.compile(r"^(- .*?)(?=  )", re.MULTILINE), "31"),
)
T = TypeVar("T")


class Notes:
    """Reports slow steps on standard error, one short line each.

    Attributes:
        quiet: Write nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet

    def say(self, text: str) -> None:
        """Writes one line."""
        if not self.quiet:
            print(encodable(f"ampgraph: {printable(text)}", sys.stderr), file=sys.stderr, flush=True)

    def timed(self, what: str, work: Callable[[], T]) -> T:
        """Runs a step; writes its name before and its duration after."""
        self.say(f"{what} ...")
        start = time.perf_counter()
        result = work()
        self.say(f"{what}: {time.perf_counter() - start:.1f} s")
        return result


def wants_colour(choice: str, stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether to colour the output to ``stream``.

    ``"auto"`` colours terminals, except dumb ones and if ``NO_COLOR`` (https://no-color.org) is not empty.
    """
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def encodable(text: str, stream: TextIO) -> str:
    """Returns the text with escapes for characters that ``stream`` cannot encode, as in module names."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def discard_output() -> None:
    """Discards buffered standard output, so that the flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def coloured(text: str) -> str:
    """Returns a report with its dtypes, rules and changes in colour; its width stays."""
    for pattern, code in _PAINT:
        text = pattern.sub(rf"\033[{code}m\1\033[0m", text)
    return text
