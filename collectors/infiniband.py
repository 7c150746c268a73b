"""Records counters of InfiniBand, RoCE and Omni-Path ports, from /sys/class/infiniband, without privilege."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from ringtap.collectors.collector_interface import Check, Context
from ringtap.collectors.kernel_files import text_of
from ringtap.core.append_only_logs import Field, JsonLinesWriter, RecordWriter
from ringtap.core.errors import failure_message
from ringtap.core.run_directory_schema import TIME_FIELDS

DEVICES = Path("/sys/class/infiniband")
# file name -> unit; read at every sample
TRAFFIC = {
    "port_xmit_data": "4 octets",
    "port_rcv_data": "4 octets",
    "port_xmit_packets": "packets",
    "port_rcv_packets": "packets",
    "port_xmit_wait": "ticks",
}
# file name -> (unit, bits): saturating; read only once a second, because every read queries the device
ERRORS = {
    "port_xmit_discards": ("packets", 16),
    "port_rcv_errors": ("packets", 16),
    "port_rcv_remote_physical_errors": ("packets", 16),
    "symbol_error": ("events", 16),
    "VL15_dropped": ("packets", 16),
    "link_error_recovery": ("events", 8),
    "link_downed": ("events", 8),
    "local_link_integrity_errors": ("events", 4),
    "excessive_buffer_overrun_errors": ("events", 4),
}
# counters for which the driver always returns 0
_NOT_COUNTED = {"hfi1": {"symbol_error", "VL15_dropped"}}
# mlx5: name -> (unit, bits)
_QUEUE_COUNTERS = {
    name: (unit, 32)
    for unit, names in {
        "packets": ("out_of_sequence", "out_of_buffer", "duplicate_request"),
        "requests": ("rx_write_requests", "rx_read_requests", "rx_atomic_requests"),
        "events": (
            "packet_seq_err",
            "implied_nak_seq_err",
            "local_ack_timeout_err",
            "rnr_nak_retry_err",
            "roce_adp_retrans",
            "roce_adp_retrans_to",
            "roce_slow_restart",
            "roce_slow_restart_cnps",
            "roce_slow_restart_trans",
            "req_cqe_error",
            "resp_cqe_error",
            "req_transport_retries_exceeded",
            "req_rnr_retries_exceeded",
        ),
    }.items()
    for name in names
}
_CONGESTION_COUNTERS = {
    "np_cnp_sent": ("packets", 64),
    "np_ecn_marked_roce_packets": ("packets", 64),
    "rp_cnp_handled": ("packets", 64),
    "rp_cnp_ignored": ("packets", 64),
    "rx_icrc_encapsulated": ("packets", 64),
    "cc_rx_ce_pkts": ("packets", 64),
    "cc_rx_cnp_pkts": ("packets", 64),
    "cc_tx_cnp_pkts": ("packets", 64),
    "rdma_tx_packets": ("packets", 64),
    "rdma_tx_bytes": ("bytes", 64),
    "rdma_rx_packets": ("packets", 64),
    "rdma_rx_bytes": ("bytes", 64),
}
_MLX5 = _QUEUE_COUNTERS | _CONGESTION_COUNTERS
# of the hundreds of other drivers: counters of loss, repetition, waiting, congestion; not per lane, context or engine
_TELLING = re.compile(
    r"cnp|ecn|nak|rnr|re?trans|resend|seq|dup|drop|dscd|discard|timeout|wait|pkt|packet|bytes|octets", re.IGNORECASE
)
_ONE_OF_MANY = re.compile(r"(?:vl|ctxt?|engine|lane|prio)?\d+(?:,32)?$", re.IGNORECASE)
_MAX_OTHERS = 48
_UNITS = {"bytes|octets": "bytes", "pkt|packet": "packets"}
_BIG = 2**32


def driver_of(device: Path) -> str:
    """Return the driver of a device without ``_core``; guessed from the device's name if sysfs has no driver link.

    Names alone mislead: rdma-core renames ``mlx5_0`` to ``ibp59s0`` or ``rocep65s0f1``, ``hfi1_0`` to ``opap2s0``.
    """
    try:
        return (device / "device/driver").readlink().name.removesuffix("_core")
    except OSError:
        match = re.match(r"mlx5|mlx4|hfi1|bnxt_re", device.name)
        return match.group() if match else re.split(r"[\d_]", device.name, maxsplit=1)[0]


def wanted_port_counters(driver: str, present: set[str]) -> tuple[list[str], dict[str, str]]:
    """Select the files of ``counters/`` to read, and those that are left out, with reasons."""
    constant = _NOT_COUNTED.get(driver, set())
    names = [name for name in (*TRAFFIC, *ERRORS) if name in present and name not in constant]
    absent = {name: "the kernel does not offer it" for name in (*TRAFFIC, *ERRORS) if name not in present}
    return names, absent | dict.fromkeys(sorted(constant & present), f"{driver} always says 0")


def wanted_hw_counters(present: set[str]) -> list[str]:
    """Select the files of ``hw_counters/`` to read."""
    names = present - {"lifespan"}
    known = [name for name in _MLX5 if name in names]
    if known:
        return known
    return [name for name in sorted(names) if _TELLING.search(name) and not _ONE_OF_MANY.search(name)][:_MAX_OTHERS]


def port_field(name: str, driver: str, wide: bool) -> Field:
    """Return the column of a file of ``counters/``.

    Args:
        name: the file's name.
        driver: the device's driver; Omni-Path counts flits of 8 octets.
        wide: True if the port has the extended counters of 64 bit; otherwise, the 32 bit ones stop at all ones.
    """
    if name in ERRORS:
        unit, bits = ERRORS[name]
        return Field(name, "<u8", unit, "saturating", bits)
    unit = TRAFFIC[name]
    if unit == "4 octets" and driver == "hfi1":
        unit = "8 octets"
    if name == "port_xmit_wait":
        return Field(name, "<u8", unit, "saturating", 32)
    return Field(name, "<u8", unit, "counter", 64) if wide else Field(name, "<u8", unit, "saturating", 32)


def is_wide(present: set[str], first: dict[str, int]) -> bool:
    """True if a port's data and packet counters have 64 bit: it has the extended set, or a value beyond 32 bit.

    ``unicast_*`` comes with the extended set. Ports without it may still count 64 bit (class port information
    ``ExtendedWidthSupportedNoIETF``), which no file reports: a larger value is then the only sign.
    """
    return "unicast_xmit_packets" in present or any(first.get(name, 0) >= _BIG for name in TRAFFIC)


def hw_field(name: str) -> Field:
    """Return the column of a file of ``hw_counters/``; hfi1 marks 32 bit counters by names that end in ``,32``."""
    unit = next((unit for words, unit in _UNITS.items() if re.search(words, name, re.IGNORECASE)), "events")
    unit, bits = _MLX5.get(name, (unit, 32 if name.endswith(",32") else 64))
    return Field(f"hw.{name}", "<u8", unit, "counter", bits)


# every read queries the device's firmware
_MIN_PERIOD_S = 0.01
_RARE_S = 1.0
# the kernel's cache is valid for its lifespan in jiffies, rounded up: a jiffy is at most 10 ms
_JIFFY_S = 0.01


class _GoneError(OSError):
    """A counter that cannot be read; the message is its text (``N/A (no PMA)``) or the error."""


class _Counter:
    """One counter file, kept open; a file that vanished is opened again at the next read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        try:
            self.value = self.read()
        except OSError:
            self.close()
            raise

    def read(self) -> int:
        """Read the number in the file.

        Raises:
            _GoneError: there is no file or no number in it, or the device is gone.
        """
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            text = os.pread(self._fd, 64, 0)
        except OSError as error:
            self.close()
            raise _GoneError(error.errno, error.strerror) from error
        try:
            self.value = int(text)
        except ValueError as error:
            raise _GoneError(0, text.decode(errors="replace").strip() or "empty") from error
        return self.value

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _names(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir()}
    except OSError:
        return set()


