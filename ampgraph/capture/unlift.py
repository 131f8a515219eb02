"""From an exported program to a graph module that reads the live source model.

An exported program takes parameters, buffers and constants as inputs. Here they become ``get_attr``
nodes that resolve in the source model itself: submodules are the source's own objects and the root's
parameter and buffer dicts are shared, so ``source.to(...)``, ``load_state_dict`` or a replaced buffer
need no update. The graph has none of the run-time guards of ``ExportedProgram.module()``.

If parts of a model have names that a graph module uses (``graph``, ``code``, ``meta``), the graph module
holds the model as one submodule, and every path starts with its name.

``torch.export`` takes parameters of modules that are no parts of the model (a teacher in a plain list) for
constants, without their later ``data``. Here they resolve in these modules.
"""

from __future__ import annotations

import keyword
from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind

from .._compat import set_calling_convention, storage_key
from ..errors import CaptureError

# The submodule that is the whole model, where its parts have names that a graph module uses.
WHOLE = "_source_model"
# Attributes that ampgraph and torch.fx set later on a graph module.
_SET_LATER = {"_amp", "_amp_slots", "_shadows", "_in_spec", "_out_spec", "_lineno_map"}
_SET_LATER |= {"_prologue_start", "shape_env"}
_ATTRIBUTES = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR, InputKind.CUSTOM_OBJ)


class _Owner(NamedTuple):
    """A module outside of the model, the attribute of the graph module that holds it, and a parameter."""

    module: nn.Module
    attribute: str
    parameter: str


def unlift(
    program: ExportedProgram,
    source: nn.Module,
    elsewhere: Iterable[nn.Module] = (),
    real: Mapping[int, torch.Tensor] = MappingProxyType({}),
) -> tuple[fx.GraphModule, dict[str, torch.Tensor]]:
    """Turns a freshly captured program into a graph module over ``source``; consumes the program.

    Args:
        program: The result of ``torch.export.export`` for ``source``.
        source: The live model.
        elsewhere: Modules that forward used and that are no parts of ``source``.
        real: The tensors outside of ``source`` that functions of torch got, by ``id``.

    Returns:
        The graph module, and the constants (by attribute name) that exist only in the capture.

    Raises:
        CaptureError: The program is not in training IR (it was decomposed).
    """
    if any(s.kind is OutputKind.BUFFER_MUTATION for s in program.graph_signature.output_specs):
        raise CaptureError(
            "the program is functionalized; pass the program as torch.export.export returned it."
        )
    graph_module = program.graph_module
    whole = _name_of_whole(graph_module, source)
    places = _Places(source, whole, elsewhere, real)
    _read_attributes(graph_module.graph, program, places)
    hold(graph_module, source, whole)
    for name, value in places.constants.items():
        object.__setattr__(graph_module, name, value)
    set_calling_convention(graph_module, program)
    graph_module.recompile()
    return graph_module, {n: v for n, v in places.constants.items() if isinstance(v, torch.Tensor)}


def _name_of_whole(graph_module: fx.GraphModule, source: nn.Module) -> str:
    """Returns the name of a submodule for ``source``, or ``""`` if the graph module can share its parts."""
    names = {*source._parameters, *source._buffers, *source._modules}
    taken = {*vars(graph_module), *dir(fx.GraphModule), *_SET_LATER}
    is_free = taken.isdisjoint(names) and not any(name.startswith("_constant_") for name in names)
    return "" if is_free else WHOLE


def hold(holder: nn.Module, source: nn.Module, whole: str) -> None:
    """Makes a module share the live parts of ``source``, so it uses replaced parts."""
    children = {n: m for n, m in holder._modules.items() if isinstance(m, fx.GraphModule)}
    if whole:
        holder._parameters, holder._buffers = {}, {}
        holder._modules = {whole: source, **children}
        return
    holder._parameters = source._parameters
    holder._buffers = source._buffers
    holder._modules = {**source._modules, **children} if children else source._modules


def _owners(modules: Iterable[nn.Module], real: Mapping[int, torch.Tensor]) -> dict[int, _Owner]:
    """Returns the owners of the parameters that functions got, by the ``id`` of the parameters."""
    found: dict[int, _Owner] = {}
    for number, module in enumerate(modules):
        for name, parameter in module._parameters.items():
            if id(parameter) in real and _is_code(name):
                found[id(parameter)] = _Owner(module, f"_constant_module_{number}", name)
    return found


