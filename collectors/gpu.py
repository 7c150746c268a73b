"""Records NVIDIA GPUs by NVML: utilisation, memory, power, clocks, PCIe and NVLink traffic; without privilege.

Source: NVML API reference (nvml.h). Every reading is tried once at the start; one that a GPU lacks has no column.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ringtap.collectors.collector_interface import Check, Context
from ringtap.core.append_only_logs import Field, Kind, RecordWriter
from ringtap.core.installation import install_command
from ringtap.core.run_directory_schema import TIME_FIELDS
from ringtap.core.units import counted

# NVML measures for 20 ms per direction; twice a second leaves the GPU's management processor time for others
_PERIOD_S = 0.5
_TX, _RX = 0, 1
_KB = 1000


class PcieMeter(threading.Thread):
    """A thread that reads ``nvmlDeviceGetPcieThroughput`` of one GPU for both directions in turn.

    Attributes:
        rates: bytes per second sent and received by the GPU, as last measured.
        failure: reason why it cannot measure; empty if it can.
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
        """Measure until stopped; a failure ends the thread and keeps the last rates."""
        while not self.failure and not self._stop_now.wait(_PERIOD_S):
            self._read()

    def stop(self) -> None:
        """End the thread, if it was started."""
        self._stop_now.set()
        if self.is_alive():
            self.join()


# NVML samples utilisation every 1/6 to 1 s, by product
_MIN_PERIOD_S = 1 / 6
_ALL_LINKS = 0xFFFFFFFF
_KIB = 1024
# NVML_VALUE_TYPE -> member of the union
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class _Reading(NamedTuple):
    """One column: its description, and the function that reads it from (NVML, handle)."""

    name: str
    unit: str
    kind: Kind
    width_bits: int
    read: Callable[[Any, Any], int]


def _field_value(nvml: Any, handle: Any, number: int, scope: int) -> int:
    """Read a field of ``nvmlDeviceGetFieldValues``, which has an error code of its own."""
    value = nvml.nvmlDeviceGetFieldValues(handle, [(number, scope)])[0]
    if value.nvmlReturn:
        raise nvml.NVMLError(value.nvmlReturn)
    return int(getattr(value.value, _MEMBERS[value.valueType]))


def _used_bytes(nvml: Any, handle: Any) -> int:
    """Read the memory in use, as nvidia-smi shows it; drivers before 510 add what they reserve for themselves."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)
    except nvml.NVMLError:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).used)


def _event_reasons(nvml: Any, handle: Any) -> int:
    """Read the mask of reasons for reduced clocks; older drivers know it as throttle reasons."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except nvml.NVMLError:
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


# numbers of fields in nvml.h: PCIe bytes 197, 198; NVLink data in KiB 138, 139, of all links with the largest scope
_READINGS = (
    _Reading("utilization_pct", "percent", "gauge", 0, lambda n, h: n.nvmlDeviceGetUtilizationRates(h).gpu),
    _Reading("memory_busy_pct", "percent", "gauge", 0, lambda n, h: n.nvmlDeviceGetUtilizationRates(h).memory),
    _Reading("memory_used_bytes", "bytes", "gauge", 0, _used_bytes),
    _Reading("memory_total_bytes", "bytes", "gauge", 0, lambda n, h: n.nvmlDeviceGetMemoryInfo(h).total),
    _Reading("power_mw", "mW", "gauge", 0, lambda n, h: n.nvmlDeviceGetPowerUsage(h)),
    _Reading("energy_mj", "mJ", "counter", 64, lambda n, h: n.nvmlDeviceGetTotalEnergyConsumption(h)),
    _Reading("temperature_c", "degrees Celsius", "gauge", 0, lambda n, h: n.nvmlDeviceGetTemperature(h, 0)),
    _Reading("sm_clock_mhz", "MHz", "gauge", 0, lambda n, h: n.nvmlDeviceGetClockInfo(h, 1)),
    _Reading("memory_clock_mhz", "MHz", "gauge", 0, lambda n, h: n.nvmlDeviceGetClockInfo(h, 2)),
    _Reading("clock_event_reasons", "mask", "gauge", 0, _event_reasons),
    _Reading("pcie_replays", "events", "counter", 32, lambda n, h: n.nvmlDeviceGetPcieReplayCounter(h)),
    _Reading("pcie_tx_bytes", "bytes", "counter", 64, lambda n, h: _field_value(n, h, 197, 0)),
    _Reading("pcie_rx_bytes", "bytes", "counter", 64, lambda n, h: _field_value(n, h, 198, 0)),
    _Reading("nvlink_tx_bytes", "bytes", "counter", 64, lambda n, h: _KIB * _field_value(n, h, 138, _ALL_LINKS)),
    _Reading("nvlink_rx_bytes", "bytes", "counter", 64, lambda n, h: _KIB * _field_value(n, h, 139, _ALL_LINKS)),
)
_PCIE_FIELDS = ("pcie_tx_bytes_per_s", "pcie_rx_bytes_per_s")


