"""The command line's options."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

import torch

from ..errors import did_you_mean
from ..numerics.numeric_comparison import COLUMNS
from ..ops.lists import PRESETS
from ..policy.policy import DTYPE_NAMES, LEVELS, OBJECTIVES, PLACEMENTS
from ..runtime.options import AUTO, CAPTURES
from ..tuning.result_error import NAMES as METRICS
from .option_values import CLASSES, UsageError
from .terminal import COLOURS

_LONGEST = 300  # characters of a message
POLICIES = ("O1", "O2", "torch", "paddle", "mindspore", "oneflow")
_HELP = """\
SPEC is one of
  torchvision:resnet18               torchvision.models.get_model, random weights
  timm:vit_tiny_patch16_224          timm.create_model, random weights
  transformers:bert                  a model type with a small configuration, random weights
  transformers:BertForMaskedLM       a model class, with a small configuration too
  package.module:name                a function or class called without arguments, or an nn.Module;
                                     a function may return (model, args) or (model, args, kwargs)

--input takes SHAPE[:DTYPE], or NAME=SHAPE[:DTYPE] for a keyword argument:
  --input 8x3x224x224    --input 2x16:int64    --input input_ids=2x16:int64

A POLICY is
  O0, O1, O2, O3                     a level with the default lists
  torch, paddle, mindspore, oneflow  a peer's lists under the rule of torch.autocast
  policy.json                        a file that holds what Policy.to_json() wrote

examples
{examples}

exit status: 0 done, 1 the model could not be converted, 2 wrong usage, 3 check found something to fix
"""
_EXPLAIN_EXAMPLES = """\
  ampgraph explain torchvision:resnet18 --input 8x3x224x224 --dtype float16
  ampgraph explain transformers:bert --input input_ids=2x16:int64 --casts-only --peers
  ampgraph explain transformers:gpt2 --input input_ids=2x16:int64 --top 20
  ampgraph explain timm:vit_tiny_patch16_224 --input 1x3x224x224 --why layer_norm_3
  ampgraph explain my_package.models:build --input 4x16 --rules 'head.*=fp32' --json -o report.json
  ampgraph explain my_package.models:build --input 4x16 --diff report.json"""
_CHECK_EXAMPLES = """\
  ampgraph check my_package.models:build --dtype float16 --level O2
  ampgraph check my_package.models:build --dtype float16 --train --backward --save-policy fixed.json
  ampgraph check my_package.models:build --policy fixed.json"""
_NUMERICS_EXAMPLES = """\
  ampgraph compare my_package.models:build --dtype float16 --level O2
  ampgraph compare torchvision:resnet18 --input 8x3x224x224 --train --backward --by headroom --top 5
  ampgraph compare my_package.models:build --draw errors.svg --histogram exponents.svg"""
_TUNE_EXAMPLES = """\
  ampgraph tune my_package.models:build --dtype float16 --budget 1e-3 --save-policy tuned.json
  ampgraph tune transformers:bert --input input_ids=2x16:int64 --budget 5e-3 --level O1
  ampgraph explain my_package.models:build --policy tuned.json"""
_DRAW_EXAMPLES = """\
  ampgraph draw torchvision:resnet18 --input 8x3x224x224 -o resnet18.svg --depth 2
  ampgraph draw transformers:gpt2 --input input_ids=2x16:int64 -o gpt2.svg --focus 'h.0.*'"""
_COMPARE_EXAMPLES = """\
  ampgraph compare-policies torchvision:resnet18 --input 8x3x224x224
  ampgraph compare-policies transformers:t5 --input input_ids=2x16:int64 \\
      --input decoder_input_ids=2x16:int64 --policies O1 O2 torch mine.json --markdown"""


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line with the nearest legal value, without the long usage text."""

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message, re.DOTALL)
        hint = did_you_mean(choice[1], re.findall(r"[\w:-]+", choice[2])) if choice else ""
        raise UsageError(f"{_shortened(message)}.{hint} See {self.prog} --help.")


def _shortened(message: str) -> str:
    return message if len(message) <= _LONGEST else f"{message[:_LONGEST]} .."


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line; ``options.command`` is the command's name."""
    from .. import __version__

    main = _Parser(prog="ampgraph", description="Mixed precision as a graph compiler pass.")
    version = f"ampgraph {__version__} (torch {torch.__version__})"
    main.add_argument("--version", action="version", version=version)
    commands = main.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    _explain(commands)
    _check(commands)
    _draw(commands)
    _numerics(commands)
    _tune(commands)
    _compare(commands)
    return main


def _explain(commands: Any) -> None:
    command = _command(
        commands,
        "explain",
        "show the dtype of each op and the cost of the casts",
        "Converts a model with random weights and shows the dtype of each op, and the reason.",
        _EXPLAIN_EXAMPLES,
    )
    _policy_options(command)
    _report_options(command)
    command.add_argument("--casts-only", action="store_true", help="only casts and totals")
    command.add_argument(
        "--top", type=_rows, metavar="N", help="the N rows of each table with the most cast bytes"
    )
    command.add_argument(
        "--all-layers",
        action="store_true",
        default=None,
        help="repeated layers in full; default: once where there are more than 200 nodes",
    )
    command.add_argument("--peers", action="store_true", help="totals under the peers' op lists too")
    command.add_argument(
        "--why", action="append", default=[], metavar="NODE", help="why this node, and what flipping it costs"
    )
    command.add_argument(
        "--diff", metavar="POLICY|REPORT", help="what differs from another policy, or from a report's JSON"
    )


