"""Draws docs/numerics-own.svg and docs/numerics-exponents.svg by running the code of docs/numerics.md.

python tools/numerics_pictures.py
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
# What the page's code writes, and the picture that the page shows.
PICTURES = {"own.svg": "numerics-own.svg", "exponents.svg": "numerics-exponents.svg"}


def draw(folder: Path) -> None:
    """Runs the page's code in order, in a folder, until all pictures are there.

    Raises:
        RuntimeError: The page draws no such picture.
    """
    space: dict[str, Any] = {"__name__": "page"}
    page = (DOCS / "numerics.md").read_text(encoding="utf-8")
    os.chdir(folder)
    for code in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(code, space)
        if all((folder / name).exists() for name in PICTURES):
            return
    raise RuntimeError(f"docs/numerics.md draws not all of {', '.join(PICTURES)}")


def main() -> None:
    """Writes the pictures into docs/."""
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder))
        for drawn, shown in PICTURES.items():
            shutil.copyfile(Path(folder) / drawn, DOCS / shown)
            print(f"wrote docs/{shown}")


if __name__ == "__main__":
    main()
