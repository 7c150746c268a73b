"""Machine code kept between processes."""

import ast
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ringtap.analysis.pcap.kernels import compile
from ringtap.analysis.pcap.scan import Scan
from ringtap.core.errors import MeasurementError
from tests.unit.capture_makers import classic, frames, usual

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

DATA = classic(frames(usual()))


@pytest.fixture
def code():
    """The object file as it is kept, made already by whatever scanned first."""
    from llvmlite import binding

    Scan()
    path = compile.cache_folder() / f"kernels-{compile._key(binding)}.o"
    return compile._object_code(binding, None), path


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A cache folder that is empty, and kernels that are not loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile, "_linked", None)
    return tmp_path / "ringtap"


def made(code, monkeypatch):
    """Stands for the compiler's process, which takes seconds: it gives the code that it gave before."""
    monkeypatch.setattr(
        subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, compile._sealed(code[0]), b"")
    )


def scan():
    one = Scan()
    one.feed(memoryview(DATA))
    return one.finish()


def test_the_key_covers_every_module_that_the_kernels_import():
    packages = ("ringtap.analysis.pcap", "ringtap.analysis.pcap.kernels", "ringtap.core")
    imported = {
        name.rpartition(".")[2]
        for path in compile.sources()
        if path.name != "compile.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(packages)
        for name in ([alias.name for alias in node.names] if node.module in packages else [node.module])
    }
    assert {"scan_dtypes", "capture_file_formats"} <= imported
    assert imported <= {path.stem for path in compile.sources()}


def test_compiled_once_and_said_once(code, fresh, monkeypatch):
    made(code, monkeypatch)
    told: list[str] = []
    compile.entries(told.append)
    assert len(told) == 1
    assert "once" in told[0]
    assert len(list(fresh.iterdir())) == 1
    monkeypatch.setattr(compile, "_linked", None)
    monkeypatch.setattr(subprocess, "run", None)
    compile.entries(told.append)
    assert len(told) == 1
    assert scan().counts["packets"] == len(usual())


def test_a_damaged_cache_is_made_anew(code, fresh, monkeypatch):
    from llvmlite import binding

    path = fresh / f"kernels-{compile._key(binding)}.o"
    fresh.mkdir()
    path.write_bytes(compile._sealed(code[0])[:-1] + b"x")
    made(code, monkeypatch)
    compile.entries()
    assert path.read_bytes() == compile._sealed(code[0])
    assert scan().counts["packets"] == len(usual())


@pytest.mark.needs_root("give a file away")
def test_anothers_cache_is_not_run(code, fresh, monkeypatch):
    from llvmlite import binding

    path = fresh / f"kernels-{compile._key(binding)}.o"
    fresh.mkdir()
    path.write_bytes(compile._sealed(code[0]))
    os.chown(path, 12345, 12345)
    told: list[str] = []
    made(code, monkeypatch)
    compile.entries(told.append)
    assert len(told) == 1
    assert path.stat().st_uid == os.geteuid()


def test_a_cache_that_cannot_be_written_is_done_without(code, fresh, monkeypatch):
    fresh.parent.mkdir(exist_ok=True)
    fresh.write_text("a file where the folder should be")
    made(code, monkeypatch)
    assert scan().counts["packets"] == len(usual())


def test_code_that_needs_more_than_later_processes_have_is_refused():
    """Linking it would end the process."""
    program = (
        "from llvmlite import binding\nfrom ringtap.analysis.pcap.kernels import compile\n"
        "def fails(state, a, b):\n    if a:\n        raise ValueError\n    return b\n"
        "binding.initialize_native_target()\nbinding.initialize_native_asmprinter()\n"
        "compile._compile(binding, {'fails': fails})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "RuntimeError: the machine code calls" in done.stderr
    assert "numba_gil_ensure" in done.stderr


def test_a_compiler_that_fails_says_why(fresh, monkeypatch):
    failed = subprocess.CompletedProcess((), 1, b"", b"Traceback\nMemoryError: no room\n")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(MeasurementError, match="no room"):
        compile.entries()


def test_a_warm_process_imports_no_compiler(code):
    program = (
        "import sys\nfrom ringtap.analysis.pcap.scan import Scan\nScan()\n"
        "print(*sorted({'numba', 'pandas', 'scipy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == ""


def test_several_scans_in_threads():
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: scan(), range(16)))
    for one in found:
        assert np.array_equal(one.conversations, found[0].conversations)
        assert one.counts == found[0].counts
