"""``import ampgraph``: its time, its side effects, and the folders from which it works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
# Modules that torch imports itself differ by its version; these are never ours to import.
HEAVY = ("torch._dynamo", "torch._inductor", "torch.onnx", "sympy", "networkx", "matplotlib", "torchvision")
STEP = """
import json, sys
import torch
{imports}
frames = []
def backend(graph_module, inputs):
    frames.append(len(graph_module.graph.nodes))
    return graph_module.forward
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(2, 4)).sum().backward()
def step():
    optimizer.step()
torch.compile(step, backend=backend)()
torch.compile(optimizer.step, backend=backend)()
from torch._dynamo.utils import counters
print(json.dumps([frames, counters["stats"], counters["frames"], len(counters["graph_break"])]))
"""


def run_python(code: str, cwd: Path | None = None, *options: str, **environment: str):
    """Runs Python in a fresh process; returns the JSON that it prints."""
    return printed(code, cwd, *options, **environment)[-1]


def printed(code: str, cwd: Path | None = None, *options: str, **environment: str) -> list:
    """The JSON of each line that a fresh process prints."""
    known = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    result = subprocess.run(
        [sys.executable, *options, "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**known, **environment},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_gpu_asks_for_triton_in_a_process_that_has_imported_nothing_else() -> None:
    code = """
import json
import torch
from ampgraph.runtime.backends import default_backend
print(json.dumps(default_backend(torch.device("cuda"))))
"""
    assert run_python(code) in ("inductor", "eager")


def after_torch(codes: Sequence[str]) -> list:
    """Runs each code in a process that has imported torch alone; returns the JSON that each prints."""
    fork = f"""
import os, sys
import torch
for code in {list(codes)!r}:
    if os.fork() == 0:
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
"""
    found = printed(fork)
    assert len(found) == len(codes)
    return found


IMPORTS = (
    "import ampgraph; ampgraph.testing, ampgraph.drawing, ampgraph.convert, ampgraph.passes",
    "import ampgraph.runtime.dynamo_backend",  # the entry point of torch.compile
    "from ampgraph.cli.parser import parser; parser()",
)


@pytest.fixture(scope="module")
def added() -> dict[str, list[str]]:
    """The modules of `HEAVY` that come on top of torch's own."""
    code = f"""
import json, sys
before = set(sys.modules)
{{}}
print(json.dumps([n for n in {HEAVY} if n in sys.modules and n not in before]))
"""
    return dict(zip(IMPORTS, after_torch([code.format(line) for line in IMPORTS]), strict=True))


@pytest.mark.parametrize("imports", IMPORTS)
def test_import_adds_nothing_heavy_to_torch(added, imports):
    assert added[imports] == []


def test_pytest_plugin_imports_no_torch():
    code = "import json, sys, pytest_ampgraph; print(json.dumps('torch' in sys.modules))"
    assert run_python(code) is False


def test_import_changes_nothing_in_torch_before_the_first_low_copies():
    code = """
import json
import torch, torch.optim.optimizer as o
import ampgraph
hooks = lambda: (
    len(o._global_optimizer_pre_hooks)
    + len(o._global_optimizer_post_hooks)
    + ("data" in vars(torch.nn.Parameter))
)
found = [hooks()]
model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
ampgraph.convert(model, (x,), policy=ampgraph.Policy(level="O1", weight_copies=False))(x)
found.append(hooks())
for _ in range(2):
    ampgraph.convert(model, (x,), policy="O2")(x)
found.append(hooks())
print(json.dumps(found))
"""
    assert run_python(code) == [0, 0, 2]  # one hook, and the property


def test_compiled_optimizer_step_is_the_same_with_ampgraph_imported():
    without, with_it = after_torch([STEP.format(imports=line) for line in ("", "import ampgraph")])
    assert without[0]  # something was compiled
    assert with_it == without


def clone(tmp_path: Path) -> Path:
    """A copy of the sources alone, as a clone that nobody installed."""
    for name in ("ampgraph", "passes"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def site_packages() -> str:
    """Where torch and networkx lie."""
    return str(Path(torch.__file__).parents[1])


IMPORT = """
import json, sys
sys.path.append({site!r})
import ampgraph, ampgraph.passes.verify
from ampgraph import passes
files = [ampgraph.__file__, passes.__file__, ampgraph.passes.verify.__file__]
print(json.dumps([files, list(ampgraph.__path__)]))
"""


@pytest.mark.parametrize("where", ["inside", "elsewhere"])
def test_clone_that_is_not_installed_is_found_whole(tmp_path, where):
    root = clone(tmp_path / "clone")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = {} if where == "inside" else {"PYTHONPATH": str(root)}
    files, _ = run_python(
        # -S: no installed ampgraph, editable or not, can help.
        IMPORT.format(site=site_packages()),
        root if where == "inside" else elsewhere,
        "-S",
        **path,
    )
    assert files == [
        str(root / "ampgraph/__init__.py"),
        str(root / "passes/__init__.py"),
        str(root / "passes/verify.py"),
    ]


def installed(root: Path, target: Path) -> Path:
    """The tree that ``pip install`` of a clone makes: the passes inside of the package."""
    shutil.copytree(root / "ampgraph", target / "ampgraph")
    shutil.copytree(root / "passes", target / "ampgraph" / "passes")
    return target


@pytest.mark.parametrize("where", ["in the clone", "elsewhere"])
def test_installed_package_and_clone_do_not_mix(tmp_path, where):
    root = clone(tmp_path / "clone")
    target = installed(root, tmp_path / "site")
    inside = where == "in the clone"
    code = IMPORT.format(site=site_packages())
    files, paths = run_python(code, root if inside else tmp_path, "-S", PYTHONPATH=str(target))
    owner = root if inside else target
    assert all(Path(file).is_relative_to(owner) for file in files)
    assert paths == [str(root / "ampgraph"), str(root)] if inside else [str(target / "ampgraph")]
