"""Histograms of binary exponents against the range of a low dtype, as text and as SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from ..report.tables import printable

# The colour-blind safe palette of Okabe and Ito.
_COLOURS = {"normal": "#56B4E9", "subnormal": "#E69F00", "zero": "#CC79A7", "beyond": "#D55E00"}
_WORDS = {
    "normal": "fits {dtype}",
    "subnormal": "subnormal in {dtype}: fewer digits",
    "zero": "becomes zero in {dtype}",
    "beyond": "becomes infinite in {dtype}",
}
_MARKS = {"normal": "#", "subnormal": "=", "zero": "0", "beyond": "!"}
_BAR = 40


class Range(NamedTuple):
    """Exponents of a dtype.

    Attributes:
        least: Of the smallest number that does not round to zero.
        normal: Of the smallest normal number.
        most: Of the largest number.
    """

    least: int
    normal: int
    most: int

    def place(self, exponent: int) -> str:
        """Returns what the dtype makes of values with this exponent."""
        if exponent > self.most:
            return "beyond"
        if exponent >= self.normal:
            return "normal"
        return "subnormal" if exponent >= self.least else "zero"


def range_of(dtype: str) -> Range:
    """Returns the exponents of a dtype by its name, ``"float16"``."""
    info = torch.finfo(getattr(torch, dtype))
    # Half of the smallest number is rounded to it or to zero.
    least = math.frexp(info.smallest_normal * info.eps)[1] - 2
    return Range(least, math.frexp(info.smallest_normal)[1] - 1, math.frexp(info.max)[1] - 1)


def text_chart(counts: Mapping[int, int], dtype: str, title: str) -> str:
    """Returns a line for each exponent, large ones first."""
    if not counts:
        return f"{title}\n(no values)"
    limits, total = range_of(dtype), sum(counts.values())
    lines = [printable(title)]
    places = dict.fromkeys(limits.place(e) for e in _exponents(counts))
    lines += [f"  {_MARKS[p]} {_WORDS[p].format(dtype=dtype)}" for p in places]
    most = max(counts.values())
    for exponent in _exponents(counts):
        count, mark = counts.get(exponent, 0), _MARKS[limits.place(exponent)]
        bar = mark * max(1, round(_BAR * count / most)) if count else ""
        share = f"{count / total:7.2%}" if count else ""
        lines.append(f"  2^{exponent:<5d}{share:>8} {bar}".rstrip())
    return "\n".join(lines)


def svg_chart(counts: Mapping[int, int], dtype: str, title: str) -> str:
    """Returns bars over exponents, on a logarithmic scale. Colours show what the low dtype can hold."""
    limits = range_of(dtype)
    least = min([*counts, limits.least]) - 1
    most = max([*counts, limits.most]) + 1
    step, height, left, top = 14, 220, 64, 58
    width = max(left + step * (most - least + 1) + 20, 560)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + height + 84}" '
        f'viewBox="0 0 {width} {top + height + 84}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="11">',
        '<rect width="100%" height="100%" fill="#FFFFFF"/>',
        f'<text x="12" y="22" font-size="13">{html.escape(printable(title))}</text>',
    ]
    total = sum(counts.values())
    decades = max(1, math.ceil(math.log10(total))) if total else 1

    def y(count: float) -> float:
        share = math.log10(count / total) if count else -decades
        return top + height * min(1.0, -share / decades)

    def x(exponent: float) -> float:
        return left + step * (exponent - least)

    lines += _scale(decades, left, width, top, height)
    lines += [
        f'<rect x="{x(e) + 1:.1f}" y="{y(n):.1f}" width="{step - 2}" '
        f'height="{max(1.0, top + height - y(n)):.1f}" fill="{_COLOURS[limits.place(e)]}">'
        f"<title>2^{e}: {n} values, {n / total:.3%}, "
        f"{_WORDS[limits.place(e)].format(dtype=dtype)}</title></rect>"
        for e, n in sorted(counts.items())
    ]
    for exponent in range(least, most + 1):
        if exponent % 5 == 0:
            lines.append(
                f'<text x="{x(exponent) + step / 2:.1f}" y="{top + height + 15}" '
                f'text-anchor="middle">2^{exponent}</text>'
            )
    for exponent, words in ((limits.normal, "smallest normal"), (limits.most + 1, "largest")):
        anchor = "end" if exponent > limits.normal else "start"
        lines.append(
            f'<line x1="{x(exponent):.1f}" x2="{x(exponent):.1f}" y1="{top - 8}" y2="{top + height}" '
            'stroke="#000000" stroke-dasharray="4 3"/>'
            f'<text x="{x(exponent) + (4 if anchor == "start" else -4):.1f}" y="{top - 10}" '
            f'text-anchor="{anchor}">{words} {dtype}</text>'
        )
    lines += _legend(counts, limits, dtype, left, top + height + 36)
    return "\n".join([*lines, "</svg>", ""])


def _scale(decades: int, left: int, width: int, top: int, height: int) -> Iterator[str]:
    for power in range(decades + 1):
        at = top + height * power / decades
        yield f'<line x1="{left}" x2="{width - 12}" y1="{at:.1f}" y2="{at:.1f}" stroke="#DDDDDD"/>'
        words = "100 %" if power == 0 else f"{100 / 10**power:g} %"
        yield f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{words}</text>'


def _legend(counts: Mapping[int, int], limits: Range, dtype: str, left: int, top: int) -> Iterator[str]:
    total = sum(counts.values())
    for row, place in enumerate(("normal", "subnormal", "zero", "beyond")):
        count = sum(n for e, n in counts.items() if limits.place(e) == place)
        share = f"{count / total:.3%}" if total else "0 %"
        at = left + 250 * (row // 2), top + 18 * (row % 2)
        yield f'<rect x="{at[0]}" y="{at[1]}" width="11" height="11" fill="{_COLOURS[place]}"/>'
        words = f"{_WORDS[place].format(dtype=dtype)}: {share}"
        yield f'<text x="{at[0] + 16}" y="{at[1] + 10}">{words}</text>'


def _exponents(counts: Mapping[int, int]) -> range:
    return range(max(counts), min(counts) - 1, -1)
