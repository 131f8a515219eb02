"""`convert_blocks`: converts selected submodules in place, each separately, with one loss scale.

It serves wrappers of submodules. FSDP2's ``fully_shard(block)`` gathers a block's parameters in hooks around
the block, so each block must stay a module that is called. The model keeps its modules and their classes;
only the ``forward`` of a converted block is replaced.

Every block has the loss-scaling boundary around it. Activations and gradients between blocks are float32 and
unscaled, so they do not underflow, and a block works next to unconverted code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from glob import escape
from os import PathLike

import torch
from torch import nn

from .._compat import path_inside_wrappers
from ..errors import CaptureError, PolicyError, did_you_mean
from ..module import AmpModule
from ..policy.policy import Policy
from ..policy.rules import NODE_PREFIX
from ..runtime.backends import choose_backend
from ..runtime.device import CPU, device_of
from ..runtime.options import AUTO, Options, check_capture
from ..runtime.siblings import Siblings
from ..training.fsdp1 import refuse_fsdp1
from ..training.scaler import LossScaler
from .block_forward import BlockForward, converted_forward

Which = str | type


class Blocks(Mapping[str, AmpModule]):
    """The converted blocks of a model by module path; `convert_blocks` returns it.

    Attributes:
        scaler: The loss scaler that all blocks share.
    """

    def __init__(self, forwards: list[BlockForward], scaler: LossScaler):
        self._forwards = {forward.path: forward for forward in forwards}
        self.scaler = scaler

    def __getitem__(self, path: str) -> AmpModule:
        return self._forwards[path].amp

    def __iter__(self) -> Iterator[str]:
        return iter(self._forwards)

    def __len__(self) -> int:
        return len(self._forwards)

    def restore(self) -> None:
        """Puts the blocks' original ``forward`` back, including a patched one."""
        for forward in self._forwards.values():
            forward.restore()

    def __repr__(self) -> str:
        return f"Blocks({', '.join(self)})"


