"""Private APIs of torch.compile and AOTAutograd. Tried on torch 2.11, 2.13, 2.14 and 2.15.

`compiled_by_dynamo` as it is now: on 2.11, 2.13 and 2.14; `keep_dynamo_out` and `never_compiled`: on 2.13
alone. Where a function names its versions, these hold.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.nn import Module, RNNBase
from torch.utils.hooks import RemovableHandle

from .guarded_calls import compiling_for, guards, guards_of_whole
from .modes import active_data_parallel, is_compiling, is_traced
from .quiet import ignore_warnings_of_dynamo
from .version import VERSION

# Past the limit Dynamo silently runs code unconverted, in float32. Layers behind graph breaks share their
# code, and each generated class (parametrizations create one) counts; torch's default is 8.
RECOMPILE_LIMIT = 64
_F = TypeVar("_F", bound=Callable)


def compiled_by_dynamo(
    model: Module, backend: str | Callable, keeps_whole: bool = False, **given: Any
) -> Callable:
    """Returns ``torch.compile(model, backend=backend, **given)``, isolated from other compiled models.

    Dynamo stores compiled code with the code of ``forward``, which all models of one class share, and stops
    after eight entries. torch 2.13 has an option against this. For 2.11 ampgraph compiles a separate
    function, which helps up to the first graph break.

    torch 2.11 also omits the guards on parameters if a module's dict did not change, and ``requires_grad_()``
    does not change it. A model that ran frozen once then never gets gradients. torch 2.13 detects the change.

    Dynamo keeps each backend for good, and the results of a backend as long as the model lives. So Dynamo
    gets functions with weak references. The returned callable holds the backend and its results.

    Inside ``DistributedDataParallel`` Dynamo splits graphs by its buckets, so that compiled backwards return
    gradients early; with ``keeps_whole`` it does not.
    """
    ignore_warnings_of_dynamo()
    held = _Held(backend) if isinstance(backend, FunctionType) else None
    own = held.for_dynamo() if held else None
    compiled = _compiled_for(model, backend if own is None else own, keeps_whole, **given)
    if own is not None and VERSION < (2, 13):
        compiled = _counting_for(own, compiled)
    compiled.held = held  # type: ignore[attr-defined]  # the only strong reference to it
    return compiled


def _counting_for(backend: Callable, compiled: Callable) -> Callable:
    """Returns a function of which Dynamo counts what it compiles for one backend; see `compiling_for`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return compiled(*args, **kwargs)
        with compiling_for(backend):
            return compiled(*args, **kwargs)

    return call


class _Held:
    """A backend, and what it returned.

    Args:
        backend: The backend.
    """

    def __init__(self, backend: Callable) -> None:
        self._backend = backend
        self._compiled: list[Callable] = []

    def for_dynamo(self) -> Callable:
        """Returns the backend as a function that holds neither it nor its results."""
        this = weakref.ref(self)

        def backend(graph_module: GraphModule, inputs: list, **options: Any) -> Callable:
            held = _alive(this)
            held._compiled.append(held._backend(graph_module, inputs, **options))
            number = len(held._compiled) - 1
            return lambda *args: _alive(this)._compiled[number](*args)

        return backend


def _alive(reference: weakref.ref[_Held]) -> _Held:
    held = reference()
    assert held is not None  # what holds it runs
    return held


def _compiled_for(model: Module, backend: str | Callable, keeps_whole: bool, **given: Any) -> Callable:
    if any(isinstance(module, RNNBase) for module in model.modules()):
        if VERSION < (2, 13):  # Dynamo traces the op there, and no fake tensor can run it
            torch._dynamo.disallow_in_graph(torch._VF._pad_packed_sequence)
        # Dynamo skips them by default.
        return torch._dynamo.config.patch(allow_rnn=True)(
            _compiled_apart(model, backend, keeps_whole, **given)
        )
    return _compiled_apart(model, backend, keeps_whole, **given)


def with_own_code(cls: type[Module]) -> type[Module]:
    """Returns a class like ``cls`` whose ``forward`` is another code object of another name.

    Dynamo counts what it compiled with each code object, for all models, and refuses more than 256 graphs of
    ``fullgraph``. By file, line and name it remembers the sizes of arguments, and makes those symbolic that
    were others before, in another model for example (tried on torch 2.13 and 2.14).
    """
    given = cls.forward
    code = given.__code__.replace(co_name=f"forward_{next(_numbers)}")
    own = FunctionType(code, given.__globals__, "forward", given.__defaults__)
    return type(cls.__name__, (cls,), {"forward": own, "__module__": cls.__module__})


