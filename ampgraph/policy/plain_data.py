"""Converts parts of a policy to and from plain data and JSON; evaluates nothing, checks every key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..errors import PolicyError, did_you_mean
from ..ops.lists import OpClass, OpLists
from .loss_scale import DynamicLossScale, LossScale, NoLossScale, StaticLossScale

_LOSS_SCALES: dict[str, type] = {
    "none": NoLossScale,
    "static": StaticLossScale,
    "dynamic": DynamicLossScale,
}
_CLASSES = tuple(cls.value for cls in OpClass)


def read_text(path: str) -> str:
    """Returns a file's text without a byte order mark, which some editors write."""
    return Path(path).read_text(encoding="utf-8-sig")


def json_object(text: str) -> object:
    """Reads JSON.

    Raises:
        PolicyError: The text is not JSON, or an object repeats a key.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except (TypeError, ValueError, RecursionError) as error:  # no text, too many digits, too deep
        raise PolicyError(f"policy: not valid JSON: {error}") from error


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise PolicyError(f"policy: key {repeated[0]!r} occurs twice.")
    return dict(pairs)


def ops_to_dict(ops: OpLists) -> dict[str, Any]:
    """Returns op lists as the name of a preset and the moved ops by class."""
    base = OpLists.preset(ops.preset_name).rules() if ops.preset_name else {}
    moved: dict[str, list[str]] = {cls: [] for cls in _CLASSES}
    for name, rule in ops.rules().items():
        if base.get(name) != rule:
            moved[rule.cls.value].append(name)
    return {"preset": ops.preset_name, **{cls: names for cls, names in moved.items() if names}}


def ops_from_dict(data: object) -> OpLists:
    """Rebuilds op lists from `ops_to_dict` or from the name of a preset."""
    if isinstance(data, str):
        return OpLists.preset(data)
    given = mapping("policy: ops", data)
    check_keys("policy: ops", given, ["preset", *_CLASSES])
    lists = {cls: given.get(cls, []) for cls in _CLASSES}
    for cls, names in lists.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise PolicyError(f"policy: ops: {cls!r} must be a list of op names, got {names!r}.")
    OpLists(**lists)  # an op in two classes is an error
    preset = given.get("preset", "default")
    ops = OpLists() if preset == "" else OpLists.preset(preset)
    # A packet moves all its overloads, so overloads with another class come after it.
    for depth in (1, 2):
        for cls, names in lists.items():
            ops = getattr(ops, f"with_{cls}")(*(n for n in names if n.count(".") == depth))
    return ops


def loss_scale_to_dict(loss_scale: LossScale | None) -> dict[str, Any] | None:
    """Returns the kind and the numbers of a loss scale."""
    if loss_scale is None:
        return None
    kind = next(name for name, cls in _LOSS_SCALES.items() if isinstance(loss_scale, cls))
    return {"type": kind, **asdict(loss_scale)}


def loss_scale_from_dict(data: object) -> LossScale:
    """Rebuilds a loss scale from `loss_scale_to_dict`."""
    given = dict(mapping("policy: loss_scale", data))
    kind = given.pop("type", None)
    if not isinstance(kind, str) or kind not in _LOSS_SCALES:
        raise PolicyError(
            f"policy: loss_scale: type={kind!r} is not legal; legal: {', '.join(_LOSS_SCALES)}."
            + did_you_mean(str(kind), _LOSS_SCALES)
        )
    check_keys("policy: loss_scale", given, [field.name for field in fields(_LOSS_SCALES[kind])])
    return _LOSS_SCALES[kind](**given)


def mapping(what: str, data: object) -> Mapping[str, Any]:
    """Returns the data if it is an object with keys; otherwise raises an error that names ``what``."""
    if not isinstance(data, Mapping):
        raise PolicyError(f"{what} must be an object with keys, got {data!r}.")
    return data


def check_keys(what: str, given: Mapping[str, Any], legal: Sequence[str]) -> None:
    """Raises an error for an illegal key and names the nearest legal key."""
    for key in given:
        if key not in legal:
            raise PolicyError(
                f"{what}: key {key!r} is not known; legal: {', '.join(legal)}.{did_you_mean(str(key), legal)}"
            )