class RdmaPort(NamedTuple):
    """Port of an RDMA device.

    Attributes:
        device: name of the device (``mlx5_0``).
        port: number of the port.
        link_layer: ``InfiniBand`` or ``Ethernet``.
        interfaces: network interfaces of the port.
        counts_all: True if 64 bit counters of the port see all of its traffic, which is known for InfiniBand only.
    """

    device: str
    port: int
    link_layer: str
    interfaces: tuple[str, ...]
    counts_all: bool


def rdma_ports(root: Path) -> list[RdmaPort]:
    """Return the ports of the RDMA devices below a folder like ``/sys/class/infiniband``."""
    found = []
    for path in port_paths(root):
        device, counters = path.parents[1], path / "counters"
        layer, present = text_of(path / "link_layer"), _names(counters)
        values = {name: int(text) for name in TRAFFIC if (text := text_of(counters / name)).isdecimal()}
        interfaces = {text_of(one) for one in (path / "gid_attrs/ndevs").glob("*")} - {""} or _names(
            device / "device/net"
        )
        if len(_names(device / "ports")) > 1:  # the interfaces of all ports of the card
            numbers = {name: text_of(device / "device/net" / name / "dev_port") for name in interfaces}
            interfaces = {name for name, number in numbers.items() if number in ("", str(int(path.name) - 1))}
        all_read = {"port_xmit_data", "port_rcv_data"} <= values.keys() and is_wide(present, values)
        counts_all = layer == "InfiniBand" and driver_of(device) != "hfi1" and all_read
        found.append(RdmaPort(device.name, int(path.name), layer, tuple(sorted(interfaces)), counts_all))
    return found


