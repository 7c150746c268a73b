"""Reads captures as blocks of bytes, from files and pipes, plain or compressed.

Formats: gzip (RFC 1952), Zstandard (RFC 8878), xz, bzip2 and LZ4 frames.
"""

from __future__ import annotations

import bz2
import contextlib
import glob
import io
import itertools
import lzma
import os
import queue
import stat
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ringtap.core.capture_file_formats import CAPTURE_MAGICS
from ringtap.core.errors import UsageError
from ringtap.core.installation import install_command, shipped_example
from ringtap.core.units import counted
from ringtap.core.untrusted_files import refuse_links

BLOCK_BYTES = 1 << 20
"""Size that fits the second-level cache of current servers, so that a block is read from memory once."""

_UNPACKED_BYTES = 1 << 20
_BLOCKS_AHEAD = 4
# One byte of zstd can expand to 32 KiB: input in pieces of this size bounds the output of a call to 32 MiB. A call that
# reaches damage returns no output, so pieces are small for every packer
_PACKED_BYTES = 1 << 10
_WINDOW_MIB = 128  # that a file may ask to be unpacked with
_GZIP, _ZSTD, _XZ, _BZIP2, _LZ4 = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"BZh", b"\x04\x22\x4d\x18"
_SKIPPED = tuple(bytes([0x50 + number, 0x2A, 0x4D, 0x18]) for number in range(16))  # frames of zstd and lz4
_OTHER_PACKERS = {b"PK\x03\x04": "zip", b"7z\xbc\xaf\x27\x1c": "7z", b"\x1f\x9d": "compress", b"LZIP": "lzip"}
_LONG = {"zstd": "zstd --long=31"}  # programs that ask for an option to use more memory
_BESIDE = (".json", ".jsonl", ".rec")  # what ringtap records in a folder of packets
_SHOWN = 5  # files left out that are named

Troubles = dict[str, int]


class Captures(NamedTuple):
    """The captures that words of a command line stand for.

    Attributes:
        paths: one path per file; None for standard input.
        left_out: a sentence for each directory or glob of which something is not among them.
    """

    paths: list[Path | None]
    left_out: tuple[str, ...] = ()


def expand(words: Sequence[str | os.PathLike[str]]) -> Captures:
    """Return the files named on a command line; examples/NAME is one that ships with ringtap, unless there is one here.

    Args:
        words: names of files or pipes, ``-`` for standard input, shell globs that the shell did not expand, or
            directories that hold captures.

    Raises:
        UsageError: a word matches nothing, or a file is named twice.
    """
    found: list[Path | None] = []
    left_out: list[str] = []
    for word in words:
        paths, reasons = ([None], {}) if word == "-" else _expand(os.fspath(word))
        found += paths
        if reasons:
            left_out.append(_left_out(os.fspath(word), len(paths), reasons))
    seen: dict[tuple[int, int], Path] = {}
    for path in found:
        if path is None:
            continue
        about = path.stat()
        if (about.st_dev, about.st_ino) in seen and stat.S_ISREG(about.st_mode):
            raise UsageError(f"{path} is named twice: its packets would count twice")
        seen[about.st_dev, about.st_ino] = path
    if found.count(None) > 1:
        raise UsageError("'-' is named twice: standard input can be read once")
    return Captures(found, tuple(left_out))


def _left_out(word: str, captures: int, reasons: dict[str, str]) -> str:
    shown = ", ".join(f"{name} {why}" for name, why in list(reasons.items())[:_SHOWN])
    more = ", …" if len(reasons) > _SHOWN else ""
    entries = captures + len(reasons)
    return f"{len(reasons)} of {counted(entries, 'entry', 'entries')} of {word} left out: {shown}{more}"


