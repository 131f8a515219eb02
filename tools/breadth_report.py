"""The report of `breadth.py`: rates, one line a model, and every failure with its cause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import zoo_report
from provenance import written_by

from tests.zoo.measure import DRAWS, FACTORS, FLOOR

Record = dict[str, Any]
WAYS = ("ahead", "just in time")
MODES = ("eval", "train")
RUNS = (("eval", "O1 float16"), ("eval", "O2 bfloat16"), ("train", "O1 bfloat16"))
OURS = ("wrong", "crash")
MARKS = {name: name for name in ("ok", "partly", "torch", "dtype", "kernel", "refused")}
MARKS |= {name: f"**{name}**" for name in OURS}

HEAD = """# Every model

{written_by}

Small models with random weights ([the zoo](zoo.md) measures some of them in depth), each converted ahead of
time (`convert(model, args, kwargs)`) and just in time (`convert(model)`), in evaluation mode (O1 float16
with a loss scale, O2 bfloat16) and in training mode (O1 bfloat16), and run forward and backward on backend
`"eager"`.
A model passes if

- it converts, runs, and gives back the type, structure and dtypes that the source gives;
- every parameter that has a gradient in the source has one, in its own dtype;
- the relative 2-norm of the error against float32, of all outputs and of all gradients, is at most {floor:g}
  eps of the low dtype, or {o1:g} (O1) or {o2:g} (O2) times that of the autocast rule; where one batch breaks
  this, the root mean square over {draws} batches decides;
- at O1 it casts no more activation bytes than the autocast rule on the same graph and lists.

**torch**: the capture itself, tried without ampgraph, fails or does not give the source's float32 result.
**dtype**: infinity or NaN, by the autocast rule as well: the low dtype, or the CPU's kernel for it, cannot
hold what the model computes.
**kernel**: out of the bound by the fault of torch's CPU kernel of layer_norm's backward, which sums the
gradients of weight and bias in the low dtype; within it once that sums in float32, as on CUDA.
**source**: the source model itself refuses to run so, and the mode does not count.
**partly**: it runs, but a part of it in its own dtypes, and the user is told which and why.
**refused**: torch captures it ahead of time, but the capture would lose what the source does, a backward of
its own for instance. ampgraph says so before anything runs; captured just in time the model keeps it.
"""


def outcomes(record: Record) -> list[str]:
    """Returns what came of each way, in words."""
    if "source" in record:
        return [f"source: {record['source']}"]
    found = [(way, record[way]) for way in WAYS if way in record]
    return [
        f"{way} {of['outcome']}" + (f" ({of['cause'][:150]})" if "cause" in of else "") for way, of in found
    ]


def failures(records: Iterable[Record]) -> list[Record]:
    """Returns the records in which a conversion failed that torch alone can capture."""
    return [r for r in records if any(r.get(way, {}).get("outcome") in OURS for way in WAYS)]


def report(records: list[Record]) -> str:
    """Renders all records as Markdown, whichever order they were made in."""
    records = sorted(records, key=lambda r: (r["model"], r["mode"]))
    head = HEAD.format(
        written_by=written_by(
            "python tools/breadth.py --output docs/results/breadth.md", *zoo_report.LIBRARIES
        ),
        floor=FLOOR,
        draws=DRAWS,
        o1=FACTORS["O1"],
        o2=FACTORS["O2"],
    )
    parts = [head, _rates(records), _ratios(records), _causes(records), _models(records)]
    return "\n".join(part for part in parts if part)


def _rates(records: list[Record]) -> str:
    causes = ["partly", "refused", "dtype", "kernel", "failed"]
    rows = []
    for way in WAYS:
        for mode in MODES:
            counts = Counter(r[way]["outcome"] for r in records if r["mode"] == mode and way in r)
            rows.append([f"{way}, {mode}", *_rate(counts)])
    best = Counter(_best(records, model) for model in {r["model"] for r in records})
    rows.append(["models, in both modes by at least one way", *_rate(best)])
    return "## Rates\n\n" + _table(["", "runs", "torch cannot", "of the rest passed", *causes], rows)


def _rate(counts: Counter[str]) -> list[str]:
    total, able = counts.total(), counts.total() - counts["torch"]
    share = f"{counts['ok']} of {able} ({100 * counts['ok'] / max(able, 1):.1f} %)"
    return [
        str(total),
        str(counts["torch"]),
        share,
        str(counts["partly"]),
        str(counts["refused"]),
        str(counts["dtype"]),
        str(counts["kernel"]),
        str(counts["wrong"] + counts["crash"]),
    ]


def _best(records: list[Record], model: str) -> str:
    """The better of a model's ways, each as bad as its worse mode."""
    order = ("ok", "partly", "kernel", "dtype", "refused", "wrong", "crash", "torch")
    modes = [r for r in records if r["model"] == model and "source" not in r]
    ways = [max((r.get(way, {}).get("outcome", "crash") for r in modes), key=order.index) for way in WAYS]
    return min(ways, key=order.index)


