"""`Place`: where Python code finds a value, outside of a model's attributes."""

from __future__ import annotations

from typing import Any, NamedTuple

GONE = object()


class Place(NamedTuple):
    """Where a value is: in a dict by key, or in a class or a closure's cell by attribute.

    Attributes:
        holder: The dict, class or cell.
        name: The key or attribute.
        path: As a user writes it.
    """

    holder: Any
    name: str
    path: str

    def value(self) -> Any:
        if isinstance(self.holder, dict):
            return self.holder.get(self.name, GONE)
        try:
            return getattr(self.holder, self.name)
        except (AttributeError, ValueError):  # ValueError: an empty cell
            return GONE

    def put(self, value: Any) -> None:
        """Sets the value; `GONE` and what a class inherits by deletion."""
        if isinstance(self.holder, dict):
            self.holder.pop(self.name, None)
        elif not isinstance(self.holder, type) or self.name in vars(self.holder):
            delattr(self.holder, self.name)
        if self.value() is value:
            return
        if isinstance(self.holder, dict):
            self.holder[self.name] = value
        else:
            setattr(self.holder, self.name, value)
