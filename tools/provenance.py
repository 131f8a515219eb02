"""The line that heads every generated page: command, commit of the code, machine, versions."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = ("ampgraph", "passes", "tests", "tools")


def written_by(command: str, *packages: str, at: str = "") -> str:
    """Returns the sentences that say where the figures of a page come from.

    Args:
        command: How to write the page again, from the repository's root.
        packages: Distributions whose versions matter, besides torch.
        at: The commit that was measured, if not the present one.
    """
    return f"Written by `{command}` at commit {at or commit()}. {machine(*packages)}."


def without_folders(text: str) -> str:
    """Leaves out where this machine keeps its packages."""
    return re.sub(r"[^\s(]*/site-packages/", "site-packages/", text)


def commit(root: Path = ROOT) -> str:
    """Returns the commit of a checkout, with ``+changes`` where its code differs from that commit.

    The variable ``COMMIT`` names it for a copy without git's folder.

    Raises:
        SystemExit: The folder is not a git checkout.
    """
    if given := os.environ.get("COMMIT"):
        return given
    git = ["git", "-C", str(root)]
    found = subprocess.run([*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(
            f"{root} is not a git checkout: generated pages name the commit that they come from."
        )
    changes = subprocess.run([*git, "status", "--porcelain", "--", *CODE], capture_output=True, text=True)
    return found.stdout.strip() + ("+changes" if changes.stdout.strip() else "")


def machine(*packages: str) -> str:
    """Returns processor, cores and versions."""
    names = ("torch", *packages)
    libraries = ", ".join(f"{name} {version(name)}" for name in names)
    return f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, {libraries}"


def processor() -> str:
    """Returns the processor's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