def _expand(word: str) -> tuple[list[Path | None], dict[str, str]]:
    """Return the files, and why other entries of the same directory or glob are left out, by their name."""
    if not word:
        raise UsageError("an empty text names no capture: give a file, a directory or '-' for standard input")
    path = shipped_example(word) or Path(word)
    try:
        if path.is_dir():
            return _in_directory(path)
        if path.exists():
            return [path], {}
        if not glob.has_magic(word):
            raise UsageError(f"{word} does not exist")
        # like a shell and unlike Path.glob, this leaves out hidden files
        found = [Path(name) for name in sorted(glob.glob(word))]  # noqa: PTH207
        folders = {str(one): "is a directory" for one in found if one.is_dir()}
    except (OSError, ValueError) as error:
        raise UsageError(f"{word!r} cannot be read: {getattr(error, 'strerror', error)}") from error
    if len(folders) == len(found):
        raise UsageError(f"no file matches {word}")
    return [one for one in found if str(one) not in folders], folders


def _in_directory(path: Path) -> tuple[list[Path | None], dict[str, str]]:
    entries = [entry for entry in sorted(path.iterdir()) if not entry.name.startswith(".")]
    entries = [entry for entry in entries if entry.suffix not in _BESIDE]
    reasons = {entry.name: why for entry in entries if (why := _why_left_out(entry))}
    if len(reasons) == len(entries):
        held = f": {_left_out(str(path), 0, reasons)}" if reasons else ""
        recorded = next(path.glob("nodes/*/packets"), None)
        hint = f"; name a node's packets, for example {recorded}" if recorded else ""
        raise UsageError(f"{path} is a directory without captures{held}{hint}")
    return [entry for entry in entries if entry.name not in reasons], reasons


def _why_left_out(entry: Path) -> str:
    """Return why an entry of a directory is not read; empty for a capture."""
    if not entry.is_file():
        return "is a directory" if entry.is_dir() else "is not a file"
    stream = CaptureStream(entry)
    try:
        if stream.is_plain or bytes(next(stream.blocks())[:4]) in CAPTURE_MAGICS:
            return ""
    except UsageError as error:
        return str(error).removeprefix(f"{stream.name} ")
    finally:
        stream.close()
    return "does not begin as a capture does"


