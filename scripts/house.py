"""Facts of the structure: modules, lines, circles of imports, lone imports, class names that occur twice.

``make lint`` prints them. The exit code is 1 when a circle or a class name that occurs twice in one package is found.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agents", "analysis", "collectors", "slurm", "trafficgen", "workload")


def modules() -> dict[str, Path]:
    """Product modules by dotted name."""
    found = {}
    for path in sorted((ROOT / "ringtap").glob("*.py")):
        found["ringtap" if path.stem == "__init__" else f"ringtap.{path.stem}"] = path
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(("ringtap", *(part for part in parts if part != "__init__")))] = path
    return found


def imports(name: str, path: Path, names: set[str], tree: ast.AST) -> Iterator[str]:
    """Product modules that a module imports, at its top or in its functions."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                if full in names:
                    yield full
                elif base in names:
                    yield base


def circles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other when they are loaded (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(arrows[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in arrows:
        if name not in index:
            visit(name)
    return found


def main() -> int:
    """Print the facts."""
    found = modules()
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in found.items()}
    importers = defaultdict(set)
    arrows: dict[str, set[str]] = {}
    for name, path in found.items():
        for other in imports(name, path, set(found), trees[name]):
            importers[other].add(name)
        top = ast.Module([node for node in trees[name].body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        arrows[name] = set(imports(name, path, set(found), top)) - {name}
    lone = sorted(
        name for name, path in found.items() if len(importers[name]) == 1 and path.stem not in ("__init__", "__main__")
    )
    classes: dict[str, Counter[str]] = defaultdict(Counter)
    for name, tree in trees.items():
        package = ".".join(name.split(".")[:2])
        classes[package].update(node.name for node in tree.body if isinstance(node, ast.ClassDef))
    twice = sorted(f"{package}: {name}" for package in classes for name, count in classes[package].items() if count > 1)
    rounds = circles(arrows)
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in found.values())
    print(f"{len(found)} modules with {lines} lines, packages included")
    print(
        f"{len(lone)} modules are imported by exactly one other" + (": " + ", ".join(lone) if "-v" in sys.argv else "")
    )
    print(f"{len(rounds)} circles of imports" + "".join(f"\n  {' - '.join(group)}" for group in rounds))
    print(f"{len(twice)} class names occur twice in one package" + "".join(f"\n  {name}" for name in twice))
    return 1 if rounds or twice else 0


if __name__ == "__main__":
    sys.exit(main())
