"""Records driver statistics as in ``ethtool -S``: physical port, priorities, pauses, drops; without privilege."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ringtap.collectors.collector_interface import Check, Context
from ringtap.collectors.ethtool_ioctl import Ethtool
from ringtap.core.append_only_logs import Field, RecordWriter
from ringtap.core.run_directory_schema import TIME_FIELDS

# mlx5e queries the firmware under a lock at each request
_MIN_PERIOD_S = 1.0
_MAX_STATISTICS = 256
PORT_COUNTERS = tuple(f"{way}_{unit}_phy" for way in ("rx", "tx") for unit in ("bytes", "packets"))
# statistics of a single queue, ring or channel: rx0_packets, rx-0.bytes, [3]: tx_drops, queue_0_tx_cnt
_OF_A_QUEUE = re.compile(
    r"^\[\d+\]|^(?:rx|tx|ch|rq|sq|xsk|q|ptp_(?:cq|ch|rx|tx|rq|sq))-?\d+[_.:]|(?:^|_)queue_?\d+_|^(?:ptp_)?ch\d+_|_q\d+_|^tc\d+_"
)
# statistics unrelated to the network: encryption, XDP, page pools, completion queues, steering tables, lanes, sizes
_BESIDE_THE_POINT = re.compile(
    r"tls_|xdp|xsk|arfs|_pp_|csum|cqe|mpwqe|_nop|_inner|congst_umr|_lane_|ipsec|macsec|^esw_|_xmit_more|recover|"
    r"_\d+_(?:to_\d+_)?bytes_phy|^ch_|peer_ifindex|module_|rx_cache|_gro_|_lro_|timestamps|aff_change|kicks"
)
# pattern -> unit; the first match applies
_UNITS = (
    (r"pause_duration$", "us"),
    (r"pci_stalled_(?:rd|wr)$", "percent"),
    (r"pci_stalled_(?:rd|wr)_events$", "s"),
    (r"pause_transition$", "events"),
    (r"\d+_(?:to_\d+_)?bytes_phy$", "packets"),
    (r"(?:_|^)(?:bytes|octets)(?:_phy|_nic)?$|_bytes$", "bytes"),
    (r"bits_phy$", "bits"),
    (r"pause(?:_ctrl_phy|_frames)?$", "frames"),
    (r"packets|pkts|discards?|drop|marked|multicast|broadcast|ecn_mark|out_of_buffer|err(?:or)?s?_phy$", "packets"),
)
# mlx5e copies these from its 32 bit Q counters
_WIDTHS = {"rx_out_of_buffer": 32, "rx_if_down_packets": 32}


def select(names: list[str]) -> list[str]:
    """Select the statistics of a driver to keep: not those of single queues, unless there are no others."""
    whole = [name for name in names if name and not _OF_A_QUEUE.search(name)]
    kept = [name for name in whole if not _BESIDE_THE_POINT.search(name)]
    if not kept:
        kept = [name for name in names if name and not _BESIDE_THE_POINT.search(name)]
    return list(dict.fromkeys(kept))[:_MAX_STATISTICS]


def counts_port(nic: str) -> bool:
    """Return True if a driver has counters of the physical port, which see all traffic; a virtual function has none."""
    with contextlib.suppress(OSError), contextlib.closing(Ethtool()) as ethtool:
        return set(PORT_COUNTERS) <= set(select(ethtool.statistic_names(nic)))
    return False


def field_of(name: str) -> Field:
    """Return the column of a statistic."""
    unit = next((unit for pattern, unit in _UNITS if re.search(pattern, name)), "events")
    if unit == "percent":
        return Field(name, "<u8", unit, "gauge")
    return Field(name, "<u8", unit, "counter", _WIDTHS.get(name, 64))


class _Nic:
    """One interface's statistics and log."""

    def __init__(self, name: str, ethtool: Ethtool) -> None:
        self.name = name
        self._ethtool = ethtool
        self._all = ethtool.statistic_names(name)
        self.kept = select(self._all)
        self.left_out = len(self._all) - len(self.kept)
        self.driver = ethtool.driver(name)
        self.lost: list[str] = []
        self._values = dict.fromkeys(self.kept, 0)

    def start(self, folder: Path, every_s: float) -> None:
        """Create the log and write the first record."""
        about = {"collector": "ethtool", "source": "SIOCETHTOOL", "every_s": every_s, "nic": self.name}
        about |= {"left_out": self.left_out, **self.driver, **self._settings()}
        self._log = RecordWriter(folder / f"{self.name}.rec", [*TIME_FIELDS, *map(field_of, self.kept)], about)
        self.sample()

    def _settings(self) -> dict[str, Any]:
        """Return rings, pause and offloads; settings that a driver does not report are left out."""
        asked: dict[str, Callable[[str], Any]] = {
            "rings": self._ethtool.rings,
            "pause": self._ethtool.pause,
            "offloads": self._active_features,
        }
        settings: dict[str, Any] = {}
        for word, ask in asked.items():
            with contextlib.suppress(OSError):
                settings[word] = ask(self.name)
        return settings

    def _active_features(self, nic: str) -> list[str]:
        return [name for name, active in self._ethtool.features(nic).items() if active]

    def sample(self) -> None:
        """Append one record; a statistic that the driver no longer has keeps its last value and is named in ``lost``.

        Raises:
            OSError: the interface is gone, or the log cannot be written.
        """
        values = self._ethtool.statistics(self.name, len(self._all))
        if len(values) != len(self._all):  # channels were added or removed
            self._all = self._ethtool.statistic_names(self.name)
            values = self._ethtool.statistics(self.name, len(self._all))
        now = dict(zip(self._all, values, strict=False))
        self.lost = [name for name in self.kept if name not in now]
        self._values |= {name: now[name] for name in self.kept if name in now}
        self._log.append(time.time_ns(), time.monotonic_ns(), *self._values.values())

    def close(self) -> None:
        """Close the log."""
        if hasattr(self, "_log"):
            self._log.close()


