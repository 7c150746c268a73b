"""Interface counters of this network namespace, read at a fixed rate."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil

from ringtap.records import Field, RecordWriter

_COUNTERS = {
    "rx_bytes": ("bytes_recv", "bytes"),
    "tx_bytes": ("bytes_sent", "bytes"),
    "rx_packets": ("packets_recv", "packets"),
    "tx_packets": ("packets_sent", "packets"),
    "rx_errors": ("errin", "packets"),
    "tx_errors": ("errout", "packets"),
    "rx_drops": ("dropin", "packets"),
    "tx_drops": ("dropout", "packets"),
}


class NicCollector:
    """Writes ``nic/nic.rec``: every interface's counters (docs/run-directory.md).

    Args:
        node_folder: the node's folder in the run directory.
        every_s: seconds between samples.
    """

    def __init__(self, node_folder: Path, every_s: float) -> None:
        self._path = node_folder / "nic" / "nic.rec"
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="nic", daemon=True)
        self.missed_samples = 0
        self.failure = ""

    @staticmethod
    def check() -> tuple[str, str]:
        """Whether it can collect here: ``ok`` or ``unavailable``, and why."""
        try:
            names = psutil.net_io_counters(pernic=True, nowrap=False)
        except OSError as error:
            return "unavailable", f"/proc/net/dev cannot be read: {error.strerror}"
        return ("ok", f"{len(names)} interfaces") if names else ("unavailable", "no interface")

    def start(self) -> None:
        """Take the first sample and go on in a thread."""
        self._nics = sorted(psutil.net_io_counters(pernic=True, nowrap=False))
        fields = [Field("t_ns", "<i8", "ns", "time"), Field("mono_ns", "<i8", "ns", "time")]
        for nic in self._nics:
            fields += [Field(f"{nic}.{name}", "<u8", unit, "counter", 64) for name, (_, unit) in _COUNTERS.items()]
        about = {"collector": "nic", "source": "/proc/net/dev", "every_s": self._every_s, "nics": self._nics}
        self._writer = RecordWriter(self._path, fields, about)
        self._sample()
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample and close the log; ``failure`` says what ended the sampling early, if anything did."""
        self._stop.set()
        self._thread.join()
        self._sample()
        self._writer.close()

    def _sample(self) -> None:
        counters = psutil.net_io_counters(pernic=True, nowrap=False)
        values = [time.time_ns(), time.monotonic_ns()]
        for nic in self._nics:
            row = counters.get(nic)
            values += [getattr(row, column) if row else 0 for column, _ in _COUNTERS.values()]
        self._writer.append(*values)

    def _work(self) -> None:
        try:
            self._keep_sampling()
        except OSError as error:  # a full disk, say: what is written stays, the job beside it goes on
            self.failure = f"stopped early: {error.strerror}"

    def _keep_sampling(self) -> None:
        due_s = time.monotonic() + self._every_s
        while not self._stop.wait(max(0.0, due_s - time.monotonic())):
            self._sample()
            due_s += self._every_s
            late = int((time.monotonic() - due_s) / self._every_s)
            if late > 0:  # a slot that has passed is counted, not made up for
                self.missed_samples += late
                due_s += late * self._every_s
