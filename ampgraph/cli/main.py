"""The command line: ``ampgraph explain torchvision:resnet18 --input 8x3x224x224``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..errors import AmpGraphError, PolicyError
from .commands import COMMANDS
from .model_spec import SpecError
from .option_values import UsageError, check_files
from .parser import parser
from .terminal import Notes, discard_output

OK, CONVERSION_ERROR, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    Bad input ends with one line on standard error. An error that neither ampgraph nor the model raises on
    purpose is a fault of ampgraph and keeps its traceback.
    """
    try:
        options = parser().parse_args(argv)
        check_files(options)
        status = COMMANDS[options.command](options, Notes(options.quiet))
        sys.stdout.flush()
        return status or OK
    except SystemExit as stop:  # argparse has printed what was wrong, or the help
        return stop.code if isinstance(stop.code, int) else USAGE_ERROR
    except (SpecError, UsageError, PolicyError) as error:
        return _fail(" ".join(str(error).split()), USAGE_ERROR)
    except AmpGraphError as error:
        return _fail(str(error), CONVERSION_ERROR)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        discard_output()
        return OK
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


def _fail(message: str, status: int) -> int:
    Notes().say(f"error: {message}")
    return status
