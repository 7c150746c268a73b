"""Writes per-flow logs of sender and receiver: record files, in batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringtap.core.append_only_logs import Field, RecordWriter
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.run_directory_schema import FLOW_STATES

FLUSH_S = 0.1

RECEIVED_FIELDS = (
    Field("flow", "<u8", "", "index"),
    Field("connection", "<u8", "", "index"),
    Field("sender", "<u8", "", "index"),
    Field("start_ns", "<i8", "ns", "time"),
    Field("finish_ns", "<i8", "ns", "time"),
    Field("size_bytes", "<i8", "bytes", "gauge"),
    Field("received_bytes", "<i8", "bytes", "gauge"),
    Field("state", "<u4", "", "index"),
)


class FlowLog:
    """A record file written in batches: call ``flush`` every ``FLUSH_S``. Without a path, records are discarded.

    The processes and threads of one sender or receiver share the file, each with a FlowLog of its own: a batch is one
    write in append mode, so records never mix.

    Args:
        path: file to create, or None.
        fields: its columns.
        about: further keys of its header; None: the file exists already, made by another process of this program.

    Raises:
        UsageError: the file exists or cannot be created.
    """

    def __init__(self, path: Path | None, fields: Sequence[Field], about: dict[str, Any] | None) -> None:
        self._path = path
        self._batch: list[tuple[int, ...]] = []
        self._writer: RecordWriter | None = None
        if path is None:
            return
        try:
            header = None if about is None else about | {"states": FLOW_STATES}
            self._writer = RecordWriter(path, fields, header)
        except FileExistsError as error:
            raise UsageError(f"{path} exists: a log is never overwritten, name another file") from error
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error

    def add(self, *values: int) -> None:
        """Add one record to the batch."""
        if self._writer is not None:
            self._batch.append(values)

    def flush(self) -> None:
        """Write the batch to the file.

        Raises:
            MeasurementError: the file cannot be written (for example, the disk is full).
        """
        if self._writer is None or not self._batch:
            return
        try:
            self._writer.append_many(self._batch)
        except OSError as error:
            raise MeasurementError(f"{self._path} cannot be written: {error.strerror}; the log stops here") from error
        finally:
            self._batch.clear()

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self.flush()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
