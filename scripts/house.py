"""Counts what makes the code heavy: modules, lines, lone imports, long functions, options, words, repeated names.

``make lint`` prints the numbers; ``-v`` names what is counted. The exit code is 1 when there is a circle of imports, a
class name that occurs twice in one package, a test file without a marker, a unit test that is not in the folder of its
package under the name of a module there, or a module whose docstring does not begin with a verb.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agents", "analysis", "collectors", "slurm", "trafficgen", "workload")
# the words with which the docstring of a module may begin; add another verb where none of them says what it does
VERBS = tuple(
    """
    Adds Analyzes Apportions Asks Assigns Attaches Builds Caches Calculates Captures Carries Checks Chooses Collects
    Combines Compares Compiles Connects Controls Converts Copies Counts Creates Decides Declares Decodes Defines
    Describes Divides Draws Ends Estimates Exchanges Excludes Exports Finds Fits Follows Forks Generates Groups
    Guards Holds Implements Infers Interleaves Joins Keeps Launches Leases Lets Lists Locks Lowers Makes Masks
    Measures Merges Models Opens Packs Parses Predicts Prepares Presents Profiles Provides Reaches Reads Receives
    Recognizes Records Reports Runs Says Scales Scans Schedules Selects Sends Serves Shows Simulates Solves Starts
    Submits Summarizes Takes Tells Tries Turns Validates Walks Writes
    """.split()  # noqa: SIM905 (a list has a line for each)
)


def modules() -> dict[str, Path]:
    """Product modules by dotted name."""
    found = {}
    for folder in ("", "core", *PACKAGES):
        top = ROOT / "ringtap" / folder
        for path in sorted(top.rglob("*.py") if folder else top.glob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = path
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


def functions(tree: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Names of functions, the lines of their bodies without the docstring, and the number of their parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            parameters = [one for one in given if one.arg not in ("self", "cls")]
            yield node.name, (body[-1].end_lineno or 0) - body[0].lineno + 1, len(parameters)


def commands() -> tuple[int, int]:
    """The number of commands, and of the arguments that they have together."""
    from ringtap.cli import build_whole_parser

    def walk(parser: argparse.ArgumentParser) -> Iterator[int]:
        groups = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
        if not groups:
            yield sum(not isinstance(one, argparse._HelpAction) for one in parser._actions)
        for group in groups:
            for verb in {id(one): one for one in group.choices.values()}.values():
                yield from walk(verb)

    numbers = list(walk(build_whole_parser()))
    return len(numbers), sum(numbers)


def without_marker() -> list[str]:
    """Test files that no make target may find, because no marker says what kind of tests they hold."""
    kinds = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(computes|shares|alone)\b", re.MULTILINE)
    files = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(path.relative_to(ROOT)) for path in files if not kinds.search(path.read_text(encoding="utf-8")))


def misplaced(found: dict[str, Path]) -> list[str]:
    """Unit tests outside the folder of a package, or whose names do not begin with that of a module there."""
    unit, lost = ROOT / "tests" / "unit", []
    for path in sorted(unit.rglob("test_*.py")):
        folder = path.relative_to(unit).parts[:-1]
        package = ".".join(("ringtap", *folder))
        names = {name.removeprefix(package + ".").partition(".")[0] for name in found if name.startswith(package + ".")}
        begins = any(f"{path.stem}_".startswith(f"test_{name}_") for name in names | set(folder[-1:]))
        if folder[:1] not in (("project",), ("examples",)) and not (names and begins):
            lost.append(str(path.relative_to(ROOT)))
    return lost


def begins_with_verb(docstring: str) -> bool:
    """True if the first word is one of `VERBS`, and not the noun of the same form, as in "Reports of sweeps"."""
    first, second = (*re.findall(r"\w+", docstring), "", "")[:2]
    return first in VERBS and second != "of"


def without_verb(trees: dict[str, ast.Module]) -> list[str]:
    """Modules whose docstrings do not begin with a verb, with these docstrings' first lines."""
    texts = {name: ast.get_docstring(tree) for name, tree in trees.items()}
    return [f"{name}: {text.splitlines()[0]}" for name, text in texts.items() if text and not begins_with_verb(text)]


def main() -> int:
    """Print the numbers."""
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
    classes = defaultdict(list)
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(name)
    repeated = sorted(f"{name}: {', '.join(places)}" for name, places in classes.items() if len(places) > 1)
    twice = sorted(
        f"{package}: {name}"
        for name, places in classes.items()
        for package, count in Counter(".".join(place.split(".")[:2]) for place in places).items()
        if count > 1
    )
    every = [(f"{name}.{function}", *size) for name, tree in trees.items() for function, *size in functions(tree)]
    long = sorted(f"{name} ({lines})" for name, lines, _ in every if lines > 50)
    wide = sorted(f"{name} ({parameters})" for name, _, parameters in every if parameters > 10)
    rounds, unmarked, lost, verbless = circles(arrows), without_marker(), misplaced(found), without_verb(trees)
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in found.values())
    benchmarks = sum(path.read_text(encoding="utf-8").count("\n") for path in (ROOT / "benchmarks").rglob("*.py"))
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in (ROOT / "docs").rglob("*.md"))
    number, arguments = commands()
    details = "-v" in sys.argv

    def show(text: str, names: list[str], always: bool = False) -> None:
        print(f"{len(names):6,} {text}", *(names if names and (always or details) else []), sep="\n         ")

    print(f"{lines:6,} lines in {len(found)} modules of the product, packages included; {benchmarks:,} of benchmarks")
    print(f"{arguments:6,} arguments of {number} commands")
    print(f"{words:6,} words of documentation")
    show("modules that exactly one other imports", lone)
    show("public class names in more than one module", repeated)
    show(f"of {len(every):,} functions with more than 50 lines", long)
    show("functions with more than 10 parameters", wide)
    show("circles of imports", [" - ".join(group) for group in rounds], always=True)
    show("class names twice in one package", twice, always=True)
    show("test files without a marker", unmarked, always=True)
    show("unit tests that are not where their module is", lost, always=True)
    show("modules whose docstrings begin with none of the VERBS of scripts/house.py", verbless, always=True)
    return 1 if rounds or twice or unmarked or lost or verbless else 0


if __name__ == "__main__":
    sys.exit(main())
