"""Turns the records of `tools/zoo_check.py` into a page and a summary, and says which bounds do not hold."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from provenance import without_folders, written_by

from tests.zoo.measure import DRAWS, FACTORS, FLOOR, tolerance

LIBRARIES = ("timm", "torchvision", "transformers")
Record = dict[str, Any]
LEVELS = ("O1", "O2")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# A capture ahead of time cannot hold the model; `ampgraph.convert` then captures it just in time.
_REFUSED = "AheadOfTimeError"
CAST_BYTES_BOUND = {"O1": 0.6, "O2": 0.45}
REWRITE_BOUND = 0.25

DEFINITIONS = """\
- **cast bytes**: bytes read plus bytes written by the casts of activations that autocast or ampgraph adds
  in one forward (parameters and buffers, and casts in the model's own code, left out on both sides),
  float16, eval mode, outputs left in the dtype they were computed in, as autocast leaves them. *autocast*:
  what torch's own CUDA autocast kernels cast, found by running the captured graph through them on tensors
  without data (`tests/zoo/oracle.py`). O1 and O2: stamped on the casts in the converted graph, divided by
  autocast's.
- **io**: KiB that the default, `keep_io_dtypes=True`, casts more at O1, to return outputs as float32.
- **traffic**: modelled bytes that all kernels and casts read and write in one forward, parameters' casts
  included; against float32, and against autocast's rule on autocast's lists. With two images or
  sequences a batch the casts of parameters weigh more here than in practice.
- **error**: relative 2-norm of the difference from the same model in float32 with the same seed, over
  all outputs; in units of the low dtype's eps (bfloat16: 2^-7). Batch norm on two small images amplifies
  rounding: compare with autocast's own error beside it.
- **rewrite**: everything `convert` does after `torch.export`, as a share of what `torch.export` takes, in CPU
  seconds, O1 float16.
"""


def geometric_mean(values: Iterable[float]) -> float:
    """Returns the geometric mean; a zero (no cast left at all) counts as a thousandth."""
    logs = [math.log(max(value, 1e-3)) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def ok(records: list[Record], mode: str) -> list[Record]:
    """Returns the records of a mode that hold figures."""
    return [record for record in records if record["mode"] == mode and "failure" not in record]


def cast_ratio(record: Record, level: str, dtype: str = "float16") -> float:
    """Cast bytes of a level over autocast's."""
    return record[f"{level} {dtype}"]["cast_bytes"] / max(record["oracle"]["cast_bytes"], 1)


def traffic_ratio(record: Record, level: str, baseline: str, dtype: str = "float16") -> float:
    """Modelled traffic of a level over a baseline's: "traffic" (autocast's) or "fp32_traffic"."""
    return record[f"{level} {dtype}"]["traffic"] / record[f"autocast {dtype}"][baseline]


def autocasts_errors(record: Record, level: str, dtype: str) -> Record:
    """Returns autocast's errors over the same batches as those of a level."""
    draws = record[f"{level} {dtype}"].get("over_draws")
    return draws["autocast"] if draws else record[f"autocast {dtype}"]


def over_draws(records: list[Record]) -> list[str]:
    """Returns a line for each run whose errors were taken over several batches."""
    lines = []
    for record in (record for record in records if "failure" not in record):
        for level, dtype in runs(record):
            own, unit = record[f"{level} {dtype}"], torch.finfo(DTYPES[dtype]).eps
            if "over_draws" not in own:
                continue
            theirs = autocasts_errors(record, level, dtype)
            figures = [
                f"{own[k] / unit:.1f} ({theirs[k] / unit:.1f})" for k in ("output_error", "gradient_error")
            ]
            lines.append(f"- {record['model']} {record['mode']} {level} {dtype}: {', '.join(figures)}\n")
    return lines


def runs(record: Record) -> list[tuple[str, str]]:
    """Returns the pairs of level and dtype that were run."""
    return [(level, dtype) for level in LEVELS for dtype in DTYPES if f"{level} {dtype}" in record]


def violations(records: list[Record]) -> list[str]:
    """Returns a line for each failure and each bound that does not hold."""
    found = [f"{r['model']} {r['mode']}: {without_folders(r['failure'])}" for r in records if "failure" in r]
    for record in (record for record in records if "failure" not in record):
        found += [f"{record['model']} {record['mode']}: {line}" for line in _broken(record)]
    evals = ok(records, "eval")
    for level in LEVELS if evals else ():
        mean = geometric_mean(cast_ratio(record, level) for record in evals)
        if mean > CAST_BYTES_BOUND[level]:
            found.append(f"cast bytes at {level}: geometric mean {mean:.2f} > {CAST_BYTES_BOUND[level]}")
    return found


def _commits(records: list[Record]) -> list[str]:
    """Says which figures are of another commit than the page."""
    runs, plans = ({r[key] for r in records if key in r} for key in ("run_at", "planned_at"))
    if not plans:
        return []
    return [f"Errors: commit {', '.join(sorted(runs))}. Plans and times: commit {', '.join(sorted(plans))}."]


def _broken(record: Record) -> Iterable[str]:
    for level, dtype in runs(record):
        own, theirs = record[f"{level} {dtype}"], record[f"autocast {dtype}"]
        allowed = record["oracle"]["cast_bytes"] if "oracle" in record else math.inf
        if own["cast_bytes"] > allowed:
            yield f"{level} {dtype} casts {own['cast_bytes']} bytes, autocast {allowed}"
        if own["traffic"] > theirs["traffic"]:
            yield f"{level} {dtype} moves {own['traffic']} bytes, autocast's rule {theirs['traffic']}"
        if wrong := own.get("wrong_integers"):
            yield f"{level} {dtype} has other integers than the source in {', '.join(wrong)}"
        share = own["rewrite_s"] / record["capture_s"]
        if share > REWRITE_BOUND and (record["mode"], dtype) == ("eval", "float16"):
            yield f"{level} {dtype} rewriting takes {share:.0%} of capture ({own['rewrite_s']:.2f} s)"
        for kind in ("output", "gradient"):
            mine, other = own[f"{kind}_error"], autocasts_errors(record, level, dtype)[f"{kind}_error"]
            if not mine <= tolerance(level, DTYPES[dtype], other):
                unit = torch.finfo(DTYPES[dtype]).eps
                yield f"{level} {dtype} {kind} error {mine / unit:.1f} eps, autocast's {other / unit:.1f} eps"


def report(records: list[Record]) -> str:
    """Returns the whole page."""
    broken = violations(records)
    parts = [
        "# The zoo: whole models against torch's autocast",
        written_by("python tools/zoo_check.py --output docs/results/zoo.md", *LIBRARIES),
        *_commits(records),
        summary(records),
        "## Every model, eval mode",
        _table(_COLUMNS, [_row(record) for record in ok(records, "eval")]),
        "## What the figures are",
        DEFINITIONS,
        "## Geometric means",
        _means(records),
        "## Precision",
        _precision(records),
        "## Failures and bounds that do not hold",
        "".join(f"- {line}\n" for line in broken) or "None.\n",
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def summary(records: list[Record]) -> str:
    """Returns the lines for the README."""
    evals, failures = ok(records, "eval"), [r for r in records if "failure" in r]
    if not evals:
        return "Nothing was measured."
    above = {level: sum(cast_ratio(r, level) > 1 for r in evals) for level in LEVELS}
    refused = sorted({r["model"] for r in failures if r["failure"].startswith(_REFUSED)})
    failed = [r for r in failures if not r["failure"].startswith(_REFUSED)]
    more = {level: sum(traffic_ratio(r, level, "fp32_traffic") > 1 for r in evals) for level in LEVELS}
    equal = {level: sum(cast_ratio(r, level) == 1 for r in evals) for level in LEVELS}
    casts = {level: geometric_mean(cast_ratio(r, level) for r in evals) for level in LEVELS}
    traffic = {level: geometric_mean(traffic_ratio(r, level, "traffic") for r in evals) for level in LEVELS}
    capture = sum(record["capture_s"] for record in evals)
    share = {level: sum(r[f"{level} float16"]["rewrite_s"] for r in evals) / capture for level in LEVELS}
    return (
        f"- {len(evals)} models (timm, torchvision, transformers, four of our own), forward and backward, "
        f"train and eval, float16 and bfloat16 (O2 in training: bfloat16): {len(failed)} failures; refused "
        f"ahead of time, so that `convert` captures them just in time: {', '.join(refused) or 'none'}\n"
        f"- bytes moved by added casts of activations, outputs left as autocast leaves them, against torch's "
        f"CUDA autocast (geometric mean): "
        f"O1 {casts['O1']:.2f}, O2 {casts['O2']:.2f}\n"
        f"- models that cast more bytes than autocast: O1 {above['O1']}, O2 {above['O2']}; as many: "
        f"O1 {equal['O1']}, O2 {equal['O2']}\n"
        f"- modelled traffic, against autocast's rule on torch's lists: O1 {traffic['O1']:.2f}, "
        f"O2 {traffic['O2']:.2f}; models that move more than in float32 at these small batches, where casts "
        f"of weights count in each forward: O1 {more['O1']}, O2 {more['O2']}\n"
        f"- rewriting the graph takes {share['O1']:.0%} (O1) and {share['O2']:.0%} (O2) of the time that "
        f"capturing it takes\n"
    )


def fill_readme(path: Path, records: list[Record]) -> None:
    """Puts the summary between the zoo marks of a README."""
    marked = re.compile(r"(<!-- zoo:begin -->\n).*?(<!-- zoo:end -->)", re.DOTALL)
    path.write_text(marked.sub(lambda match: match[1] + summary(records) + match[2], path.read_text()))


_COLUMNS: dict[str, Callable[[Record], str]] = {
    "model": lambda r: r["model"],
    "nodes": lambda r: str(r["nodes"]),
    "autocast KiB": lambda r: f"{r['oracle']['cast_bytes'] / 1024:.0f}",
    "cast bytes O1": lambda r: f"{cast_ratio(r, 'O1'):.2f}",
    "O2": lambda r: f"{cast_ratio(r, 'O2'):.2f}",
    "io KiB": lambda r: f"{(r['O1 default'] - r['O1 float16']['cast_bytes']) / 1024:.1f}",
    "traffic/fp32 O1": lambda r: f"{traffic_ratio(r, 'O1', 'fp32_traffic'):.2f}",
    "O2 ": lambda r: f"{traffic_ratio(r, 'O2', 'fp32_traffic'):.2f}",
    "traffic/autocast O1": lambda r: f"{traffic_ratio(r, 'O1', 'traffic'):.2f}",
    "O2  ": lambda r: f"{traffic_ratio(r, 'O2', 'traffic'):.2f}",
    "bf16 error autocast": lambda r: f"{r['autocast bfloat16']['output_error'] * 2**7:.2f}",
    "O1": lambda r: f"{r['O1 bfloat16']['output_error'] * 2**7:.2f}",
    "O2   ": lambda r: f"{r['O2 bfloat16']['output_error'] * 2**7:.2f}",
    "capture s": lambda r: f"{r['capture_s']:.2f}",
    "rewrite": lambda r: f"{r['O1 float16']['rewrite_s'] / r['capture_s']:.0%}",
}


def _row(record: Record) -> list[str]:
    return [cell(record) for cell in _COLUMNS.values()]


def _means(records: list[Record]) -> str:
    evals = ok(records, "eval")
    families = ["all", *dict.fromkeys(record["family"] for record in evals)]
    rows = []
    for family in families:
        members = [record for record in evals if family in ("all", record["family"])]
        rows.append([family, str(len(members))])
        for baseline in ("casts", "traffic", "fp32_traffic"):
            for level in LEVELS:
                ratios = [
                    cast_ratio(r, level) if baseline == "casts" else traffic_ratio(r, level, baseline)
                    for r in members
                ]
                rows[-1].append(f"{geometric_mean(ratios):.2f}")
    columns = ["family", "models", "casts O1", "O2", "traffic/autocast O1", "O2", "traffic/fp32 O1", "O2"]
    return _table(columns, rows) + "\nA model that is left without any cast counts as 0.001.\n"


def _precision(records: list[Record]) -> str:
    rows = []
    for mode in ("eval", "train"):
        for level in LEVELS:
            for dtype in DTYPES:
                row = [mode, level, dtype]
                for kind in ("output_error", "gradient_error"):
                    pairs = [
                        (
                            r[f"{level} {dtype}"][kind] / max(autocasts_errors(r, level, dtype)[kind], 1e-12),
                            r["model"],
                        )
                        for r in ok(records, mode)
                        if f"{level} {dtype}" in r
                    ]
                    mean = geometric_mean(ratio for ratio, _ in pairs)
                    row += [f"{mean:.2f}", "{:.1f} ({})".format(*max(pairs))] if pairs else ["", ""]
                if any(row[3:]):
                    rows.append(row)
    columns = ["mode", "level", "dtype", "output error / autocast's", "largest", "gradients", "largest"]
    return (
        "Every model was run forward and backward in each of these combinations; float16 with a loss scale.\n"
        f"\n{_table(columns, rows)}\n"
        f"Bound on outputs and on gradients: {FLOOR:g} eps, or {FACTORS['O1']} (O1) and {FACTORS['O2']} (O2) "
        "times the error of autocast's rule on the same model and seed, whichever is more;\n"
        "`tests/zoo/measure.py` says why. Where a ratio is large within the bound, autocast's own error is "
        "far below one eps. Where one batch broke the bound, the root mean square over "
        f"{DRAWS} batches stands instead, for both; output and gradient error in eps, "
        "autocast's in brackets:\n\n"
        f"{''.join(over_draws(records)) or 'none.'}"
    )


def _table(columns: Iterable[str], rows: list[list[str]]) -> str:
    lines = [[column.strip() for column in columns]]
    lines += [["---"] * len(lines[0]), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
