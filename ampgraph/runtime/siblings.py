"""`Siblings`: blocks of one model that are alike use one capture.

A capture holds for another block if that block has the same modules, parameters of the same kind, and the
same values wherever forward read one. What cannot be compared counts as different, and the block is captured
by itself. A plan also depends on the sizes of weights: where these differ, the block is planned by itself.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from .._compat import storage_key
from ..capture.containers import alike, is_plain
from ..capture.reads import Reads
from ..marks import META_KEY
from ..origin import module_names
from ..passes.analysis.magnitudes import values_that_count
from ..passes.pipeline import rewrite
from ..proxy.bound_proxy import class_behind
from ..proxy.module_parts import HOOKS
from .captured_graph import CapturedGraph, Timing
from .family import Families, parts_of
from .graph_copies import copy_graph
from .options import Options
from .planned_values import PlannedValues
from .python_state import PythonState
from .signature import Signature

if TYPE_CHECKING:
    from ..training.scaler import LossScaler
    from .shadow_weights import ShadowWeights

_TENSORS = (torch.Tensor, nn.Parameter)


class _Same:
    """An object that equals only itself; it is kept, so that its address stays its own."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.held is self.held

    __hash__ = None  # type: ignore[assignment]


@dataclass
class Call:
    """A call of a block that has no graph for it.

    Attributes:
        source: The block.
        options: Its options.
        args: The positional arguments.
        kwargs: The keyword arguments.
        signature: Their signature.
        flags: The training mode of every module, and the kinds of its tensors.
    """

    source: nn.Module
    options: Options
    args: tuple
    kwargs: dict[str, Any]
    signature: Signature
    flags: Hashable

    def key(self) -> tuple[Hashable, ...]:
        """Returns what the call of a block that is alike has in common with this one."""
        options = self.options
        return self.flags, self.signature.kind, options.backend, options.mode, options.capture

    def state(self, reads: Reads, alike: PythonState) -> PythonState:
        """Returns the present values of what another block's forward read."""
        return PythonState(self.source, reads.of(self.source), self.args, self.kwargs, alike)


class Unplanned:
    """A captured graph before it is rewritten, and what its plan will depend on of its weights."""

    def __init__(self, graph_module: fx.GraphModule, options: Options) -> None:
        self.graph = copy_graph(graph_module.graph)
        self.meta = {name: value for name, value in graph_module.meta.items() if name != META_KEY}
        self.values = values_that_count(graph_module.graph, graph_module, options.low_dtype)


@dataclass(frozen=True)
class _Sibling:
    """A captured block, as it was at its capture."""

    key: tuple
    policy: Any
    structure: list
    reads: Reads
    seen: list
    captured: CapturedGraph
    unplanned: Unplanned
    families: Families


class Siblings:
    """The captures of blocks that were converted together. A copied or loaded model begins without any."""

    def __init__(self) -> None:
        self._found: list[_Sibling] = []
        self._told: set[str] = set()

    def has_told(self, reason: str) -> bool:
        """Whether a block has told the user a reason before; from now on one has."""
        if reason in self._told:
            return True
        self._told.add(reason)
        return False

    def __reduce__(self) -> tuple:
        return Siblings, ()

    def __deepcopy__(self, memo: dict) -> Siblings:
        return Siblings()

    def add(self, call: Call, captured: CapturedGraph, reads: Reads, unplanned: Unplanned) -> None:
        """Keeps a capture for other blocks, if it says all that it depends on."""
        structure = _structure(call.source)
        if structure is None or captured.state is None or not _is_complete(captured, reads):
            return
        families = Families()
        family = families.of(captured.graph_module, call.options)
        if family is None:
            return
        captured.family = family
        captured.parts = parts_of(call.source, family.planned, captured.constants)
        seen, policy = _seen(captured.state), call.options.policy
        self._found.append(
            _Sibling(call.key(), policy, structure, reads, seen, captured, unplanned, families)
        )

    def drop(self, graphs: Iterable[CapturedGraph]) -> None:
        """Forgets captures of a block whose parts were exchanged: they hold the old parts."""
        gone = set(map(id, graphs))
        self._found = [sibling for sibling in self._found if id(sibling.captured) not in gone]

    def find(
        self, call: Call, scaler: LossScaler, shadows: ShadowWeights | None, check_rules: bool
    ) -> CapturedGraph | None:
        """Returns the graph of a block that is like this one, over the parameters of this one."""
        start, key = time.perf_counter(), call.key()
        candidates = [s for s in self._found if s.key == key and s.policy == call.options.policy]
        candidates = [
            s for s in candidates if s.captured.sizes and s.captured.sizes.fit(call.signature.shapes)
        ]
        structure = _structure(call.source) if candidates else None
        if structure is None:
            return None
        for sibling in candidates:
            known = sibling.captured.state
            if sibling.structure != structure or known is None or not known.has_same_code():
                continue
            state = call.state(sibling.reads, known)
            if alike(_seen(state), sibling.seen):
                return _for_block(sibling, call, state, scaler, shadows, start, check_rules)
        return None


