"""ATen ops that some of the supported versions of torch lack; the tables name them all the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .._compat.version import VERSION

Version = tuple[int, ...]


class Range(NamedTuple):
    """Where an op is: from version ``since`` on, up to ``until``, which lacks it again; None: no bound."""

    since: Version | None = None
    until: Version | None = None


VERSIONS: Mapping[str, Range] = {
    "cholesky": Range(until=(2, 14)),  # linalg_cholesky takes its place
    "qr": Range(until=(2, 14)),  # linalg_qr takes its place
    "linalg_matrix_sqrth": Range(since=(2, 14)),
    "linalg_polar": Range(since=(2, 14)),
}


def is_in_torch(op: str, version: Version = VERSION) -> bool:
    """Whether a version of torch, by default the installed one, has an ATen op (``"qr"``, ``"qr.out"``)."""
    found = VERSIONS.get(op.partition(".")[0], Range())
    return (found.since is None or version >= found.since) and (found.until is None or version < found.until)


def where_it_is(op: str) -> str:
    """Returns which versions have an ATen op, for a message; an empty string where all have it."""
    found = VERSIONS.get(op.partition(".")[0])
    if found is None:
        return ""
    bounds = ((">=", found.since), ("<", found.until))
    return " and ".join(f"torch {sign} {'.'.join(map(str, bound))}" for sign, bound in bounds if bound)
