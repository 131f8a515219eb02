"""Stands in for a CUDA device on a machine without one, so that Inductor and Triton compile for it.

A library of stubs is preloaded in place of the CUDA runtime and driver; it tells of one H100. Tensors are
fake, so no memory is needed and no kernel runs. Triton's driver knows its target alone.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MARK = "AMPGRAPH_GPU_STUBS"
ARCH = 90
NAME = "NVIDIA H100 (stub)"
SHARED_MEMORY, PROCESSORS, REGISTERS = 232_448, 132, 65_536

_COPY = "memcpy(d, s, n);"
_ATTRIBUTES = "memset(a, 0, sizeof *a); a->maxThreadsPerBlock = 1024; a->ptxVersion = a->binaryVersion = 90;"
_OCCUPANCY = "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags"
# Functions of the CUDA runtime that torch calls, and their bodies. Memory is the host's; no kernel runs.
_RUNTIME = {
    "cudaGetDeviceCount(int *n)": "*n = 1;",
    "cudaGetDevice(int *d)": "*d = 0;",
    "cudaSetDevice(int d)": "",
    "cudaDriverGetVersion(int *v)": "*v = CUDART_VERSION;",
    "cudaGetLastError(void)": "",
    "cudaPeekAtLastError(void)": "",
    "cudaDeviceSynchronize(void)": "",
    "cudaDeviceGetStreamPriorityRange(int *a, int *b)": "*a = 0; *b = -5;",
    "cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c)": "*c = 0;",
    "cudaStreamQuery(cudaStream_t s)": "",
    "cudaStreamSynchronize(cudaStream_t s)": "",
    "cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p)": "*s = (cudaStream_t)malloc(8);",
    "cudaDeviceCanAccessPeer(int *c, int a, int b)": "*c = 0;",
    "cudaMemGetInfo(size_t *f, size_t *t)": "*f = *t = 80ul << 30;",
    "cudaMalloc(void **p, size_t n)": "*p = calloc(1, n);",
    "cudaFree(void *p)": "",
    "cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t t)": _COPY,
    "cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k)": _COPY,
    "cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t t)": "memset(d, v, n);",
    "cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f)": "",
    "cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f)": "*e = (cudaEvent_t)malloc(8);",
    "cudaEventRecord(cudaEvent_t e, cudaStream_t s)": "",
    "cudaEventQuery(cudaEvent_t e)": "",
    "cudaEventSynchronize(cudaEvent_t e)": "",
    "cudaEventDestroy(cudaEvent_t e)": "",
    "cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t m, cudaStream_t s)": "",
    "cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a)": "",
    "cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v)": "",
    "cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f)": _ATTRIBUTES,
    f"{_OCCUPANCY}(int *n, const void *f, int b, size_t m, unsigned g)": "*n = 1;",
    "cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d)": "*v = 1024;",
    "cudaHostAlloc(void **p, size_t n, unsigned f)": "*p = calloc(1, n);",
    "cudaFreeHost(void *p)": "",
    "cudaMemset(void *d, int v, size_t n)": "memset(d, v, n);",
    "cudaEventCreate(cudaEvent_t *e)": "*e = (cudaEvent_t)malloc(8);",
    "cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f)": "*s = (cudaStream_t)malloc(8);",
    "cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p)": "memset(a, 0, sizeof *a);",
    "cudaGetDeviceProperties(struct cudaDeviceProp *p, int d)": "fill(p);",
    "cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int d)": "fill(p);",
}
_DRIVER = {
    "cuInit(unsigned f)": "",
    "cuDriverGetVersion(int *v)": "*v = CUDART_VERSION;",
    "cuDeviceGet(int *d, int i)": "*d = i;",
    "cuDeviceGetCount(int *n)": "*n = 1;",
    "cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active)": "*flags = 0; *active = 0;",
}
# Matrix products of a library; all other functions of it succeed too.
_BLAS = {
    "cublasCreate_v2(void **h)": "*h = malloc(8);",
    "cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int n, "
    "void *r, int *found)": "*found = 1; memset(r, 0, 64);",
}
_HEAD = f"""
#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <string.h>
#undef cudaGetDeviceProperties
#undef cudaGetDeviceProperties_v2
static void fill(struct cudaDeviceProp *p) {{
  memset(p, 0, sizeof *p);
  strcpy(p->name, "{NAME}");
  p->totalGlobalMem = 80ul << 30; p->sharedMemPerBlock = 48 << 10;
  p->sharedMemPerBlockOptin = {SHARED_MEMORY};
  p->sharedMemPerMultiprocessor = 233472; p->regsPerBlock = p->regsPerMultiprocessor = {REGISTERS};
  p->warpSize = 32; p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = 2048;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->major = {ARCH // 10}; p->minor = {ARCH % 10}; p->multiProcessorCount = {PROCESSORS};
  p->l2CacheSize = 50 << 20; p->maxBlocksPerMultiProcessor = 32; p->memoryBusWidth = 5120;
  p->unifiedAddressing = 1; p->concurrentKernels = 1; p->asyncEngineCount = 3; p->cooperativeLaunch = 1;
}}
"""


def restart_with_stubs() -> None:
    """Builds the stubs and starts this script again with them, unless they are there already.

    Raises:
        SystemExit: torch is no CUDA build, or there is no C compiler.
    """
    if os.environ.pop(MARK, None):
        os.environ.pop("LD_PRELOAD", None)  # not for ptxas and other children
        return
    loader = _folder("torch") / "lib" / "libcaffe2_nvrtc.so"
    if not loader.exists():
        raise SystemExit("gpu_compile_check: this torch is no CUDA build; see make gpu-compile-check.")
    folder = Path(tempfile.mkdtemp(prefix="ampgraph_gpu_stubs_"))
    blas = [name for name in _undefined(loader.with_name("libtorch_cuda.so")) if name.startswith("cublas")]
    (folder / "stubs.c").write_text(_source([*_undefined(loader), *blas]))
    library = folder / "libcuda.so.1"
    # CUDA's own headers have the structures of torch's version. They need some of Triton's.
    own = [_folder("nvidia") / "cu13" / "include"] if importlib.util.find_spec("nvidia") else []
    includes = [f"-I{folder}" for folder in (*own, _folder("triton") / "backends" / "nvidia" / "include")]
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", *includes, "-Wl,-soname,libcuda.so.1"]
    try:
        subprocess.run([*command, "-o", str(library), str(folder / "stubs.c")], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"gpu_compile_check: gcc cannot build the stubs: {error}") from error
    caches = {"TRITON_CACHE_DIR": folder / "triton", "TORCHINDUCTOR_CACHE_DIR": folder / "inductor"}
    settings = {MARK: "1", "LD_PRELOAD": library, "TORCHINDUCTOR_COMPILE_THREADS": "1", **caches}
    environment = {**os.environ, **{name: str(value) for name, value in settings.items()}}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def _source(undefined: list[str]) -> str:
    """Returns the C source; functions of the driver that nothing should call yield an error."""
    lines = [f"cudaError_t {name} {{ {body} return 0; }}" for name, body in _RUNTIME.items()]
    lines += [f"int {name} {{ {body} return 0; }}" for name, body in _DRIVER.items()]
    lines += [f"int {name} {{ {body} return 0; }}" for name, body in _BLAS.items()]
    known = {name.partition("(")[0] for name in (*_DRIVER, *_BLAS)}
    others = [name for name in undefined if name not in known]
    lines += [f"int {name}() {{ return {0 if name.startswith('cublas') else 999}; }}" for name in others]
    return _HEAD + "\n".join(lines) + "\n"


def _undefined(library: Path) -> list[str]:
    found = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True)
    return sorted(
        {word.split("@")[0] for word in found.stdout.split() if re.match(r"cu[A-Z]|cublas[A-Z]", word)}
    )


def _folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"gpu_compile_check: no {package} here; a CUDA build of torch brings it.")
    return Path(next(iter(found.submodule_search_locations)))


def compile_for_stub() -> None:
    """Lets Triton compile for the stub, and Inductor fold constants on the CPU."""
    import torch
    import torch._inductor.config as inductor
    import triton
    from torch._inductor.constant_folding import ConstantFolder
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    class Utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            limits = {"max_shared_mem": SHARED_MEMORY, "multiprocessor_count": PROCESSORS}
            return {**limits, "warpSize": 32, "max_num_regs": REGISTERS}

    class Driver(CudaDriver):
        def __init__(self) -> None:
            self.utils = Utils()
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None
            self.get_current_stream = lambda device: 0
            self.get_device_capability = lambda device: (ARCH // 10, ARCH % 10)

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", ARCH, 32)

    class OnCpu(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cpu = torch.device("cpu")
            args, kwargs = tree_map(lambda a: cpu if isinstance(a, torch.device) else a, (args, kwargs or {}))
            return func(*args, **kwargs)

    triton.runtime.driver.set_active(Driver())
    inductor.force_disable_caches = True
    inductor.compile_threads = 1
    inductor.shape_padding = False  # a device would have to time whether a product pads its operands
    for name in ("use_static_triton_launcher", "use_static_cuda_launcher"):
        if hasattr(inductor, name):
            setattr(inductor, name, False)
    torch._functorch.config.enable_autograd_cache = False
    run = ConstantFolder.run

    def run_on_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        with OnCpu():
            return run(self, *args, **kwargs)

    ConstantFolder.run = run_on_cpu
