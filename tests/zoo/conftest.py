"""Groups the tests of one model in one mode, from all files: `Subject.shared` captures it once."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = [place for place, item in enumerate(items) if item.path.is_relative_to(HERE)]
    for place, item in zip(places, sorted((items[place] for place in places), key=_model), strict=True):
        items[place] = item


def _model(item: pytest.Item) -> tuple[str, str]:
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return given.get("name", ""), given.get("mode", "eval")
