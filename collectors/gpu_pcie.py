"""PCIe rates of a GPU whose driver has no byte counters: each reading waits 20 ms, so a thread takes them."""

from __future__ import annotations

import threading
from typing import Any

# NVML measures over 20 ms a direction; twice a second keeps the GPU's management processor free for others
_PERIOD_S = 0.5
_TX, _RX = 0, 1
_KB = 1000


class PcieMeter(threading.Thread):
    """Reads ``nvmlDeviceGetPcieThroughput`` of one GPU in turn for both directions.

    Attributes:
        rates: bytes per second sent and received by the GPU, as last measured.
        failure: why it cannot measure here; empty where it can.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        super().__init__(name="pcie", daemon=True)
        self._nvml, self._handle = nvml, handle
        self._stop_now = threading.Event()
        self.rates = (0, 0)
        self.failure = ""
        self._read()

    def _read(self) -> None:
        try:
            sent, received = (self._nvml.nvmlDeviceGetPcieThroughput(self._handle, way) for way in (_TX, _RX))
            self.rates = (sent * _KB, received * _KB)
        except self._nvml.NVMLError as error:
            self.failure = str(error)

    def run(self) -> None:
        """Measure until stopped; a failure ends it and leaves the last rates."""
        while not self.failure and not self._stop_now.wait(_PERIOD_S):
            self._read()

    def stop(self) -> None:
        """End the thread, if it was started."""
        self._stop_now.set()
        if self.is_alive():
            self.join()
