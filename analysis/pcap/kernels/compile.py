"""Machine code of the kernels: compiled once, kept in the user's cache folder, loaded without the compiler.

numba compiles the kernels to LLVM code, and llvmlite compiles that to an object file. A later process only links the
object file and calls it. It does not import numba: the import alone takes as long as scanning millions of packets. The
compiler runs in its own process, so that its memory is freed when it is done.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.installation import cache_folder, install_command
from ringtap.core.parent_death import die_with_parent
from ringtap.core.python_command import python_command

Entry = Callable[[int, int, int], int]
_NAMES = ("walk", "walk_blocks", "resume", "resume_blocks", "finish", "total", "join")
# numba's convention: pointers to the result and to an exception, the arguments; returns a status
_SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *(ctypes.c_int64,) * 3)


_linked: dict[str, Entry] = {}
_alive: list[Any] = []  # owners of the machine code


def entries(say: Callable[[str], None] | None = None) -> dict[str, Entry]:
    """Return the compiled entry points by name; they release the interpreter's lock while they run.

    Args:
        say: called with one line of text if the kernels have to be compiled first.

    Raises:
        UsageError: numba is not installed, or the machine is big-endian.
        MeasurementError: the kernels could not be compiled.
    """
    if not _linked:
        if sys.byteorder != "little":
            raise UsageError("captures are read on little-endian machines only: copy the files to one")
        try:
            from llvmlite import binding
        except ImportError as error:
            raise UsageError(f"reading captures needs numba: {install_command('report')}") from error
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        _linked.update(_link(binding, _object_code(binding, say)))
    return _linked


def _object_code(binding: Any, say: Callable[[str], None] | None) -> bytes:
    path = cache_folder() / f"kernels-{_key(binding)}.o"
    try:
        code = _unsealed(path.read_bytes())
    except OSError:
        code = b""
    if not code:
        import subprocess

        if importlib.util.find_spec("numba") is None:
            raise UsageError(f"reading captures needs numba: {install_command('report')}")
        if say is not None:
            say("Compiling the reader of captures, once on this machine: about 10 s")
        command = python_command(sys.executable, "ringtap.analysis.pcap.kernels.compile")
        done = subprocess.run(command, capture_output=True, check=False, preexec_fn=die_with_parent())
        code = _unsealed(done.stdout)
        if not code:
            why = (done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
            raise MeasurementError(f"the reader of captures could not be compiled: {why}")
        _store(path, done.stdout)
    return code


def sources() -> list[Path]:
    """Return the files that the machine code is made from: the kernels, and the columns that they write."""
    here = Path(__file__).parent
    return [*sorted(here.glob("*.py")), here.parent / "scan_dtypes.py"]


def _key(binding: Any) -> str:
    """Return a hash of everything that the machine code depends on."""
    import llvmlite

    parts = [source.read_bytes() for source in sources()]
    numba = importlib.util.find_spec("numba")
    if numba is not None and numba.origin is not None:
        version = Path(numba.origin).with_name("_version.py")  # numba.__version__ needs a slow import
        parts.append(version.read_bytes() if version.exists() else b"")
    parts.append(f"{llvmlite.__version__} {sys.version_info[:2]} {os.uname().machine}".encode())
    parts.append(binding.get_host_cpu_name().encode())
    parts.append(binding.get_host_cpu_features().flatten().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _sealed(code: bytes) -> bytes:
    return hashlib.sha256(code).digest() + code


def _unsealed(stored: bytes) -> bytes:
    """Return the code of a cache file; empty if it is damaged."""
    code = stored[32:]
    return code if hashlib.sha256(code).digest() == stored[:32] else b""


def _store(path: Path, sealed: bytes) -> None:
    """Store the code atomically, as two processes may do so; failure to write the cache is not an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(sealed)
        Path(name).replace(path)
    except OSError:
        return


def _machine(binding: Any) -> Any:
    features = binding.get_host_cpu_features().flatten()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(binding.get_host_cpu_name(), features, opt=3, reloc="pic")


def _compile(binding: Any) -> bytes:
    """Return the object file with all entry points."""
    from numba import njit, types

    from ringtap.analysis.pcap.kernels.walk import ENTRIES

    whole = binding.parse_assembly("")
    for function in ENTRIES:
        made = njit((types.int64,) * 3, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
        (text,) = made.inspect_llvm().values()
        # replace the mangled name of module and function by one that can be looked up
        text = re.sub(rf"@_ZN\w*?7kernels4walk\d+{function.__name__}B\w+\(", f"@ringtap_{function.__name__}(", text)
        whole.link_in(binding.parse_assembly(text))
    return bytes(_machine(binding).emit_object(whole))


def _link(binding: Any, code: bytes) -> dict[str, Entry]:
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine(binding))
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _alive.append(engine)
    return {name: _entry(engine.get_function_address(f"ringtap_{name}")) for name in _NAMES}


def _entry(address: int) -> Entry:
    call = _SIGNATURE(address)

    def entry(a: int, b: int, c: int) -> int:
        result, exception = ctypes.c_int64(), ctypes.c_void_p()
        call(ctypes.addressof(result), ctypes.addressof(exception), a, b, c)
        return result.value

    return entry


if __name__ == "__main__":
    from llvmlite import binding as native

    native.initialize_native_target()
    native.initialize_native_asmprinter()
    sys.stdout.buffer.write(_sealed(_compile(native)))
