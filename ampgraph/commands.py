"""What the command line's commands do."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import ampgraph

from .cli_options import UsageError, policy_named, policy_of, read
from .comparison import compare_policies
from .convert import convert
from .errors import AmpGraphError
from .explain import explain
from .explanation import Explanation
from .model_spec import ModelSpec, SpecError, build_inputs, parse_input, resolve
from .module import AmpModule
from .policy import LEVELS, Policy
from .terminal import Notes, coloured, wants_colour

_DRAW_KEYWORDS = ("depth", "focus", "highlight", "graph", "plumbing")


class Report(Protocol):
    """What can be written in each form; its ``str()`` is the text."""

    def to_json(self) -> str:
        """Returns it as JSON."""

    def to_markdown(self) -> str:
        """Returns it as Markdown."""


def run_explain(options: argparse.Namespace, notes: Notes) -> None:
    """``ampgraph explain``."""
    _check_rows(options)
    policy, reference = policy_of(options), _reference(options.diff) if options.diff else None
    explanation = explain(_converted(options, policy, notes))
    if options.why:
        _write(_Answers(explanation, options.why), options, notes)
    elif reference is not None:
        _write(explanation.diff(reference), options, notes)
    else:
        extent = (options.casts_only, options.peers, options.top, options.all_layers)
        _write(_Whole(explanation, *extent), options, notes)


def _check_rows(options: argparse.Namespace) -> None:
    """Refuses options on rows where there is no report with rows to choose from."""
    given = [name for name, value in (("--top", options.top), ("--all-layers", options.all_layers)) if value]
    other = [name for name in ("json", "why", "diff") if getattr(options, name)]
    if given and other:
        raise UsageError(f"{given[0]} chooses rows of the report; --{other[0]} is always complete.")


def run_draw(options: argparse.Namespace, notes: Notes) -> None:
    """``ampgraph draw``."""
    keywords = {name: value for name in _DRAW_KEYWORDS if (value := getattr(options, name)) is not None}
    if options.highlight and len(options.highlight) == 1:
        keywords["highlight"] = options.highlight[0]
    amp = _converted(options, policy_of(options), notes)
    try:
        notes.timed("drawing", lambda: ampgraph.draw(amp, options.output, **keywords))
    except OSError as error:
        raise UsageError(f"-o {options.output}: {error.strerror}") from error
    notes.say(f"wrote {options.output}")


def run_compare(options: argparse.Namespace, notes: Notes) -> None:
    """``ampgraph compare-policies``."""
    policies = {name: policy_named(name) for name in options.policies}
    first = Policy(dtype=options.dtype)
    explanation = explain(_converted(options, first, notes))
    _write(
        notes.timed(f"planning {len(policies)} policies", lambda: compare_policies(explanation, policies)),
        options,
        notes,
    )


COMMANDS: Mapping[str, Callable[[argparse.Namespace, Notes], None]] = {
    "explain": run_explain,
    "draw": run_draw,
    "compare-policies": run_compare,
}


class _Whole:
    """An explanation with the parts that the options ask for."""

    def __init__(
        self,
        explanation: Explanation,
        casts_only: bool,
        peers: bool,
        top: int | None,
        all_layers: bool | None,
    ) -> None:
        self._explanation, self._peers = explanation, peers
        self._extent = (casts_only, peers, top, all_layers)

    def __str__(self) -> str:
        return self._explanation.table(*self._extent)

    def to_markdown(self) -> str:
        return self._explanation.to_markdown(*self._extent)

    def to_json(self) -> str:
        data = self._explanation.to_dict()
        if self._peers:
            data["peers"] = {name: vars(totals) for name, totals in self._explanation.peers().items()}
        return json.dumps(data, indent=2)


class _Answers:
    """Why some nodes are what they are, and what flipping them costs."""

    def __init__(self, explanation: Explanation, names: list[str]) -> None:
        self._answers = {name: explanation.why(name) for name in names}
        self._flips = {name: _flip(explanation, name) for name in names}

    def __str__(self) -> str:
        return "\n\n".join(f"{why}\n{self._flips[name]['text']}" for name, why in self._answers.items())

    def to_markdown(self) -> str:
        return "\n\n".join(
            f"```text\n{why}\n{self._flips[name]['text']}\n```" for name, why in self._answers.items()
        )

    def to_json(self) -> str:
        answers = {
            name: {"why": why, "flip": self._flips[name]["difference"]} for name, why in self._answers.items()
        }
        return json.dumps(answers, indent=2)


def _flip(explanation: Explanation, name: str) -> dict[str, Any]:
    try:
        difference = explanation.flip(name)
    except AmpGraphError as error:  # a cast, a user's cast, an input: the answer is that nothing flips it
        return {"text": f"  flipping: {error}", "difference": None}
    changed = f"{len(difference.dtypes)} nodes change dtype"
    return {"text": f"  flipping: {difference.costs()}; {changed}", "difference": difference.to_dict()}


def _converted(options: argparse.Namespace, policy: Policy, notes: Notes) -> AmpModule:
    inputs = [parse_input(text) for text in options.input]
    spec = notes.timed(f"building {options.spec}", lambda: resolve(options.spec))
    return notes.timed("converting", lambda: _convert(spec, policy, inputs, options.train))


def _convert(spec: ModelSpec, policy: Policy, inputs: list, train: bool) -> AmpModule:
    model = spec.model.train(train)
    args, kwargs = build_inputs(inputs) if inputs else (spec.args, spec.kwargs)
    if args is None:
        raise SpecError(f"{spec.name} needs an example input, for instance --input {spec.example_input}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of libraries, about libraries
            return convert(model, args, kwargs, policy=policy, backend="eager")
    except AmpGraphError:
        raise
    except Exception as error:
        raise AmpGraphError(f"{spec.name} could not be converted: {type(error).__name__}: {error}") from error


def _reference(name: str) -> Explanation | Policy:
    """Returns what ``--diff`` names: a policy, or a report that ``explain --json`` wrote."""
    if not name.endswith(".json") or name in LEVELS:
        return policy_named(name)
    try:
        data = json.loads(read(name))
    except json.JSONDecodeError as error:
        raise UsageError(f"{name}: no JSON: {error}") from error
    if not (isinstance(data, dict) and "nodes" in data):
        return policy_named(name)
    try:
        return Explanation.from_dict(data)
    except AmpGraphError as error:
        raise UsageError(f"{name}: {error}") from error


def _write(report: Report, options: argparse.Namespace, notes: Notes) -> None:
    is_text = not (options.json or options.markdown)
    text = report.to_json() if options.json else report.to_markdown() if options.markdown else str(report)
    if options.output is None:
        print(coloured(text) if is_text and wants_colour(options.color, sys.stdout) else text)
        return
    try:
        Path(options.output).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-o {options.output}: {error.strerror}") from error
    notes.say(f"wrote {options.output}")
