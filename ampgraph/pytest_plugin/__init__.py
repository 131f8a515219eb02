"""The pytest plugin of ampgraph: golden files for cast maps, or for any text.

    def test_casts(ampgraph_golden):
        ampgraph_golden(ampgraph.convert(model, (x,)))

compares with ``golden/<test module>/<test>.txt`` beside the module; ``pytest --ampgraph-update`` writes it.

It is a separate top-level module. pytest imports it in every session of every project in the environment, and
importing `ampgraph` would import torch.
"""

from __future__ import annotations

import difflib
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_PROPERTY = "ampgraph golden file"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ampgraph")
    group.addoption(
        "--ampgraph-update",
        action="store_true",
        help="write the golden files of ampgraph_golden that are missing or differ",
    )


@pytest.fixture
def ampgraph_golden(request: pytest.FixtureRequest) -> Golden:
    """Compares cast maps (or texts) with golden files, see `Golden.__call__`."""
    return Golden(request)


class Golden:
    """The golden files of one test."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._node, self._path = request.node, request.path
        self._update = request.config.getoption("--ampgraph-update")
        self._seen: set[Path] = set()

    def __call__(self, subject: Any, name: str = "") -> None:
        """Asserts that a model's cast map, or a text, equals the golden file.

        Args:
            subject: The converted model, its graph module, or a text.
            name: Distinguishes several golden files of one test.

        Raises:
            AssertionError: The file is missing or differs; the message has a unified diff. With
                ``--ampgraph-update`` the file is written instead.
            ValueError: The test has used this name already.
        """
        __tracebackhide__ = True
        path = self.path(name)
        if path in self._seen:
            raise ValueError(f"this test compares with {path.name} twice: give the second one a name=.")
        self._seen.add(path)
        found = _text(subject)
        golden = path.read_text(encoding="utf-8") if path.exists() else None
        if golden == found:
            return
        if self._update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found, encoding="utf-8", newline="\n")
            self._node.user_properties.append((_PROPERTY, "updated" if golden is not None else "written"))
            return
        shown = _relative(path, self._node.config.rootpath)
        if golden is None:
            raise AssertionError(
                f"there is no golden file {shown} yet; pytest --ampgraph-update writes it:\n{found}"
            )
        raise AssertionError(
            f"differs from {shown}; pytest --ampgraph-update accepts it:\n{_diff(golden, found, shown)}"
        )

    def path(self, name: str = "") -> Path:
        """Returns the path of the golden file, which may not exist yet."""
        test = ".".join(self._node.nodeid.split("::")[1:])
        slug = _slug(test if not name else f"{test}.{name}")
        return self._path.parent / "golden" / self._path.stem / f"{slug}.txt"


def _text(subject: Any) -> str:
    if not isinstance(subject, str):
        from ampgraph.testing import cast_map

        subject = cast_map(subject)
    return subject.rstrip("\n") + "\n"


def _slug(name: str) -> str:
    """Returns a file name; a checksum distinguishes names with replaced characters."""
    plain = re.sub(r"[^\w.=+-]", "-", name.replace("[", "-").replace("]", ""))
    lossy = re.search(r"[^\w.=+\[\]-]", name)
    return f"{plain}-{zlib.crc32(name.encode()):08x}" if lossy else plain


def _diff(golden: str, found: str, path: str) -> str:
    lines = difflib.unified_diff(golden.splitlines(), found.splitlines(), path, "this run", lineterm="")
    return "\n".join(lines)


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Reports the number of written golden files; user properties also arrive from pytest-xdist workers."""
    found = list(_changes(terminalreporter))
    if found:
        counts = ", ".join(f"{found.count(what)} {what}" for what in ("written", "updated") if what in found)
        terminalreporter.write_line(f"ampgraph: golden files {counts}")


def _changes(terminalreporter: Any) -> Iterator[str]:
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                yield from (value for key, value in report.user_properties if key == _PROPERTY)
