"""Docstrings begin with what a thing is or does."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.computes, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("agents", "analysis", "benchmarks", "collectors", "scripts", "slurm", "trafficgen", "workload")
SOURCES = sorted(
    [*(ROOT / "ringtap").glob("**/*.py"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))]
)
QUESTION = re.compile(r"(What|Whether|How|Where|Which|Why|Who|Whose|When)\b")


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