def _ratios(records: list[Record]) -> str:
    rows = []
    for mode, run in RUNS:
        for way in WAYS:
            found = [r[way][run] for r in records if r["mode"] == mode and run in r.get(way, {})]
            if not found:
                continue
            casts = [f["cast_bytes"] / f["rule_cast_bytes"] for f in found if f["rule_cast_bytes"]]
            traffic = [f["traffic"] / f["rule_traffic"] for f in found if f["rule_traffic"]]
            eps = [f["errors"][0] / torch.finfo(getattr(torch, run.split()[1])).eps for f in found]
            rows.append(
                [f"{run}, {mode}", way, str(len(found)), f"{zoo_report.geometric_mean(casts):.2f}",
                 f"{zoo_report.geometric_mean(traffic):.2f}", f"{max(traffic):.2f}",
                 f"{sorted(eps)[len(eps) // 2]:.2f}", str(sum("autocasts_errors" in f for f in found))]
            )  # fmt: skip
    columns = ["", "way", "runs", "cast bytes / autocast rule's", "traffic / rule's", "largest",
               "median error, eps", "held to autocast's error"]  # fmt: skip
    note = "Geometric means; modelled bytes of one forward; parameters' casts count in the traffic.\n"
    return "## Against the autocast rule\n\n" + _table(columns, rows) + "\n" + note


def _causes(records: list[Record]) -> str:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        if "source" in record:
            groups.setdefault(("source", record["model"], record["source"]), []).append(record["mode"])
        for way in WAYS:
            of = record.get(way, {})
            if of.get("outcome", "ok") != "ok":
                key = (of["outcome"], f"{record['model']}, {way}", of["cause"])
                groups.setdefault(key, []).append(record["mode"])
    order = ("crash", "wrong", "source", "kernel", "dtype", "partly", "refused", "torch")
    rows = [
        [MARKS.get(outcome, outcome), where, ", ".join(modes), _cell(cause)]
        for (outcome, where, cause), modes in sorted(
            groups.items(), key=lambda g: (order.index(g[0][0]), g[0][1])
        )
    ]
    if not rows:
        return "## What did not pass\n\nNothing.\n"
    return "## What did not pass\n\n" + _table(["outcome", "model", "modes", "cause"], rows)


def _models(records: list[Record]) -> str:
    by_model: dict[str, dict[str, Record]] = {}
    for record in records:
        by_model.setdefault(record["model"], {})[record["mode"]] = record
    rows = []
    for model, modes in by_model.items():
        row = [model, next(iter(modes.values())).get("kind", "")]
        for way in WAYS:
            row += [MARKS.get(modes.get(mode, {}).get(way, {}).get("outcome", ""), "") for mode in MODES]
        row += [_figures(modes, mode, run) for mode, run in RUNS]
        rows.append(row)
    columns = [
        "model",
        "kind",
        "ahead, eval",
        "train",
        "just in time, eval",
        "train",
        *(run for _, run in RUNS),
    ]
    note = (
        "Figures: cast bytes over the autocast rule's / error of the outputs in eps / error of the gradients "
        "in eps; ahead of time where that is possible."
    )
    return f"## All {len(rows)} models\n\n{note}\n\n" + _table(columns, rows)


def _figures(modes: dict[str, Record], mode: str, run: str) -> str:
    ways = modes.get(mode, {})
    found = next((ways[way][run] for way in WAYS if run in ways.get(way, {})), None)
    if found is None:
        return ""
    unit = torch.finfo(getattr(torch, run.split()[1])).eps
    ratio = found["cast_bytes"] / found["rule_cast_bytes"] if found["rule_cast_bytes"] else 1.0
    return f"{ratio:.2f} / {found['errors'][0] / unit:.1f} / {found['errors'][1] / unit:.1f}"


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    """Paths on this machine are left out; markup is shown as it is."""
    words = [word.rsplit("/", 1)[-1] if word.count("/") > 2 else word for word in text.split()]
    return " ".join(words).replace("|", "\\|").replace("<", "&lt;")[:300]
