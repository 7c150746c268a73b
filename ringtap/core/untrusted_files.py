"""Opens files of run directories: regular files only, and no link of another user below a run directory.

A run directory may belong to somebody else. A pipe in it might never give anything, a device might never end, and a
link in it might lead to a file of its reader.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from ringtap.core.errors import UsageError, file_errors

RUN_JSON = "run.json"
MAX_BYTES = 64 << 20  # of a file that is read whole


def refuse_links(path: Path) -> None:
    """Check that no link of another user leads to a path below a run directory.

    Raises:
        OSError: a part of the path below the outermost run directory is such a link.
    """
    # every file is opened through here: with pathlib, this would take longer than to read most of them
    parts = [os.path.abspath(path)]  # noqa: PTH100 (keeps links)
    while (above := os.path.dirname(parts[-1])) != parts[-1]:  # noqa: PTH120
        parts.append(above)
    tops = [number for number, folder in enumerate(parts[1:]) if os.path.lexists(f"{folder}/{RUN_JSON}")]
    for part in parts[tops[-1] :: -1] if tops else []:
        try:
            about = os.lstat(part)
        except FileNotFoundError:
            return
        if stat.S_ISLNK(about.st_mode) and about.st_uid != os.geteuid():
            name = "it" if part == parts[0] else part
            raise OSError(errno.ELOOP, f"{name} is a link of another user, which is not followed", str(path))


def open_file(path: Path, flags: int, mode: int = 0o644) -> int:
    """Open a file as ``os.open`` does, for this process alone, where no link of another user leads to it.

    Raises:
        OSError: it cannot be opened, is not a regular file, or such a link leads to it.
    """
    refuse_links(path)
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return fd


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        OSError: as for `open_file`.
    """
    return os.fdopen(open_file(path, os.O_RDONLY), "rb")


@contextlib.contextmanager
def new_file(path: Path, force: bool) -> Iterator[TextIO]:
    """Open a text file of an option for writing within the block.

    Raises:
        UsageError: it exists and ``force`` is not set, or it cannot be written.
    """
    refuse_existing(path, force)
    with file_errors(path, "cannot be written"), path.open("w" if force else "x", encoding="ascii") as file:
        yield file


def refuse_existing(path: Path | None, force: bool) -> None:
    """Check that the file of an option does not exist, unless ``force`` is set.

    Raises:
        UsageError: it exists.
    """
    if path is not None and not force and path.exists():
        raise UsageError(f"{path} exists: name another file or add --force")


def read_whole(path: Path) -> bytes:
    """Read a file of at most `MAX_BYTES`.

    Raises:
        OSError: as for `open_file`, or it is larger.
    """
    with open_regular(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_BYTES >> 20} MiB", str(path))
    return data


def read_tail(path: Path, size_bytes: int) -> str:
    """Return the end of a file as text, at most so many bytes; empty if it cannot be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def make_folder(path: Path) -> None:
    """Make a folder with its parents where no link of another user leads to it; it may exist.

    Raises:
        OSError: it cannot be made, or such a link leads to it.
    """
    refuse_links(path)
    path.mkdir(parents=True, exist_ok=True)


def replace_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file to a temporary name of its own and rename it, so that a reader never sees half a file.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    temporary = new_file_beside(path, data, mode)
    try:
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def new_file_beside(path: Path, data: bytes = b"", mode: int = 0o666) -> Path:
    """Write a new file under a hidden name of its own beside a path, and return its path.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    # machines that share the folder may have the same host name
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.{os.urandom(4).hex()}")
    refuse_links(path.parent)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return temporary
