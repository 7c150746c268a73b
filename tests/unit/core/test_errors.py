"""Sentences about errors: none has the number of a system error, or a type of Python where there is a message."""

import ast
import builtins
import errno
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringtap.cli import main
from ringtap.core.errors import UsageError, error_message, exit_words, failure_message, last_line

pytestmark = pytest.mark.computes

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("agents", "analysis", "collectors", "slurm", "trafficgen", "workload", "ringtap")
SYSTEM = {name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, OSError)}
SYSTEM |= {"Exception", "BaseException"}
# the first stands alone, without ringtap's modules; the others take the system's message first
OTHERWISE = {
    "agents/hook/ringtap_hook/replace_ddp_all_reduce.py",
    "agents/hosts/remote.py",
    "agents/job/foreground_command.py",
    "agents/node/sampling.py",
}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EADDRINUSE, "Address already in use"), "Address already in use"),
        (OSError(errno.ENOENT, "No such file or directory", "/x"), "No such file or directory"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files (ulimit -n)"),
        (OSError(0, "the capture on eth0 ended early"), "the capture on eth0 ended early"),
        (OSError(errno.EINVAL, "it is not a regular file"), "it is not a regular file"),
        (OSError("the record file was deleted"), "the record file was deleted"),
        (TimeoutError(), "TimeoutError"),
        (TimeoutError("no data for 5 s"), "no data for 5 s"),
        (UsageError("there is no x"), "there is no x"),
        (ValueError("bad"), "ValueError: bad"),
        (KeyError(), "KeyError"),
    ],
)
def test_an_error_has_a_message(error: Exception, words: str) -> None:
    assert error_message(error) == words


def test_the_file_of_a_system_error_is_named() -> None:
    assert failure_message(OSError(errno.EACCES, "Permission denied", "/a/b")) == "/a/b: Permission denied"
    assert failure_message(OSError(errno.EACCES, "Permission denied", b"/a")) == "/a: Permission denied"
    assert failure_message(OSError(errno.EADDRINUSE, "Address already in use")) == "Address already in use"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "exit code 1"),
        (128, "exit code 128"),
        (137, "exit code 137 (128 + SIGKILL)"),
        (139, "exit code 139 (128 + SIGSEGV)"),
        (255, "exit code 255"),
        (-9, "SIGKILL"),
    ],
)
def test_the_exit_code_of_a_shell_names_the_signal(code: int, words: str) -> None:
    assert exit_words(code) == words


def test_the_last_line_of_a_traceback_has_no_number() -> None:
    text = "Traceback (most recent call last):\n  x\nOSError: [Errno 98] Address already in use\n"
    assert last_line(text) == "Address already in use"
    assert last_line("squeue: error: no\n\n") == "squeue: error: no"
    assert last_line("") == "no message"


def test_a_system_error_of_a_command_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "/secret/points.csv")

    monkeypatch.setattr("ringtap.doctor._doctor", fail)
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err == "ringtap: /secret/points.csv: Permission denied\n"


def bare(path: Path) -> Iterator[int]:
    """Lines of a module that show an error which may be the system's by its type and number."""
    tree = ast.parse(path.read_text())
    constants = {
        target.id: _names(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for handler in ast.walk(tree):
        if isinstance(handler, ast.ExceptHandler) and handler.name:
            kinds = _names(handler.type)
            kinds |= set().union(*(constants.get(kind, set()) for kind in kinds))
            if kinds & SYSTEM:
                yield from (node.lineno for node in ast.walk(handler) if _shows(node, handler.name))


def _names(node: ast.AST | None) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} if node else set()


def _shows(node: ast.AST, name: str) -> bool:
    """Return True for ``str(name)``, and for ``{name}`` in a formatted text."""
    value: ast.AST | None = node.value if isinstance(node, ast.FormattedValue) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and node.args:
        value = node.args[0]
    return isinstance(value, ast.Name) and value.id == name


def test_no_error_of_the_system_is_shown_by_its_number(tmp_path: Path) -> None:
    sample = tmp_path / "one.py"
    sample.write_text("try:\n    x()\nexcept (OSError, KeyError) as e:\n    print(f'{e}', str(e))\n")
    assert list(bare(sample)) == [4, 4]
    found = set()
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text()
        names = set(re.findall(r"\bexcept .* as (\w+):", text))
        if path.resolve() == path and any(f"{{{name}}}" in text or f"str({name})" in text for name in names):
            found |= {str(path.relative_to(ROOT)) for _ in bare(path)}
    assert found == OTHERWISE
