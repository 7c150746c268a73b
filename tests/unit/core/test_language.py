"""Docstrings begin with what a thing is or does, and the project's own words of version 0.1 are gone."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.computes

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("agents", "analysis", "benchmarks", "collectors", "scripts", "slurm", "trafficgen", "workload")
SOURCES = sorted(
    [*(ROOT / "ringtap").glob("**/*.py"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))]
)
QUESTION = re.compile(r"(What|Whether|How|Where|Which|Why|Who|Whose|When)\b")
GONE = (
    "nobody's child",
    "how well that is known must be known",
    "no word from the reference",
    "What a job could not finish, a later one goes on with",
    "a record that cannot be",
    "further ones are told so and closed",
    "Where a sweep plays",
)


def docstrings(tree: ast.Module) -> list[tuple[int, str]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                found.append((getattr(node, "lineno", 1), text))
    return found


def test_no_docstring_begins_with_a_question_word() -> None:
    assert len(SOURCES) > 250
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in SOURCES
        for line, text in docstrings(ast.parse(path.read_text()))
        if QUESTION.match(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_phrases_that_the_language_guide_replaces_are_gone() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    wrong = [
        f"{path.relative_to(ROOT)}: {phrase}"
        for path in [*SOURCES, *pages]
        for phrase in GONE
        if phrase in " ".join(path.read_text().split())
    ]
    assert not wrong, "\n".join(wrong)
