"""Random modules with real Python code: what a generator of single graphs does not reach.

A module is a list of lines, each tried on real tensors while the module is written; lines that fail, or
whose values leave the range of float16, are dropped. So any list of integers is a program, and a shorter list
is a simpler one: what hypothesis shrinks is what a person reads.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

ROWS, FEATURES = 4, 8
LIMIT = 100.0
INPUTS = {
    "x": "torch.float32",
    "y": "torch.float32",
    "low": "{low}",
    "wide": "torch.float64",
    "integer": "torch.int64",
    "boolean": "torch.bool",
}

HEADER = """import torch
from torch import nn
from torch.nn import functional as F

import ampgraph


class Fuzzed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.layer_norm, self.batch_norm = nn.LayerNorm(8), nn.BatchNorm1d(8)
        self.dropout, self.scale = nn.Dropout(0.5), nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.register_buffer("state", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("low_state", torch.zeros(8, dtype={low}))

    def forward(self, x, y, low, wide, integer, boolean):
"""

# {a} is any float tensor so far, {b} another of its shape, {i} and {m} integers and masks of its shape, {o}
# any tensor at all; {n} is a small number, {k} one more, {s} a scalar, {l} the low dtype, {v} the new name.
LINES = (
    # low by the lists
    "{v} = self.first({a})",
    "{v} = self.second({a})",
    "{v} = F.linear({a}, self.first.weight.to({a}.dtype))",
    "{v} = {a} @ {b}.transpose(-1, -2)",
    "{v} = torch.matmul({a}, {b}.mT) * 0.1",
    "{v} = torch.einsum('ij,kj->ik', {a}, {b})",
    "{v} = F.scaled_dot_product_attention({a}[None], {b}[None], {a}[None])[0]",
    "{v} = F.conv1d({a}[None], self.first.weight[:4, :4, None].to({a}.dtype))[0]",
    # arithmetic
    "{v} = {a} + {b}",
    "{v} = {a} * {b}",
    "{v} = {a} - {b} * {s}",
    "{v} = {a} / ({b}.abs() + 1)",
    "{v} = {a} * {s}",
    "{v} = {a} + 1e-8",
    "{v} = 1 - {a}",
    "{v} = F.gelu({a})",
    "{v} = torch.sigmoid({a})",
    "{v} = torch.tanh({a})",
    "{v} = self.layer_norm({a})",
    "{v} = self.batch_norm({a})",
    "{v} = self.dropout({a})",
    "{v} = {a}.mean(-1, keepdim=True)",
    "{v} = {a} * self.scale",
    "{v} = torch.addcmul({a}, {b}, {a}, value=0.5)",
    "{v} = torch.lerp({a}, {b}, 0.25)",
    "{v} = {a} * {a}.mean()",
    "{v} = {a} + {a}.flatten()[0]",
    "{v} = {a} * torch.tensor(0.5)",
    "{v} = {a} + {i}",
    "{v} = {a} * {m}",
    "{v} = {o} * 2",
    "{v} = {a} + {o}",
    # float32 by the lists
    "{v} = torch.exp({a}.clamp(max=2.0))",
    "{v} = {a}.softmax(-1)",
    "{v} = {a}.log_softmax(-1)",
    "{v} = {a}.sum(-1, keepdim=True)",
    "{v} = {a}.sum() * 0.1",
    "{v} = {a}.cumsum(-1)",
    "{v} = torch.rsqrt({a}.abs() + 1)",
    "{v} = {a}.pow(2)",
    "{v} = {a}.norm(dim=-1, keepdim=True)",
    "{v} = F.mse_loss({a}, {b})",
    "{v} = {a}.logsumexp(-1, keepdim=True)",
    "{v} = torch.cos({a})",
    # moves and selects values
    "{v} = {a}.relu()",
    "{v} = torch.cat([{a}, {b}], {n} % {a}.dim())",
    "{v} = torch.stack([{a}, {b}]).sum(0)",
    "{v} = torch.cat([{a}, {b}], -1)[..., :8]",
    "{v} = torch.where({m}, {a}, {b})",
    "{v} = {a}.masked_fill({m}, {s})",
    "{v} = {a}.masked_fill({m}, -1e9).softmax(-1)",
    "{v} = torch.maximum({a}, {b})",
    "{v} = {a}.gather(-1, {i}.clamp(0, {a}.shape[-1] - 1))",
    "{v} = {a}.flip(-1).roll(1, 0)",
    "{v} = F.pad({a}, (1, 0))[..., :{a}.shape[-1]]",
    "{v} = {a}.t()",
    "{v} = {a}.T.contiguous()",
    "{v} = {a}[{n} % {a}.shape[0]:]",
    "{v} = {a}[..., :{k}]",
    "{v} = {a}[0]",
    "{v} = {a}.unsqueeze(0).expand(2, *{a}.shape)[1]",
    "{v} = {a}.mean(0, keepdim=True).expand_as({a})",
    "{v} = {a}.reshape(-1)",
    "{v} = {a}.reshape(-1, 4)",
    "{v} = {a}.as_strided((2, 4), (4, 1))",
    "{v} = {a}.diagonal()",
    "{v} = torch.einsum('...i->i...', {a})",
    "{v} = {a}.sum_to_size({a}.shape)",
    "{v} = torch.atleast_2d({a})",
    "{v} = F.dropout({a}, 0.0)",
    "{v} = {a}.clone()",
    "{v} = {a}.detach()",
    "{v}, {v}b = {a}.chunk(2, -1)[:2]",
    "{v}, {v}b = {a}.split([2, {a}.shape[0] - 2])",
    "{v} = torch.stack({a}.unbind(0)[::-1])",
    "{v}, {v}i = {a}.topk(2, -1)",
    "{v}, {v}i = {a}.max(-1, keepdim=True)",
    "{v}, {v}i = {a}.sort(-1)",
    "{v}, {v}b = torch.broadcast_tensors({a}, {b})",
    "{v} = {a}.std(-1, keepdim=True)",
    # integers and masks
    "{v} = {a}.argmax(-1)",
    "{v} = {a} > {s}",
    "{v} = {a} < {b}",
    "{v} = torch.isfinite({a})",
    "{v} = {a}.round().long()",
    "{v} = F.one_hot({i} % 8, 8)",
    "{v} = F.embedding({i} % 8, self.first.weight)",
    # positions and decisions
    "{v} = torch.arange({a}.shape[-1]) * 37.3 + {s}",
    "{v} = torch.outer(torch.arange({n}, dtype=torch.float32), torch.linspace(0, 9.7, 8)).cos()",
    "{v} = torch.einsum('i,j->ij', torch.arange({k}).float(), torch.arange({k}).float()) * 1.1",
    "{v} = {a} * {s} + torch.arange({a}.shape[-1]) * 3.3",
    "{v} = torch.floor(({a} * 17.3 + 0.1) * 1.7)",
    "{v} = torch.bucketize({a} * 3.7, torch.linspace(-5, 5, 101))",
    "{v} = torch.searchsorted(torch.linspace(-5, 5, 101), {a} * 3.7 - 0.1)",
    "{v} = (({a} * 29.3 + 0.1).round() + 0.5).long() % 8",
    "{v} = ({a} * 1.01 - 0.1).argmax(-1)",
    "{v}, {v}i = ({a} * 1.01 + 0.1).max(-1)",
    "{v} = torch.sin(({a} * 31.7 + 0.1) * 1.3)",
    "{v} = (torch.arange(8) - torch.arange({k})[:, None]).abs().float().log1p().ceil().long()",
    # casts that the model itself makes
    "{v} = {a}.to({l})",
    "{v} = {a}.float()",
    "{v} = {a}.double()",
    "{v} = {a}.to({b}.dtype) + {b}",
    "{v} = {a}.type_as({o})",
    "{v} = {a}.softmax(-1, dtype=torch.float32)",
    "{v} = torch.zeros_like({a}) + {a}",
    "{v} = {a}.new_ones({a}.shape[-1])",
    "{v} = torch.arange({a}.shape[-1], dtype=torch.float32) + {a}",
    # in place
    "{a}.add_({b})",
    "{a}.mul_({s})",
    "{a}.relu_()",
    "F.relu({a}, inplace=True)",
    "{a}[0].copy_({b}[-1])",
    "{a}[..., 0].zero_()",
    "{a}[{m}] = {s}",
    "{a}[:, 1:3] += {b}[:, :2]",
    "{a}[0] = {o}",
    "{a}.t().mul_({s})",
    "{a}.reshape(-1)[:3].sub_(1)",
    "{a}.clamp_(-1, 1)",
    "{a}.masked_fill_({m}, 0.5)",
    "{a}.copy_({b})",
    "{a}.copy_({o})",
    "{a}.add_({o})",
    "{a}.unsqueeze(0).add_({b})",
    "{v} = {a}.clone(); {v}[0] = {b}[0]",
    "{v} = torch.zeros_like({a}); {v}[1:] = {a}[1:]",
    "{v} = torch.empty_like({a}).copy_({b})",
    "{v} = {a}.index_add(0, torch.tensor([0, 1]), {b}[:2])",
    "{v} = {a}.scatter(-1, {i}.clamp(0, {a}.shape[-1] - 1), {b})",
    "self.state.mul_(0.9).add_({a}.detach().mean(0), alpha=0.1)",
    "self.state.copy_({a}.detach()[0])",
    "self.low_state.copy_({a}.detach()[0])",
    "self.count.add_(1)",
    "{v} = {a} * self.state",
    "{v} = {a} + self.low_state",
)

REGIONS = (
    *("",) * 10,
    "with ampgraph.fp32_guard():",
    "with ampgraph.fp32_guard():",
    "with torch.no_grad():",
    "with torch.autocast('cpu', enabled=False):",
    "with torch.autocast('cpu', dtype=torch.bfloat16):",
    "with torch.autocast('cpu', dtype=torch.float16):",
    "with ampgraph.fp16_guard():",
)


class Step(NamedTuple):
    """Integers that become one line: which line, which operands, which numbers, in which region."""

    line: int
    a: int
    b: int
    n: int
    region: int


class Program(NamedTuple):
    """A module as text, with what it takes to run it."""

    source: str
    low: torch.dtype
    training: bool
    seed: int

    def build(self) -> nn.Module:
        """Returns the module with seeded parameters, in its mode."""
        torch.manual_seed(self.seed)
        return _execute(self.source)["Fuzzed"]().train(self.training)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Returns seeded inputs, one of every kind."""
        return _inputs(self.low, self.seed)

    def __repr__(self) -> str:
        return f"Program(low={self.low}, training={self.training}, seed={self.seed})\n{self.source}"


def _execute(source: str) -> dict[str, Any]:
    import linecache

    name = f"<fuzzed {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space: dict[str, Any] = {}
    exec(compile(source, name, "exec"), space)
    return space


def _inputs(low: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x, y, low_x, wide = (torch.randn(ROWS, FEATURES, generator=generator) for _ in range(4))
    integer = torch.randint(0, 4, (ROWS, FEATURES), generator=generator)
    return x, y, low_x.to(low), wide.double(), integer, integer > 1


def programs(steps: int = 12) -> st.SearchStrategy[Program]:
    """Programs of up to ``steps`` lines."""
    number = st.integers(0, 7)
    step = st.builds(
        Step, st.integers(0, len(LINES) - 1), number, number, number, st.integers(0, len(REGIONS) - 1)
    )
    return st.builds(
        write,
        st.lists(step, min_size=1, max_size=steps),
        st.sampled_from([torch.bfloat16, torch.float16]),
        st.booleans(),
        st.integers(0, 3),
    )


def write(steps: list[Step], low: torch.dtype, training: bool, seed: int) -> Program:
    """Writes a program, keeping the lines that run."""
    header = HEADER.format(low=low)
    writer = _Writer(header, low, training, seed)
    for step in steps:
        writer.add(step)
    return Program(header + "".join(writer.lines) + writer.result(), low, training, seed)


class _Writer:
    def __init__(self, header: str, low: torch.dtype, training: bool, seed: int) -> None:
        self.low, self.lines = low, []
        space = _execute(header + "        return x\n")
        torch.manual_seed(seed)
        self.space = {n: space[n] for n in ("torch", "nn", "F", "ampgraph")}
        self.space["self"] = space["Fuzzed"]().train(training)
        self.names: dict[str, torch.Tensor] = dict(zip(INPUTS, _inputs(low, seed), strict=True))
        self.made = 0

    def add(self, step: Step) -> None:
        """Appends the step's line if it runs."""
        name = f"v{self.made}"
        line = self._render(step, name)
        before = {n: t.detach().clone() for n, t in self.names.items()}
        space = {**self.space, **self.names}
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                exec(line, space)
            fresh = {n: space[n] for n in (name, f"{name}b", f"{name}i") if n in space}
            if not all(map(_is_tame, [*fresh.values(), *self.names.values()])):
                raise ValueError("out of range")
        except Exception:
            for n, t in self.names.items():
                with contextlib.suppress(Exception), torch.no_grad():
                    t.copy_(before[n])
            return
        self.names.update({n: t for n, t in fresh.items() if isinstance(t, torch.Tensor)})
        self.made += bool(fresh)
        region = REGIONS[step.region]
        self.lines.append(f"        {region}\n            {line}\n" if region else f"        {line}\n")

    def result(self) -> str:
        """Returns the ``return`` line: what was made last, and whatever nothing else is left of."""
        made = [n for n in self.names if n not in INPUTS] or ["x"]
        shown = made[-4:]
        return "        return {" + ", ".join(f"{n!r}: {n}" for n in shown) + "}\n"

    def _render(self, step: Step, name: str) -> str:
        a = self._pick(step.a, lambda t: t.is_floating_point() and t.dtype != torch.float64)
        like = self.names[a].shape
        return LINES[step.line].format(
            v=name,
            a=a,
            b=self._pick(step.b, lambda t: t.is_floating_point() and t.shape == like),
            o=self._pick(step.b, lambda t: True),
            i=self._pick(step.b, lambda t: t.dtype == torch.int64 and t.shape == like, "integer"),
            m=self._pick(step.b, lambda t: t.dtype == torch.bool and t.shape == like, "boolean"),
            n=step.n,
            k=step.n + 1,
            s=(0.5, 2.0, -1.0, 0.1, 3.0, 0.0, 1e-9, 0.25)[step.n],
            l=str(self.low),
        )

    def _pick(self, index: int, fits: Callable[[torch.Tensor], bool], default: str = "x") -> str:
        names = [n for n, t in self.names.items() if fits(t)]
        return names[-1 - index % len(names)] if names else default


def _is_tame(value: Any) -> bool:
    tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    floats = [t for t in tensors if t.is_floating_point()]
    return bool(tensors) and all(t.numel() and t.isfinite().all() and t.abs().max() < LIMIT for t in floats)
