"""The user's settings: level, dtype, op lists, rules and placement."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import Any

import torch

from ..errors import PolicyError, did_you_mean
from ..ops.lists import PRESETS, OpLists
from .loss_scale import DynamicLossScale, LossScale, NoLossScale
from .plain_data import (
    check_keys,
    json_object,
    loss_scale_from_dict,
    loss_scale_to_dict,
    mapping,
    ops_from_dict,
    ops_to_dict,
    read_text,
)

LEVELS = ("O0", "O1", "O2", "O3")
PLACEMENTS = ("optimal", "autocast")
OBJECTIVES = ("auto", "traffic", "fused", "cast_bytes", "casts")
LOW_DTYPES = (torch.float16, torch.bfloat16)
DTYPE_NAMES = {
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
RULE_VALUES = ("low", "fp32")
_SWITCHES = (
    "keep_io_dtypes",
    "hazards",
    "weight_copies",
    "save_norms_low",
    "save_softmax_low",
    "wide_weight_gradients",
)


class _Rules(Mapping):
    """A read-only, hashable dict: a policy must not change after its check."""

    def __init__(self, rules: Mapping[str, str]):
        self._rules = dict(rules)

    def __getitem__(self, key: str) -> str:
        return self._rules[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __hash__(self) -> int:
        return hash(frozenset(self._rules.items()))

    def __repr__(self) -> str:
        return repr(self._rules)


@dataclass(frozen=True, repr=False)
class Policy:
    """The settings of a conversion. Immutable; its repr is an expression that builds an equal policy.

    Args:
        level: ``"O0"`` changes nothing. ``"O1"`` runs white ops low and black ops in float32; gray ops
            follow their inputs. ``"O2"`` runs everything low except black ops and norm parameters.
            ``"O3"`` runs everything low, for inference.
        dtype: The low dtype, ``torch.float16`` or ``torch.bfloat16``, or its name (``"float16"``,
            ``"fp16"``, ``"bfloat16"``, ``"bf16"``). None means float16 if the parameters are on CUDA,
            else bfloat16.
        ops: The op lists, see `OpLists`.
        rules: Globs over module paths (as in ``model.named_modules()``), each mapped to ``"low"`` or
            ``"fp32"``. The innermost module that a rule matches decides (MindSpore's ``Cell.to_float``,
            Paddle's ``custom_black_varnames``). ``"node:linear*"`` is a glob over graph node names; without
            the prefix a glob matches node names only if it matches no module. Rules for nodes take precedence
            over rules for modules.
        use_fp16_guard: If True, only code inside `fp16_guard` may run low. If False, `fp16_guard` is ignored.
            None means True if the code of the model, or a graph of it, contains an `fp16_guard`.
        placement: ``"optimal"`` (minimum cut) or ``"autocast"`` (the rule of ``torch.autocast``).
        objective: The cost that the optimal placement minimises. ``"traffic"``: the bytes that the kernels
            and casts of an eager forward read and write. The plan never exceeds the rule of
            ``torch.autocast`` on the same graph, neither in bytes of casts of activations nor in bytes of
            forward and backward together. ``"fused"``: the bytes of fused kernels, forward and backward. Free
            nodes run low wherever their constraints allow it, unless the estimate favours the rule of
            ``torch.autocast``. ``"cast_bytes"``: the bytes of the casts. ``"casts"``: their number.
            ``"auto"`` means ``"traffic"`` for the eager backend and ``"fused"`` for others. `Plan.gap` bounds
            the distance to the minimum; `Plan.optimal` means that the gap is 0.
        loss_scale: `NoLossScale`, `StaticLossScale` or `DynamicLossScale`. None means dynamic for
            float16 and none for bfloat16.
        keep_io_dtypes: Whether graph outputs keep the dtypes of the source model. False is illegal with a
            loss scale in float16, because gradients of float16 outputs underflow before they are scaled.
        hazards: Whether values that rounding would spoil stay as precise as the autocast rule computes them:
            positions, differences of inputs, angles, and values that become integers or booleans. At O1 and
            O2 also whether values that may leave the low range, and the ops that read them, stay float32.
            Guards and rules take precedence over hazards; hazards take precedence over op lists.
        weight_copies: Whether the model keeps a low copy of each float32 parameter that its graphs cast. The
            copies are refreshed once per update, so no forward casts weights. They hold the same values as
            casts and take 2 bytes per parameter. False casts in every forward.
        save_norms_low: Whether compiled graphs save the normalized values of layer norm and RMS norm in the
            low dtype for the backward, where the norm runs in float32 and a low op reads its result. Only
            gradients change, by the rounding of these values. False saves float32 values.
        save_softmax_low: Whether compiled graphs save the probabilities of a float32 softmax in the low dtype
            for the backward, where a low op reads them. Only gradients change, by the rounding of these
            values. False saves the scores, from which the backward computes the probabilities again.
        wide_weight_gradients: Whether matrix products on CUDA give the gradients of their weights in float32:
            in compiled graphs without a loss scale, and large products in eager mode. These gradients are
            not rounded, and no kernel casts them. False gives them in the low dtype and casts them.

    Raises:
        PolicyError: A value is not legal; the message gives the legal ones.
    """

    level: str = "O1"
    dtype: torch.dtype | None = None
    ops: OpLists = field(default_factory=OpLists.default)
    rules: Mapping[str, str] = field(default_factory=dict)
    use_fp16_guard: bool | None = None
    placement: str = "optimal"
    objective: str = "auto"
    loss_scale: LossScale | None = None
    keep_io_dtypes: bool = True
    hazards: bool = True
    weight_copies: bool = True
    save_norms_low: bool = True
    save_softmax_low: bool = True
    wide_weight_gradients: bool = True

    def __post_init__(self) -> None:
        _check_choice("level", self.level, LEVELS)
        _check_choice("placement", self.placement, PLACEMENTS)
        _check_choice("objective", self.objective, OBJECTIVES)
        object.__setattr__(self, "dtype", low_dtype_of(self.dtype))
        if not isinstance(self.ops, OpLists):
            raise PolicyError(f"Policy: ops must be an OpLists, got {type(self.ops).__name__}.")
        if self.use_fp16_guard is not None and not isinstance(self.use_fp16_guard, bool):
            raise PolicyError(f"Policy: use_fp16_guard={self.use_fp16_guard!r}; legal: True, False, None.")
        if self.loss_scale is not None and not isinstance(self.loss_scale, LossScale):
            raise PolicyError(
                f"Policy: loss_scale={self.loss_scale!r}; legal: NoLossScale(), StaticLossScale(value), "
                "DynamicLossScale(...) or None."
            )
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise PolicyError(f"Policy: {name}={getattr(self, name)!r}; legal: True, False.")
        if not isinstance(self.rules, Mapping):
            raise PolicyError(f"Policy: rules must be a dict, got {type(self.rules).__name__}.")
        for pattern, value in self.rules.items():
            if not isinstance(pattern, str):
                raise PolicyError(
                    f"Policy: rule {pattern!r} must be a string: a glob of module paths, or 'node:' and a "
                    "glob of node names."
                )
            _check_choice(f"rule {pattern!r}", value, RULE_VALUES)
        object.__setattr__(self, "rules", _Rules(self.rules))

    @classmethod
    def of(
        cls, policy: Policy | str | PathLike[str] | None, dtype: torch.dtype | str | None = None
    ) -> Policy:
        """Returns the policy that a user named; ``dtype`` is its dtype if it does not set one.

        Args:
            policy: A policy, the name of a level (``"O1"``) or of a peer (``"torch"``: its op lists under the
                rule of ``torch.autocast``), the path of a file written by `to_json`, or None for the default.
            dtype: The low dtype, or its name.

        Raises:
            PolicyError: The policy or the file does not exist, or ``dtype`` contradicts the policy's dtype.
        """
        dtype = low_dtype_of(dtype)
        if policy is None:
            return cls(dtype=dtype)
        if isinstance(policy, (str, PathLike)):
            policy = _named(policy)
        if not isinstance(policy, cls):
            raise PolicyError(
                f"policy must be a Policy, a name ({', '.join(LEVELS)}, torch ..) or a policy file's path, "
                f"got {type(policy).__name__}."
            )
        if dtype is None or dtype == policy.dtype:
            return policy
        if policy.dtype is not None:
            raise PolicyError(f"dtype={dtype} contradicts the policy's dtype={policy.dtype}.")
        return policy.replace(dtype=dtype)

    def replace(self, **changes: object) -> Policy:
        """Returns a new policy with the given fields changed."""
        legal = [f.name for f in fields(self)]
        for name in changes:
            _check_choice("field", name, tuple(legal))
        return Policy(**{**{name: getattr(self, name) for name in legal}, **changes})  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings, numbers, booleans and None, for `from_dict`."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["dtype"] = str(self.dtype).removeprefix("torch.") if self.dtype else None
        data["ops"] = ops_to_dict(self.ops)
        data["rules"] = dict(self.rules)
        data["loss_scale"] = loss_scale_to_dict(self.loss_scale)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Policy:
        """Rebuilds a policy from `to_dict`; missing keys get their defaults.

        Raises:
            PolicyError: A key or a value is not legal; the message names it and the nearest legal one.
        """
        given = dict(mapping("policy", data))
        check_keys("policy", given, [f.name for f in fields(cls)])
        if "ops" in given:
            given["ops"] = ops_from_dict(given["ops"])
        if "rules" in given:
            given["rules"] = mapping("policy: rules", given["rules"])
        if given.get("loss_scale") is not None:
            given["loss_scale"] = loss_scale_from_dict(given["loss_scale"])
        return cls(**given)

    def to_json(self, indent: int | None = 2) -> str:
        """Returns `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Policy:
        """Reads the output of `to_json`; evaluates nothing.

        Raises:
            PolicyError: The text is not JSON or not a policy.
        """
        return cls.from_dict(json_object(text))  # type: ignore[arg-type]  # checked there

    def resolved(
        self, device: torch.device | str = "cpu", backend: object = "eager", mode: str | None = None
    ) -> Policy:
        """Returns the policy with its dtype set, and its objective for a backend that compiles.

        Args:
            device: Selects the dtype if the policy does not.
            backend: Selects the objective if the policy does not.
            mode: The backend's mode. With ``"max-autotune"`` Inductor may choose a kernel that it generates,
                with the cast inside, so gradients of weights stay low. It has none that writes float32.
        """
        changes: dict[str, object] = {}
        if self.dtype is None:
            on_cuda = torch.device(device).type == "cuda"
            changes["dtype"] = torch.float16 if on_cuda else torch.bfloat16
        if self.objective == "auto" and backend != "eager":
            changes["objective"] = "fused"
        if self.wide_weight_gradients and "max-autotune" in (mode or ""):
            changes["wide_weight_gradients"] = False
        return self.replace(**changes) if changes else self

    @property
    def low_dtype(self) -> torch.dtype:
        """The low dtype of a policy that names one.

        Raises:
            PolicyError: It names none; see `resolved`.
        """
        if self.dtype is None:
            raise PolicyError("Policy: dtype is None until a device selects it; call resolved(device).")
        return self.dtype

    @property
    def keeps_low_copies(self) -> bool:
        """Whether graphs read low copies of parameters instead of casting them in every forward."""
        return self.weight_copies and self.level != "O0"

    @property
    def saves_norms_low(self) -> bool:
        """Whether the backward of norms reads low values: with the objective of compiled backends alone."""
        return self.save_norms_low and self._chooses_for_kernels

    @property
    def saves_softmax_low(self) -> bool:
        """Whether the backward of softmax reads low values: with the objective of compiled backends alone."""
        return self.save_softmax_low and self._chooses_for_kernels

    @property
    def widens_gradients(self) -> bool:
        """Whether products give float32 gradients of weights, where their device has the kernels."""
        if not self.wide_weight_gradients or self.placement != "optimal":
            return False
        return not self.is_for_fused_kernels or isinstance(self.active_loss_scale(), NoLossScale)

    @property
    def is_for_fused_kernels(self) -> bool:
        """Whether the objective counts the bytes of fused kernels, which compiled backends make."""
        return self.objective == "fused"

    @property
    def _chooses_for_kernels(self) -> bool:
        return self.is_for_fused_kernels and self.placement == "optimal"

    def active_loss_scale(self) -> LossScale:
        """Returns the loss scale; the dtype selects it if the policy does not set one."""
        if self.loss_scale is not None:
            return self.loss_scale
        return DynamicLossScale() if self.dtype == torch.float16 and self.level != "O0" else NoLossScale()

    def check_outputs(self, caller: str) -> None:
        """Checks that gradients of outputs are not float16 before they are scaled.

        Raises:
            PolicyError: They would be; the message names the caller.
        """
        scales = not isinstance(self.active_loss_scale(), NoLossScale)
        if self.keep_io_dtypes or self.dtype != torch.float16 or not scales:
            return
        raise PolicyError(
            f"{caller}: keep_io_dtypes=False gives float16 outputs, whose gradients underflow before they "
            "are scaled; keep the default True, use bfloat16, or pass loss_scale=ampgraph.NoLossScale()."
        )

    def __repr__(self) -> str:
        default = {f.name: getattr(_DEFAULT, f.name) for f in fields(self)} if _DEFAULT else {}
        given = ((f.name, getattr(self, f.name)) for f in fields(self))
        return f"Policy({', '.join(f'{k}={v!r}' for k, v in given if k == 'level' or v != default.get(k))})"


def _named(name: str | PathLike[str]) -> Policy:
    """Returns the policy of a level, a peer or a JSON file; a path object always means a file.

    Raises:
        PolicyError: No policy has that name, or the file is not a policy.
    """
    if name in LEVELS:
        return Policy(str(name))
    if name in PRESETS:
        return Policy(ops=OpLists.preset(str(name)), placement="autocast")
    path = os.fspath(name)
    if isinstance(path, str) and (path is not name or _looks_like_a_file(path)):
        return _policy_in(path)
    if name == "auto":
        raise PolicyError(
            "policy 'auto' is for ampgraph.convert with example inputs; elsewhere, take the policy that "
            "ampgraph.tune(model, batches, ...) returns."
        )
    known = (*LEVELS, *PRESETS)
    hint = did_you_mean(str(name), (*known, "auto"))
    raise PolicyError(
        f"there is no policy {name!r}; legal: {', '.join(known)}, or a .json file; "
        f"ampgraph.convert takes 'auto', too.{hint}"
    )


def _looks_like_a_file(name: str) -> bool:
    return name.lower().endswith(".json") or os.path.basename(name) != name


def _policy_in(path: str) -> Policy:
    try:
        return Policy.from_json(read_text(path))
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:  # no such path, or bytes that are not text
        raise PolicyError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def low_dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Returns the low dtype from a dtype or its name; None stays None.

    Raises:
        PolicyError: The value is not a low dtype or its name.
    """
    if dtype is None or dtype in LOW_DTYPES:
        return dtype  # type: ignore[return-value]
    name = str(dtype).removeprefix("torch.")
    if isinstance(dtype, str) and name in DTYPE_NAMES:
        return DTYPE_NAMES[name]
    raise PolicyError(
        f"Policy: dtype={dtype!r} is not a low dtype; legal: torch.float16, torch.bfloat16, their names "
        f"({', '.join(DTYPE_NAMES)}) or None.{did_you_mean(name, DTYPE_NAMES)}"
    )


def _check_choice(what: str, value: object, legal: tuple[str, ...]) -> None:
    if value in legal:
        return
    raise PolicyError(
        f"Policy: {what}={value!r} is not legal; legal: {', '.join(legal)}.{did_you_mean(str(value), legal)}"
    )


_DEFAULT: Policy | None = None
_DEFAULT = Policy()
