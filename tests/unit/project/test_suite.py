"""The suite itself: its workers agree on the names of tests, and with CI=true a skip is a failure."""

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from scripts.house import without_marker
from tests.conftest import KEEPS_TIME, SHARES
from tests.unit.agent_processes import ended

pytestmark = pytest.mark.shares

ROOT = Path(__file__).resolve().parents[3]


COLLECT = """
import os, sys
import pytest

for part in sys.argv[1:]:
    assert pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-m", part]) == 0
    print(chr(12), flush=True)
os._exit(0)  # what the tests import takes long to be taken down, and some of it says so
"""


def collect(seed: str, *parts: str) -> subprocess.Popen[str]:
    """Collect parts one after the other, in a process that imports the tests once."""
    environment = dict(os.environ) | {"PYTHONHASHSEED": seed, "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-c", COLLECT, *parts]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def test_names_of_tests_depend_on_neither_hashes_nor_the_time_and_each_is_in_one_part() -> None:
    with ExitStack() as stack:
        processes = [stack.enter_context(ended(collect("1", "")))]
        # some formats hold whole seconds
        time.sleep(1.1)
        processes.append(stack.enter_context(ended(collect("2", SHARES, KEEPS_TIME))))
        texts = [process.communicate(timeout=250)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    whole, *parts = (text.splitlines()[:-2] for text in "".join(texts).split("\f\n")[:-1])
    assert len(whole) > 1000
    for part in map(set, parts):
        assert [name for name in whole if name in part] in parts
    assert sorted([*parts[0], *parts[1]]) == sorted(whole)
    makefile = (ROOT / "Makefile").read_text()
    assert all(f'-m "{part}"' in makefile for part in (SHARES, KEEPS_TIME))


def test_each_file_says_what_kind_of_tests_it_holds() -> None:
    assert without_marker() == []


SKIPS = {
    "module": 'import pytest\npytest.skip("no tool", allow_module_level=True)',
    "package": 'import pytest\npytest.importorskip("no_such_package")',
    "mark": 'import pytest\n@pytest.mark.skipif(True, reason="no tool")\ndef test_it(): pass',
    "fixture": 'import pytest\n@pytest.fixture\ndef tool(): pytest.skip("no tool")\ndef test_it(tool): pass',
    "call": 'import pytest\ndef test_it(): pytest.skip("no tool")',
    "hardware": 'import pytest\ndef test_it(): pytest.skip("needs a GPU")',
}


@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.parametrize("ci", ["true", "false"])
def test_with_ci_a_skip_is_a_failure_unless_hardware_is_missing(ci: str, workers: str, tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    tests.mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", tests)
    for name, text in SKIPS.items():
        (tests / f"test_{name}.py").write_text(text + "\n")
    command = [sys.executable, "-m", "pytest", "-rfE", "-n", workers, "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(tmp_path), "--continue-on-collection-errors", "--tb=no", "tests"]
    environment = dict(os.environ) | {"CI": ci}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    failed = set(re.findall(r"^(?:FAILED|ERROR) tests/test_(\w+)\.py", done.stdout, re.MULTILINE))
    assert failed == (set(SKIPS) - {"hardware"} if ci == "true" else set()), done.stdout
    assert bool(done.returncode) == bool(failed)
