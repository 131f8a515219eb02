"""The commands of the command line."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

import ampgraph

from ..convert import as_tuple, convert
from ..drawing.draw import format_suffix
from ..errors import AmpGraphError, did_you_mean
from ..module import AmpModule
from ..numerics.check import check_numerics
from ..numerics.compare import compare
from ..numerics.finding import Finding
from ..numerics.numeric_comparison import NumericComparison
from ..policy.plain_data import read_text
from ..policy.policy import Policy
from ..report.comparison import compare_policies
from ..report.explain import explain
from ..report.explanation import Explanation
from ..tune_model import check_level
from ..tuning.result_error import ResultError, checked_budget
from ..tuning.tuner import Tuner
from .model_spec import ModelSpec, SpecError, build_inputs, check_inputs, parse_input, resolve
from .option_values import UsageError, given, policy_of, write_file
from .terminal import Notes, coloured, encodable, wants_colour

# The exit status of ``check`` where there is something to fix.
FOUND = 3
# The form of the report for a suffix of -o; None: any form.
_FORMS = {"": None, ".txt": None, ".text": None, ".log": None, ".json": "json", ".md": "markdown"}
# The graphs that only AOTAutograd has, see `draw`.
_AFTER_AUTOGRAD = ("backward", "both")
_DRAW_KEYWORDS = ("depth", "focus", "highlight", "graph", "plumbing", "all_layers")


class Report(Protocol):
    """A result that can be written in each form; its ``str()`` is the text."""

    def to_json(self) -> str:
        """Returns it as JSON."""

    def to_markdown(self) -> str:
        """Returns it as Markdown."""


def run_explain(options: argparse.Namespace, notes: Notes) -> None:
    """``ampgraph explain``."""
    form = _form(options)
    _check_rows(options, form)
    policy, reference = policy_of(options), _reference(options.diff) if options.diff else None
    explanation = explain(_converted(options, policy, notes))
    if options.why:
        with given("--why", reads=False):
            answers = _Answers(explanation, options.why)
        _write(answers, form, options, notes)
    elif reference is not None:
        with given(f"--diff {options.diff}", reads=False):
            difference = explanation.diff(reference)
        _write(difference, form, options, notes)
    else:
        extent = (options.casts_only, options.peers, options.top, options.all_layers)
        _write(_Whole(explanation, *extent), form, options, notes)


def _check_rows(options: argparse.Namespace, form: str) -> None:
    """Refuses options that select rows if the report has no rows to select."""
    rows = [name for name, value in (("--top", options.top), ("--all-layers", options.all_layers)) if value]
    other = [name for name in ("why", "diff") if getattr(options, name)]
    if form == "json":
        other.insert(0, "json")
    if rows and other:
        raise UsageError(f"{rows[0]} selects rows of the text report; --{other[0]} always writes all rows.")


def run_draw(options: argparse.Namespace, notes: Notes) -> None:
    """``ampgraph draw``."""
    keywords = {name: value for name in _DRAW_KEYWORDS if (value := getattr(options, name)) is not None}
    if options.highlight and len(options.highlight) == 1:
        keywords["highlight"] = options.highlight[0]
    with given(f"-o {options.output}"):
        format_suffix(Path(options.output))
    backend = "aot_eager" if options.graph in _AFTER_AUTOGRAD else "eager"
    amp, args, kwargs = _built(options, policy_of(options), notes, backend)
    if backend == "aot_eager":
        notes.timed("running forward and backward", lambda: _run_backward(amp, args, kwargs))
    with given(f"-o {options.output}", reads=False):
        notes.timed("drawing", lambda: ampgraph.draw(amp, options.output, **keywords))
    notes.say(f"wrote {options.output}")


def _run_backward(amp: AmpModule, args: tuple, kwargs: dict[str, Any]) -> None:
    """Lets AOTAutograd make the graph of the backward, if anything has gradients."""
    with torch.enable_grad():
        loss = _mean_square(amp(*args, **kwargs))
        if loss.requires_grad:
            loss.backward()


def run_compare(options: argparse.Namespace, notes: Notes) -> None:
    """``ampgraph compare-policies``."""
    form = _form(options)
    with given("--policies"):
        policies = {name: Policy.of(name) for name in options.policies}
    first = Policy(dtype=options.dtype)
    explanation = explain(_converted(options, first, notes))
    _write(
        notes.timed(f"planning {len(policies)} policies", lambda: compare_policies(explanation, policies)),
        form,
        options,
        notes,
    )


def run_check(options: argparse.Namespace, notes: Notes) -> int:
    """``ampgraph check``; returns `FOUND` where there is something to fix."""
    form = _form(options)
    amp, args, kwargs = _built(options, policy_of(options), notes)
    loss = _mean_square if options.backward else None
    found = notes.timed("checking", lambda: check_numerics(amp, args, kwargs, loss=loss))
    _write(_Found(found), form, options, notes)
    if options.save_policy:
        rules = found.remedy if found and found.remedy else amp.policy.rules
        write_file("--save-policy", options.save_policy, amp.policy.replace(rules=rules).to_json())
        notes.say(f"wrote {options.save_policy}")
    return FOUND if found is not None and found.settles_at is None else 0


def run_numerics(options: argparse.Namespace, notes: Notes) -> None:
    """``ampgraph compare``."""
    form = _form(options)
    if form != "text" and options.top:
        raise UsageError(f"--top selects rows of the text report; {form} always writes all rows.")
    if options.draw:
        with given(f"--draw {options.draw}"):
            format_suffix(Path(options.draw))
    amp, args, kwargs = _built(options, policy_of(options), notes)
    loss = _mean_square if options.backward else None
    found = notes.timed("comparing", lambda: compare(amp, args, kwargs, loss=loss))
    _write(_Ranked(found, options.by, options.top), form, options, notes)
    direction = "backward" if options.backward else "forward"
    if options.draw:
        with given(f"--draw {options.draw}", reads=False):
            found.draw(amp, options.draw, by=options.by, direction=direction)
        notes.say(f"wrote {options.draw}")
    if options.histogram:
        with given(f"--histogram {options.histogram}", reads=False):
            found.histogram(options.histogram, direction=direction)
        notes.say(f"wrote {options.histogram}")


def run_tune(options: argparse.Namespace, notes: Notes) -> None:
    """``ampgraph tune``."""
    form = _form(options)
    with given("--budget", reads=False):
        budget = checked_budget(options.budget)
    policy = policy_of(options)
    with given("--level", reads=False):
        check_level(policy)
    amp, args, kwargs = _built(options, policy, notes)
    error = ResultError(options.metric)
    found = Tuner(amp, [(as_tuple(args) or (), kwargs)], budget, error).run(progress=not notes.quiet)
    _write(found, form, options, notes)
    if options.save_policy:
        write_file("--save-policy", options.save_policy, found.policy.to_json())
        notes.say(f"wrote {options.save_policy}")


def _mean_square(result: Any) -> torch.Tensor:
    """The loss of ``--backward``: the mean squares of all floating results together."""
    tensors = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return torch.stack([t.float().square().mean() for t in tensors]).sum()


COMMANDS: Mapping[str, Callable[[argparse.Namespace, Notes], int | None]] = {
    "check": run_check,
    "compare": run_numerics,
    "explain": run_explain,
    "draw": run_draw,
    "compare-policies": run_compare,
    "tune": run_tune,
}


class _Ranked:
    """A comparison whose text lists the rows that are worst in one column."""

    def __init__(self, comparison: NumericComparison, by: str, top: int | None) -> None:
        self._comparison, self._by, self._top = comparison, by, top

    def __str__(self) -> str:
        return self._comparison.table(self._top, self._by)

    def to_markdown(self) -> str:
        return self._comparison.to_markdown()

    def to_json(self) -> str:
        return self._comparison.to_json(indent=2)


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


class _Found:
    """What ``check`` found, or that it found nothing."""

    def __init__(self, found: Finding | None) -> None:
        self._found = found

    def __str__(self) -> str:
        return str(self._found) if self._found else "everything is finite that is finite in float32"

    def to_markdown(self) -> str:
        return f"```text\n{self}\n```"

    def to_json(self) -> str:
        return json.dumps(self._found.to_dict() if self._found else None, indent=2)


class _Answers:
    """The reasons of some nodes, and the cost of flipping them."""

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
    except AmpGraphError as error:  # a cast, a user's cast or an input cannot flip; the message says so
        return {"text": f"  flipping: {error}", "difference": None}
    changed = f"{len(difference.dtypes)} nodes change dtype"
    return {"text": f"  flipping: {difference.costs()}; {changed}", "difference": difference.to_dict()}


def _converted(options: argparse.Namespace, policy: Policy, notes: Notes) -> AmpModule:
    return _built(options, policy, notes)[0]


def _built(
    options: argparse.Namespace, policy: Policy, notes: Notes, backend: str = "eager"
) -> tuple[AmpModule, tuple, dict[str, Any]]:
    """Returns the converted model with the arguments that it was converted for."""
    inputs = [parse_input(text) for text in options.input]
    spec = notes.timed(f"building {options.spec}", lambda: resolve(options.spec))
    how = inputs, options.train, options.capture, backend
    return notes.timed("converting", lambda: _convert(spec, policy, *how))


def _convert(
    spec: ModelSpec, policy: Policy, inputs: list, train: bool, capture: str, backend: str
) -> tuple[AmpModule, tuple, dict[str, Any]]:
    model = spec.model.train(train)
    args, kwargs = build_inputs(inputs) if inputs else (spec.args, spec.kwargs)
    if args is None:
        raise SpecError(f"{spec.name} needs an example input, for instance --input {spec.example_input}")
    check_inputs(model, args, kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of libraries, about libraries
        amp = convert(model, args, kwargs, policy=policy, backend=backend, capture=capture)
        if amp.options.just_in_time:
            with torch.no_grad():
                amp(*args, **(kwargs or {}))
        return amp, args, dict(kwargs or {})


def _reference(name: str) -> Explanation | Policy:
    """Returns the value of ``--diff``: a policy, or a report written by ``explain --json``."""
    if not name.lower().endswith(".json"):
        return Policy.of(name)
    with given(f"--diff {name}"):
        data = json.loads(read_text(name))
        if isinstance(data, dict) and "nodes" in data:
            return Explanation.from_dict(data)
    return Policy.of(name)


def _form(options: argparse.Namespace) -> str:
    """Returns the form of the report, ``"json"``, ``"markdown"`` or ``"text"``, by option or by suffix.

    Raises:
        UsageError: The suffix is unknown or contradicts the option.
    """
    asked = "json" if options.json else "markdown" if options.markdown else None
    if options.output is None:
        return asked or "text"
    suffix = Path(options.output).suffix.lower()
    if suffix not in _FORMS:
        legal = ", ".join(filter(None, _FORMS))
        raise UsageError(
            f"-o {options.output}: no report has the suffix {suffix!r}; legal: {legal} or none."
            + did_you_mean(suffix, _FORMS)
        )
    tells = _FORMS[suffix]
    if asked and tells and asked != tells:
        raise UsageError(f"-o {options.output}: the suffix {suffix!r} contradicts --{asked}.")
    return asked or tells or "text"


def _write(report: Report, form: str, options: argparse.Namespace, notes: Notes) -> None:
    made = {"json": report.to_json, "markdown": report.to_markdown, "text": report.__str__}[form]
    text = made()
    if options.output is None:
        colour = form == "text" and wants_colour(options.color, sys.stdout)
        print(encodable(coloured(text) if colour else text, sys.stdout))
        return
    write_file("-o", options.output, text)
    notes.say(f"wrote {options.output}")
