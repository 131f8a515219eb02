"""`export` and the conversion of an ``ExportedProgram``: the program contains the casts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature

from ._compat import SET_GRAD_ENABLED, compiled_calls, wrap_grad_modes
from .capture import LOST_KEY, Reads, capture_program, keep_before_assignment_in, planned_by
from .errors import CaptureError, PolicyError, warn_user
from .marks import META_KEY, InputMark, drop_input_mark, set_input_mark
from .module import AmpModule
from .passes import ExplicitCasts, ReadStored, run_passes
from .passes.analysis.ranges import peak_of
from .passes.insert_casts import is_inserted
from .passes.pipeline import rewrite
from .passes.read_shadows import casts_of
from .policy.policy import Policy
from .runtime.capture_lock import lock_of
from .runtime.device import device_of, device_of_tensors
from .runtime.graph_copies import keep_names
from .runtime.options import check_keywords


def export(
    model: nn.Module,
    args: tuple | torch.Tensor,
    kwargs: dict[str, Any] | None = None,
    *,
    policy: Policy | str | PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    dynamic_shapes: Any = None,
    explicit_casts: bool = False,
) -> ExportedProgram:
    """Exports a model with its casts in the graph.

    At level O3 in evaluation mode, the program stores each parameter low that no op reads in float32.

    Args:
        model: The source model, or a converted model, which supplies source and policy. It does not change.
        args: Example positional arguments, or one tensor.
        kwargs: Example keyword arguments.
        policy: As for `ampgraph.convert`.
        dtype: The low dtype or its name, if the policy does not set one.
        dynamic_shapes: As for ``torch.export.export``.
        explicit_casts: Whether to write conversions inside ATen's kernels as casts (a sum of both dtypes, a
            softmax in float32 of low values, a norm with float32 weights). For runtimes such as ONNX, whose
            operators take operands of one dtype.

    Raises:
        CaptureError: The model cannot be captured.
        PolicyError: The policy or its rules do not fit this model, or its parameters are stored low.
    """
    if not isinstance(model, (nn.Module, ExportedProgram)):
        raise CaptureError(f"export takes an nn.Module, or what ampgraph.convert returns; got {model!r}.")
    if isinstance(args, torch.Tensor):
        args = (args,)
    if isinstance(model, AmpModule):
        policy = model.policy if policy is None else policy
        model = _source_of(model)
    if isinstance(model, ExportedProgram):
        raise CaptureError(
            "an ExportedProgram is exported already: ampgraph.convert(program, policy=...) inserts casts."
        )
    check_keywords(kwargs, "export")
    chosen = Policy.of(policy, dtype)
    reads = Reads(model)
    whole = chosen.resolved(device_of(model))
    with lock_of(model).alone(), compiled_calls.kept_out(), planned_by(whole):
        program = capture_program(model, args, kwargs, dynamic_shapes, reads)
    keep_before_assignment_in(program, model, reads.assigned_buffers())
    if set_by_forward := reads.set_by_forward():
        warn_user(
            f"{type(model).__name__}: forward sets {', '.join(set_by_forward)}. An exported program sets no "
            "attributes and keeps the values from the capture: return such values."
        )
    if lost := program.graph_module.meta[LOST_KEY]:
        warn_user(
            f"{type(model).__name__}: the exported program contains only the forward, without "
            f"{', '.join(lost)}."
        )
    stores_low = chosen.level == "O3" and not model.training
    return convert_program(program, chosen, explicit_casts, stores_low)


def _source_of(amp: AmpModule) -> nn.Module:
    if amp.stored_low:
        raise PolicyError(
            f"level O3 has stored {len(amp.stored_low)} parameters of {type(amp.source).__name__} in "
            f"{amp.policy.dtype}; export the float32 model before you convert it."
        )
    return amp.source


def convert_program(
    program: ExportedProgram, policy: Policy, explicit_casts: bool = False, stores_low: bool = False
) -> ExportedProgram:
    """Returns a new program with casts inserted; the given program does not change.

    Args:
        program: The program.
        policy: The policy.
        explicit_casts: As for `export`.
        stores_low: Whether the new program stores each parameter low that no op reads in float32.
    """
    policy = policy.resolved(device_of_tensors(dict(program.state_dict)))
    graph_module = copy.deepcopy(program.graph_module)
    keep_names(program.graph, graph_module.graph)
    signature = copy.deepcopy(program.graph_signature)
    _mark_parameters(graph_module, program)
    modules = sorted({p for e in program.module_call_graph for p in [e.fqn]})
    rewrite(graph_module, policy, modules)
    state = dict(program.state_dict)
    if stores_low:
        state |= _store_low(graph_module, signature.inputs_to_parameters, state, policy.low_dtype)
    for part in [m for m in graph_module.modules() if isinstance(m, torch.fx.GraphModule)]:
        if explicit_casts:
            run_passes(part, (ExplicitCasts(policy.low_dtype),))
        _fix_grad_modes(part.graph)
    _make_savable(graph_module)
    graph_module = _with_grad_modes(graph_module)
    _name_outputs(signature, graph_module.graph)
    return ExportedProgram(
        root=graph_module,
        graph=graph_module.graph,
        graph_signature=signature,
        state_dict=state,
        range_constraints=program.range_constraints,
        module_call_graph=copy.deepcopy(program.module_call_graph),
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=[program.verifier],
    )


def _make_savable(graph_module: torch.fx.GraphModule) -> None:
    """Turns marks into strings, the only metadata that a saved program keeps."""
    for node in graph_module.graph.nodes:
        drop_input_mark(node)
        if is_inserted(node):
            node.meta["custom"] = {**node.meta.get("custom", {}), META_KEY: node.meta[META_KEY]["reason"]}
    graph_module.meta.pop(META_KEY, None)


def _with_grad_modes(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Wraps regions of a grad mode as export does, and keeps the names of the inputs."""
    names = [node.name for node in graph_module.graph.find_nodes(op="placeholder")]
    wrapped = wrap_grad_modes(graph_module)
    for name, node in zip(names, wrapped.graph.find_nodes(op="placeholder"), strict=True):
        node.name = name
    return wrapped


