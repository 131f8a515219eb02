"""The rule of each op for the size of its result."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch.fx import Node

from ampgraph.ops.lists import OpClass

from . import size_of_arithmetic as arithmetic
from . import size_of_growth as growth
from .arguments import argument
from .facts import tensors
from .magnitudes import SIGNED_UNIT, UNIT, UNKNOWN, Rule, Size, Sizes
from .products import terms


def _fixed(size: Size) -> Rule:
    return lambda sizes, node: size


def _table(*rows: tuple[Rule, str]) -> Mapping[str, Rule]:
    return {name: rule for rule, names in rows for name in names.split()}


def _of_fill(name: str) -> Rule:
    return lambda sizes, node: sizes.of(argument(node, name))


def _arange(sizes: Sizes, node: Node) -> Size:
    ends = [sizes.of(argument(node, name)) for name in ("start", "end") if argument(node, name) is not None]
    return sizes.hull(*ends, Size(0.0, 0.0)) if len(ends) == 1 else sizes.hull(*ends)


RULES: Mapping[str, Rule] = _table(
    (
        _fixed(UNIT),
        "sigmoid special_expit hardsigmoid softmax special_softmax _softmax _safe_softmax rand rand_like",
    ),
    (_fixed(UNIT), "one_hot bernoulli eye"),
    (_fixed(SIGNED_UNIT), "tanh sin cos erf sign sgn cosine_similarity"),
    (_fixed(Size(high=0.0)), "log_softmax special_log_softmax _log_softmax log_sigmoid log_sigmoid_forward"),
    (
        _fixed(UNKNOWN),
        "batch_norm group_norm instance_norm randn randn_like",
    ),
    (_fixed(UNKNOWN), "native_layer_norm native_group_norm atan nan_to_num"),
    (_fixed(Size(0.0, 0.0)), "zeros zeros_like new_zeros"),
    (_fixed(Size(1.0, 1.0)), "ones ones_like new_ones"),
    (_of_fill("fill_value"), "full full_like new_full"),
    (_of_fill("s"), "scalar_tensor"),
    (_arange, "arange linspace"),
    (arithmetic.relu, "relu"),
    (arithmetic.absolute, "abs absolute"),
    (arithmetic.negated, "neg negative"),
    (arithmetic.softplus, "softplus"),
    (arithmetic.clamp, "clamp clip clamp_min clamp_max"),
    (arithmetic.hardtanh, "hardtanh relu6"),
    (arithmetic.extreme, "maximum fmax minimum fmin"),
    (arithmetic.dropout, "dropout feature_dropout native_dropout"),
    (arithmetic.add, "add sub rsub subtract"),
    (arithmetic.mul, "mul multiply"),
    (arithmetic.interpolated, "lerp"),
    (arithmetic.div, "div divide true_divide"),
    (arithmetic.inverse, "rsqrt reciprocal"),
    (arithmetic.sqrt, "sqrt"),
    (arithmetic.logarithm, "log log2 log10 log1p special_log1p"),
    (growth.exponential, "exp exp2 special_exp2 expm1 special_expm1 cosh sinh"),
    (growth.squared, "square"),
    (arithmetic.to_power, "pow"),
    (growth.running_product, "prod cumprod"),
    (growth.total, "sum nansum cumsum"),
    (growth.log_of_sum, "logsumexp special_logsumexp logcumsumexp"),
    (growth.unbounded, "scatter_add index_add scatter_reduce segment_reduce"),
    (growth.mean, "mean nanmean"),
    (growth.mean, growth.AVERAGES),
    (growth.variance, "var std"),
    (growth.norm_of, "linalg_vector_norm norm linalg_norm"),
    (growth.norm_layer, "layer_norm rms_norm"),
)


def size_of_op(sizes: Sizes, node: Node) -> Size:
    """Returns the size of what a node computes from what it reads."""
    fact, values = sizes.facts[node], tensors(node)
    if values and all(v.dtype is torch.bool for v in values):
        return UNIT
    if node.target is operator.getitem:
        return sizes.of(node.args[0])
    if fact.op is None:
        return UNKNOWN
    if rule := RULES.get(fact.op.name):
        return rule(sizes, node)
    if terms(node) is not None or fact.op_class is OpClass.WHITE:
        return growth.product(sizes, node)
    if fact.op_class is OpClass.CLEAR or fact.op.is_view:
        return sizes.hull(*read) if (read := sizes.moved(node)) else UNKNOWN
    if fact.op_class is OpClass.GRAY:
        return growth.unbounded(sizes, node)
    return UNKNOWN