def _check(commands: Any) -> None:
    command = _command(
        commands,
        "check",
        "find the first node that is not finite, and rules that fix it",
        "Converts a model, runs it node by node, and tries rules until everything is finite.",
        _CHECK_EXAMPLES,
    )
    _policy_options(command)
    _report_options(command)
    _backward_option(command)
    command.add_argument("--save-policy", metavar="FILE", help="write the policy with the fix as JSON")


def _tune(commands: Any) -> None:
    command = _command(
        commands,
        "tune",
        "find what has to stay float32 for an error budget, at little traffic",
        "Measures a model and writes the policy that meets the budget on the example input.",
        _TUNE_EXAMPLES,
    )
    _policy_options(command, default="O2")
    _report_options(command)
    command.add_argument("--budget", type=float, required=True, metavar="ERROR", help="the error allowed")
    command.add_argument(
        "--metric", choices=METRICS, default=METRICS[0], help="what the error is of; default: output"
    )
    command.add_argument("--save-policy", metavar="FILE", help="write the policy as JSON")


def _backward_option(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--backward",
        action="store_true",
        help="gradients too; the loss is the mean square of the results",
    )


def _numerics(commands: Any) -> None:
    command = _command(
        commands,
        "compare",
        "measure each node's error against float32",
        "Converts a model and runs it beside float32, node by node.",
        _NUMERICS_EXAMPLES,
    )
    _policy_options(command)
    _report_options(command)
    _backward_option(command)
    command.add_argument(
        "--by", choices=COLUMNS, default=COLUMNS[0], help="what rows are ranked and coloured by; default: own"
    )
    command.add_argument("--top", type=_rows, metavar="N", help="the N worst rows; default: 20")
    command.add_argument("--draw", metavar="FILE", help="draw the model, coloured by the column")
    command.add_argument("--histogram", metavar="FILE", help="write the exponents as .svg or .txt")


def _draw(commands: Any) -> None:
    command = _command(
        commands,
        "draw",
        "draw a model with its casts",
        "Converts a model with random weights and draws its graph.",
        _DRAW_EXAMPLES,
    )
    _policy_options(command)
    command.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        required=True,
        help="the suffix is the format: svg, png, pdf, dot ..",
    )
    command.add_argument("--depth", type=int, metavar="N", help="fold modules deeper than this")
    command.add_argument("--focus", metavar="GLOB", help="only these modules and what they touch")
    command.add_argument("--highlight", nargs="+", metavar="WHAT", help="'casts', or globs of nodes")
    command.add_argument("--graph", metavar="WHICH", help="forward, backward or both; default: forward")
    command.add_argument(
        "--plumbing",
        action="store_true",
        default=None,
        help="open the boxes of integer and mask ops, which are folded by default",
    )
    command.add_argument(
        "--all-layers",
        action="store_true",
        default=None,
        help="repeated layers in full; default: the first one where there are more than 200 nodes",
    )


def _compare(commands: Any) -> None:
    command = _command(
        commands,
        "compare-policies",
        "show what a model costs under several policies",
        "Converts a model with random weights under each policy; it is captured once.",
        _COMPARE_EXAMPLES,
    )
    command.add_argument(
        "--policies",
        nargs="+",
        default=list(POLICIES),
        metavar="POLICY",
        help=f"see below; default: {' '.join(POLICIES)}",
    )
    command.add_argument("--dtype", choices=tuple(DTYPE_NAMES), help="low dtype; default: bfloat16 on CPU")
    _report_options(command)


def _command(commands: Any, name: str, summary: str, description: str, examples: str) -> Any:
    command = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=_HELP.format(examples=examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("spec", metavar="SPEC", help="which model, see below")
    command.add_argument(
        "--input", action="append", default=[], metavar="SHAPE", help="example input; repeat"
    )
    command.add_argument(
        "--train", action="store_true", help="capture in training mode; default: evaluation mode"
    )
    command.add_argument(
        "--capture",
        choices=CAPTURES,
        type=lambda text: text.replace("-", " "),
        default=AUTO,
        metavar="WAY",
        help="auto, ahead-of-time or just-in-time; default: auto",
    )
    command.add_argument("-q", "--quiet", action="store_true", help="no progress on standard error")
    return command


def _policy_options(command: Any, default: str = "O1") -> None:
    group = command.add_argument_group("policy")
    group.add_argument("--policy", metavar="POLICY", help=f"see below; default: {default}")
    command.set_defaults(default_policy=default)
    group.add_argument("--level", choices=LEVELS, help="instead of the policy's")
    group.add_argument("--dtype", choices=tuple(DTYPE_NAMES), help="low dtype; default: bfloat16 on CPU")
    group.add_argument("--lists", choices=tuple(PRESETS), help="op lists to start from")
    for cls, meaning in CLASSES.items():
        group.add_argument(f"--{cls}", nargs="+", action="extend", default=[], metavar="OP", help=meaning)
    group.add_argument(
        "--rules",
        nargs="+",
        action="extend",
        default=[],
        metavar="GLOB=low|fp32",
        help="by module path, or by node name as node:GLOB",
    )
    group.add_argument("--placement", choices=PLACEMENTS, help="instead of the policy's")
    group.add_argument("--objective", choices=OBJECTIVES, help="what the optimal placement minimises")


def _report_options(command: Any) -> None:
    form = command.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="JSON instead of text")
    form.add_argument("--markdown", action="store_true", help="Markdown instead of text")
    command.add_argument(
        "-o", "--output", metavar="FILE", help="write there; the suffix .json or .md selects the format"
    )
    command.add_argument(
        "--color",
        choices=COLOURS,
        default="auto",
        help="colours in text; auto: on a terminal, not with NO_COLOR",
    )


def _rows(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of rows, 1 or more")
    return int(text)
