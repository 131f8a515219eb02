"""Plants faults in ten small models and counts which `ampgraph.check_numerics` names and cures.

python tools/planted_faults.py --output docs/results/planted-faults.md
python tools/planted_faults.py --forward 10 --backward 5
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from provenance import written_by  # noqa: E402

from tests.planted_checks import Outcome, backward_outcome, forward_outcome  # noqa: E402

HEAD = """# Planted faults

Faults in ten small models, float16, levels O1 and O2, with `Policy(hazards=False)`, so that nothing is kept
in float32 first. `ampgraph.check_numerics` names and cures them; other code judges it. In the forward:
torch's interpreter runs the graph with casts and the graph without, and the first node with more values that
are not finite must be the one that is named. The model is converted with the remedy, and nothing may be left.
In the backward: hooks find the first gradient that is not finite, and a training loop shows at which scale
the first step is taken.

{written_by}
"""


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    logging.getLogger("ampgraph").setLevel(logging.ERROR)
    forward = list(itertools.islice(_outcomes(forward_outcome), options.forward))
    backward = list(itertools.islice(_outcomes(backward_outcome), options.backward))
    text = "\n".join([_head(), _table("Forward", forward), _least(forward), _table("Backward", backward)])
    text += _failures([*forward, *backward])
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text, encoding="utf-8")
    else:
        print(text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--forward", type=int, default=100, help="faults in the forward")
    parser.add_argument("--backward", type=int, default=50, help="faults in the backward")
    parser.add_argument("--output", type=Path, help="write the page there")
    return parser.parse_args()


def _outcomes(plant: Callable[[int], Outcome | None]) -> Iterator[Outcome]:
    """Yields what became of the faults that break anything."""
    for seed in itertools.count():
        if (outcome := plant(seed)) is not None:
            print(f"{plant.__name__} {seed}: {outcome.model}, {outcome.fault}", file=sys.stderr)
            yield outcome


def _head() -> str:
    return HEAD.format(
        written_by=written_by("python tools/planted_faults.py --output docs/results/planted-faults.md")
    )


def _table(title: str, outcomes: list[Outcome]) -> str:
    lines = [
        f"## {title}: {len(outcomes)} faults",
        "",
        "| fault | planted | named | cured by a remedy | told that the scale settles | nodes pinned |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for fault in sorted({o.fault for o in outcomes}):
        lines.append(_row(fault, [o for o in outcomes if o.fault == fault]))
    return "\n".join([*lines, _row("**all**", outcomes), ""])


def _row(name: str, outcomes: list[Outcome]) -> str:
    remedies = [o for o in outcomes if o.kind == "remedy"]
    settles = [o for o in outcomes if o.kind == "settles"]
    pinned = sorted(o.pinned for o in remedies)
    spread = f"{pinned[0]} to {pinned[-1]}" if pinned else ""
    cured = f"{sum(o.cured for o in remedies)} of {len(remedies)}" if remedies else ""
    told = f"{sum(o.cured for o in settles)} of {len(settles)}" if settles else ""
    return f"| {name} | {len(outcomes)} | {sum(o.named for o in outcomes)} | {cured} | {told} | {spread} |"


def _least(outcomes: list[Outcome]) -> str:
    known = [o for o in outcomes if o.least is not None]
    more = [o for o in known if o.pinned > (o.least or 0)]
    pinned, least = sum(o.pinned for o in known), sum(o.least or 0 for o in known)
    lines = [
        f"Every smaller set of nodes was tried in {len(known)} cases: {pinned} nodes pinned in all, {least} "
        f"at the least; {len(known) - len(more)} remedies are the smallest possible."
    ]
    lines += [f"- {o.model}, {o.fault}, {o.level}: {o.pinned} pinned, {o.least} would do" for o in more]
    return "\n".join([*lines, ""])


def _failures(outcomes: list[Outcome]) -> str:
    failed = [o for o in outcomes if not (o.named and o.cured)]
    if not failed:
        return "\nEvery fault was named, and cured or rightly told to settle.\n"
    return "\n## Failures\n\n" + "".join(f"```text\n{o.model}, {o.fault}\n{o.detail}\n```\n" for o in failed)


if __name__ == "__main__":
    main()
