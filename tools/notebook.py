"""Runs the code cells of a notebook in order and stores what they print and show.

    python tools/notebook.py examples/tour.ipynb

A Jupyter kernel would do the same and bring some thirty packages into the development environment.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

from provenance import without_folders

Cell = dict[str, Any]


def run(path: Path) -> dict[str, Any]:
    """Returns the notebook with the outputs of this run; the file stays as it is.

    Args:
        path: A notebook in nbformat 4.

    Raises:
        Exception: What a cell raises.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        cell["execution_count"] = count
        cell["outputs"] = _outputs("".join(cell["source"]), names, count)
    return notebook


def _outputs(source: str, names: dict[str, Any], count: int) -> list[Cell]:
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    out = io.StringIO()
    value = None
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(tree, f"<cell {count}>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"<cell {count}>", "eval"), names)
    outputs: list[Cell] = []
    if out.getvalue():
        lines = without_folders(out.getvalue()).splitlines(keepends=True)
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines})
    if value is not None:
        shown = {
            "output_type": "execute_result",
            "execution_count": count,
            "metadata": {},
            "data": _data(value),
        }
        outputs.append(shown)
    return outputs


def _data(value: object) -> dict[str, list[str]]:
    svg = getattr(value, "_repr_svg_", lambda: None)()
    data = {"text/plain": repr(value)} | ({"image/svg+xml": svg} if svg else {})
    return {kind: text.splitlines(keepends=True) for kind, text in data.items()}


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(json.dumps(run(path), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
