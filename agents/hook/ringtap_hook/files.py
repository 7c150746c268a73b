"""The files that a process of the job writes: its own alone, and every record handed to the kernel in one call."""

from __future__ import annotations

import os

from .settings import identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def header(fields: list[tuple[str, str, str]], about: dict[str, Any]) -> bytes:
    """The line that a record file of 64-bit integers starts with.

    Args:
        fields: name, unit and kind of each column, as in ringtap.records.
        about: further facts.
    """
    import json

    columns = [
        {"name": name, "type": "<i8", "unit": unit, "kind": kind, "width_bits": 0} for name, unit, kind in fields
    ]
    item = {"format": "ringtap-records", "version": 1, "record_bytes": 8 * len(fields), "fields": columns}
    line = json.dumps(dict(item, about=about)).encode()
    return line + b" " * (-(len(line) + 1) % 64) + b"\n"


class ProcessFile:
    """A file ``rank<R>-<pid><suffix>`` of this process, made at the first write.

    Args:
        folder: where; made if missing.
        suffix: end of the name, ``.rec`` or the like.
        fields: the columns of a record file; None: the file has no header.
        source: for the header: where the numbers come from.
    """

    def __init__(self, folder: str, suffix: str, fields: list[tuple[str, str, str]] | None, source: str) -> None:
        self._folder, self._suffix, self._fields, self._source = folder, suffix, fields, source
        self._fd = -1
        self._file_id = (0, 0)
        self._is_linked = True

    def write(self, data: bytes) -> None:
        """Append; one call to the kernel, so that a killed process loses none.

        Raises:
            OSError: the file cannot be made or written, or the job has closed it.
        """
        if self._fd < 0:
            self._make()
        self._hand_over(data)

    def leave_parent(self) -> None:
        """In a forked child: leave the parent's file alone."""
        if self._fd >= 0 and self._is_open():
            os.close(self._fd)
        self._fd = -1

    def _make(self) -> None:
        about = identity()
        os.makedirs(self._folder, exist_ok=True)
        stem = os.path.join(self._folder, "rank{}-{}".format(about["rank"], about["pid"]))
        path = stem + self._suffix
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        again = 1
        while self._fd < 0:
            try:
                self._fd = os.open(path, flags, 0o644)
            except FileExistsError:  # a restarted job in a fresh process namespace gets the same pid
                if again == 100:
                    raise
                again += 1
                path = f"{stem}-{again}{self._suffix}"
        if self._fd <= 2:  # the job has closed a standard descriptor, and may yet write to that number
            from fcntl import F_DUPFD_CLOEXEC, fcntl

            low, self._fd = self._fd, fcntl(self._fd, F_DUPFD_CLOEXEC, 3)
            os.close(low)
        status = os.fstat(self._fd)
        self._file_id = (status.st_dev, status.st_ino)
        if self._fields is None:
            return
        try:
            self._hand_over(header(self._fields, dict(about, source=self._source)))
        except OSError:
            os.unlink(path)  # a torn header would read as a file of something else
            raise

    def _hand_over(self, data: bytes) -> None:
        if not self._is_open():
            raise OSError("the record file was closed by the job")
        if not self._is_linked:
            raise OSError("the record file was deleted")
        left = data
        try:
            while left:  # a disk that is nearly full takes a part
                left = left[os.write(self._fd, left) :]
        except OSError:
            if len(left) < len(data):  # this process alone writes here: end with the record before
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - len(data) + len(left))
            raise

    def _is_open(self) -> bool:
        """True if the file is still open; the job may have closed it, and its number be one of the job's own by now."""
        try:
            found = os.fstat(self._fd)
        except OSError:
            return False
        self._is_linked = found.st_nlink > 0
        return (found.st_dev, found.st_ino) == self._file_id
