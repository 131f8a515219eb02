"""The base of the precision plugins for Lightning's two package names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import nn

from ..blocks import Blocks, Which, convert_blocks
from ..errors import AmpGraphError, PolicyError, warn_user
from ..policy.policy import Policy
from ..runtime.backends import default_backend
from ..training.scaler import LossScaler


class PrecisionMixin:
    """Converts a LightningModule's networks while a Trainer runs it.

    Args:
        policy: As for `ampgraph.convert`.
        dtype: The low dtype; None means float16 if the Trainer's device is CUDA, else bfloat16.
        blocks: The submodules of the LightningModule to convert, as for `ampgraph.convert_blocks`. None
            means its direct children with parameters (the members of a ``ModuleList``). ``""`` means the
            ``forward`` of the module itself, for a ``training_step`` that calls ``self(x)``.
        backend: As for `ampgraph.convert`.

    Attributes:
        blocks: The converted submodules, after a Trainer has set up the module.
    """

    blocks: Blocks | None
    precision: Any

    def __init__(
        self,
        policy: Policy | str | PathLike[str] | None = None,
        dtype: torch.dtype | None = None,
        blocks: Which | tuple[Which, ...] | None = None,
        backend: str | Callable | None = None,
    ):
        self.policy, self.which, self.backend = Policy.of(policy, dtype), blocks, backend
        self.blocks = None
        self._state: dict[str, Any] = {}
        self._is_checked = False

    @property
    def scaler(self) -> LossScaler:
        """The loss scaler of the converted submodules.

        Raises:
            AmpGraphError: No Trainer has set up a module yet.
        """
        if self.blocks is None:
            raise AmpGraphError(
                "AmpGraphPrecision has no scaler yet: the Trainer creates it when it sets up the module."
            )
        return self.blocks.scaler

    def convert_module(self, module: Any) -> Any:
        """Converts in place, because some strategies ignore the return value."""
        device = module.trainer.strategy.root_device  # the module is moved there only later
        policy = self.policy.resolved(device)
        which = networks(module) if self.which is None else self.which
        if not which and which != "":
            raise PolicyError(
                f"AmpGraphPrecision: {type(module).__name__} has no child module with parameters to convert; "
                "put the network into one, or pass blocks='' for the module's own forward."
            )
        backend = self.backend or default_backend(device)
        self.blocks = convert_blocks(module, which, policy=policy, backend=backend)
        self.precision = "16-mixed" if policy.dtype == torch.float16 else "bf16-mixed"
        self.load_state_dict(self._state)
        return module

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Runs the closure, clips, and steps if all gradients are finite."""
        closure = partial(self._wrap_closure, model, optimizer, closure)  # type: ignore[attr-defined]
        result = self.scaler.step(optimizer, closure=closure, **kwargs)
        self.scaler.update()
        if not self._is_checked:
            self._is_checked = True
            self._warn_about_other_methods()
        return result

    def _warn_about_other_methods(self) -> None:
        """Warns about networks that have gradients, and that no call of their forward computed."""
        assert self.blocks is not None
        silent = [
            name
            for name, block in self.blocks.items()
            if not block._graphs and any(p.grad is not None for p in block.parameters())
        ]
        if silent:
            warn_user(
                f"AmpGraphPrecision: {', '.join(silent)} ran in float32: training_step calls other methods "
                "than forward. Pass blocks= with the paths of the modules inside that it does call "
                f"(blocks='{silent[0]}.*'), or let training_step call self(x) and pass blocks=''."
            )

    def teardown(self) -> None:
        """Puts the module's original forwards back."""
        if self.blocks is not None:
            self._state = self.state_dict()
            self.blocks.restore()
        super().teardown()  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Returns the scaler's state, for the Trainer's checkpoint."""
        return self._state if self.blocks is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a scaler's state; the state of Lightning's float16 plugin also fits."""
        self._state = state_dict
        if self.blocks is not None and state_dict:
            self.scaler.load_state_dict(state_dict)


def networks(module: nn.Module, prefix: str = "") -> tuple[str, ...]:
    """Returns the paths of the children with parameters; lists and dicts of modules give their members."""
    paths: list[str] = []
    for name, child in module.named_children():
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            paths += networks(child, f"{prefix}{name}.")
        else:
            paths.append(prefix + name)
    return tuple(paths)
