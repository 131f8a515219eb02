"""Prints which file of the package imports which: circles, floors, and what stands in each room.

    python tools/import_graph.py            # counts, and the circles if there are any
    python tools/import_graph.py --rooms    # the imports between rooms
    python tools/import_graph.py --floors   # every file by floor
    python tools/import_graph.py --draw docs/rooms.svg   # the rooms as a picture; needs pygraphviz

Reads source text, so it needs no installation. Imports under ``TYPE_CHECKING`` and inside of functions count.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "ampgraph"
# Folder of the clone -> dotted name of the package that it holds.
FOLDERS = {"passes": f"{PACKAGE}.passes", PACKAGE: PACKAGE}


def import_graph(root: Path = ROOT) -> nx.DiGraph:
    """Returns a graph of module names; an edge goes from the module that imports to what it imports."""
    files = dict(_modules(root))
    graph = nx.DiGraph()
    graph.add_nodes_from(files)
    for module, path in files.items():
        is_package = path.name == "__init__.py"
        for imported in _imports(module, is_package, ast.parse(path.read_text(encoding="utf-8"))):
            if (target := _known(imported, files)) and target != module:
                graph.add_edge(module, target)
    return graph


def circles(graph: nx.DiGraph) -> list[list[str]]:
    """Returns the sets of modules that import each other, directly or through others."""
    return sorted(sorted(c) for c in nx.strongly_connected_components(graph) if len(c) > 1)


def floors(graph: nx.DiGraph) -> dict[str, int]:
    """Returns the floor of each module: 0 for one without imports, else one above its highest import."""
    condensed = nx.condensation(graph)
    level: dict[int, int] = {}
    for component in reversed(list(nx.topological_sort(condensed))):
        level[component] = 1 + max((level[below] for below in condensed.successors(component)), default=-1)
    return {module: level[component] for module, component in condensed.graph["mapping"].items()}


def room_of(module: str) -> str:
    """Returns the subpackage of a module, or its own name for a file at the top."""
    return module.split(".")[1] if "." in module else module


def rooms_as_dot(graph: nx.DiGraph) -> str:
    """Returns the rooms and the imports between them as DOT; implied arrows are left out."""
    rooms = nx.DiGraph()
    rooms.add_edges_from(
        (room_of(a), room_of(b)) for a, b in graph.edges if room_of(a) != room_of(b) and PACKAGE not in (a, b)
    )
    rooms.add_nodes_from(room_of(module) for module in graph if module != PACKAGE)
    sizes = Counter(map(room_of, graph))
    drawn = nx.transitive_reduction(rooms) if nx.is_directed_acyclic_graph(rooms) else rooms
    style = 'shape=box, style="rounded,filled", fillcolor="#E8F0FE", fontname="Helvetica"'
    lines = ["digraph rooms {", f"  node [{style}]"]
    for room in sorted(rooms):
        count = f"{sizes[room]} file" + "s" * (sizes[room] > 1)
        lines.append(f'  "{room}" [label="{room}\\n{count}"]')
    lines += [f'  "{a}" -> "{b}" [color="#5F6368"]' for a, b in sorted(drawn.edges)]
    return "\n".join([*lines, "}"]) + "\n"


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, package in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            yield ".".join((package, *parts)).removesuffix(".__init__"), path


def _imports(module: str, is_package: bool, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")
            up = node.level - is_package
            base = ".".join(package[: len(package) - up]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            yield from (f"{source}.{alias.name}" for alias in node.names)


def _known(imported: str, files: dict[str, Path]) -> str | None:
    """Returns the module that an imported name lies in, if it is one of the package's."""
    while imported and imported not in files:
        imported = imported.rpartition(".")[0]
    return imported or None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the clone to read")
    parser.add_argument("--rooms", action="store_true", help="the imports between rooms")
    parser.add_argument("--floors", action="store_true", help="every file by floor")
    parser.add_argument("--draw", type=Path, metavar="SVG", help="the rooms as a picture")
    options = parser.parse_args()
    graph = import_graph(options.root)
    level = floors(graph)
    found = circles(graph)
    print(f"{len(graph)} files, {len(found)} circles, {max(level.values()) + 1} floors")
    for circle in found:
        print("  circle:", ", ".join(circle))
    if options.rooms:
        arrows = Counter((room_of(a), room_of(b)) for a, b in graph.edges if room_of(a) != room_of(b))
        for (upper, lower), count in sorted(arrows.items()):
            print(f"  {upper} -> {lower} ({count})")
    if options.draw:
        import pygraphviz

        pygraphviz.AGraph(string=rooms_as_dot(graph)).draw(options.draw, prog="dot")
    if options.floors:
        for floor in range(max(level.values()), -1, -1):
            print(f"  {floor:2}  {', '.join(sorted(m for m in level if level[m] == floor))}")


if __name__ == "__main__":
    main()