_numbers = itertools.count()


def _compiled_apart(model: Module, backend: str | Callable, keeps_whole: bool, **given: Any) -> Callable:
    if VERSION >= (2, 13):
        apart = {"isolate_recompiles": True, "recompile_limit": RECOMPILE_LIMIT}
        if _has_hidden_forward(model):
            return _guarding(keeps_whole, _compiled_method(model, backend, **apart, **given))
        before = set(model.__dict__)
        compiled = torch.compile(model, backend=backend, **apart, **given)  # type: ignore[call-overload]
        # Attributes set on the result are stored on the model: torch's mark, Lightning's arguments (with the
        # backend, which cannot be pickled).
        for name in set(model.__dict__) - before:
            del model.__dict__[name]
        return _guarding(keeps_whole, compiled)
    # In torch 2.11 each call with fullgraph sets a switch of the process and sets it back; calls from several
    # threads leave it set, and then Dynamo skips code everywhere.
    given["fullgraph"] = False
    if _has_hidden_forward(model):
        return _guarding(keeps_whole, _compiled_method(model, backend, **given))
    own = FunctionType(_call_module.__code__.replace(), globals())
    return _guarding(keeps_whole, partial(torch.compile(own, backend=backend, **given), model))


def _guarding(keeps_whole: bool, compiled: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # `is_compiling` is true in every thread
            return compiled(*args, **kwargs)
        with guards_of_whole if keeps_whole and active_data_parallel() else guards:
            return compiled(*args, **kwargs)

    return call


def _has_hidden_forward(model: Module) -> bool:
    """Whether a property of the class hides the ``forward`` in the model's dict.

    Dynamo guards on the ``forward`` in the dict, but a call of the model uses the property.
    """
    own = model.forward
    return (
        vars(model).get("forward", own) is not own and isinstance(own, MethodType) and own.__self__ is model
    )


def _compiled_method(model: Module, backend: str | Callable, **given: Any) -> Callable:
    """Compiles the model's forward as a function of the model, so that Dynamo does not call the model."""
    own = FunctionType(_call_method.__code__.replace(), globals())
    compiled = torch.compile(own, backend=backend, **given)

    def call(*args: Any, **kwargs: Any) -> Any:
        forward: Any = model.forward
        return compiled(model, forward.__func__, *args, **kwargs)

    return call


def _call_method(self: Module, function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    return function(self, *args, **kwargs)


def _call_module(self: Module, /, *args: Any, **kwargs: Any) -> Any:
    return self(*args, **kwargs)


def hooks_registered() -> int:
    """Returns a number that grows whenever a hook is registered, on any module or tensor of the process."""
    return RemovableHandle.next_id


# Dynamo's names for breaks that leave no op out, in torch 2.11, 2.13 and 2.14.
_NO_OPS = (
    "generic_jump",
    "Data-dependent branching",
    "Data dependent operator",
    "Dynamic shape operator",
    "Tensor.item()",
    "_local_scalar_dense",
    "torch._dynamo.graph_break()",
    "`print`",
    "DDPOptimizer",
)


class BreakLog:
    """Graph breaks of Dynamo in this process, including those of other threads."""

    def __init__(self) -> None:
        from torch._dynamo.output_graph import graph_break_reasons
        from torch._dynamo.utils import get_compilation_metrics

        self._reasons, self._metrics = graph_break_reasons, get_compilation_metrics

    def mark(self) -> tuple[int, float]:
        """Returns the number of graph breaks so far, and the time."""
        return len(self._reasons), time.time()

    def since(self, count: int, start: float) -> list[tuple[str, str, bool]]:
        """Returns ``file:line``, reason and whether ops may be left out, for each break after a mark."""
        found = []
        for broken in self._reasons[count:]:
            line = broken.user_stack[-1] if broken.user_stack else None
            where = f"{line.filename}:{line.lineno}" if line else ""
            runs_ops = not any(words in broken.reason for words in _NO_OPS)
            found.append((where, _first_line(broken.reason), runs_ops))
        for frame in self._metrics():
            if frame.fail_type is None or (frame.start_time_us or 0) < start * 1e6:
                continue
            # A frame that cannot be broken is not captured; the functions that it calls are.
            where = f"{frame.fail_user_frame_filename}:{frame.fail_user_frame_lineno}"
            found.append((where, _first_line(frame.fail_reason or frame.fail_type), True))
        return found


def _first_line(reason: str) -> str:
    line = reason.strip().partition("\n")[0]
    # torch 2.11 tells a branch twice, by both names.
    is_branch = line.startswith(("generic_jump", "Data-dependent branching"))
    return "branch on a tensor's value" if is_branch else line


def keep_dynamo_out(function: Callable) -> None:
    """Lets Dynamo inline ``function`` into a capture, but never compile it as a separate frame."""
    _skip(function, _FrameAction.DEFAULT)


def never_compiled(function: _F) -> _F:
    """Keeps Dynamo out of a function that torch calls, and of all that it calls; it may still inline it.

    Autograd calls backward functions and hooks in the thread of ``torch.autograd.grad``. If a model that
    Dynamo captures calls that in its forward, Dynamo would compile them as if they were parts of the model.
    ``torch.compile`` around a training step would do so too, also with hooks of optimizers.
    """
    _skip(function, _FrameAction.SKIP)
    return function


def _skip(function: Callable, calls: _FrameAction) -> None:
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, calls))