def _word(value: Any) -> str:
    """Return a text of NVML, which older bindings give as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


def _handles(nvml: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and handle of each GPU that this user may open, and of each MIG slice of it.

    NVML counts all GPUs of the node, also those that the cgroup of a job keeps from it.
    """
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except (nvml.NVMLError_NoPermission, nvml.NVMLError_GpuIsLost):
            continue
        yield f"gpu{index}", handle
        try:
            slices = nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if nvml.nvmlDeviceGetMigMode(handle)[0] else 0
        except nvml.NVMLError:  # a GPU that cannot be divided
            continue
        for number in range(slices):
            with contextlib.suppress(nvml.NVMLError):  # one that does not exist
                yield f"gpu{index}-mig{number}", nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)


class _Gpu:
    """A GPU, or a MIG slice of it, and its log ``<name>.rec``; ``readings`` are those that it supports."""

    def __init__(self, nvml: Any, name: str, handle: Any) -> None:
        self.name = name
        self._nvml, self._handle = nvml, handle
        self.title = _word(nvml.nvmlDeviceGetName(self._handle))
        self.failed_readings = 0
        self.absent: dict[str, str] = {}
        self._values: dict[str, int] = {}
        self.readings = [reading for reading in _READINGS if self._try(reading)]
        self.meter: PcieMeter | None = None
        if "pcie_tx_bytes" in self.absent:
            self._start_meter()

    def _try(self, reading: _Reading) -> bool:
        try:
            self._values[reading.name] = reading.read(self._nvml, self._handle)
        except self._nvml.NVMLError as error:
            self.absent[reading.name] = _word(error)
            return False
        return True

    def _start_meter(self) -> None:
        meter = PcieMeter(self._nvml, self._handle)
        if meter.failure:
            self.absent |= dict.fromkeys(_PCIE_FIELDS, meter.failure)
        else:
            self.meter = meter

    @property
    def fields(self) -> list[Field]:
        """The columns of its log."""
        names = _PCIE_FIELDS if self.meter else ()
        columns = [Field(name, "<u8", unit, kind, width) for name, unit, kind, width, _ in self.readings]
        return [*TIME_FIELDS, *columns, *(Field(name, "<u8", "bytes/s", "gauge") for name in names)]

    def start(self, folder: Path, every_s: float) -> None:
        """Create the log and write the first record."""
        about = {"collector": "gpu", "source": "NVML", "every_s": every_s, "name": self.title}
        about |= {"uuid": _word(self._nvml.nvmlDeviceGetUUID(self._handle)), "absent": self.absent}
        with contextlib.suppress(self._nvml.NVMLError):
            about["driver"] = _word(self._nvml.nvmlSystemGetDriverVersion())
        self._log = RecordWriter(folder / f"{self.name}.rec", self.fields, about)
        if self.meter:
            self.meter.start()
        self.sample()

    def sample(self) -> None:
        """Append one record; a reading that fails keeps its last value and is counted.

        Raises:
            OSError: all readings fail: the GPU fell off the bus, or its driver was unloaded.
        """
        t_ns, mono_ns = time.time_ns(), time.monotonic_ns()
        failed = ""
        failures = 0
        for reading in self.readings:
            try:
                self._values[reading.name] = reading.read(self._nvml, self._handle)
            except self._nvml.NVMLError as error:
                failures += 1
                failed = _word(error)
        self.failed_readings += failures + (len(_PCIE_FIELDS) if self.meter and self.meter.failure else 0)
        if failures == len(self.readings):
            raise OSError(0, f"{self.name} does not answer: {failed}")
        values = [self._values[reading.name] for reading in self.readings]
        self._log.append(t_ns, mono_ns, *values, *(self.meter.rates if self.meter else ()))

    def close(self) -> None:
        """Stop the PCIe meter and close the log."""
        if self.meter:
            self.meter.stop()
        if hasattr(self, "_log"):
            self._log.close()


