"""`replaced` puts an attribute back on every path."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from ampgraph._compat import replaced


class Base:
    @classmethod
    def name(cls) -> str:
        return f"base of {cls.__name__}"


class Own(Base):
    @staticmethod
    def name() -> str:  # type: ignore[override]
        return "own"


class Heir(Base):
    pass


@pytest.mark.parametrize("owner", [Own, Heir, Base, Own(), SimpleNamespace(name=None), SimpleNamespace()])
def test_an_owner_has_what_it_had(owner: Any) -> None:
    before = dict(vars(owner))
    with replaced(owner, "name", "outer"):
        with contextlib.suppress(ZeroDivisionError), replaced(owner, "name", "inner"):
            assert owner.name == "inner"
            raise ZeroDivisionError
        assert owner.name == "outer"
    assert dict(vars(owner)) == before