def port_paths(root: Path) -> list[Path]:
    """Return the folders of all ports below a folder like ``/sys/class/infiniband``, by device and number."""
    found = [
        root / device / "ports" / port
        for device in _names(root)
        for port in _names(root / device / "ports")
        if port.isdecimal()
    ]
    return sorted(found, key=lambda path: (path.parents[1].name, int(path.name)))


class _Port:
    """One port of one device, and its log.

    Attributes:
        name: ``mlx5_0-1``.
        missing: counters that could be read at the start and cannot now, with reasons.
        repeats: samples whose hardware counters came from a cache, the kernel's or this object's.
    """

    def __init__(self, path: Path, every_s: float) -> None:
        self.path = path
        self.name = f"{path.parents[1].name}-{path.name}"
        self.driver = driver_of(path.parents[1])
        self.missing: dict[str, str] = {}
        self.repeats = 0
        self._rare_due = self._hw_due = 0.0
        present = _names(path / "counters")
        names, self.absent = wanted_port_counters(self.driver, present)
        self._port = self._open("counters", names)
        self._hw = self._open("hw_counters", wanted_hw_counters(_names(path / "hw_counters")))
        self._lifespan_s = int(text_of(path / "hw_counters/lifespan") or 0) / 1000
        # drivers other than mlx5 read hundreds of registers for one counter
        self._hw_every_s = self._lifespan_s + _JIFFY_S if self.driver == "mlx5" else max(_RARE_S, self._lifespan_s)
        self.every_s = max(every_s, self._lifespan_s)
        self.idle = not text_of(path / "state").endswith("ACTIVE")
        wide = is_wide(present, {name: counter.value for name, counter in self._port.items()})
        self.fields = [*TIME_FIELDS, *(port_field(name, self.driver, wide) for name in self._port)]
        self.fields += [hw_field(name) for name in self._hw]
        self.fields.append(Field("hw.repeated", "<u1", "flag", "gauge"))

    def _open(self, folder: str, names: list[str]) -> dict[str, _Counter]:
        counters = {}
        for name in names:
            try:
                counters[name] = _Counter(self.path / folder / name)
            except _GoneError as error:
                self.absent[name if folder == "counters" else f"hw.{name}"] = str(error.strerror)
        return counters

    @property
    def countless(self) -> bool:
        """True if there is nothing to record."""
        return not self._port and not self._hw

    def about(self) -> dict[str, Any]:
        """Return the header fields of its log."""
        layer = text_of(self.path / "link_layer") or "unknown"
        interfaces = sorted(_names(self.path.parents[1] / "device/net"))  # of a RoCE or IPoIB port
        return {
            "collector": "infiniband",
            "source": str(self.path),
            "every_s": self.every_s,
            "device": self.path.parents[1].name,
            "port": int(self.path.name),
            "driver": self.driver,
            "link_layer": layer,
            "rate": text_of(self.path / "rate"),
            "state": text_of(self.path / "state"),
            "interface": text_of(self.path / "gid_attrs/ndevs/0") or next(iter(interfaces), ""),
            "firmware": text_of(self.path.parents[1] / "fw_ver"),
            "lifespan_s": self._lifespan_s,
            "hw_every_s": self._hw_every_s,
            "errors_every_s": _RARE_S,
            "counts": "RDMA only, no other Ethernet traffic" if layer == "Ethernet" else "all traffic",
            "absent": self.absent,
        }

    def start(self, folder: Path) -> None:
        """Create the log and write the first record."""
        self._log = RecordWriter(folder / f"{self.name}.rec", self.fields, self.about())
        self._rare_due = self._hw_due = 0.0
        self.sample(time.monotonic())

    def sample(self, now_s: float, last: bool = False) -> None:
        """Append one record; a port that is down is read once a second.

        Raises:
            OSError: the log cannot be written.
        """
        rare = last or now_s >= self._rare_due
        if self.idle and not rare:
            return
        t_ns, mono_ns = time.time_ns(), time.monotonic_ns()
        before = {name: counter.value for name, counter in self._port.items()}
        for name, counter in self._port.items():
            if rare or (name not in ERRORS and name not in self.missing):
                self._read(name, counter)
        moved = any(counter.value != before[name] for name, counter in self._port.items())
        repeated = self._read_hw(now_s, moved, last)
        if rare:
            self._rare_due = now_s + _RARE_S
            self.idle = not text_of(self.path / "state").endswith("ACTIVE")
        if len(self.missing) == len(self._port) + len(self._hw):  # the device is gone: leave a gap, not a flat line
            return
        self.repeats += repeated
        values = [counter.value for counter in (*self._port.values(), *self._hw.values())]
        self._log.append(t_ns, mono_ns, *values, repeated)

    def _read_hw(self, now_s: float, moved: bool, last: bool) -> int:
        """Read the hardware counters if the kernel's cache has expired; return 1 if the record repeats known values."""
        if not self._hw:
            return 0
        if now_s < self._hw_due and not last:
            return 1
        self._hw_due = now_s + self._hw_every_s
        before = [counter.value for counter in self._hw.values()]
        for name, counter in self._hw.items():
            self._read(f"hw.{name}", counter)
        # a cache that another reader filled is no older than its lifespan, and shows only if there was traffic
        return int(moved and before == [counter.value for counter in self._hw.values()])

    def _read(self, name: str, counter: _Counter) -> None:
        try:
            counter.read()
            self.missing.pop(name, None)
        except _GoneError as error:
            self.missing[name] = str(error.strerror)

    def close(self) -> None:
        """Close the log and the counters."""
        for counter in (*self._port.values(), *self._hw.values()):
            counter.close()
        if hasattr(self, "_log"):
            self._log.close()