class CaptureStream:
    """The bytes of one capture.

    Args:
        path: a file or a pipe; None for standard input.

    Attributes:
        name: name of the source, for messages.
        about: status of a regular file when it was opened; None for pipes and standard input.
        read_bytes: bytes read so far, before decompression.
        troubles: anomalies of the compressed file, as counts by name.

    Raises:
        UsageError: it cannot be opened.
    """

    def __init__(self, path: Path | None) -> None:
        self.name = "standard input" if path is None else str(path)
        self.read_bytes = 0
        self.troubles: Troubles = {}
        try:
            # unbuffered: standard input is read from its descriptor
            if path is not None:
                refuse_links(path)
            self._file = io.FileIO(sys.stdin.fileno() if path is None else path, closefd=path is not None)
            about = os.fstat(self._file.fileno())
        except (OSError, AttributeError, ValueError) as error:
            raise UsageError(f"{self.name} cannot be read: {getattr(error, 'strerror', error)}") from error
        if path is not None and (stat.S_ISCHR(about.st_mode) or stat.S_ISBLK(about.st_mode)):
            self._file.close()
            raise UsageError(f"{self.name} is a device: give a file, or '-' for standard input")
        self.about = about if stat.S_ISREG(about.st_mode) and path is not None else None
        self._ahead: _ReadAhead | None = None

    @property
    def total_bytes(self) -> int | None:
        """Size of the file; None if it is not known."""
        return None if self.about is None else self.about.st_size

    @property
    def is_plain(self) -> bool:
        """True for a file that is not compressed, so that it can be read from anywhere."""
        return self.about is not None and os.pread(self._file.fileno(), 4, 0) in CAPTURE_MAGICS

    def read_at(self, block: memoryview, at: int) -> int:
        """Read bytes of a file, from one place on, into a block; return their number, which is 0 at its end.

        Raises:
            UsageError: they cannot be read.
        """
        try:
            return os.preadv(self._file.fileno(), [block], at)
        except OSError as error:
            raise UsageError(f"{self.name} cannot be read: {error.strerror}") from error

    def rest(self, at: int) -> Iterator[memoryview]:
        """Yield the blocks of a plain file from one place on."""
        self._file.seek(at)
        return self._plain()

    def blocks(self) -> Iterator[memoryview]:
        """Yield the capture's bytes in order, decompressed. A block is valid until the next one is requested.

        Raises:
            UsageError: it is empty, or its compression is damaged or not supported.
        """
        plain = self._plain()
        first = next(plain, None)
        if first is None:
            raise UsageError(f"{self.name} is empty")
        unpack = _unpacker(bytes(first[:6]), self.name)
        if unpack is None:
            yield first
            yield from plain
            return
        self._ahead = _ReadAhead(lambda: unpack(itertools.chain((first,), plain), self.troubles, self.name))
        any_block = False
        for block in self._ahead:
            any_block = True
            yield block
        if not any_block:
            raise UsageError(f"{self.name} holds nothing that can be unpacked")

    def close(self) -> None:
        """Close the file, and stop the thread that decompresses it."""
        if self._ahead is not None:
            self._ahead.close()
        self._file.close()

    def _plain(self) -> Iterator[memoryview]:
        """Yield the unchanged blocks of the file; each is overwritten by the next."""
        whole = memoryview(bytearray(BLOCK_BYTES))
        while True:
            at = 0
            while at < BLOCK_BYTES:  # a pipe returns few bytes per call
                try:
                    number = self._file.readinto(whole[at:])
                except OSError as error:
                    raise UsageError(f"{self.name} cannot be read: {error.strerror}") from error
                if not number:
                    break
                at += number
                self.read_bytes += number
            if at:
                yield whole[:at]
            if at < BLOCK_BYTES:
                return


def _gunzip(blocks: Iterator[memoryview], troubles: Troubles, _name: str) -> Iterator[bytes]:
    """Decompress gzip members one after another, in pieces of bounded size."""
    decompressor: zlib._Decompress = zlib.decompressobj(31)
    fresh = True  # no byte of the member was read yet
    for block in blocks:
        data: bytes | memoryview = block
        while len(data):
            if fresh and data[0] == 0:  # tape blocks are padded with zeros
                data = bytes(data).lstrip(b"\0")
                continue
            before = decompressor.copy()
            try:
                piece = decompressor.decompress(data, _UNPACKED_BYTES)
            except zlib.error:
                whole = b"".join(_until_damage(before, data))
                if whole:
                    yield whole
                # gzip itself ignores garbage after the last member, too
                troubles["unpacking_damaged" if whole or not fresh else "bytes_after_gzip"] = 1
                return
            fresh = False
            if piece:
                yield piece
            data = decompressor.unconsumed_tail
            if decompressor.eof:
                data, decompressor, fresh = decompressor.unused_data, zlib.decompressobj(31), True
    if not fresh:
        if piece := decompressor.flush():
            yield piece
        if not decompressor.eof:
            troubles["unpacking_cut"] = 1


def _until_damage(decompressor: zlib._Decompress, data: bytes | memoryview) -> Iterator[bytes]:
    """Decompress byte by byte up to the damage, because a call that reaches it returns no output."""
    with contextlib.suppress(zlib.error):
        for at in range(len(data)):
            yield decompressor.decompress(data[at : at + 1])


_Unpack = Callable[[Iterator[memoryview], Troubles, str], Iterator[bytes]]