for _function in (is_compiling, is_traced):  # compiled as frames of their own they would say yes
    keep_dynamo_out(_function)


def apart_from_dynamo(function: Callable) -> Callable:
    """Returns ``function`` so that Dynamo runs it without compiling it.

    ``torch.compiler.disable`` does the same but imports Dynamo at once; this imports it at the first call.
    """
    wrapped: Callable = torch._disable_dynamo(function)
    return wrapped


def runs_while_traced(function: _F) -> _F:
    """Lets Dynamo call a method of no arguments while it traces the caller, and take the result for constant.

    ``torch.compiler.assume_constant_result`` does the same but imports Dynamo at once. Tried on torch 2.13.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def mark_as_input(node: Node, value: torch.Tensor, mode: FakeTensorMode) -> None:
    """Makes ``node`` an input of a graph that Dynamo captured, with a static shape, for AOTAutograd."""
    from torch._dynamo.source import LocalSource

    source = LocalSource(str(node.target))
    # Symbols would need a source in the caller's frame, where Dynamo checks its guards.
    fake = mode.from_tensor(value, static_shapes=True, source=source)
    node.meta.update({"val": fake, "_dynamo_source": source})


def aot_eager(keep: Callable[[str, GraphModule], None]) -> Callable:
    """Returns torch.compile's backend ``"aot_eager"``, which passes its graphs to ``keep``.

    Their kinds are ``"forward"`` and ``"backward"``, or ``"inference"`` if nothing needs a gradient.
    """
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    def compiler(kind: str) -> Callable:
        def compile_graph(graph_module: GraphModule, inputs: list) -> Callable:
            keep(kind, graph_module)
            return make_boxed_func(graph_module.forward)

        return compile_graph

    return aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )


def find_backend(name: str) -> Callable:
    """Returns the function behind the name of one of torch.compile's backends."""
    found: Callable = torch._dynamo.lookup_backend(name)
    return found


def known_backends() -> list[str]:
    """Returns the names of torch.compile's backends, those for debugging included."""
    return list(torch.compiler.list_backends(exclude_tags=()))


def inductor_modes() -> dict[str, dict[str, Any]]:
    """Returns inductor's options by the name of the mode that sets them."""
    modes: dict[str, dict[str, Any]] = torch._inductor.list_mode_options()
    return modes


def inductor_records_cuda_graphs(mode: str | None) -> bool:
    """Whether inductor records CUDA graphs in a mode; if the mode does not say, by torch's settings."""
    from torch._inductor import config

    own = inductor_modes().get(mode or "default", {})
    return bool(own.get("triton.cudagraphs", config.triton.cudagraphs))


def has_triton() -> bool:
    """Whether inductor can generate code for a GPU here. Torch does not import the module by itself."""
    from torch.utils import _triton

    return bool(_triton.has_triton())


def is_module_tensor(placeholder: Node) -> bool:
    """Whether a placeholder of Dynamo's graph stands for a parameter, buffer or other tensor of a module."""
    return "_dynamo_static_input_type" in placeholder.meta.get("tensor_dict", ())
