"""Compiles the kernels once, keeps their machine code in the user's cache folder, and loads it without the compiler.

numba makes a C callback of each entry point, and llvmlite compiles the callbacks' LLVM code to an object file. A later
process only links the object file and calls it. It does not import numba: the import alone takes as long as scanning
millions of packets. The compiler runs in its own process, so that its memory is freed when it is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ringtap.core import capture_file_formats
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.installation import cache_folder, install_command
from ringtap.core.isolated_python import python_command
from ringtap.core.parent_death import die_with_parent
from ringtap.core.untrusted_files import open_regular, replace_file

Entry = Callable[[int, int, int], int]
_SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int64, *(ctypes.c_int64,) * 3)


class Entries(NamedTuple):
    """The entry points, described in `walk`. They release the interpreter's lock while they run."""

    walk: Entry
    walk_blocks: Entry
    resume: Entry
    resume_blocks: Entry
    finish: Entry
    total: Entry
    join: Entry


_linked: Entries | None = None
_alive: list[Any] = []  # owners of the machine code


def entries(say: Callable[[str], None] | None = None) -> Entries:
    """Return the compiled entry points.

    Args:
        say: called with one line of text if the kernels have to be compiled first.

    Raises:
        UsageError: numba is not installed, or the machine is big-endian.
        MeasurementError: the kernels could not be compiled.
    """
    global _linked
    if _linked is None:
        if sys.byteorder != "little":
            raise UsageError("captures are read on little-endian machines only: copy the files to one")
        try:
            from llvmlite import binding
        except ImportError as error:
            raise UsageError(f"reading captures needs numba: {install_command('report')}") from error
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        _linked = _link(binding, _object_code(binding, say))
    return _linked


def _object_code(binding: Any, say: Callable[[str], None] | None) -> bytes:
    path = cache_folder() / f"kernels-{_key(binding)}.o"
    code = _stored(path)
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
    """Return the files that the machine code is made from: the kernels, their columns, and formats of captures."""
    here = Path(__file__).parent
    return [*sorted(here.glob("*.py")), here.parent / "scan_dtypes.py", Path(capture_file_formats.__file__)]


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


def _stored(path: Path) -> bytes:
    """Return the code that this user or root has stored; empty if there is none."""
    try:
        with open_regular(path) as file:
            return _unsealed(file.read()) if os.fstat(file.fileno()).st_uid in (os.geteuid(), 0) else b""
    except OSError:
        return b""


def _store(path: Path, sealed: bytes) -> None:
    """Store the code atomically, as two processes may do so; failure to write the cache is not an error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, sealed)


def _machine(binding: Any) -> Any:
    features = binding.get_host_cpu_features().flatten()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(binding.get_host_cpu_name(), features, opt=3, reloc="pic")


def _kernels() -> Entries:
    """Return the entry points in Python, before they are compiled."""
    os.environ["NUMBA_OPT"] = "0"  # numba would optimize each kernel again in each one that calls it
    from ringtap.analysis.pcap.kernels.walk_records import finish, join, resume, resume_blocks, total, walk, walk_blocks

    return Entries(walk, walk_blocks, resume, resume_blocks, finish, total, join)


def _compile(binding: Any, kernels: dict[str, Entry]) -> bytes:
    """Return the object file with some entry points."""
    from numba import cfunc, types

    whole = binding.parse_assembly("")
    for name, kernel in kernels.items():
        made = cfunc(types.int64(*(types.int64,) * 3), error_model="numpy")(kernel)
        module = binding.parse_assembly(made.inspect_llvm())
        module.get_function(made.native_name).name = _symbol(name)
        whole.link_in(module)
    entries = {_symbol(name) for name in kernels}
    for function in whole.functions:
        if not function.is_declaration and function.name not in entries:
            function.linkage = "internal"
    machine = _machine(binding)
    _optimize(binding, machine, whole)
    missing = [one.name for one in whole.functions if one.is_declaration and not one.name.startswith("llvm.")]
    if missing:
        raise RuntimeError(f"the machine code calls {', '.join(missing)}, which no later process has")
    return bytes(machine.emit_object(whole))


def _optimize(binding: Any, machine: Any, whole: Any) -> None:
    """Optimize all functions, and remove numba's code for exceptions, which kernels do not raise."""
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options())
    for _ in range(2):  # only then no function seems to return the status of an exception any more
        builder.getModulePassManager().run(whole, builder)


def _link(binding: Any, code: bytes) -> Entries:
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine(binding))
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _alive.append(engine)
    return Entries(*(_SIGNATURE(engine.get_function_address(_symbol(name))) for name in Entries._fields))


def _symbol(name: str) -> str:
    return f"ringtap_{name}"


if __name__ == "__main__":
    from llvmlite import binding as native

    native.initialize_native_target()
    native.initialize_native_asmprinter()
    sys.stdout.buffer.write(_sealed(_compile(native, _kernels()._asdict())))