def _for_block(
    sibling: _Sibling,
    call: Call,
    state: PythonState,
    scaler: LossScaler,
    shadows: ShadowWeights | None,
    start: float,
    check_rules: bool,
) -> CapturedGraph:
    captured, unplanned, constants = sibling.captured, sibling.unplanned, dict(sibling.captured.constants)
    family, plan = captured.family, captured.plan
    assert family is not None
    parts = parts_of(call.source, family.planned, constants)
    found = time.perf_counter()
    if values_that_count(unplanned.graph, parts, plan.low_dtype) == unplanned.values:
        meta = captured.graph_module.meta
        graph: Any = functools.partial(_planned_over, parts, constants, family.planned, meta)
    else:
        graph = _over(parts, constants, unplanned.graph, unplanned.meta)
        modules = module_names(call.source)
        plan = rewrite(graph, call.options.policy, modules, check_rules=check_rules)
        family = sibling.families.of(graph, call.options)
    made = CapturedGraph(
        graph,
        plan,
        call.options,
        scaler,
        captured.sizes,
        call.signature.shapes,
        constants,
        Timing(found - start, time.perf_counter() - found),
        shadows,
        state,
        family=family,
        parts=parts,
    )
    made.values = PlannedValues(unplanned.graph, parts, plan.low_dtype)
    if captured.writes is not None:
        made.writes = captured.writes.of(parts, call.args, call.kwargs)
    return made


def _planned_over(
    parts: nn.Module, constants: dict[str, torch.Tensor], planned: fx.GraphModule, meta: dict
) -> fx.GraphModule:
    made = _over(parts, constants, planned.graph, meta)
    space = made.meta[META_KEY]
    made.meta[META_KEY] = dataclasses.replace(space, seconds=dict(space.seconds))
    return made


def _over(
    parts: nn.Module, constants: dict[str, torch.Tensor], graph: fx.Graph, meta: dict
) -> fx.GraphModule:
    """Returns a copy of a graph that reads the parameters of another block."""
    made = fx.GraphModule({}, fx.Graph())
    made._parameters, made._buffers, made._modules = parts._parameters, parts._buffers, parts._modules
    for name, value in constants.items():  # as they are now: `to` may have moved them
        object.__setattr__(made, name, value)
    made.meta.update(meta)
    made.graph = copy_graph(graph)
    return made


def _is_complete(captured: CapturedGraph, reads: Reads) -> bool:
    """Whether nothing is in a graph but what its block has by name, and what its code makes."""
    if captured.lost or reads.carried or reads.only_set or reads.lost_paths():
        return False
    if reads.asks.for_itself or reads.elsewhere or not reads.code.names.isdisjoint(("id", "hash")):
        return False
    graph_module = captured.graph_module
    if any(isinstance(m, fx.GraphModule) for m in graph_module._modules.values()):
        return False
    targets = [str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")]
    constants = {target for target in targets if target.startswith("_constant_")}
    return constants <= captured.constants.keys() and not any(
        constant.requires_grad for constant in captured.constants.values()
    )


def _seen(state: PythonState) -> list:
    """Returns what forward read; without the block's own forward, which the conversion has replaced."""
    (attributes, *inside), *others = state.seen()
    return [[pair for pair in attributes if pair[0] != "forward"], *inside, *others]


def _structure(source: nn.Module) -> list | None:
    """Describes a block without the values of its parameters; None if it has hooks or odd tensors."""
    modules: dict[int, int] = {}
    tensors: dict[int, int] = {}
    storages: dict[object, int] = {}
    found: list = []
    for path, module in source.named_modules(remove_duplicate=False):
        own = vars(module)
        is_patched = module is not source and "forward" in own
        if is_patched or any(getattr(module, name) for name in HOOKS):
            return None
        number = modules.setdefault(id(module), len(modules))
        found.append((path, number, class_behind(type(module)), module.training, frozenset(own)))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            description = _described(tensor, tensors, storages)
            if description is None:
                return None
            found.append((name, description))
    return found


def _described(
    tensor: torch.Tensor | None, tensors: dict[int, int], storages: dict[object, int]
) -> tuple | None:
    if tensor is None:
        return ()
    if type(tensor) not in _TENSORS or tensor.layout != torch.strided:
        return None
    number = tensors.setdefault(id(tensor), len(tensors))
    memory = storages.setdefault(storage_key(tensor), len(storages))
    marks = [(name, repr(v) if is_plain(v) else _Same(v)) for name, v in sorted(vars(tensor).items())]
    return (
        number,
        memory,
        type(tensor),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_inference(),
        marks,
    )
