"""The kernels as machine code: compiled once, kept in the user's cache folder, loaded without the compiler.

numba compiles the kernels to LLVM code, llvmlite that to an object file. A later process needs neither numba, whose
import alone takes longer than a million packets, nor a compilation: it links the object file and calls it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from ringtap.errors import UsageError

Entry = Callable[[int, int, int], int]
_NAMES = ("walk", "walk_blocks", "resume", "resume_blocks", "finish")
_SIGNATURE = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_int64,
)
_keep: list[Any] = []


def cache_folder() -> Path:
    """Where ringtap keeps what can be made again: ``$XDG_CACHE_HOME/ringtap``, else ``~/.cache/ringtap``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ringtap"


@functools.cache
def entries(say: Callable[[str], None] | None = None) -> dict[str, Entry]:
    """The compiled entry points by name; they release the interpreter's lock while they run.

    Args:
        say: told in one line when the kernels have to be compiled first, which takes some seconds.

    Raises:
        UsageError: llvmlite or numba are not installed, or the machine is big-endian.
    """
    if sys.byteorder != "little":
        raise UsageError("captures are read on little-endian machines only: copy the files to one")
    try:
        from llvmlite import binding
    except ImportError as error:
        raise UsageError("reading captures needs numba: pip install 'ringtap[analysis]'") from error
    if not hasattr(binding, "initialize_all_asmprinters"):
        binding.initialize()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    path = cache_folder() / f"kernels-{_key(binding)}.o"
    try:
        code = _unsealed(path.read_bytes())
    except OSError:
        code = b""
    if not code:
        if say is not None:
            say("Compiling the reader of captures, once on this machine (some 20 s)")
        code = _compile(binding)
        _store(path, code)
    return _link(binding, code)


def _key(binding: Any) -> str:
    """Of everything that the machine code depends on."""
    here = Path(__file__).parent
    parts = [p.read_bytes() for p in sorted(here.glob("kernel_*.py"))] + [(here / "layout.py").read_bytes()]
    for name in ("numba", "llvmlite"):
        parts.append(metadata.version(name).encode())
    parts.append(f"{sys.version_info[:2]} {platform.machine()} {binding.get_host_cpu_name()}".encode())
    parts.append(binding.get_host_cpu_features().flatten().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _seal(code: bytes) -> bytes:
    return hashlib.sha256(code).digest() + code


def _unsealed(stored: bytes) -> bytes:
    """The code of a cache file; empty if it is damaged."""
    code = stored[32:]
    return code if hashlib.sha256(code).digest() == stored[:32] else b""


def _store(path: Path, code: bytes) -> None:
    """Keep the code, at once and whole; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(_seal(code))
        Path(name).replace(path)
    except OSError:
        pass


def _machine(binding: Any) -> Any:
    features = binding.get_host_cpu_features().flatten()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=features, opt=3, reloc="pic", codemodel="default"
    )


def _compile(binding: Any) -> bytes:
    try:
        from numba import njit, types
    except ImportError as error:
        raise UsageError("reading captures needs numba: pip install 'ringtap[analysis]'") from error
    from ringtap.analysis.pcap.kernel_walk import ENTRIES

    whole = None
    for function in ENTRIES:
        made = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
        made.compile((types.int64,) * 3)
        text = next(iter(made.inspect_llvm().values()))
        text = re.sub(rf"@(_ZN\w*kernel_walk\w*{function.__name__}B\w+)\(", rf"@ringtap_{function.__name__}(", text)
        module = binding.parse_assembly(text)
        if whole is None:
            whole = module
        else:
            whole.link_in(module)
    assert whole is not None
    return bytes(_machine(binding).emit_object(whole))


def _link(binding: Any, code: bytes) -> dict[str, Entry]:
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine(binding))
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _keep.append(engine)
    return {name: _entry(engine.get_function_address(f"ringtap_{name}")) for name in _NAMES}


def _entry(address: int) -> Entry:
    call, result = _SIGNATURE(address), ctypes.c_int64()

    def entry(a: int, b: int, c: int) -> int:
        result = ctypes.c_int64()
        call(result, None, a, b, c)
        return result.value

    del result
    return entry
