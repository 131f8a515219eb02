"""Processes forked from one that has torch, its compiler and ampgraph imported: a start costs 0.1 s, not 5.

A test that is about the start of Python or about what an import does starts Python itself.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import io
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# Without pytest, the import of Inductor starts workers; a thread would make the forks unsafe.
IMPORTS = (
    *("pytest", "hypothesis", "torch", "torch._dynamo.aot_compile", "torch._dynamo.polyfills.loader"),
    *("torch.export._trace", "torch.distributed.fsdp", "ampgraph.cli.main", "ampgraph.passes.pipeline"),
    *("ampgraph.capture", "ampgraph.runtime.captured_graph", "ampgraph.runtime.dynamo_backend"),
    "tests.conftest",
)
LARGEST = 1 << 20


@dataclass(frozen=True)
class Job:
    """A call of a top-level function, or the command line of Python if there is none."""

    function: Callable | None
    arguments: tuple
    directory: str
    environment: dict[str, str]
    imports: tuple[str, ...]


class Fork:
    """A running process; its standard streams are the given files, or those of the tests."""

    def __init__(
        self,
        function: Callable | None,
        *arguments: Any,
        cwd: Path | None = None,
        env: Mapping[str, str] = os.environ,
        imports: Sequence[str] = (),
        streams: tuple[int, int] = (1, 2),
        pipe: int | None = None,
    ) -> None:
        """Starts it. A function gets the number of ``pipe`` first; the server keeps the imports."""
        job = Job(function, arguments, str(cwd or Path.cwd()), dict(env), tuple(imports))
        self._told, told = os.pipe()
        files = [told, *streams, *([] if pipe is None else [pipe])]
        socket.send_fds(_server(), [pickle.dumps(job)], files)
        os.close(told)
        self.pid = self._number(None)

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status, or minus the signal."""
        return self._number(timeout)

    def kill(self) -> None:
        """Ends it unless it has ended by itself, and waits for that."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def _number(self, timeout: float | None) -> int:
        if not select.select([self._told], [], [], timeout)[0]:
            raise TimeoutError(f"process {self.pid} did not end in {timeout} s")
        return int.from_bytes(os.read(self._told, 8), "little", signed=True)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            os.close(self._told)


def run(
    *argv: str, cwd: Path | None = None, env: Mapping[str, str] = os.environ, timeout: float = 300
) -> subprocess.CompletedProcess:
    """Runs ``python -c code ...`` or ``python -m module ...`` to its end."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        status = Fork(None, *argv, cwd=cwd, env=env, streams=(out.fileno(), err.fileno())).wait(timeout)
        texts = [file.read() for file in (out, err) if file.seek(0) == 0]
    return subprocess.CompletedProcess(argv, status, *texts)


@functools.cache
def _server() -> socket.socket:
    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-c", "from tests.forks import serve; serve()", str(theirs.fileno())]
    server = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], start_new_session=True)
    theirs.close()
    atexit.register(_end, channel, server)
    return channel


def _end(channel: socket.socket, server: subprocess.Popen) -> None:
    channel.close()
    server.wait()


# -- in the server ---------------------------------------------------------------------------------------


def serve() -> None:
    """Forks until the tests end. Returns in a fork whose job is done: Python then ends as usual."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTS:
        importlib.import_module(name)
    while True:
        request, files, *_ = socket.recv_fds(channel, LARGEST, 8)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG if request else 0)[0]:
                pass
        if not request:
            return
        job = pickle.loads(request)
        for name in job.imports:
            importlib.import_module(name)
        assert threading.active_count() == 1, threading.enumerate()
        if os.fork() == 0:
            channel.close()
            _keep(job, *files)
            return
        for file in files:
            os.close(file)


def _keep(job: Job, told: int, *files: int) -> None:
    """Tells the number and the exit status of the process that does the job."""
    number = os.fork()
    if number == 0:
        os.close(told)
        _do(job, *files)
        return
    for file in files:
        os.close(file)
    _tell(told, number)
    _tell(told, os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
    os._exit(0)


def _tell(told: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(told, number.to_bytes(8, "little", signed=True))


def _do(job: Job, out: int, err: int, *pipe: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.chdir(job.directory)
    os.environ.clear()
    os.environ.update(job.environment)
    sys.path[:0] = [job.directory, *filter(None, job.environment.get("PYTHONPATH", "").split(os.pathsep))]
    encoding = job.environment.get("PYTHONIOENCODING")
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding=encoding)
    if job.function is not None:
        job.function(*pipe, *job.arguments)
        return
    kind, what, *rest = job.arguments
    sys.argv = [kind, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
