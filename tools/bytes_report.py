"""The page of `bench_bytes.py`: ratios to the autocast rule, model by model, and their geometric means."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from bytes_models import MODELS
from provenance import written_by

# Bytes that the refresh of a low copy moves for each element: it reads float32 and writes low.
REFRESH = 6
# Bytes that the cast of a gradient to float32 moves for each element: it reads low and writes float32.
GRADIENT = 6
# What a product adds for each element that writes such a gradient itself.
WIDER = 2
# Bytes that a low copy takes.
COPY = 2
# Bytes that SGD moves for each element: it reads the gradient, and reads and writes the parameter.
SGD = 12
# By variant and backend: [forward, backward, saved, refresh] bytes; of a whole step [all, SGD].
# Of a model that is low as a whole, the last figure is its number of parameters.
Record = dict[str, dict[str, list[int]]]
ALL_LOW = "all low"
# What a whole step is counted for, and the prefix of the same variants with images in channels-last format.
WHOLE = ("autocast", "O1", "O2")
LAID_OUT = "channels last: "
# What a variant's name ends in if casts make the float32 gradients of weights.
CAST = ", cast gradients"


def moved(record: Record, label: str, backend: str) -> int:
    """Returns the bytes of forward, backward and refresh."""
    forward, backward, _, refresh = record[label][backend]
    return forward + backward + refresh


def around(record: Record, label: str, backend: str) -> int:
    """Returns the bytes of a whole step without those of the optimizer alone."""
    whole, optimizer = record[label][backend]
    return whole - optimizer


def saved(record: Record, label: str, backend: str) -> int:
    """Returns the bytes saved for the backward."""
    return record[label][backend][2]


def kept(record: Record, label: str, backend: str) -> int:
    """Returns the bytes saved for the backward, and the bytes of the low copies."""
    saved_bytes, refresh = record[label][backend][2:]
    return saved_bytes + refresh // REFRESH * COPY


# Title, count, variant, goal for the geometric mean and for the highest ratio.
Column = tuple[str, Callable, str, float | None, float | None]


def _columns(goals: tuple[float | None, ...]) -> tuple[Column, ...]:
    o1, o2, saved_o1, saved_o2 = goals
    return (
        ("O1", moved, "O1", o1, 1.0),
        ("O2", moved, "O2", o2, 1.0),
        ("O1, torch's lists", moved, "O1, torch's lists", None, 1.0),
        ("saved O1", saved, "O1", saved_o1, None),
        ("saved O2", saved, "O2", saved_o2, None),
        ("saved + copies O1", kept, "O1", None, None),
        ("saved + copies O2", kept, "O2", None, None),
    )


FUSED = _columns((0.95, 0.90, 0.92, 0.82))
EAGER = _columns((0.84, 0.75, None, None))
STEP: tuple[Column, ...] = (
    ("O1", around, "O1", 0.95, 1.0),
    ("O2", around, "O2", 0.90, 1.0),
    ("O1, torch's lists", around, "O1, torch's lists", None, 1.0),
)
ON_CUDA: tuple[Column, ...] = (*FUSED, (f"O1{CAST}", moved, f"O1{CAST}", None, None))
STEPS = (
    ("lists", "autocast", "lists"),
    ("sharing", "lists", "sharing"),
    ("placement, values saved low", "sharing", "placement"),
    ("low copies", "placement", "O1"),
)


def table(records: dict[str, Record], columns: tuple[Column, ...], backend: str) -> str:
    """Returns the ratios to the autocast rule, their geometric mean and highest, and the goals for both."""
    lines = [f"| model | {' | '.join(title for title, *_ in columns)} |", "|---|" + "---|" * len(columns)]
    rows = {
        name: [
            count(record, label, backend) / count(record, "autocast", backend)
            for _, count, label, _, _ in columns
        ]
        for name, record in records.items()
    }
    ratios = list(zip(*rows.values(), strict=True))
    below = {
        **rows,
        "**geometric mean**": [statistics.geometric_mean(ratio) for ratio in ratios],
        "goal: at most": [goal for *_, goal, _ in columns],
        "**highest**": [max(ratio) for ratio in ratios],
        "goal for the highest: at most": [goal for *_, goal in columns],
    }
    lines += [f"| {name} | {' | '.join(map(_cell, row))} |" for name, row in below.items()]
    return "\n".join(lines)


def above(records: dict[str, Record], columns: tuple[Column, ...], backend: str) -> str:
    """Returns the ratios that are above their goal for the highest, with all digits that matter."""
    found = [
        f"{name}, {title}: {ratio:.5f}"
        for name, record in records.items()
        for title, count, label, _, most in columns
        if most is not None
        and (ratio := count(record, label, backend) / count(record, "autocast", backend)) > most
    ]
    return f"Above 1: {'; '.join(found)}." if found else "No model is above 1."


def beside_loop(records: dict[str, Record]) -> str:
    """Returns the bytes of one graph over those of the plain loop: forward, backward, refresh, optimizer."""
    rows = {name: [_beside_loop(record, label) for label in WHOLE] for name, record in records.items()}
    return _with_means(WHOLE, rows)


def laid_out(records: dict[str, Record]) -> str:
    """Returns the ratios of whole steps in channels-last format: to the autocast rule, and to the loop."""
    columns = ("O1", "O2", *(f"{label} / loop" for label in WHOLE))
    return _with_means(columns, {name: _laid_out(record) for name, record in records.items()})


def _laid_out(record: Record) -> list[float]:
    rule = around(record, LAID_OUT + "autocast", "step")
    steps = [around(record, LAID_OUT + label, "step") / rule for label in ("O1", "O2")]
    return [*steps, *(_beside_loop(record, LAID_OUT + label) for label in WHOLE)]


def means_laid_out(records: dict[str, Record]) -> str:
    """Returns the geometric means of whole steps of all models, those of convolutions in channels-last."""
    rows = []
    for record in records.values():
        prefix = LAID_OUT if LAID_OUT + "autocast" in record else ""
        rule, *levels = (around(record, prefix + label, "step") for label in WHOLE)
        rows.append([level / rule for level in levels])
    o1, o2 = (statistics.geometric_mean(ratios) for ratios in zip(*rows, strict=True))
    return (
        f"Whole steps of all {len(rows)} models, the networks of convolutions in this format: "
        f"O1 {o1:.3f}, O2 {o2:.3f} of the rule of `torch.autocast` in geometric mean."
    )


def _with_means(columns: Sequence[str], rows: dict[str, list[float]]) -> str:
    ratios = list(zip(*rows.values(), strict=True))
    below = {
        **rows,
        "**geometric mean**": [statistics.geometric_mean(ratio) for ratio in ratios],
        "**highest**": [max(ratio) for ratio in ratios],
    }
    lines = [f"| model | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    return "\n".join(
        [*lines, *(f"| {name} | {' | '.join(map(_cell, row))} |" for name, row in below.items())]
    )


def _beside_loop(record: Record, label: str) -> float:
    whole, optimizer = record[label]["step"]
    return whole / (moved(record, label, "fused") + optimizer)


def left(records: dict[str, Record], gradient: int) -> str:
    """Returns the bytes of O2 and of a model that is low as a whole, with what float32 parameters add.

    Args:
        records: What was counted.
        gradient: The bytes that a float32 gradient adds for each element.
    """
    columns = ("all low", "with refresh", "with float32 gradients", "O2", "saved, all low", "saved O2")
    lines = [f"| model | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    rows = {name: _left(record, gradient) for name, record in records.items()}
    rows["**geometric mean**"] = [statistics.geometric_mean(r) for r in zip(*rows.values(), strict=True)]
    lines += [f"| {name} | {' | '.join(map(_cell, row))} |" for name, row in rows.items()]
    return "\n".join(lines)


def _left(record: Record, gradient: int) -> list[float]:
    forward, backward, saved_bytes, parameters = record[ALL_LOW]["fused"]
    low, rule = forward + backward, moved(record, "autocast", "fused")
    refreshed = low + REFRESH * parameters
    counts = (low, refreshed, refreshed + gradient * parameters, moved(record, "O2", "fused"))
    kept_bytes = (saved_bytes, saved(record, "O2", "fused"))
    return [*(c / rule for c in counts), *(c / saved(record, "autocast", "fused") for c in kept_bytes)]


def _cell(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def shares(records: dict[str, Record]) -> str:
    """Returns the factor of each step from the autocast rule to O1: geometric means."""
    lines = ["| step | eager | fused |", "|---|---|---|"]
    for title, before, after in STEPS:
        cells = []
        for backend in ("eager", "fused"):
            pair = [_fused_name(x) if backend == "fused" else x for x in (before, after)]
            factors = [moved(r, pair[1], backend) / moved(r, pair[0], backend) for r in records.values()]
            cells.append(f"{statistics.geometric_mean(factors):.3f}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    for level in ("O1", "O2"):
        shared = [r[level]["fused"][3] / moved(r, level, "fused") for r in records.values()]
        lines += ["", f"The refresh of low copies at {level}: {statistics.mean(shared):.1%} of a fused step."]
    return "\n".join(lines)


def _fused_name(label: str) -> str:
    return "lists" if label == "sharing" else label  # a compiler shares all casts


_IN_CHANNELS_LAST = (
    "With `model.to(memory_format=torch.channels_last)` and images in this format, both layouts are the "
    "same, and nothing is copied. The networks of convolutions again: a whole step beside the rule of "
    "`torch.autocast`, and beside the plain loop, all in this format."
)


def page(records: dict[str, Record], failed: dict[str, str], command: str, at: str) -> str:
    """Returns the page; models are in the order of their file."""
    records = {name: records[name] for name in MODELS if name in records}
    missing = [name for name in MODELS if name not in records and name not in failed]
    whole = {name: r for name, r in records.items() if "step" in r["autocast"]}
    loops = [name for name in records if name not in whole]
    convolutional = {name: r for name, r in whole.items() if LAID_OUT + "autocast" in r}
    parts = [
        "# Bytes of a training step",
        written_by(command, "timm", "transformers", at=at),
        f"{len(records)} models of two or more layers, training mode, loss inside, bfloat16, no loss scale. "
        "Every figure is a ratio to the rule of `torch.autocast` with torch's lists on the same graph. "
        "Nothing is timed. No figure is from a GPU.",
        "## Compiled",
        "Forward and backward of the plain loop, as Inductor schedules them for a CPU: bytes that each fused "
        "kernel and each library kernel reads and writes. One refresh of the low copies, a kernel that moves "
        "6 bytes a parameter, is included at each level that has them, so a loop with one forward an update "
        "is counted. Saved: what the forward "
        "keeps for the backward, without inputs, parameters and low copies. Casts of weights count as saved "
        "under the rule of `torch.autocast`; *saved + copies* counts the low copies beside them.",
        table(records, FUSED, "fused"),
        above(records, FUSED, "fused"),
        "### What is left",
        "`model.to(torch.bfloat16)` on the same inputs, which it casts first: no other float32 value, so no "
        "placement of casts moves less. Two columns add what float32 parameters and gradients cost a loop of "
        f"separate graphs: the refresh, {REFRESH} bytes a parameter, and the cast of each gradient, "
        f"{GRADIENT} bytes. A kernel that writes a gradient in float32 itself saves part of the second.",
        left(records, GRADIENT),
        "## A whole compiled step",
        "Forward, backward and optimizer as one graph, as `ampgraph.compile_step` captures it, on Inductor. "
        "The rule of `torch.autocast` is captured in the same way: its graph casts weights and has no low "
        "copies. The kernels of the update read low gradients and write low copies (2 bytes a parameter). "
        f"The bytes of the optimizer alone are subtracted everywhere: {SGD} a parameter for SGD, which reads "
        "the gradient, and reads and writes the parameter. Forward and backward fuse here, and nothing "
        "divides them into saved and computed values, so more than the refresh differs from the table above.",
        table(whole, STEP, "step"),
        above(whole, STEP, "step"),
        *([f"`compile_step` runs the plain loop for: {', '.join(loops)}."] if loops else []),
        "Bytes of the same graphs over those of the plain loop (forward, backward, refresh and SGD, each "
        "counted alone). Networks of convolutions may move more: Inductor wants the channels of a pixel next "
        "to each other for a convolution, and keeps eager's layout for its backward, so it copies.",
        beside_loop(whole),
        *([_IN_CHANNELS_LAST, laid_out(convolutional), means_laid_out(whole)] if convolutional else []),
        "## Eager",
        "Forward and backward, op by op; each cast of an activation counts at each use under the rule of "
        "`torch.autocast`. The refresh is included.",
        table(records, EAGER, "eager"),
        above(records, EAGER, "eager"),
        "## Shares",
        "Geometric means of the factors from the rule of `torch.autocast` to O1.",
        shares(records),
    ]
    if failed:
        parts += ["## Not counted", "\n".join(f"- {name}: {why}" for name, why in failed.items())]
    if missing:
        parts.append(f"Not measured for this page: {', '.join(missing)}.")
    return "\n\n".join(parts) + "\n"


def cuda_page(records: dict[str, Record], failed: dict[str, str], at: str) -> str:
    """Returns the page of the same models scheduled for a GPU."""
    records = {name: records[name] for name in MODELS if name in records}
    laid_out = {
        name: {label.removeprefix(LAID_OUT): counts for label, counts in r.items() if LAID_OUT in label}
        for name, r in records.items()
        if LAID_OUT + "autocast" in r
    }
    whole = {name: r for name, r in records.items() if "step" in r["autocast"]}
    loops = [name for name in records if name not in whole]
    parts = [
        "# Bytes of a training step, scheduled for a GPU",
        written_by("make bytes-cuda", "triton", "timm", "transformers", at=at),
        "**Nothing ran on a GPU**, and nothing is timed: a stub stands in for the driver of an H100, and "
        f"Inductor lowers and fuses for it. The {len(records)} models of [the page for a CPU](bytes.md), "
        "training mode, loss inside, bfloat16, no loss scale. Every figure is a ratio to the rule of "
        "`torch.autocast` with torch's lists on the same graph. Products do not pad their operands: whether "
        "they do is timed on a device.",
        "## Forward and backward",
        "Of the plain loop: bytes that each fused kernel and each library kernel reads and writes, and one "
        "refresh of the low copies. Products give the gradients of weights in float32; in the last column "
        "they give low gradients, and kernels cast them (`Policy(wide_weight_gradients=False)`).",
        table(records, ON_CUDA, "fused"),
        above(records, ON_CUDA, "fused"),
        "### What is left",
        "`model.to(torch.bfloat16)` on the same inputs, which it casts first. Two columns add what float32 "
        f"parameters and gradients cost a loop of separate graphs: the refresh, {REFRESH} bytes a parameter, "
        f"and {WIDER} bytes for each element of a gradient that a product writes in float32.",
        left(records, WIDER),
        "## A whole step as one graph",
        f"As `ampgraph.compile_step` captures it, without the bytes of SGD alone ({SGD} a parameter).",
        table(whole, STEP[:2], "step"),
        above(whole, STEP[:2], "step"),
        *([f"Not counted: {', '.join(loops)}."] if loops else []),
        "## Networks of convolutions in channels-last format",
        "The images too. Forward and backward of the plain loop, then a whole step.",
        table(laid_out, FUSED[:2], "fused"),
        above(laid_out, FUSED[:2], "fused"),
        table(laid_out, STEP[:2], "step"),
        above(laid_out, STEP[:2], "step"),
    ]
    if failed:
        parts += ["## Not counted", "\n".join(f"- {name}: {why}" for name, why in failed.items())]
    return "\n\n".join(parts) + "\n"
