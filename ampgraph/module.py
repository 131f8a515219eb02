"""`AmpModule`: the converted model, which stands wherever the source model stood."""

from __future__ import annotations

import copy
import inspect
import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from ._compat import (
    compiled_by_dynamo,
    in_transform,
    is_any_autocast_enabled,
    is_exporting,
    no_ambient_autocast,
)
from .capture import capture_program, unlift
from .errors import AmpGraphError, CaptureError, NoGraphError
from .gate import gate_of
from .guards import is_capturing, warn_about_uncaptured_guards
from .lowering import AotGraphs
from .plan import Plan
from .policy import Policy
from .ranks import sharded_error
from .rewrite import rewrite
from .scaler import LossScaler
from .shadow import ShadowWeights
from .signature import Signature, accepted_shapes, changed_dims, fits, signature_of
from .source_face import SourceFace
from .stored import StoredLow
from .variant import Timing, Variant

log = logging.getLogger("ampgraph")

MANY_CAPTURES = 8


@dataclass(frozen=True)
class Options:
    """How a converted model captures and runs, besides its policy."""

    policy: Policy
    low_dtype: torch.dtype
    backend: str | Callable = "eager"
    mode: str | None = None
    dynamic_shapes: Any = None
    just_in_time: bool = False


class AmpModule(SourceFace):
    """A converted model; made by `ampgraph.convert`.

    It shares the source's parameters, buffers and submodules (the same objects, the same state_dict
    keys), keeps its forward signature and attributes, runs the source's methods with itself in place of
    the source's forward (``amp.generate(...)``), and captures again, once each, for another
    training mode or other argument shapes and dtypes.

    Attributes:
        source: The model it was made from, unchanged.
        policy: The policy, with its dtype filled in.
        scaler: The loss scaler; does nothing where the policy asks for no loss scale.
    """

    def __init__(
        self,
        source: nn.Module,
        options: Options,
        stored_low: tuple[str, ...] = (),
        scaler: LossScaler | None = None,
    ):
        super().__init__(source)
        self.__dict__["options"] = options
        self.__dict__["_variants"] = {}
        self.__dict__["_current"] = None
        self.__dict__["_gate"] = gate_of(source)
        self.__dict__["scaler"] = scaler or LossScaler(
            options.policy.active_loss_scale(), source, torch.device("cpu")
        )
        self.scaler.move(device_of(source))
        has_shadows = options.policy.level in ("O2", "O3")
        self.__dict__["_shadows"] = ShadowWeights(source, options.low_dtype) if has_shadows else None
        self.__dict__["_stored"] = StoredLow(source, options.low_dtype, stored_low)
        self.__dict__["forward"] = self._make_forward()
        if options.just_in_time:
            self.__dict__["_compiled"] = self._compile_just_in_time()

    # -- what it is ------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        return self.options.policy

    @property
    def graph_module(self) -> fx.GraphModule:
        """The rewritten graph that ran or was captured last, of the current training mode if there is one."""
        return self._variant().graph_module

    @property
    def graph_modules(self) -> list[fx.GraphModule]:
        """All rewritten graphs so far; with graph breaks, one call runs several."""
        return [v.graph_module for variants in list(self._variants.values()) for v in variants]

    @property
    def training_graph(self) -> fx.GraphModule:
        """What runs with gradients: `graph_module` with shadow weights and loss-scaling boundary, if any."""
        return self._variant().training_graph

    @property
    def inference_graph(self) -> fx.GraphModule:
        """What runs without gradients: `graph_module` with shadow weights, if any."""
        return self._variant().inference_graph

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The forward after autograd, ATen ops only; on backend ``"aot_eager"``, after the first call."""
        return self._variant().aot.get("forward", self.options.backend)

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The backward, loss scaling in it; on backend ``"aot_eager"``, after the first call with gradients.

        ``node.meta["ampgraph"]["boundary"]`` tells its ``"scale"``, ``"unscale"`` and ``"finite check"``.
        """
        return self._variant().aot.get("backward", self.options.backend)

    @property
    def plan(self) -> Plan:
        """The plan of `graph_module`."""
        return self._variant().plan

    @property
    def timings(self) -> list[Timing]:
        """Seconds that capture and rewriting took, for each of `graph_modules`."""
        return [v.timing for variants in list(self._variants.values()) for v in variants]

    def _repr_svg_(self) -> str | None:
        """A small diagram for notebooks; None, which shows the text, where nothing can render one."""
        from .drawing import notebook_svg

        return notebook_svg(self)

    def _variant(self) -> Variant:
        if self._current is None:
            raise NoGraphError(
                f"{type(self.source).__name__} is not captured yet: call the converted model once, "
                "or pass example inputs to ampgraph.convert."
            )
        flags = self._flags()
        for (seen_flags, _), variants in reversed(list(self._variants.items())):
            if seen_flags == flags and self._current not in variants and self._current_flags != flags:
                return variants[-1]
        return self._current

    def extra_repr(self) -> str:
        return f"{type(self.source).__name__}, {self.policy!r}, backend={self.options.backend!r}"

    # -- running ---------------------------------------------------------------------------------

    def _make_forward(self) -> Callable:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(args, kwargs)

        forward.__doc__ = self.source.forward.__doc__
        forward.__signature__ = inspect.signature(self.source.forward)  # type: ignore[attr-defined]
        return forward

    def _run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if is_exporting() or torch.jit.is_tracing():
            return self._run_traced(args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self._call_apart(args, kwargs)
        if is_any_autocast_enabled():
            # Precision is the plan's alone: an autocast around the call must not cast once more.
            with no_ambient_autocast():
                return self._call(args, kwargs)
        return self._call(args, kwargs)

    def _run_traced(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs the graph as it was rewritten, for whoever traces it: no low copies, no loss scaling."""
        if "_compiled" not in self.__dict__:
            return self.variant_for(args, kwargs).graph_module(*args, **kwargs)
        if is_capturing():
            return self._call(args, kwargs)
        raise CaptureError(
            f"{type(self.source).__name__} was converted just in time, which torch.export leaves "
            "out; call ampgraph.export(model, args), or convert with example inputs."
        )

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if in_transform():
            variant = self._captured_variant(args, kwargs)
            with self._gate:
                return variant.run_in_transform(*args, **kwargs)
        self.scaler.note_wrapper()
        if "_compiled" in self.__dict__:
            if torch.is_grad_enabled():
                self.scaler.check_loop()
            try:
                with warn_about_uncaptured_guards():
                    result = self._compiled(*args, **kwargs)
                self._warn_if_not_captured()
                return result
            except RuntimeError as error:
                # Dynamo wraps what a backend raises.
                inner = getattr(error, "inner_exception", None)
                if isinstance(inner, AmpGraphError):
                    raise inner from None
                raise
        variant = self.variant_for(args, kwargs)
        try:
            with self._gate:
                return variant.run(*args, **kwargs)
        except RuntimeError as error:
            if (reason := sharded_error(self.source)) is None:
                raise
            raise reason from error

    # A torch.compile around a converted model must not take it apart: it has a backend of its own.
    _call_apart = torch.compiler.disable(_call)

    def _warn_if_not_captured(self) -> None:
        if self._variants or "_told" in self.__dict__:
            return
        self.__dict__["_told"] = True
        warnings.warn(
            f"{type(self.source).__name__} ran in its own dtypes: torch.compile captured no "
            "graph of it. Convert with example inputs to capture it.",
            stacklevel=5,
        )

    def variant_for(self, args: tuple, kwargs: dict[str, Any]) -> Variant:
        """Returns the variant that runs these arguments, captured now if there is none."""
        signature = signature_of(args, kwargs)
        flags = self._flags()
        if (variant := self._known_variant(signature, flags)) is not None:
            return variant
        with self._gate.alone():
            # Another thread may have captured the same while this one waited.
            known = self._known_variant(signature, flags)
            return known or self._capture(args, kwargs, signature, flags)

    def _known_variant(self, signature: Signature, flags: tuple[bool, ...]) -> Variant | None:
        for variant in self._variants.get((flags, signature.kind), ()):
            if fits(variant.shapes, signature.shapes):
                self.__dict__["_current"], self.__dict__["_current_flags"] = variant, flags
                return variant
        return None

    def _captured_variant(self, args: tuple, kwargs: dict[str, Any]) -> Variant:
        """Returns the variant for a call inside a transform of ``torch.func``: nothing is captured there."""
        name = type(self.source).__name__
        if self.options.just_in_time:
            raise CaptureError(
                f"{name}: torch.compile's front end captures nothing inside a transform of torch.func; "
                "pass example inputs to ampgraph.convert."
            )
        signature = signature_of(args, kwargs)
        if variant := self._known_variant(signature, self._flags()):
            return variant
        raise CaptureError(
            f"{name} is not captured for tensors of the sizes {list(signature.shapes)} and cannot be inside "
            "a transform of torch.func: call the converted model once, outside, with such tensors (under "
            "vmap those of one sample)."
        )

    def _flags(self) -> tuple[bool, ...]:
        if self._follow_structure() and not self.options.just_in_time:
            self._variants.clear()
        return tuple([m.training for m in self._structure.modules])

    def _capture(
        self, args: tuple, kwargs: dict[str, Any], signature: Signature, flags: tuple[bool, ...]
    ) -> Variant:
        variants = self._variants.get((flags, signature.kind), [])
        self.scaler.move(device_of(self.source))  # it may have been converted without values
        start = time.perf_counter()
        with self._stored.as_float32():
            program = self._export(args, kwargs, signature, variants)
            variant = self._rewrite(program, signature, time.perf_counter() - start)
        if self.policy.level == "O3":
            self._store_low(variant)
        variants.append(variant)
        self._variants[(flags, signature.kind)] = variants
        self.__dict__["_current"], self.__dict__["_current_flags"] = variant, flags
        if sum(len(v) for (seen, _), v in self._variants.items() if seen == flags) == MANY_CAPTURES:
            log.warning(
                "%s was captured %d times for different shapes or values; pass dynamic_shapes to "
                "ampgraph.convert, and as tensors the numbers that change.",
                type(self.source).__name__,
                MANY_CAPTURES,
            )
        return variant

    def _export(
        self, args: tuple, kwargs: dict, signature: Signature, variants: list[Variant]
    ) -> ExportedProgram:
        dynamic_shapes = self.options.dynamic_shapes
        if variants and dynamic_shapes is None:
            dims = changed_dims(signature.shapes, [v.seen for v in variants])
            try:
                shapes = _dynamic(args, kwargs, dims)
                dynamic = shapes.dynamic_shapes(self.source, args, kwargs)
                return capture_program(self.source, args, kwargs, dynamic)
            except (CaptureError, ValueError) as error:
                log.info("capturing with static shapes: %s", error)
        return capture_program(self.source, args, kwargs, dynamic_shapes if not variants else None)

    def _rewrite(self, program: ExportedProgram, signature: Signature, capture_seconds: float) -> Variant:
        start = time.perf_counter()
        graph_module, constants = unlift(program, self.source)
        modules = [name for name, _ in self.source.named_modules()]
        plan = rewrite(graph_module, self.policy, self.options.low_dtype, modules)
        shapes = accepted_shapes(graph_module)
        seconds = time.perf_counter() - start
        variant = Variant(graph_module, plan, self.options, self.scaler, shapes, signature.shapes, constants)
        variant.timing = Timing(capture_seconds, seconds)
        variant.shadows = self._shadows
        return variant

    def _store_low(self, variant: Variant) -> None:
        """Gives up the float32 memory of parameters; at the first capture, in evaluation mode, only."""
        freed = [] if self._variants or self.training else self._stored.add(variant.graph_module)
        variant.plan = self._stored.read(variant.graph_module, variant.plan)
        for parameter in freed:
            parameter.data = parameter.data.to(self.options.low_dtype)

    def _compile_just_in_time(self) -> Callable:
        from .backends import make_backend

        def record(graph_module: fx.GraphModule, plan: Plan, aot: AotGraphs, timing: Timing) -> None:
            self.scaler.move(device_of(self.source))  # it may have been converted without values
            type(graph_module).__name__ = type(self.source).__name__  # every graph module has its own class
            variant = Variant(graph_module, plan, self.options, self.scaler, timing=timing, aot=aot)
            self._variants.setdefault((self._flags(), "just in time"), []).append(variant)
            self.__dict__["_current"], self.__dict__["_current_flags"] = variant, self._flags()

        modules = tuple(name for name, _ in self.source.named_modules())
        backend = make_backend(self.options, modules, record, self.scaler, self._shadows)
        return compiled_by_dynamo(self.source, backend)

    # -- being a module --------------------------------------------------------------------------

    def _apply(self, fn: Callable, recurse: bool = True) -> AmpModule:
        self.source._apply(fn, recurse)
        self.scaler.move(device_of(self.source))
        for variants in self._variants.values():
            for variant in variants:
                variant.apply(fn)
        return self

    def __deepcopy__(self, memo: dict) -> AmpModule:
        return _rebuild(copy.deepcopy(self.source, memo), *self.__reduce__()[1][1:])

    def __reduce__(self) -> tuple:
        return _rebuild, (self.source, self.options, self.scaler.state_dict(), self.stored_low)

    @property
    def stored_low(self) -> tuple[str, ...]:
        """Paths of the parameters that level O3 has stored in the low dtype."""
        return self._stored.names(self.source)


def _rebuild(
    source: nn.Module, options: Options, scaler_state: dict[str, Any], stored_low: tuple[str, ...]
) -> AmpModule:
    amp = AmpModule(source, options, stored_low)
    amp.scaler.load_state_dict(scaler_state)
    return amp


def device_of(model: nn.Module, default: torch.device = torch.device("cpu")) -> torch.device:  # noqa: B008
    """Returns the device of the model's first parameter or buffer, or ``default`` if it has none."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), default)


def _dynamic(args: tuple, kwargs: dict[str, Any], dims: list[set[int]]) -> ShapesCollection:
    """Marks the given dimensions of each tensor as dynamic if the model allows."""
    leaves = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    shapes = ShapesCollection()
    for leaf, changed in zip(leaves, dims, strict=True):
        if changed:
            shapes[leaf] = dict.fromkeys(changed, Dim.AUTO)
    return shapes
