"""Policies by name, as plain data and as JSON: nothing is evaluated, every key is checked."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from os import PathLike
from pathlib import Path
from typing import Any

from .errors import PolicyError, did_you_mean
from .ops.lists import PRESETS, OpClass, OpLists
from .policy.loss_scale import DynamicLossScale, LossScale, NoLossScale, StaticLossScale
from .policy.policy import LEVELS, Policy

_LOSS_SCALES: dict[str, type] = {
    "none": NoLossScale,
    "static": StaticLossScale,
    "dynamic": DynamicLossScale,
}
_CLASSES = tuple(cls.value for cls in OpClass)


def policy_named(name: str | PathLike[str]) -> Policy:
    """Returns the policy of a level, of a peer or of a JSON file; a path object is always a file's.

    Raises:
        PolicyError: There is none of that name, or the file is no policy.
    """
    if name in LEVELS:
        return Policy(str(name))
    if name in PRESETS:
        return Policy(ops=OpLists.preset(str(name)), placement="autocast")
    path = os.fspath(name)
    if isinstance(path, str) and (path is not name or _looks_like_a_file(path)):
        return _policy_in(path)
    known = (*LEVELS, *PRESETS)
    hint = did_you_mean(str(name), known)
    raise PolicyError(f"there is no policy {name!r}; legal: {', '.join(known)}, or a .json file.{hint}")


def _looks_like_a_file(name: str) -> bool:
    return name.lower().endswith(".json") or os.path.basename(name) != name


def _policy_in(path: str) -> Policy:
    try:
        return policy_from_json(read_text(path))
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:  # a path that is none, bytes that are no text
        raise PolicyError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def read_text(path: str) -> str:
    """Returns a file's text; a byte order mark, which editors write, is no part of it."""
    return Path(path).read_text(encoding="utf-8-sig")


def policy_to_dict(policy: Policy) -> dict[str, Any]:
    """Returns a policy as dicts, lists, strings, numbers, booleans and None."""
    data = {field.name: getattr(policy, field.name) for field in fields(policy)}
    data["dtype"] = str(policy.dtype).removeprefix("torch.") if policy.dtype else None
    data["ops"] = _ops_to_dict(policy.ops)
    data["rules"] = dict(policy.rules)
    data["loss_scale"] = _loss_scale_to_dict(policy.loss_scale)
    return data


def policy_from_dict(data: object) -> Policy:
    """Builds what `policy_to_dict` gave; keys that are left out have their defaults.

    Raises:
        PolicyError: A key or a value is not legal; names it and the nearest legal one.
    """
    given = dict(_mapping("policy", data))
    _check_keys("policy", given, [field.name for field in fields(Policy)])
    if "ops" in given:
        given["ops"] = _ops_from_dict(given["ops"])
    if "rules" in given:
        given["rules"] = _mapping("policy: rules", given["rules"])
    if given.get("loss_scale") is not None:
        given["loss_scale"] = _loss_scale_from_dict(given["loss_scale"])
    return Policy(**given)


def policy_from_json(text: str) -> Policy:
    """Reads a policy's JSON.

    Raises:
        PolicyError: It is no JSON, has a key twice, or is no policy.
    """
    try:
        data = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:  # too many digits, too deep
        raise PolicyError(f"policy: no JSON: {error}") from error
    return policy_from_dict(data)


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise PolicyError(f"policy: key {repeated[0]!r} is there twice.")
    return dict(pairs)


def _ops_to_dict(ops: OpLists) -> dict[str, Any]:
    base = OpLists.preset(ops.preset_name).rules() if ops.preset_name else {}
    moved: dict[str, list[str]] = {cls: [] for cls in _CLASSES}
    for name, rule in ops.rules().items():
        if base.get(name) != rule:
            moved[rule.cls.value].append(name)
    return {"preset": ops.preset_name, **{cls: names for cls, names in moved.items() if names}}


def _ops_from_dict(data: object) -> OpLists:
    if isinstance(data, str):
        return OpLists.preset(data)
    given = _mapping("policy: ops", data)
    _check_keys("policy: ops", given, ["preset", *_CLASSES])
    lists = {cls: given.get(cls, []) for cls in _CLASSES}
    for cls, names in lists.items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise PolicyError(f"policy: ops: {cls!r} must be a list of op names, got {names!r}.")
    OpLists(**lists)  # an op in two classes is an error
    preset = given.get("preset", "default")
    ops = OpLists() if preset == "" else OpLists.preset(preset)
    # A packet moves all its overloads, so those that go elsewhere come after it.
    for depth in (1, 2):
        for cls, names in lists.items():
            ops = getattr(ops, f"with_{cls}")(*(n for n in names if n.count(".") == depth))
    return ops


def _loss_scale_to_dict(loss_scale: LossScale | None) -> dict[str, Any] | None:
    if loss_scale is None:
        return None
    kind = next(name for name, cls in _LOSS_SCALES.items() if isinstance(loss_scale, cls))
    return {"type": kind, **asdict(loss_scale)}


def _loss_scale_from_dict(data: object) -> LossScale:
    given = dict(_mapping("policy: loss_scale", data))
    kind = given.pop("type", None)
    if not isinstance(kind, str) or kind not in _LOSS_SCALES:
        raise PolicyError(
            f"policy: loss_scale: type={kind!r} is not legal; legal: {', '.join(_LOSS_SCALES)}."
            + did_you_mean(str(kind), _LOSS_SCALES)
        )
    _check_keys("policy: loss_scale", given, [field.name for field in fields(_LOSS_SCALES[kind])])
    return _LOSS_SCALES[kind](**given)


def _mapping(what: str, data: object) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise PolicyError(f"{what} must be an object with keys, got {data!r}.")
    return data


def _check_keys(what: str, given: Mapping[str, Any], legal: Sequence[str]) -> None:
    for key in given:
        if key not in legal:
            raise PolicyError(
                f"{what}: key {key!r} is not known; legal: {', '.join(legal)}.{did_you_mean(str(key), legal)}"
            )
