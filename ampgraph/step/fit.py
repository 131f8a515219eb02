"""Whether one graph can take a whole step: the reasons against it, and the key of a call."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import chain, count
from operator import attrgetter, is_
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.utils._pytree import tree_leaves

from .._compat import (
    data_of,
    has_global_hooks,
    has_modes_of_callers,
    has_saved_tensor_hooks,
    has_step_hooks,
    is_any_autocast_enabled,
    kernel_settings,
    storage_key,
    times_asked_in_all,
)
from ..errors import PolicyError
from ..module import AmpModule
from ..proxy.module_parts import HOOKS
from ..runtime.module_structure import Flags
from ..runtime.signature import signature_of
from ..training import optimizer_step
from ..training.distributed import is_distributed
from ..training.optimizer_step import has_torchs_step, parameters_of
from ..training.optimizer_steps import has_other_hooks
from ..training.untaken_gradients import has_hooks
from .surroundings import layout_of

_requires_grad, _version = attrgetter("requires_grad"), attrgetter("_version")
_hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_MOST_NUMBERS = 64
# What the arguments and results of ``loss_fn`` may be beside tensors; a graph keeps them.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# The code of a converted model's ``forward``.
_FORWARD = next(c for c in AmpModule._make_forward.__code__.co_consts if isinstance(c, CodeType))
# The code of what wraps ``Optimizer.step`` and keeps what it does.
_WRAPPERS = (lr_scheduler.__file__, optimizer_step.__file__)


class Key(NamedTuple):
    """What must be the same for two steps that run one graph.

    Attributes:
        settings: The optimizer's, for each group its parameters, and the names and values of settings.
        others: Of model, arguments and scaler.
    """

    settings: tuple[tuple, ...]
    others: tuple[Hashable, ...]


class Fit:
    """Why a step cannot be one graph, and the key of its graph if it can.

    What the checks of parameters found is kept as long as these are the same objects in the same state.

    Args:
        amp: The model.
        optimizer: The optimizer of the step.

    Attributes:
        asks_for_offsets: Whether the step asks where arguments begin in their memory; then keys include that.
    """

    def __init__(self, amp: AmpModule, optimizer: Optimizer) -> None:
        self._amp, self._optimizer = amp, optimizer
        self._checked: _Checked | None = None
        self.asks_for_offsets = False
        self._numbers: dict[Hashable, int] = {}
        self._next = count()

    def reason_for_the_loop(self, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """Returns why a step with these arguments cannot be one graph; None if it can. Runs at every step."""
        amp = self._amp
        if amp.is_just_in_time:
            return (
                "the model is captured just in time: ampgraph.convert got no example inputs, or warned why "
                "they do not suffice"
            )
        if is_distributed():
            return "gradients of several processes are averaged outside the graph"
        if (reason := _reason_of_optimizer(self._optimizer)) is not None:
            return reason
        if is_any_autocast_enabled():
            return "it is called under torch.autocast"
        if not torch.is_grad_enabled():
            return "it is called under torch.no_grad or torch.inference_mode"
        if has_saved_tensor_hooks():
            return "it is called inside hooks for the tensors that autograd saves"
        if amp.options.backend != "eager" and has_modes_of_callers():
            return "it is called inside a dispatch mode, which sees each op"
        if any(getattr(amp, name) for name in HOOKS):
            return "the converted model has hooks"
        if has_global_hooks():
            return "there are hooks for all modules of the process"
        if getattr(vars(amp)["forward"], "__code__", None) is not _FORWARD:
            return "forward of the converted model is replaced, as ampgraph.watch does"
        return self._reason_of_parameters() or _reason_of_arguments(args, kwargs)

    def key_of(self, args: tuple, kwargs: dict[str, Any]) -> Key:
        """Returns the key of a call for which there is no reason to run the loop. Runs at every step."""
        assert self._checked is not None
        optimizer = self._optimizer
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        memory = [*map(storage_key, tensors)]
        first: dict[object, int] = {}
        others = (
            self._checked.number,
            signature_of(args, kwargs),
            tuple([(x.stride(), x.is_conj(), x.is_neg()) for x in tensors]),
            tuple([x.storage_offset() for x in tensors]) if self.asks_for_offsets else (),
            tuple([first.setdefault(key, i) for i, key in enumerate(memory)]),
            self._amp.scaler.config,
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            kernel_settings(),
        )
        return Key(tuple([_settings(group, optimizer.defaults) for group in optimizer.param_groups]), others)

    def _reason_of_parameters(self) -> str | None:
        """Looks for parameters that a graph cannot train, unless all are as at the last step."""
        flags = self._amp._graphs.modes()  # notices another structure
        tensors = self._amp._graphs.structure.tensors
        asked = times_asked_in_all()  # first: another thread may set data now
        stepped, last = parameters_of(self._optimizer), self._checked
        held = last.held if last is not None and last.flags is flags else _Held.of(tensors.now())
        states = chain.from_iterable(state.values() for state in self._optimizer.state.values())
        watched = [*map(_requires_grad, held.all)], held.marks(), [*map(_hooks, stepped)]
        now = _Checked(flags, asked, [*map(id, states)], *watched, stepped, held)
        if last is not None and tensors.counts_data and now.is_like(last):
            return None
        trained = {id(t) for t in held.all if t.requires_grad}
        if any(map(has_hooks, stepped)):
            return "a parameter has hooks"
        if {id(p) for p in stepped if p.requires_grad} != trained:
            return "the optimizer does not hold exactly the model's parameters that require gradients"
        if any(type(data_of(p)) is not Tensor for p in stepped):
            return "a parameter is a subclass of Tensor"
        key = (flags, tuple(now.states), *[(id(t), layout_of(t)) for t in held.all])
        if len(self._numbers) >= _MOST_NUMBERS:
            self._numbers.clear()
        number = self._numbers.setdefault(key, next(self._next))
        # A dict of hooks that is empty now would equal itself with a hook.
        hooks = now.hooks if all(found == (None, None) for found in now.hooks) else []
        self._checked = now._replace(hooks=hooks, number=number)
        return None


class _Held(NamedTuple):
    """The tensors of a model, by what tells that one of them has other sizes or strides.

    Attributes:
        all: The parameters and buffers.
        parameters: Those with a version counter, which fused optimizers do not raise.
        others: The others, buffers among them, which a forward may write at every step.
    """

    all: list[Tensor]
    parameters: list[Tensor]
    others: list[Tensor]

    @classmethod
    def of(cls, tensors: list[Tensor]) -> _Held:
        """Returns tensors in their two kinds."""
        found: tuple[list[Tensor], list[Tensor]] = [], []
        for tensor in tensors:
            found[not isinstance(tensor, nn.Parameter) or tensor.is_inference()].append(tensor)
        return cls(tensors, *found)

    def marks(self) -> tuple[list[int], list[tuple]]:
        """Returns values that are others if a tensor has other sizes or strides now. Runs at every step.

        ``.data`` of a buffer may be set, which nothing counts, and ``set_`` or ``t_`` change a parameter.
        """
        return [*map(_version, self.parameters)], [*map(layout_of, self.others)]


class _Checked(NamedTuple):
    """Parameters that one graph can train.

    Attributes:
        flags: Modes of the model, and the kinds of its tensors.
        asked: How often ``.data`` of a parameter was asked for or set.
        states: The ids of the tensors of the optimizer's state.
        trains: Which of ``held`` require gradients.
        marks: See `_Held.marks`.
        hooks: The hooks of ``stepped``, if there are none.
        stepped: The parameters of the optimizer.
        held: The parameters and buffers of the model.
        number: Stands for all of this in keys.
    """

    flags: Flags
    asked: int
    states: list[int]
    trains: list[bool]
    marks: tuple[list[int], list[tuple]]
    hooks: list[tuple]
    stepped: list[Tensor]
    held: _Held
    number: int = -1

    def is_like(self, other: _Checked) -> bool:
        """Whether nothing that was looked at has changed since another step."""
        return (
            self[:6] == other[:6]
            and _are_same(self.stepped, other.stepped)
            and (self.held is other.held or _are_same(self.held.all, other.held.all))
        )


def _are_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _reason_of_optimizer(optimizer: Optimizer) -> str | None:
    name = type(optimizer).__name__
    if not (type(optimizer).__module__ + ".").startswith("torch.optim."):
        return f"{name} is not an optimizer of torch"
    if not all(group.get("fused") for group in optimizer.param_groups):
        return f"{name} is not fused; where torch has a fused form of it, pass fused=True"
    if has_step_hooks(optimizer) or has_other_hooks():
        return f"{name} has hooks"
    return None if _is_own_step(optimizer) else f"the step of this {name} is replaced"


def _reason_of_arguments(args: tuple, kwargs: dict[str, Any]) -> str | None:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad or type(leaf) is not Tensor:
                return "an argument requires gradients or is a subclass of Tensor"
        elif not isinstance(leaf, PLAIN):
            return (
                f"an argument is a {type(leaf).__name__}, whose content a graph cannot follow; pass tensors "
                "and numbers, also in lists, tuples and dicts"
            )
    return None


def _is_own_step(optimizer: Optimizer) -> bool:
    """Whether ``step`` is torch's, also inside what a scheduler and `attach` put around it."""
    if not has_torchs_step(optimizer):
        return False
    step = vars(optimizer).get("step")
    while step is not None:
        step = getattr(step, "__func__", step)
        if step is type(optimizer).step:
            return True
        if getattr(getattr(step, "__code__", None), "co_filename", "") not in _WRAPPERS:
            return False
        step = getattr(step, "__wrapped__", None)
    return "step" not in vars(optimizer)