def _unpacker(head: bytes, name: str) -> _Unpack | None:
    """Return the function that decompresses a file which begins like this; None for a plain one.

    Raises:
        UsageError: its compression is not supported, or not installed.
    """
    for magic, packer in _OTHER_PACKERS.items():
        if head.startswith(magic):
            raise UsageError(f"{name} is packed with {packer}: unpack it first, or pipe it in ('-')")
    if head.startswith(_GZIP):
        return _gunzip
    if head.startswith(_XZ):
        return _unpack_with(partial(lzma.LZMADecompressor, memlimit=_WINDOW_MIB << 20), lzma.LZMAError, "xz")
    if head.startswith(_BZIP2):
        return _unpack_with(bz2.BZ2Decompressor, OSError, "bzip2")
    if head.startswith(_LZ4):
        try:
            import lz4.frame
        except ImportError as error:
            raise UsageError(f"{name} is packed with lz4: pip install lz4, or unpack it first") from error
        return _unpack_with(lz4.frame.LZ4FrameDecompressor, RuntimeError, "lz4")
    if not head.startswith((_ZSTD, *_SKIPPED)):
        return None
    try:
        import zstandard
    except ImportError as error:
        raise UsageError(f"{name} is packed with zstd: {install_command('report')}, or unpack it first") from error
    return _unpack_with(zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError, "zstd")


def _unpack_with(make: Callable[[], Any], damaged: type[Exception], packer: str) -> _Unpack:
    """Return a function that decompresses streams one after another, from small pieces of input.

    Args:
        make: returns the decompressor of one stream.
        damaged: what it raises.
        packer: the name of the program that packs so.
    """

    def unpack(blocks: Iterator[memoryview], troubles: Troubles, name: str) -> Iterator[bytes]:
        decompressor, fresh = make(), True
        limit = () if packer == "zstd" else (_UNPACKED_BYTES,)  # a limit of the output, which zstandard does not know
        for block in blocks:
            pieces: list[bytes] = []
            size = 0
            for at in range(0, len(block), _PACKED_BYTES):
                data = bytes(block[at : at + _PACKED_BYTES])
                while data or not getattr(decompressor, "needs_input", True):
                    if fresh and not (data := data.lstrip(b"\0")):  # streams are padded with zeros
                        break
                    try:
                        piece = decompressor.decompress(data, *limit)
                    except damaged as error:
                        if "memory" in str(error).lower():
                            raise UsageError(
                                f"{name} is packed with a window of more than {_WINDOW_MIB} MiB: unpack it with "
                                f"{_LONG.get(packer, packer)} first"
                            ) from error
                        troubles["unpacking_damaged"] = 1
                        yield b"".join(pieces)
                        return
                    pieces.append(piece)
                    size += len(piece)
                    fresh = decompressor.eof
                    data = (fresh and decompressor.unused_data) or b""
                    if fresh:
                        decompressor = make()
                    if size >= _UNPACKED_BYTES:
                        yield b"".join(pieces)
                        pieces, size = [], 0
            if size:
                yield b"".join(pieces)
        if not fresh:
            troubles["unpacking_cut"] = 1

    return unpack


class _ReadAhead:
    """Bounded queue of blocks that another thread produces while earlier ones are processed."""

    def __init__(self, make: Callable[[], Iterator[bytes]]) -> None:
        self._ready: queue.Queue[bytes | BaseException | None] = queue.Queue(_BLOCKS_AHEAD)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(make,), name="ringtap-unpack", daemon=True)
        self._thread.start()

    def _run(self, make: Callable[[], Iterator[bytes]]) -> None:
        end: BaseException | None = None
        try:
            for block in make():
                self._put(block)
                if self._stopped.is_set():
                    return
        except BaseException as error:
            end = error
        self._put(end)

    def _put(self, item: bytes | BaseException | None) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(item, timeout=0.1)
                return

    def __iter__(self) -> Iterator[memoryview]:
        while (item := self._ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            whole = memoryview(item)
            for at in range(0, len(whole), _UNPACKED_BYTES):
                yield whole[at : at + _UNPACKED_BYTES]

    def close(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self._thread.join()