def _name_outputs(signature: ExportGraphSignature, graph: torch.fx.Graph) -> None:
    """Corrects the names of outputs that a cast has replaced."""
    outputs: Any = graph.output_node().args[0]
    for spec, node in zip(signature.output_specs, outputs, strict=True):
        if hasattr(node, "name") and getattr(spec.arg, "name", None) not in (None, node.name):
            spec.arg.name = node.name


def _store_low(
    graph_module: torch.fx.GraphModule,
    parameters: Mapping[str, str],
    state: Mapping[str, torch.Tensor],
    low_dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Stores each parameter low that is cast at every use; returns these low tensors by name.

    Args:
        graph_module: The rewritten graph.
        parameters: Names of parameters by the name of their placeholder.
        state: Tensors by the parameters' names; tied parameters are one tensor.
        low_dtype: The low dtype.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    reads = [(n, state[parameters[n.name]]) for n in placeholders if n.name in parameters]
    wide = {id(p) for n, p in reads if p.dtype != torch.float32 or len(casts_of(n)) != len(n.users)}
    narrow = {id(p): nn.Parameter(p.to(low_dtype), p.requires_grad) for _, p in reads if id(p) not in wide}
    run_passes(graph_module, (ReadStored(tuple(n.name for n, p in reads if id(p) in narrow), low_dtype),))
    return {name: narrow[id(value)] for name, value in state.items() if id(value) in narrow}


def _fix_grad_modes(graph: torch.fx.Graph) -> None:
    """Writes the grad mode of each region as a constant, and drops empty regions.

    A program may not read the mode at run time, and torch cannot load an empty region.
    """
    for node in graph.find_nodes(op="call_function", target=torch.is_grad_enabled):
        for user in list(node.users):
            user.args = (node.meta["val"],)
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=SET_GRAD_ENABLED):
        if node.next.target is SET_GRAD_ENABLED:
            graph.erase_node(node)


def _mark_parameters(graph_module: torch.fx.GraphModule, program: ExportedProgram) -> None:
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names.update(signature.inputs_to_lifted_tensor_constants)
    for node in graph_module.graph.find_nodes(op="placeholder"):
        if node.name in names:
            name = names[node.name]
            peak = peak_of(program.state_dict.get(name, program.constants.get(name)))
            is_table = node.name not in signature.inputs_to_parameters
            set_input_mark(node, InputMark(True, is_table, peak))
