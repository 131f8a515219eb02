"""`AmpModule`: the converted model, a replacement for the source model."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from ._compat import (
    apart_from_dynamo,
    has_global_hooks,
    in_transform,
    is_exporting,
    is_plain_call,
    no_global_hooks,
    waited,
    write_code,
)
from .capture import advice_of, differences, is_capturing_here, loses_scale, refusal
from .errors import AheadOfTimeError, CaptureError, PassError, warn_user
from .guards import is_capturing
from .plan import Plan
from .policy.policy import Policy
from .proxy.all_parameters import all_parameters
from .proxy.module_parts import OF_EVERY_MODULE
from .proxy.module_proxy import without_swapping
from .proxy.wrappers import wraps
from .report.converted import Converted
from .runtime.callers_autocast import without_callers_autocast
from .runtime.captured_graph import CapturedGraph, Timing
from .runtime.compiled_source import CompiledSource
from .runtime.coverage import Coverage
from .runtime.device import CPU, device_of
from .runtime.graph_cache import GraphCache
from .runtime.low_storage import LowStorage
from .runtime.options import AUTO, JUST_IN_TIME, Options
from .runtime.own_error import own_error
from .runtime.run_as_part import run_as_part
from .runtime.siblings import Siblings
from .training.distributed import is_distributed, sharded_error
from .training.fsdp1 import MANAGED, refuse_fsdp1
from .training.scaler import LossScaler

# The attributes of a module for its hooks; a copy of a converted model has them.
_HOOKS = frozenset(n for n in OF_EVERY_MODULE if "_hook" in n and "state_dict" not in n)
# An error names at most this many parts that a capture lost.
NAMED = 3


class AmpModule(Converted):
    """A converted model; `ampgraph.convert` returns it.

    It shares the source's parameters, buffers and submodules (the same objects, the same state_dict
    keys) and keeps its forward signature and attributes. Methods of the source (``amp.generate(...)``)
    run with the converted forward. A new training mode and new argument shapes or dtypes are captured
    once each.

    Attributes of `AmpModule` hide the source's of the same name (``policy``, ``plan``, ``scaler``,
    ``options``). Use ``amp.source.policy`` for the source's; setting ``amp.policy`` raises an error.

    Attributes:
        source: The source model, unchanged.
        policy: The policy, with its dtype filled in.
        scaler: The loss scaler; does nothing if the policy has no loss scale.
    """

    _hides: ClassVar[tuple[str, ...]] = ("source", "options", "scaler")

    def __init__(
        self,
        source: nn.Module,
        options: Options,
        stored_low: tuple[str, ...] | None = None,
        scaler: LossScaler | None = None,
        siblings: Siblings | None = None,
    ):
        super().__init__(source)
        scaler = scaler or LossScaler(options.policy.active_loss_scale(), source, CPU)
        scaler.move(device_of(source))
        stored = LowStorage(source, options, stored_low)
        self.__dict__["options"] = options
        self.__dict__["scaler"] = scaler
        self.__dict__["_stored"] = stored
        self.__dict__["_graphs"] = GraphCache(source, options, scaler, stored, siblings)
        self.__dict__["forward"] = self.__dict__["_own_forward"] = self._make_forward()
        if options.just_in_time:
            self.__dict__["_compiled"] = self._just_in_time(options, self._graphs)

    # -- what it is ------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        return self.options.policy

    @property
    def graph_module(self) -> fx.GraphModule:
        """The rewritten graph that ran or was captured last, preferably in the current training mode."""
        return write_code(self._graphs.current.graph_module)

    @property
    def graph_modules(self) -> list[fx.GraphModule]:
        """All rewritten graphs that are kept; with graph breaks, one call runs several."""
        return [write_code(captured.graph_module) for captured in self._graphs]

    @property
    def training_graph(self) -> fx.GraphModule:
        """The graph for calls with gradients: `graph_module` with low copies of weights and loss scaling."""
        return write_code(self._graphs.current.training_graph)

    @property
    def inference_graph(self) -> fx.GraphModule:
        """The graph for calls without gradients: `graph_module` with low copies of weights."""
        return write_code(self._graphs.current.inference_graph)

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The forward after autograd, ATen ops only; on backend ``"aot_eager"``, after the first call."""
        return self._graphs.current.aot.get("forward", self.options.backend)

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The backward with loss scaling; on backend ``"aot_eager"``, after the first call with gradients.

        ``node.meta["ampgraph"]["boundary"]`` marks ``"scale"``, ``"unscale"`` and ``"finite check"``.
        """
        return self._graphs.current.aot.get("backward", self.options.backend)

    @property
    def coverage(self) -> Coverage | None:
        """The share of the source inside the graphs; None ahead of time, where a graph is always whole."""
        return self._graphs.watch.coverage() if self.options.just_in_time else None

    @property
    def plan(self) -> Plan:
        """The plan of `graph_module`."""
        return self._graphs.current.plan

    @property
    def timings(self) -> list[Timing]:
        """Seconds that capture and rewriting took, for each of `graph_modules`."""
        return [captured.timing for captured in self._graphs]

    def _repr_svg_(self) -> str | None:
        """A small diagram for notebooks; None shows the text if no renderer is installed."""
        from .drawing import notebook_svg

        return notebook_svg(self)

    def extra_repr(self) -> str:
        return f"{type(self.source).__name__}, {self.policy!r}, backend={self.options.backend!r}"

    @property
    def is_just_in_time(self) -> bool:
        return self.options.just_in_time

    # -- running ---------------------------------------------------------------------------------

    def _make_forward(self) -> Callable:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(args, kwargs)

        forward.__doc__ = self.source.forward.__doc__
        forward.__signature__ = inspect.signature(self.source.forward)  # type: ignore[attr-defined]
        return forward

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward" and any(wraps(value, self.__dict__[k]) for k in ("forward", "_own_forward")):
            if value is self.__dict__["_own_forward"]:
                self._put_forward_back()
            self.__dict__["forward"] = value  # Accelerate and others put a function around a model
            return
        if name == "forward":
            self.__dict__.setdefault("_forward_of_source", vars(self.source).get("forward"))
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name != "forward":
            super().__delattr__(name)
            return
        self._put_forward_back()
        self.__dict__["forward"] = self.__dict__["_own_forward"]

    def _put_forward_back(self) -> None:
        """Takes back what was set as the source's forward through this model."""
        if "_forward_of_source" not in self.__dict__:
            return
        vars(self.source).pop("forward", None)
        if (before := self.__dict__.pop("_forward_of_source")) is not None:
            self.source.forward = before

    def _run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not torch.compiler.is_dynamo_compiling() and is_plain_call() and not has_global_hooks():
            return self._call_outside(args, kwargs)
        if is_exporting() or torch.jit.is_tracing():
            return self._run_traced(args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self._call_apart(args, kwargs)
        if has_global_hooks():
            self._warn_about_global_hooks()
            with no_global_hooks():
                return without_callers_autocast(self._call, args, kwargs)
        # The plan alone decides dtypes: an autocast around the call must not cast again.
        return without_callers_autocast(self._call, args, kwargs)

    def _run_traced(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs the rewritten graph for a tracer, without low copies and loss scaling."""
        if is_capturing_here():
            return self._run_as_part(args, kwargs)
        if "_compiled" not in self.__dict__:
            if _has_symbolic_sizes(args, kwargs):
                raise CaptureError(
                    f"torch.export cannot keep the sizes of {type(self.source).__name__} dynamic, which is "
                    "converted; ampgraph.export(model, args, dynamic_shapes=...) can, of the model or of an "
                    "unconverted larger one."
                )
            if (captured := self._graphs.known(args, kwargs)) is None:
                raise self._inner_capture_error()
            captured.write_code()
            return captured.graph_module(*args, **kwargs)
        if is_capturing():
            return self._call(args, kwargs)
        raise CaptureError(
            f"{type(self.source).__name__} was converted just in time, which torch.export leaves "
            "out; call ampgraph.export(model, args), or convert with example inputs."
        )

    def _run_as_part(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs the source, or the rewritten graph, for the capture of a larger model."""
        differs = differences(self.policy)
        differs += ["parameters stored low"] if self.stored_low else []
        differs += ["an edited graph"] if any(captured.is_edited for captured in self._graphs) else []
        lost = ["an fp16_guard"] if self._graphs.guard_scope.has_guard() else []
        lost += ["a loss scale"] if loses_scale(self.policy) else []
        if not (differs or lost):
            return self.source(*args, **kwargs)
        is_kept = "_compiled" not in self.__dict__ and not _has_symbolic_sizes(args, kwargs)
        captured = self._graphs.known(args, kwargs) if is_kept else None
        if captured is None or lost:
            raise refusal(self.options.named(type(self.source).__name__), [*differs, *lost])
        return run_as_part(captured.graph_module, args, kwargs)

    def _inner_capture_error(self) -> CaptureError:
        return CaptureError(
            f"{type(self.source).__name__} is converted already and has no graph for these arguments, and "
            "nothing is captured inside another capture or trace. Call the whole model once with such "
            "arguments first, or convert the whole model from unconverted parts (blocks.restore() undoes "
            "convert_blocks, amp.source is the source of a part)."
        )

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not in_transform():
            return self._call_outside(args, kwargs)
        self._check_wrapper()
        captured = self._graphs.find_known(args, kwargs)
        if captured.lost:
            raise self._lost_error(captured)
        with self._graphs.lock:
            return captured.run_in_transform(*args, **kwargs)

    def _check_wrapper(self) -> None:
        if MANAGED in vars(self.source) and "_is_of_fsdp2" not in self.__dict__:
            refuse_fsdp1(self.source)
            self.__dict__["_is_of_fsdp2"] = True

    def _call_outside(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs outside of the transforms of ``torch.func``."""
        self._check_wrapper()
        if is_distributed():
            args, kwargs = waited(args, kwargs)
            self.scaler.note_wrapper()
        graphs = self._graphs  # before the look at the compiled form: another thread may fall back now
        if "_compiled" in self.__dict__:
            return self._compiled(args, kwargs)
        return self._call_captured(graphs, args, kwargs)

    def _call_captured(self, graphs: GraphCache, args: tuple, kwargs: dict[str, Any]) -> Any:
        try:
            found = graphs.find_for_run(args, kwargs)
            captured = found.captured
            if captured.lost and self._needs_gradients(args, kwargs):
                raise self._lost_error(captured)
        except AheadOfTimeError as error:
            if reason := sharded_error(self.source):  # before the source runs: it would gather
                raise reason from error
            if not error.is_known and (own := own_error(self.source, self._stored, args, kwargs)):
                raise own from None
            self._fall_back(error)
            return self._compiled(args, kwargs)
        except PassError as error:
            self._fall_back(error)
            return self._compiled(args, kwargs)
        except AttributeError as error:
            if (reason := sharded_error(self.source)) is None:
                raise
            raise reason from error
        try:
            with graphs.lock:
                return captured.run(args, kwargs, found.is_in_place)
        except (RuntimeError, AttributeError) as error:  # FSDP2 may miss its own state, too
            if (reason := sharded_error(self.source)) is None:
                raise
            raise reason from error

    def _capture_now(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Captures ahead of time for example inputs; falls back to just in time if allowed."""
        try:
            captured = self._graphs.find(args, kwargs)
            if captured.lost and self.options.capture != AUTO:
                warn_user(self.options.named(str(self._lost_error(captured))))
            elif captured.lost and self._needs_gradients(args, kwargs):
                raise self._lost_error(captured)
        except AheadOfTimeError as error:
            may_run = error.is_known or self.options.capture != AUTO
            if not may_run and own_error(self.source, self._stored, args, kwargs):
                raise  # nor can it be called
            self._fall_back(error)
        except PassError as error:
            self._fall_back(error)

    def _fall_back(self, error: AheadOfTimeError | PassError) -> None:
        """Captures just in time from now on.

        Raises:
            AmpGraphError: ``error``, if the fallback is off or level O3 has freed float32 memory.
        """
        with self._graphs.lock.alone():
            if "_compiled" in self.__dict__:
                return  # another thread came first
            if self.options.capture != AUTO or self.stored_low:
                raise error
            options = dataclasses.replace(self.options, capture=JUST_IN_TIME, dynamic_shapes=None)
            has_told = self._graphs.has_told
            graphs = GraphCache(self.source, options, self.scaler, self._stored)
            compiled = self._just_in_time(options, graphs)
            # At once: a call of another thread that finds the new graphs must find the compiled form, too.
            self.__dict__.update(_compiled=compiled, _graphs=graphs, options=options)
        reason, advice = str(error).splitlines()[0], advice_of(error)
        self._graphs.watch.is_told = True
        if self.options.block and has_told(reason):
            return
        ahead = f" {advice}, for a capture ahead of time." if advice else ""
        warn_user(
            f"{self.options.named(reason)}; it is captured just in time instead, at its first call.{ahead} "
            "ampgraph.explain(amp).coverage then lists the parts that are not captured."
            + (" Other blocks with this reason are not named." if self.options.block else "")
        )

    def _needs_gradients(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        if not torch.is_grad_enabled():
            return False
        tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        return any(t.requires_grad for t in (*all_parameters(self.source), *tensors))

    def _lost_error(self, captured: CapturedGraph) -> AheadOfTimeError:
        name = type(self.source).__name__
        lost = ", ".join(captured.lost[:NAMED]) + (" .." if len(captured.lost) > NAMED else "")
        return AheadOfTimeError(
            f"{name}: a capture ahead of time loses {lost}, and gradients would be wrong\n"
            'Run it under torch.no_grad(), or convert with capture="auto" or "just in time".'
        ).because(is_known=True)

    def _warn_about_global_hooks(self) -> None:
        if "_told_hooks" in self.__dict__:
            return
        self.__dict__["_told_hooks"] = True
        warn_user(
            f"{self.options.named(type(self.source).__name__)}: hooks for all modules of the process "
            "(torch.nn.modules.module.register_module_forward_hook and others) see a converted model as one "
            "module; on the modules inside they do not run. Register hooks on those modules instead."
        )

    # torch.compile around a converted model must not trace into it: the model already has a backend.
    _call_apart = apart_from_dynamo(_call)

    def _just_in_time(self, options: Options, graphs: GraphCache) -> CompiledSource:
        return CompiledSource(self.source, options, graphs, self.scaler, self._stored)

    # -- being a module --------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Same as for the source; a graph whose plan the new values do not fit is captured again."""
        result = super().load_state_dict(state_dict, *args, **kwargs)
        self._graphs.note_loaded()
        return result

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:  # a module around this one loads
        super()._load_from_state_dict(*args, **kwargs)
        self._graphs.note_loaded()

    def _apply(self, fn: Callable, recurse: bool = True) -> AmpModule:
        with without_swapping():
            self.source._apply(fn, recurse)
        self.scaler.move(device_of(self.source))
        for captured in self._graphs:
            captured.apply(fn)
        return self

    def __deepcopy__(self, memo: dict) -> AmpModule:
        _, (source, *rest), hooks = self.__reduce__()
        amp = memo[id(self)] = _rebuild(copy.deepcopy(source, memo), *rest)
        amp.__setstate__(copy.deepcopy(hooks, memo))
        return amp

    def _replicate_for_data_parallel(self) -> AmpModule:
        raise CaptureError(
            f"nn.DataParallel cannot replicate the converted {type(self.source).__name__}: a graph reads the "
            "parameters of one model. Use DistributedDataParallel."
        )

    def __reduce__(self) -> tuple:
        hooks = {name: value for name, value in vars(self).items() if name in _HOOKS and value}
        return _rebuild, (self.source, self.options, self.scaler.state_dict(), self._decided_low), hooks

    @property
    def stored_low(self) -> tuple[str, ...]:
        """Paths of the parameters that level O3 has stored in the low dtype."""
        return self._stored.names(self.source)

    @property
    def _decided_low(self) -> tuple[str, ...] | None:
        """`stored_low` for a copy; None before the first capture, which decides it."""
        return self.stored_low if self._stored.is_decided else None


def _rebuild(
    source: nn.Module, options: Options, scaler_state: dict[str, Any], stored_low: tuple[str, ...] | None
) -> AmpModule:
    amp = AmpModule(source, options, stored_low)
    amp.scaler.load_state_dict(scaler_state)
    return amp


def _has_symbolic_sizes(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a trace keeps sizes of tensors among the arguments dynamic."""
    found = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
    return any(isinstance(size, torch.SymInt) for x in found for size in x.shape)
