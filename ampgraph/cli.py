"""The command line: ``ampgraph explain torchvision:resnet18 --input 8x3x224x224``."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .convert import convert
from .errors import AmpGraphError, PolicyError, did_you_mean
from .explain import explain
from .explanation import Explanation
from .model_spec import ModelSpec, SpecError, build_inputs, parse_input, resolve
from .oplists import OpLists
from .policy import LEVELS, OBJECTIVES, PLACEMENTS, RULE_VALUES, Policy

OK, CONVERSION_ERROR, USAGE_ERROR = 0, 1, 2

_LISTS: dict[str, Callable[[], OpLists]] = {
    "default": OpLists.default,
    "torch": OpLists.torch,
    "paddle": OpLists.paddle,
    "paddle:OD": lambda: OpLists.paddle("OD"),
    "paddle:O2": lambda: OpLists.paddle("O2"),
    "mindspore": OpLists.mindspore,
    "oneflow": OpLists.oneflow,
}
_EPILOG = """\
SPEC is one of
  torchvision:resnet18               torchvision.models.get_model, random weights
  timm:vit_tiny_patch16_224          timm.create_model, random weights
  transformers:bert                  a model type with a small configuration, random weights
  transformers:BertForMaskedLM       a model class, likewise
  package.module:name                a function or class called without arguments, or an nn.Module;
                                     a function may return (model, args) or (model, args, kwargs)

--input takes SHAPE[:DTYPE], or NAME=SHAPE[:DTYPE] for a keyword argument:
  --input 8x3x224x224    --input 2x16:int64    --input input_ids=2x16:int64

exit status: 0 done, 1 the model could not be converted, 2 wrong usage
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed what was wrong, or the help
        return stop.code if isinstance(stop.code, int) else USAGE_ERROR
    try:
        return _explain(options)
    except (SpecError, _UsageError) as error:
        return _fail(error, USAGE_ERROR)
    except AmpGraphError as error:
        return _fail(error, CONVERSION_ERROR)
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


class _UsageError(Exception):
    """An option's value makes no sense; the message says what would."""


def _explain(options: argparse.Namespace) -> int:
    policy = _policy(options)
    inputs = [parse_input(text) for text in options.input]
    spec = _timed(f"building {options.spec}", lambda: resolve(options.spec))
    explanation = _timed("converting", lambda: _converted(spec, policy, inputs, options.train))
    text = explanation.to_json() if options.json else explanation.table(casts_only=options.casts_only)
    if options.output is None:
        print(text)
        return OK
    try:
        Path(options.output).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise _UsageError(f"-o {options.output}: {error.strerror}") from error
    _note(f"wrote {options.output}")
    return OK


def _converted(spec: ModelSpec, policy: Policy, inputs: list, train: bool) -> Explanation:
    model = spec.model.train(train)
    args, kwargs = build_inputs(inputs) if inputs else (spec.args, spec.kwargs)
    if args is None:
        raise SpecError(f"{spec.name} needs an example input, for instance --input {spec.example_input}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of libraries, about libraries
            return explain(convert(model, args, kwargs, policy=policy, backend="eager"))
    except AmpGraphError:
        raise
    except Exception as error:
        raise AmpGraphError(f"{spec.name} could not be converted: {type(error).__name__}: {error}") from error


def _policy(options: argparse.Namespace) -> Policy:
    try:
        ops = _LISTS[options.lists]().with_white(*options.white).with_black(*options.black)
        return Policy(
            level=options.level,
            dtype=getattr(torch, options.dtype) if options.dtype else None,
            ops=ops,
            rules=dict(map(_rule, options.rules)),
            placement=options.placement,
            objective=options.objective,
        )
    except PolicyError as error:
        raise _UsageError(str(error)) from error


def _rule(text: str) -> tuple[str, str]:
    pattern, equals, value = text.rpartition("=")
    if not equals or value not in RULE_VALUES:
        hint = did_you_mean(value, RULE_VALUES)
        raise _UsageError(f"--rules {text!r}: expected GLOB=low or GLOB=fp32, such as 'head.*=fp32'.{hint}")
    return pattern, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ampgraph", description="Mixed precision as a graph compiler pass.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "explain",
        help="show what a model runs in which dtype, and what its casts cost",
        description="Converts a model with random weights and shows what runs in which dtype, and why.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("spec", metavar="SPEC", help="which model, see below")
    command.add_argument(
        "--input", action="append", default=[], metavar="SHAPE", help="example input; repeat"
    )
    command.add_argument("--level", choices=LEVELS, default="O1", help="default: %(default)s")
    command.add_argument(
        "--dtype", choices=("float16", "bfloat16"), help="low dtype; default: bfloat16 on CPU"
    )
    command.add_argument("--lists", choices=tuple(_LISTS), default="default", help="op lists to start from")
    command.add_argument(
        "--white", nargs="+", action="extend", default=[], metavar="OP", help="run these low"
    )
    command.add_argument(
        "--black", nargs="+", action="extend", default=[], metavar="OP", help="run these in fp32"
    )
    command.add_argument(
        "--rules",
        nargs="+",
        action="extend",
        default=[],
        metavar="GLOB=low|fp32",
        help="by module path or node name",
    )
    command.add_argument("--placement", choices=PLACEMENTS, default="optimal", help="default: %(default)s")
    command.add_argument("--objective", choices=OBJECTIVES, default="traffic", help="default: %(default)s")
    command.add_argument(
        "--train", action="store_true", help="capture in training mode; default: evaluation mode"
    )
    command.add_argument("--json", action="store_true", help="JSON instead of tables")
    command.add_argument("--casts-only", action="store_true", help="leave out the table of nodes")
    command.add_argument("-o", "--output", metavar="FILE", help="write there instead of to standard output")
    return parser


def _timed(what: str, work: Callable):
    _note(f"{what} ...")
    start = time.perf_counter()
    result = work()
    _note(f"{what}: {time.perf_counter() - start:.1f} s")
    return result


def _note(text: str) -> None:
    print(f"ampgraph: {text}", file=sys.stderr, flush=True)


def _fail(error: Exception, status: int) -> int:
    _note(f"error: {error}")
    return status
