"""The updates of torch's fused optimizers as ops that a compiler fuses with what stands around them.

A compiler does not look into the fused kernels: it writes each gradient in float32 for them, and the low
copies of weights need a kernel more. In ops of the graph an update reads a low gradient where it was made,
and writes the low copy with the parameter. Lists of parameters stay lists, which compilers for GPUs turn into
a few kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from .._compat import storage_key
from ..errors import NoStateError

Tensors = list[Tensor] | tuple[Tensor, ...]


class _Group(NamedTuple):
    """The parameters of a group that have gradients.

    Attributes:
        options: The group's settings.
        parameters: The parameters.
        gradients: Theirs, negated if the group maximizes.
        state: The optimizer's tensors by name, one for each parameter.
        steps: The number of this step, for each parameter.
    """

    options: dict[str, Any]
    parameters: Tensors
    gradients: Tensors
    state: dict[str, Tensors]
    steps: Tensors

    def held(self, name: str) -> Tensors:
        """Returns the optimizer's tensors of a name, one for each parameter."""
        if name not in self.state:
            raise NoStateError
        return self.state[name]

    def decayed(self) -> Tensors:
        """Returns the gradients with the weight decay."""
        decay = self.options["weight_decay"]
        if not decay:
            return self.gradients
        return torch._foreach_add(self.gradients, self.parameters, alpha=decay)


# The new parameters, and the new state by name.
Updated = tuple[Tensors, dict[str, Tensors]]


def can_update(optimizer: Optimizer) -> bool:
    """Whether ops can take the steps of this optimizer.

    All its tensors are float32, on one device, and in a memory each: compilers copy what shares memory.
    """
    if type(optimizer) not in _UPDATES:
        return False
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = [*parameters, *(t for p in parameters for t in optimizer.state.get(p, {}).values())]
    tensors = [t for t in held if isinstance(t, Tensor)]
    if any(t.dtype != torch.float32 or t.layout != torch.strided for t in tensors):
        return False
    if len({storage_key(t) for t in tensors}) != len(tensors):
        return False
    settings = (value for group in optimizer.param_groups for value in group.get("betas", ()))
    return len({t.device for t in tensors}) == 1 and not any(isinstance(s, Tensor) for s in settings)


def update(optimizer: Optimizer, found: Tensor | None) -> None:
    """Takes a step, except where ``found``, a number on the device, is 1."""
    for options in optimizer.param_groups:
        if group := _group(optimizer, options):
            parameters, state = _UPDATES[type(optimizer)](group)
            _write(group.parameters, parameters, found)
            for name, values in state.items():
                _write(group.state[name], values, found)
            if "step" in group.state:
                one = group.parameters[0].new_ones(()) if found is None else 1 - found
                torch._foreach_add_(group.state["step"], [one] * len(group.steps))


def _group(optimizer: Optimizer, options: dict[str, Any]) -> _Group | None:
    parameters = [p for p in options["params"] if p.grad is not None]
    if not parameters:
        return None
    gradients: Tensors = [p.grad for p in parameters]
    if options["maximize"]:
        gradients = torch._foreach_neg(gradients)
    states = [optimizer.state.get(p, {}) for p in parameters]
    names = {name for held in states for name, value in held.items() if isinstance(value, Tensor)}
    whole = [name for name in names if all(isinstance(held.get(name), Tensor) for held in states)]
    state: dict[str, Tensors] = {name: [held[name] for held in states] for name in sorted(whole)}
    steps: Tensors = [*torch._foreach_add(state["step"], 1)] if "step" in state else []
    return _Group(options, parameters, gradients, state, steps)


def _write(targets: Tensors, values: Tensors, found: Tensor | None) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value if found is None else torch.where(found > 0, target, value))


def _adam(group: _Group) -> Updated:
    options, (beta1, beta2) = group.options, group.options["betas"]
    rate, decay = options["lr"], options["weight_decay"]
    parameters, gradients = group.parameters, group.gradients
    if options["decoupled_weight_decay"]:
        parameters = torch._foreach_mul(parameters, 1 - rate * decay) if decay else parameters
    else:
        gradients = group.decayed()
    mean = torch._foreach_lerp(group.held("exp_avg"), gradients, 1 - beta1)
    squares = torch._foreach_mul(group.held("exp_avg_sq"), beta2)
    squares = torch._foreach_addcmul(squares, gradients, gradients, value=1 - beta2)
    state: dict[str, Tensors] = {"exp_avg": mean, "exp_avg_sq": squares}
    largest = squares
    if options["amsgrad"]:
        largest = state["max_exp_avg_sq"] = torch._foreach_maximum(group.held("max_exp_avg_sq"), squares)
    roots = torch._foreach_sqrt(_grown(beta2, group.steps))
    below = torch._foreach_add(torch._foreach_div(torch._foreach_sqrt(largest), roots), options["eps"])
    sizes = torch._foreach_mul(torch._foreach_reciprocal(_grown(beta1, group.steps)), rate)
    changes = torch._foreach_mul(torch._foreach_div(mean, below), sizes)
    return torch._foreach_sub(parameters, changes), state


def _grown(beta: float, steps: Tensors) -> Tensors:
    """Returns ``1 - beta ** step``, without the loss of digits that this has in float32."""
    exponents = torch._foreach_mul(steps, math.log(beta) if beta else -math.inf)
    return torch._foreach_neg([x.expm1() for x in exponents])


def _sgd(group: _Group) -> Updated:
    options, gradients = group.options, group.decayed()
    state: dict[str, Tensors] = {}
    if momentum := options["momentum"]:
        buffers = torch._foreach_mul(group.held("momentum_buffer"), momentum)
        buffers = torch._foreach_add(buffers, gradients, alpha=1 - options["dampening"])
        state["momentum_buffer"] = buffers
        is_ahead = options["nesterov"]
        gradients = torch._foreach_add(gradients, buffers, alpha=momentum) if is_ahead else buffers
    changes = torch._foreach_mul(gradients, options["lr"])
    return torch._foreach_sub(group.parameters, changes), state


def _adagrad(group: _Group) -> Updated:
    options, gradients = group.options, group.decayed()
    sums = torch._foreach_addcmul(group.held("sum"), gradients, gradients)
    below = torch._foreach_add(torch._foreach_sqrt(sums), options["eps"])
    before = torch._foreach_add(group.steps, -1)
    slower = torch._foreach_add(torch._foreach_mul(before, options["lr_decay"]), 1)
    sizes = torch._foreach_mul(torch._foreach_reciprocal(slower), options["lr"])
    changes = torch._foreach_mul(torch._foreach_div(gradients, below), sizes)
    return torch._foreach_sub(group.parameters, changes), {"sum": sums}


_UPDATES: dict[type[Optimizer], Callable[[_Group], Updated]] = {
    Adam: _adam,
    AdamW: _adam,
    SGD: _sgd,
    Adagrad: _adagrad,
}
