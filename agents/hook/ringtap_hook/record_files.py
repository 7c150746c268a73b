"""Writes the files of a process of the job: no other process writes them, and each record is one system call."""

from __future__ import annotations

import os
import time

from .settings import identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from .settings import Settings

#: suffixes of the files of a process, which have one stem
SUFFIXES = (".rec", ".ddp.rec", ".horovod.rec", ".buckets.jsonl", ".optimizers.jsonl", ".profile.jsonl")
_MAX_STEMS = 1000
_begun = 0  # number of the current files: a process that joins another group, or is forked, begins new ones
_begun_ns = 0  # by CLOCK_MONOTONIC; 0: with the process
_stem = ""  # of the current files


def begin_files() -> None:
    """Let the next record of each file of this process begin a new one."""
    global _begun, _begun_ns, _stem
    _begun, _begun_ns, _stem = _begun + 1, time.monotonic_ns(), ""


os.register_at_fork(after_in_child=begin_files)


def attach(module: ModuleType, _settings: Settings) -> None:
    """Begin new files when the process joins or leaves its default process group, because its rank may differ."""
    import functools

    def wrap(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def changing(*args: Any, **kwargs: Any) -> Any:
            try:
                return plain(*args, **kwargs)
            finally:
                begin_files()

        return changing

    for name in ("init_process_group", "destroy_process_group"):
        if hasattr(module, name):
            setattr(module, name, wrap(getattr(module, name)))


def header(fields: list[tuple[str, str, str]], about: dict[str, Any]) -> bytes:
    """The first line of a record file of 64-bit integers.

    Args:
        fields: name, unit and kind of each column, as in ringtap.core.append_only_logs.
        about: further entries of the header.
    """
    import json

    columns = [
        {"name": name, "type": "<i8", "unit": unit, "kind": kind, "width_bits": 0} for name, unit, kind in fields
    ]
    item = {"format": "ringtap-records", "version": 1, "record_bytes": 8 * len(fields), "fields": columns}
    line = json.dumps(dict(item, about=about)).encode()
    return line + b" " * (-(len(line) + 1) % 64) + b"\n"


def json_line(item: dict[str, Any]) -> bytes:
    """A line of a file without a header."""
    import json

    return json.dumps(item).encode() + b"\n"


class ProcessFile:
    """A file ``rank<R>-<pid><suffix>`` of this process, created at the first write.

    Args:
        folder: its folder, created if missing.
        suffix: end of the name, such as ``.rec``.
        fields: the columns of a record file; None for a file without a header.
        source: origin of the numbers, for the header.
        is_whole: True if another process group begins no new file. A forked child must not write such a file.

    Attributes:
        about: further entries of the header.
    """

    def __init__(
        self,
        folder: str,
        suffix: str,
        fields: list[tuple[str, str, str]] | None,
        source: str = "",
        is_whole: bool = False,
    ) -> None:
        self._folder, self._suffix, self._fields, self._source = folder, suffix, fields, source
        self.about: dict[str, Any] = {}
        self._is_whole = is_whole
        self._fd = -1
        self._begun = _begun
        self._file_id = (0, 0)
        self._is_linked = True

    def write(self, data: bytes, mono_ns: int) -> None:
        """Append data in one system call, so that none is lost when the process is killed.

        Args:
            data: one record or line.
            mono_ns: its time by CLOCK_MONOTONIC. The header holds the age of the process in its group at the first one.

        Raises:
            OSError: the file cannot be made or written, or the job has closed it.
        """
        if self._begun != _begun and not self._is_whole:
            self.leave()
            self._begun = _begun
        if self._fd < 0:
            self._create(mono_ns)
        self._append(data)

    def leave(self) -> None:
        """Close the file, so that the next write creates a new one: in a forked child, or in another process group."""
        if self._fd >= 0 and self._is_open():
            os.close(self._fd)
        self._fd = -1

    def _create(self, mono_ns: int) -> None:
        about = identity(mono_ns)
        os.makedirs(self._folder, exist_ok=True)
        about["age_ns"] = max(0, min(about["age_ns"], mono_ns - _begun_ns))
        path = _stem_in(self._folder, about) + self._suffix
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if self._fd <= 2:  # the job has closed a standard descriptor, and may still write to that number
            from fcntl import F_DUPFD_CLOEXEC, fcntl

            low, self._fd = self._fd, fcntl(self._fd, F_DUPFD_CLOEXEC, 3)
            os.close(low)
        status = os.fstat(self._fd)
        self._file_id = (status.st_dev, status.st_ino)
        if self._fields is None:
            return
        try:
            self._append(header(self._fields, dict(about, source=self._source, **self.about)))
        except OSError:
            os.unlink(path)  # a torn header would make the file unreadable
            raise

    def _append(self, data: bytes) -> None:
        if not self._is_open():
            raise OSError("the record file was closed by the job")
        if not self._is_linked:
            raise OSError("the record file was deleted")
        left = data
        try:
            while left:  # a disk that is nearly full takes only a part
                left = left[os.write(self._fd, left) :]
        except OSError:
            if len(left) < len(data):  # only this process writes here: cut the partial record off
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - len(data) + len(left))
            raise

    def _is_open(self) -> bool:
        """True if the descriptor still refers to the file: the job may have closed it and reused its number."""
        try:
            found = os.fstat(self._fd)
        except OSError:
            return False
        self._is_linked = found.st_nlink > 0
        return (found.st_dev, found.st_ino) == self._file_id


def _stem_in(folder: str, about: dict[str, Any]) -> str:
    """The stem that the current files of this process have in common; no other process has it."""
    global _stem
    if os.path.dirname(_stem) != folder:
        first = os.path.join(folder, "rank{}-{}".format(about["rank"], about["pid"]))
        # another group, another program after os.exec, or a restart with the same pid in a new PID namespace
        stems = (first if number == 1 else f"{first}-{number}" for number in range(1, _MAX_STEMS))
        _stem = next(stem for stem in stems if not any(os.path.exists(stem + suffix) for suffix in SUFFIXES))
    return _stem
