"""The reasons why a step is no graph, in one line."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

from .._compat import is_read_of_a_value, is_untraced_generator
from ..capture.user_code import user_line
from ..errors import AmpGraphError

log = logging.getLogger("ampgraph")


def reason_of(error: Exception) -> str:
    """Returns why a step cannot be one graph, from the error of its trace."""
    if isinstance(error, AmpGraphError):
        return str(error)
    if is_untraced_generator(error):
        return "loss_fn draws from a torch.Generator, which this version of torch does not trace"
    if is_read_of_a_value(error):
        line = user_line(error)
        return f"loss_fn reads the value of a tensor, which a graph does not know{line and f' ({line})'}"
    return why("tracing", error)


def _place(error: BaseException) -> str:
    """Returns the file and line that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown line"


def why(work: str, error: Exception) -> str:
    """Returns the first line of an error, and that of the C++ compiler if one speaks in it."""
    log.info("compile_step", exc_info=error)
    lines = str(error).strip().splitlines() or [""]
    lines[0] = lines[0].strip()
    first = " ".join(lines[:2]).strip() if lines[0].endswith(":") else lines[0]
    if not first or first.endswith(":"):  # an assertion without a message
        first = f"{first} at {_place(error)}".strip()
    said = next((f": {line.partition(' error: ')[2]}" for line in lines[1:] if " error: " in line), "")
    return f"{work} fails with {type(error).__name__}: {first}{said}"