def _memory(value: object) -> Hashable:
    """Returns what tensors have in common that are alike and share memory; None for other values."""
    if not isinstance(value, torch.Tensor) or (key := storage_key(value)) is None:
        return None
    return key, value.storage_offset(), tuple(value.shape), value.stride()


class _Places:
    """The attributes of a graph module that hold the inputs of an exported program.

    Args:
        source: The live model.
        whole: The name of the submodule that is ``source``, or ``""``.
        elsewhere: Modules that are no parts of ``source``.
        real: The tensors outside of ``source`` that functions of torch got, by ``id``.

    Attributes:
        constants: What the graph module holds beside the parts of ``source``, by name.
    """

    def __init__(
        self, source: nn.Module, whole: str, elsewhere: Iterable[nn.Module], real: Mapping[int, torch.Tensor]
    ) -> None:
        self._source, self._whole, self._real = source, whole, real
        self._owners = _owners(elsewhere, real)
        self._parameters = {_memory(p): p for p in real.values() if isinstance(p, nn.Parameter)}
        self._parameters.pop(None, None)
        self.constants: dict[str, object] = {}

    def of(self, target: str, value: object) -> str:
        """Returns the path of an input, which has this name in the program."""
        # A plain attribute of the root (``self.table = torch.arange(8)``) is in none of the shared dicts.
        if _get(self._source, target) is value and target not in self._source.__dict__:
            if not _is_code(target):
                return self._alias(target, value)
            return f"{self._whole}.{target}" if self._whole else target
        if id(value) not in self._real:  # torch.export has made it, of a parameter
            value = self._parameters.get(_memory(value), value)
        owner = self._owners.get(id(value))
        if owner is not None:
            self.constants[owner.attribute] = owner.module
            return f"{owner.attribute}.{owner.parameter}"
        name = "_constant_" + target.replace(".", "_")
        return self._stored(name if _is_code(name) else self._next_name(), value)

    def _alias(self, path: str, value: object) -> str:
        """Stores the owner of a parameter (or the parameter) under a plain name; returns the path."""
        owner, _, leaf = path.rpartition(".")
        if owner and _is_code(leaf):
            return f"{self._stored(self._next_name(), self._source.get_submodule(owner))}.{leaf}"
        return self._stored(self._next_name(), value)

    def _next_name(self) -> str:
        return f"_constant__{len(self.constants)}"

    def _stored(self, name: str, value: object) -> str:
        self.constants[name] = value
        return name


def _read_attributes(graph: fx.Graph, program: ExportedProgram, places: _Places) -> None:
    """Replaces the inputs that are parameters, buffers and constants by reads of attributes."""
    placeholders = graph.find_nodes(op="placeholder")
    taken = {node.name for node in placeholders}
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind not in _ATTRIBUTES:
            continue
        path = places.of(str(spec.target), _value(program, spec))
        with graph.inserting_before(node):
            name = _plain_name(node.name)
            name = node.name if name in taken else name  # an argument may have the name of a buffer
            attribute = graph.create_node("get_attr", path, name=name)
        attribute.meta = node.meta
        node.replace_all_uses_with(attribute)
        graph.erase_node(node)


def _is_code(path: str) -> bool:
    """Whether torch.fx can write the path into its code; torch.fx does not escape it."""
    quotes = set(path) & {'"', "\\"}
    return path.isprintable() and not quotes and not any(map(keyword.iskeyword, path.split(".")))


def _value(program: ExportedProgram, spec: InputSpec) -> object:
    if spec.target in program.state_dict:
        return program.state_dict[spec.target]
    return program.constants[spec.target]  # type: ignore[index]


def _plain_name(name: str) -> str:
    """Drops the kind that export puts before a lifted input's name: ``p_fc_weight`` is ``fc_weight``."""
    prefix, _, rest = name.partition("_")
    return rest if prefix in ("p", "b", "c", "obj") and rest else name


def _get(root: nn.Module, path: str) -> object:
    value: object = root
    for part in path.split("."):
        value = getattr(value, part, None)
    return value