class InfinibandCollector:
    """Recorder of ``infiniband/<device>-<port>.rec`` for every port (docs/reference/collectors-devices.md).

    A counter that vanishes keeps its last value in the log; ``infiniband/missing.jsonl`` records when and why, and
    when it came back. While a whole port is gone, its log has a gap.
    """

    name = "infiniband"
    slow = True
    root = DEVICES

    def __init__(self, context: Context) -> None:
        self._folder = context.folder / self.name
        self.every_s = max(context.every_s, _MIN_PERIOD_S)
        self._ports: list[_Port] = []
        self._told: dict[str, dict[str, str]] = {}
        self._events: JsonLinesWriter | None = None

    def check(self) -> Check:
        """Check which devices there are and what they count."""
        paths = port_paths(self.root)
        if not paths:
            reason = f"there is no InfiniBand, RoCE or Omni-Path device in {self.root}"
            remedy = "nothing, where the network is plain Ethernet; in a container, have /sys shared with it"
            return Check("unavailable", reason, remedy)
        ports = []
        try:
            ports = [_Port(path, self.every_s) for path in paths]
            return self._judge(ports)
        except (OSError, ValueError) as error:
            return Check(
                "unavailable", f"{self.root} cannot be read: {failure_message(error)}", "ask the site's support"
            )
        finally:
            for port in ports:
                port.close()

    @staticmethod
    def _judge(ports: list[_Port]) -> Check:
        silent = [port.name for port in ports if port.countless]
        if len(silent) == len(ports):
            reason = f"no counter of {', '.join(silent)} can be read: {next(iter(ports[0].absent.values()), 'no file')}"
            return Check("unavailable", reason, "ask the site whether the virtual function may read its port counters")
        told = ", ".join(f"{port.name} ({port.about()['link_layer']})" for port in ports if not port.countless)
        if silent:
            return Check(
                "degraded", f"counters of {told}; none of {', '.join(silent)}", "ask the site about the others"
            )
        return Check("ok", f"counters of {told}")

    def start(self) -> None:
        """Open every port's counters and log, and write the first records."""
        ports = [_Port(path, self.every_s) for path in port_paths(self.root)]
        self._ports = [port for port in ports if not port.countless]
        for port in self._ports:
            self.every_s = max(self.every_s, port.every_s)
        for port in self._ports:
            port.every_s = self.every_s
            port.start(self._folder)

    def sample(self) -> None:
        """Append one record per port."""
        self._sample(last=False)

    def _sample(self, last: bool) -> None:
        now_s = time.monotonic()
        for port in self._ports:
            port.sample(now_s, last)
            if port.missing != self._told.get(port.name, {}):
                self._tell(port)

    def _tell(self, port: _Port) -> None:
        if self._events is None:
            self._events = JsonLinesWriter(self._folder / "missing.jsonl")
        self._events.append({"t_ns": time.time_ns(), "port": port.name, "missing": port.missing})
        self._told[port.name] = dict(port.missing)

    def stop(self) -> dict[str, Any]:
        """Take the last sample of every port and close the logs.

        Returns:
            ``ports``, ``repeated_samples`` (hardware counters from a cache), ``absent`` and ``missing`` by port.
        """
        try:
            self._sample(last=True)
        finally:
            for port in self._ports:
                port.close()
            if self._events:
                self._events.close()
        return {
            "ports": [port.name for port in self._ports],
            "repeated_samples": sum(port.repeats for port in self._ports),
            "absent": {port.name: port.absent for port in self._ports if port.absent},
            "missing": {port.name: port.missing for port in self._ports if port.missing},
        }
