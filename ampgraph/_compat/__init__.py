"""Every private torch API that ampgraph uses, in one place. Tried on torch 2.11 and 2.13."""

from torch._dynamo.source import LocalSource
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .dynamo import (
    aot_eager,
    compiled_by_dynamo,
    find_backend,
    has_triton,
    inductor_modes,
    keep_dynamo_out,
    known_backends,
)
from .fake_tensors import (
    accept_real_constants,
    dtypes_of,
    errors_raised_not_logged,
    evaluate,
    fake_mode_of,
    result_dtypes,
    with_dtypes,
)
from .graphs import (
    all_op_names,
    outside_tracing,
    set_calling_convention,
    size_hint,
    storage_key,
    wrap_grad_modes,
)
from .modes import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    INFERENCE_MODE_CALLS,
    SET_GRAD_ENABLED,
    active_data_parallel,
    autocast_values,
    in_transform,
    is_any_autocast_enabled,
    is_exporting,
    keep_versions,
    no_ambient_autocast,
    no_saved_tensor_hooks,
    outside_transforms,
)
from .version import VERSION

__all__ = [
    "ENTER_AUTOCAST",
    "EXIT_AUTOCAST",
    "INFERENCE_MODE_CALLS",
    "SET_GRAD_ENABLED",
    "VERSION",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "LocalSource",
    "OpOverload",
    "OpOverloadPacket",
    "accept_real_constants",
    "active_data_parallel",
    "all_op_names",
    "aot_eager",
    "autocast_values",
    "compiled_by_dynamo",
    "dtypes_of",
    "errors_raised_not_logged",
    "evaluate",
    "fake_mode_of",
    "find_backend",
    "has_triton",
    "in_transform",
    "inductor_modes",
    "is_any_autocast_enabled",
    "is_exporting",
    "keep_dynamo_out",
    "keep_versions",
    "known_backends",
    "no_ambient_autocast",
    "no_saved_tensor_hooks",
    "outside_tracing",
    "outside_transforms",
    "result_dtypes",
    "set_calling_convention",
    "size_hint",
    "storage_key",
    "with_dtypes",
    "wrap_grad_modes",
]