class EthtoolCollector:
    """Recorder of ``ethtool/<nic>.rec`` for each interface that is up and has statistics.

    docs/reference/collectors-devices.md describes the records.
    """

    name = "ethtool"
    slow = True
    # not /sys/class/net: in a network namespace it may show the interfaces of another one
    interfaces = staticmethod(psutil.net_if_stats)

    def __init__(self, context: Context) -> None:
        self._folder = context.folder / self.name
        self.every_s = max(context.every_s, _MIN_PERIOD_S)
        self._nics: list[_Nic] = []
        self._gone: dict[str, str] = {}
        self._ethtool: Ethtool | None = None

    def _open(self, ethtool: Ethtool) -> list[_Nic]:
        nics = []
        for name, stats in sorted(self.interfaces().items()):
            with contextlib.suppress(OSError):  # no statistics; or gone since it was listed
                if stats.isup:
                    nics.append(_Nic(name, ethtool))
        return [nic for nic in nics if nic.kept]

    def check(self) -> Check:
        """Check which interfaces have statistics."""
        try:
            ethtool = Ethtool()
        except OSError as error:
            return Check("unavailable", f"no socket: {error.strerror}", "raise the limit of open files (ulimit -n)")
        with contextlib.closing(ethtool):
            nics = self._open(ethtool)
        if not nics:
            reason = "no interface that is up has driver statistics"
            return Check("unavailable", reason, "nothing: the counters of /sys/class/net are collected by 'nic'")
        told = ", ".join(f"{len(nic.kept)} of {nic.name} ({nic.driver['driver']})" for nic in nics)
        return Check("ok", f"driver statistics: {told}")

    def start(self) -> None:
        """Open the logs and write the first records."""
        self._ethtool = Ethtool()
        self._nics = self._open(self._ethtool)
        for nic in self._nics:
            nic.start(self._folder, self.every_s)

    def sample(self) -> None:
        """Append one record per interface; an interface that vanished is noted and left out from then on."""
        for nic in list(self._nics):
            try:
                nic.sample()
            except OSError as error:
                if nic.name in self.interfaces():
                    raise
                self._gone[nic.name] = str(error.strerror)
                nic.close()
                self._nics.remove(nic)

    def stop(self) -> dict[str, Any]:
        """Take the last sample and close the logs.

        Returns:
            ``nics``; ``gone``: vanished interfaces, with reasons; ``lost``: vanished statistics, by interface.
        """
        try:
            self.sample()
        finally:
            for nic in self._nics:
                nic.close()
            if self._ethtool:
                self._ethtool.close()
        lost = {nic.name: nic.lost for nic in self._nics if nic.lost}
        return {"nics": [nic.name for nic in self._nics], "gone": self._gone, "lost": lost}
