"""Runs the suite with several versions of Python and torch, each in a separate environment.

Usage:
    python tools/matrix.py --pythons 3.10 3.13 --torch 2.13.0 --output docs/results/versions.md
    python tools/matrix.py --pythons 3.12 --torch 2.11.0 --flags "-n 2 tests/test_capture.py"

Interpreters are found as ``python3.x`` on the path or under ``~/.pyenv/versions``. A record is kept per pair
in ``--records`` (JSON lines), where a later run of the same pair takes the place of the earlier; an
environment is made once and kept in ``out/matrix``. Everything but torch and what goes with it is pinned as
in constraints.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from provenance import commit

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "matrix"
# torch 2.11 wants another setuptools; torchvision belongs to one torch.
GOES_WITH_TORCH = ("torch", "torchvision", "setuptools")
TORCHVISION = {
    "2.11.0": "0.26.0", "2.12.0": "0.27.0", "2.13.0": "0.28.0", "2.14.1": "0.29.1", "2.15.0": "0.29.2",
}  # fmt: skip
# Without one of its own: that of an earlier torch is installed, whose compiled operators do not load.
BORROWS_TORCHVISION = {"2.15.0"}
NEEDS_TORCHVISION = ("timm", "torchvision")
COUNT = re.compile(r"(\d+) (passed|failed|error|skipped|xfailed)")

Record = dict[str, Any]


def interpreter(version: str) -> str:
    """Returns the path of a Python of that version (major and minor).

    Raises:
        SystemExit: No such version is installed.
    """
    if found := shutil.which(f"python{version}"):
        answer = subprocess.run([found, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True)
        if answer.returncode == 0:
            return found
    installed = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    if installed:
        return str(installed[-1])
    raise SystemExit(f"there is no Python {version} on the path or under ~/.pyenv/versions")


def constraints(torch: str) -> Path:
    """Writes the pins with another torch and returns their path."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if re.split("[=;]", line)[0].strip() not in GOES_WITH_TORCH]
    kept += [f"torch=={torch}", f"torchvision=={TORCHVISION[torch]}"]
    path = OUT / f"constraints-{torch}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(kept) + "\n")
    return path


def install(venv: Path, python: str, torch: str) -> None:
    """Makes the environment for a torch that no torchvision allows.

    Raises:
        subprocess.CalledProcessError: An installation failed.
    """
    if (venv / ".dev").exists():
        return
    import tomllib  # needs Python 3.11

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = [line for line in extras["dev"] if line not in NEEDS_TORCHVISION]
    pins = constraints(torch)
    subprocess.run([python, "-m", "venv", venv], check=True)
    pip = [venv / "bin/python", "-m", "pip", "install", "--quiet", "-c", pins]
    subprocess.run([*pip, f"torch=={torch}", "wheel", *wanted], cwd=ROOT, check=True)
    subprocess.run([*pip, "--no-deps", *NEEDS_TORCHVISION], cwd=ROOT, check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", "."], cwd=ROOT, check=True)
    for name in (".dev", ".demo"):
        (venv / name).touch()


def run(python: str, torch: str, flags: str) -> Record:
    """Makes the environment if need be, runs the tests in it, and returns what came out."""
    pinned = (
        ROOT / "constraints.txt" if f"torch=={torch}\n" in (ROOT / "constraints.txt").read_text() else None
    )
    venv = OUT / f"python{python}-torch{torch}"
    if torch in BORROWS_TORCHVISION:
        install(venv, interpreter(python), torch)
    made = subprocess.run(
        [
            "make", "--no-print-directory", "test", f"PYTHON={interpreter(python)}", f"VENV={venv}",
            f"CONSTRAINTS={pinned or constraints(torch)}", f"PYTEST_FLAGS={flags}",
        ],
        cwd=ROOT, env={**os.environ, "PIP_NO_INPUT": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    log = OUT / f"python{python}-torch{torch}.log"
    log.write_text(made.stdout + made.stderr)
    tell = "import sys, torch; print(sys.version.split()[0], torch.__version__)"
    told = subprocess.run([venv / "bin/python", "-c", tell], capture_output=True, text=True, check=True)
    versions = told.stdout.split()
    counts = {kind: int(number) for number, kind in COUNT.findall(_last_line(made.stdout))}
    failures = sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", made.stdout, re.MULTILINE)))
    return {
        "python": versions[0],
        "torch": versions[1],
        "commit": commit(),
        "flags": flags,
        "counts": counts,
        "failed": failures,
    }


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if COUNT.search(line)]
    return lines[-1] if lines else ""


def report(records: list[Record]) -> str:
    """Returns the page."""
    rows = [
        f"| {r['python']} | {r['torch']} | {r.get('commit', '-')} | {_tests(r['flags'])} | "
        + " | ".join(str(r["counts"].get(kind, 0)) for kind in ("passed", "skipped", "failed"))
        + f" | {', '.join(f'`{name}`' for name in r['failed']) or '-'} |"
        for r in sorted(records, key=lambda r: (r["torch"], [int(p) for p in r["python"].split(".")]))
    ]
    return "\n".join(
        [
            "# Versions",
            "",
            "What the tests gave with each pair of Python and torch, on a CPU; `tools/matrix.py` makes an",
            "environment for each and writes this page. ampgraph supports torch 2.11 and newer, Python 3.10",
            "and newer; constraints.txt names the versions that `make test` installs. Skipped are tests of",
            "optional programs and packages that are not there for that pair. A row speaks of its commit;",
            "the changelog says what was mended since.",
            "",
            "| Python | torch | commit | tests | passed | skipped | failed | which |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _tests(flags: str) -> str:
    chosen = [word for word in flags.split() if word.startswith("tests/")]
    return ", ".join(f"`{name}`" for name in chosen) or "all"


def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns 1 if a test failed anywhere."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pythons", nargs="*", default=[], metavar="3.x")
    parser.add_argument("--torch", nargs="*", default=["2.13.0"], metavar="2.x.y", choices=TORCHVISION)
    parser.add_argument(
        "--flags", default="-n 2", help="for pytest; default: %(default)s, which runs all tests"
    )
    parser.add_argument("--records", type=Path, default=OUT / "records.jsonl")
    parser.add_argument("--output", type=Path, help="where to write the page; default: print it")
    options = parser.parse_args(argv)
    lines = options.records.read_text().splitlines() if options.records.exists() else []
    records = {(r["python"], r["torch"]): r for r in map(json.loads, lines)}
    for python in options.pythons:
        for torch in options.torch:
            start = time.perf_counter()
            record = run(python, torch, options.flags)
            records[record["python"], record["torch"]] = record
            options.records.parent.mkdir(parents=True, exist_ok=True)
            options.records.write_text("".join(json.dumps(r) + "\n" for r in records.values()))
            print(
                python,
                torch,
                record["counts"],
                f"{(time.perf_counter() - start) / 60:.1f} minutes",
                flush=True,
            )
    text = report(list(records.values()))
    if options.output:
        options.output.write_text(text)
    else:
        print(text)
    return 1 if any(r["failed"] or not r["counts"] for r in records.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
