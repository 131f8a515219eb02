"""The command line: ``ampgraph explain torchvision:resnet18 --input 8x3x224x224``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from .cli_options import UsageError, parser
from .commands import COMMANDS
from .errors import AmpGraphError
from .model_spec import SpecError
from .terminal import Notes

OK, CONVERSION_ERROR, USAGE_ERROR = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    try:
        options = parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed what was wrong, or the help
        return stop.code if isinstance(stop.code, int) else USAGE_ERROR
    try:
        COMMANDS[options.command](options, Notes(options.quiet))
        return OK
    except (SpecError, UsageError) as error:
        return _fail(error, USAGE_ERROR)
    except AmpGraphError as error:
        return _fail(error, CONVERSION_ERROR)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _fail(error: Exception, status: int) -> int:
    Notes().say(f"error: {error}")
    return status