def convert_blocks(
    model: nn.Module,
    which: Which | list[Which] | tuple[Which, ...],
    *,
    policy: Policy | str | PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    backend: str | Callable | None = None,
    mode: str | None = None,
    capture: str = AUTO,
) -> Blocks:
    """Converts submodules of a model in place; each is captured at its first call.

    Args:
        model: The model. Only the ``forward`` of its blocks is replaced. It may be on the device meta, and
            get its values later (``to_empty``): then dtype and backend are chosen at the first call.
        which: The submodules: a glob over module paths (as in ``model.named_modules()``), a class, or
            a list or tuple of them. Of nested matches the outermost is converted. ``""`` is the model itself,
            which no other glob matches: ``"*"`` are its children.
        policy: As for `ampgraph.convert`; its rules name modules by their paths in ``model``.
        dtype: The low dtype, if the policy does not set one.
        backend: As for `ampgraph.convert`.
        mode: As for `ampgraph.convert`.
        capture: As for `ampgraph.convert`; applied to each block separately.

    Returns:
        The blocks by module path, and their common scaler. A block has a graph after its first call.

    Raises:
        PolicyError: ``which`` is empty or matches nothing, a block is already converted, or the policy does
            not fit.
        CaptureError: ``FullyShardedDataParallel`` (FSDP1) wraps the model.

    Example:
        >>> blocks = ampgraph.convert_blocks(model, "layers.*", dtype=torch.float16)
        >>> for path in blocks:
        ...     fully_shard(model.get_submodule(path))
        >>> fully_shard(model)
        >>> blocks.scaler.attach(optimizer)
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"convert_blocks takes an nn.Module, got {type(model).__name__}.")
    paths = _matching(model, tuple(which) if isinstance(which, (list, tuple)) else (which,))
    refuse_fsdp1(model)
    device = device_of(model)
    backend, mode = choose_backend(backend, mode, device, can_wait=True)
    check_capture(capture)
    policy = Policy.of(policy, dtype)
    if device.type != "meta":
        policy = policy.resolved(device, backend, mode)
    policy.check_outputs("convert_blocks")
    policies = _by_block(policy, model, paths)
    is_decided = policy.dtype is not None or policy.loss_scale is not None
    scaler = LossScaler(
        policy.active_loss_scale() if is_decided else policy, model, CPU if device.type == "meta" else device
    )
    forwards, siblings = [], Siblings()
    for path in paths:
        options = Options(policies[path], backend, mode, None, capture, path)
        forwards.append(BlockForward(_inside_wrappers(model, path), path, options, scaler, siblings))
    for forward in forwards:
        forward.install()
    return Blocks(forwards, scaler)


def _matching(model: nn.Module, which: tuple[Which, ...]) -> list[str]:
    """Returns the outermost paths that match."""
    if not which:
        raise PolicyError("convert_blocks: which is empty; expected globs of module paths or module classes.")
    modules = dict(model.named_modules())
    for one in which:
        if not isinstance(one, str) and not (isinstance(one, type) and issubclass(one, nn.Module)):
            raise PolicyError(f"convert_blocks takes globs of module paths and module classes, got {one!r}.")
        if not any(_matches(path, module, one) for path, module in modules.items()):
            name = one if isinstance(one, str) else one.__name__
            legal = modules if isinstance(one, str) else {type(m).__name__ for m in modules.values()}
            raise PolicyError(f"convert_blocks: {name!r} matches no module.{did_you_mean(name, legal)}")
    paths: list[str] = []
    for path, module in modules.items():  # parents come first
        if not any(_matches(path, module, one) for one in which) or any(_is_under(path, p) for p in paths):
            continue
        if any(map(_is_converted, module.modules())):
            raise PolicyError(
                f"convert_blocks: {path!r} is converted already, or has a converted module inside."
            )
        paths.append(path)
    return paths


def _matches(path: str, module: nn.Module, which: Which) -> bool:
    if not isinstance(which, str):
        return isinstance(module, which)
    return fnmatchcase(path, which) if path else not which


def _is_converted(module: nn.Module) -> bool:
    return isinstance(module, AmpModule) or converted_forward(module) is not None


def _is_under(path: str, other: str) -> bool:
    return not other or path.startswith(f"{other}.")


def _inside_wrappers(model: nn.Module, path: str) -> nn.Module:
    """Returns the module at a path, without the wrappers of checkpointing and ``torch.compile``."""
    module = model.get_submodule(path)
    return module.get_submodule(path_inside_wrappers(module))


def _by_block(policy: Policy, model: nn.Module, paths: list[str]) -> dict[str, Policy]:
    """Translates rules over the model's module paths to paths inside each block."""
    used: set[str] = set()
    policies = {}
    for path in paths:
        rules = {}
        whole = f"{path}.{path_inside_wrappers(model.get_submodule(path))}".strip(".")
        for inner, _ in _inside_wrappers(model, path).named_modules():
            names = (f"{start}.{inner}".strip(".") for start in (path, whole))
            matches = _matching_rules(policy, *names)
            if not inner and not matches:
                matches = _rules_of_parents(policy, path)
            if matches:
                used.update(matches)
                rules[escape(inner)] = next(iter(matches.values()))
        policies[path] = policy.replace(rules=rules)
    for rule in policy.rules:
        if rule.startswith(NODE_PREFIX):
            raise PolicyError(f"convert_blocks: rule {rule!r} names a node; its rules name modules only.")
        if rule not in used:
            legal = [name for name, _ in model.named_modules()]
            raise PolicyError(
                f"convert_blocks: rule {rule!r} matches no module in a block; rules name modules by their "
                f"paths in the whole model.{did_you_mean(rule, legal)}"
            )
    return policies


def _rules_of_parents(policy: Policy, path: str) -> dict[str, str]:
    while path:
        path = path.rpartition(".")[0]
        if matches := _matching_rules(policy, path):
            return matches
    return {}


def _matching_rules(policy: Policy, *paths: str) -> dict[str, str]:
    rules = policy.rules.items()
    matches = {rule: value for rule, value in rules if any(fnmatchcase(path, rule) for path in paths)}
    if len(set(matches.values())) > 1:
        raise PolicyError(f"contradictory rules for {paths[0]!r}: {matches}")
    return matches