class GpuCollector:
    """Recorder of ``gpu/gpu<index>.rec`` for every GPU visible to this user (docs/reference/collectors-devices.md).

    Attributes:
        nvml: the module that calls NVML; None: ``pynvml`` of nvidia-ml-py, imported when it is needed.
    """

    name = "gpu"
    slow = True
    nvml: Any = None

    def __init__(self, context: Context) -> None:
        self._folder = context.folder / self.name
        self.every_s = max(context.every_s, _MIN_PERIOD_S)
        self._gpus: list[_Gpu] = []
        self._lost: dict[str, str] = {}
        self._open = False

    def _load(self) -> Any:
        if self.nvml is None:
            import pynvml

            self.nvml = pynvml
        return self.nvml

    def check(self) -> Check:
        """Check that NVML answers, and which GPUs there are."""
        try:
            nvml = self._load()
        except ImportError:
            reason = "the Python package nvidia-ml-py, which asks the NVIDIA driver, is not installed"
            return Check("unavailable", reason, install_command("gpu"))
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            remedy = (
                "nothing, where the node has no NVIDIA GPU; else ask the site for the driver, or for a GPU in the job"
            )
            return Check("unavailable", f"the NVIDIA driver does not answer: {_word(error)}", remedy)
        try:
            names = [_word(nvml.nvmlDeviceGetName(handle)) for _, handle in _handles(nvml)]
        except nvml.NVMLError as error:
            return Check("unavailable", f"the GPUs cannot be listed: {_word(error)}", "ask for a GPU in the job")
        finally:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()
        if not names:
            return Check(
                "unavailable", "the driver shows no GPU to this job", "ask for a GPU in the job (--gres=gpu:1)"
            )
        return Check("ok", f"{counted(len(names), 'GPU')}: {', '.join(sorted(set(names)))}")

    def start(self) -> None:
        """Open NVML and the logs and write the first records.

        Raises:
            OSError: NVML does not answer.
        """
        nvml = self._load()
        try:
            nvml.nvmlInit()
            self._open = True
            self._gpus = [_Gpu(nvml, name, handle) for name, handle in _handles(nvml)]
        except nvml.NVMLError as error:
            raise OSError(0, f"the NVIDIA driver does not answer: {_word(error)}") from error
        self._gpus = [gpu for gpu in self._gpus if gpu.readings]
        for gpu in self._gpus:
            gpu.start(self._folder, self.every_s)

    def sample(self) -> None:
        """Append one record per GPU; one that no longer answers is left out from then on (``stop`` gives the reason).

        Raises:
            OSError: the log cannot be written, or the last GPU is gone.
        """
        for gpu in list(self._gpus):
            try:
                gpu.sample()
            except OSError as error:
                if error.errno:
                    raise
                self._lost[gpu.name] = str(error.strerror)
                gpu.close()
                self._gpus.remove(gpu)
                if not self._gpus:
                    raise

    def stop(self) -> dict[str, Any]:
        """Take the last sample and close everything.

        Returns:
            ``gpus``: number recorded to the end; ``failed_readings``; ``lost``: GPUs that vanished, with reasons.
        """
        try:
            if self._gpus:
                self.sample()
        finally:
            for gpu in self._gpus:
                gpu.close()
            if self._open:
                with contextlib.suppress(self.nvml.NVMLError):
                    self.nvml.nvmlShutdown()
        failed = sum(gpu.failed_readings for gpu in self._gpus)
        return {"gpus": len(self._gpus), "failed_readings": failed, "lost": self._lost}
