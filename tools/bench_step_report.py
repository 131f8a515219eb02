"""Tables and a picture of what `bench_step.py` measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PARTS = ("forward", "backward", "check", "optimizer")
_SHOWN = 6  # kernels
COLORS = {"float32": "#bbbbbb", "autocast": "#888888", "to(low)": "#dddddd"}


def table(title: str, rows: list[dict[str, Any]]) -> list[str]:
    """Returns the Markdown table of one model."""
    total = {row["way"]: row["total"] for row in rows}
    head = [
        "way",
        "step, ms",
        *PARTS,
        "float32 / way",
        "autocast / way",
        "peak MiB",
        "kernels",
        "syncs",
        "loss apart",
    ]
    lines = [f"### {title}", "", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        cells = [row["way"], f"{row['total']:.2f}"]
        cells += ["" if "one graph" in row["way"] else f"{row[part]:.2f}" for part in PARTS]
        cells += [
            f"{total[base] / row['total']:.2f}" if base in total else "" for base in ("float32", "autocast")
        ]
        cells += ["" if row[key] is None else f"{row[key]:,.0f}" for key in ("peak_memory", "kernels")]
        cells += [str(row["syncs"]), f"{row['agreement']:.1e}"]
        lines.append(f"| {' | '.join(cells)} |")
    if rows[0]["longest_kernels"]:
        lines += ["", "Longest kernels of a step, with their number and milliseconds:", ""]
        lines += [f"- {row['way']}: {_kernels(row['longest_kernels'])}" for row in rows]
    return [*lines, ""]


def _kernels(longest: list[tuple[str, int, float]]) -> str:
    """Returns kernels by name, without namespaces and what they are made for."""
    found: dict[str, list[float]] = {}
    for name, count, ms in longest:
        short = re.sub(r"^void |\(anonymous namespace\)::|at::native::", "", name)
        total = found.setdefault(re.split(r"[<(]", short)[0], [0, 0.0])
        total[0], total[1] = total[0] + count, total[1] + ms
    ordered = sorted(found.items(), key=lambda item: -item[1][1])[:_SHOWN]
    return ", ".join(f"`{name}` {count:.0f}: {ms:.2f}" for name, (count, ms) in ordered)


def page(runs: list[dict[str, Any]], description: str, drawing: Path | None) -> str:
    """Returns a page of several runs."""
    lines = ["# Time of a training step", ""]
    commits = ", ".join(dict.fromkeys(commit for run in runs for commit in run["commit"].split(", ")))
    machines = "; ".join(dict.fromkeys(run["machine"] for run in runs))
    lines += [f"Written by `python tools/bench_step.py` at commit {commits}. {machines}.", ""]
    lines += [*description.split("\n\n")[2].splitlines(), ""]
    if drawing:
        lines += [f"![Steps as many times as fast as autocast's]({drawing.name})", ""]
    for run in runs:
        lines += [f"## {_kind(run)}", ""]
        for title, rows in run["models"].items():
            lines += table(title, rows)
    return "\n".join(lines)


def _kind(run: dict[str, Any]) -> str:
    scaled = ", with a loss scale" if run["dtype"] == "float16" else ""
    return f"{'Compiled' if run['compiled'] else 'Eager'}, {run['dtype']}{scaled}"


def picture(runs: list[dict[str, Any]], path: Path) -> None:
    """Draws, for each run and model, how many times as fast as autocast each way is."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        len(runs), 1, figsize=(11, 3.2 * len(runs)), squeeze=False, layout="constrained"
    )
    for run, axis in zip(runs, axes[:, 0], strict=True):
        ways = list(dict.fromkeys(row["way"] for rows in run["models"].values() for row in rows))
        ways = [way for way in ways if way not in ("float32", "autocast")]
        for offset, way in enumerate(ways):
            points = [_speed(rows, way) for rows in run["models"].values()]
            where = [i + (offset - len(ways) / 2 + 0.5) * 0.8 / len(ways) for i in range(len(points))]
            axis.bar(where, points, 0.8 / len(ways), label=way, color=COLORS.get(way))
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_xticks(
            range(len(run["models"])), [t.replace(", ", "\n", 1) for t in run["models"]], fontsize=8
        )
        axis.set_title(_kind(run), loc="left", fontsize=10)
        axis.set_ylabel("autocast's time / way's")
    axes[0, 0].legend(fontsize=8, ncols=5)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _speed(rows: list[dict[str, Any]], way: str) -> float:
    total = {row["way"]: row["total"] for row in rows}
    return total["autocast"] / total[way] if way in total else 0.0