def _settings(group: dict[str, Any], names: Iterable[str]) -> tuple:
    """Returns the settings that a step of torch reads: those that have defaults."""
    found: list[Hashable] = [tuple(map(id, group["params"]))]
    for name in names:
        value = group.get(name)
        if isinstance(value, Tensor):
            found.append((name, id(value)))
        elif name == "lr":
            found.append((name, type(value)))  # an input of the graph
        elif isinstance(value, (tuple, list)):
            found.append((name, tuple([(id(x), x._version) if isinstance(x, Tensor) else x for x in value])))
        else:
            found.append((name, value if _is_hashable(value) else repr(value)))
    return tuple(found)


def varying_settings(keys: Iterable[Key]) -> list[str]:
    """Returns the names of the optimizer's settings in which the keys of calls differ."""
    seen: dict[tuple[int, str], set] = {}
    for key in keys:
        for index, (_, *settings) in enumerate(key.settings):
            for name, value in settings:
                seen.setdefault((index, name), set()).add(value)
    return sorted({name for (_, name), values in seen.items() if len(values) > 1})


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def is_size(value: object) -> bool:
    """Whether pytree would make a tuple of it."""
    return isinstance(value, torch.Size)


def loss_of(result: Any) -> Tensor:
    """Returns the loss of what ``loss_fn`` returned.

    Raises:
        PolicyError: It is not one real number.
    """
    loss = result[0] if isinstance(result, (tuple, list)) and result else result
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        return loss
    what = type(loss).__name__
    if isinstance(loss, Tensor):
        what = f"a tensor of shape {tuple(loss.shape)} and dtype {loss.dtype}"
    raise PolicyError(
        f"compile_step: loss_fn returned {what}; expected the loss, a tensor of one real number."
    )
