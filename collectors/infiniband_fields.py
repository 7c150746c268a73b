"""What the counters of InfiniBand, RoCE and Omni-Path ports are: unit, width and kind, by file name.

Sources: Linux Documentation/ABI/stable/sysfs-class-infiniband; the widths of drivers/infiniband/core/sysfs.c (which
takes them from PortCounters and PortCountersExtended, InfiniBand Architecture Specification 16.1.3.5 and 16.1.4.11;
PortCounters stop at all ones); Q counters and congestion counters of drivers/infiniband/hw/mlx5/counters.c;
flits instead of 4 octets: drivers/infiniband/hw/hfi1/mad.c, whose port data counters are the flit counters as they are.
"""

from __future__ import annotations

import re
from pathlib import Path

from ringtap.records import Field

# file name -> unit; read at every sample
TRAFFIC = {
    "port_xmit_data": "4 octets",
    "port_rcv_data": "4 octets",
    "port_xmit_packets": "packets",
    "port_rcv_packets": "packets",
    "port_xmit_wait": "ticks",
}
# file name -> (unit, bits): saturating, and rare: read once a second, because every read asks the device
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
# the driver answers these with a constant 0
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
# of other drivers' hundreds: what tells of loss, repetition, waiting, congestion; not per lane, context or engine
_TELLING = re.compile(
    r"cnp|ecn|nak|rnr|re?trans|resend|seq|dup|drop|dscd|discard|timeout|wait|pkt|packet|bytes|octets", re.IGNORECASE
)
_ONE_OF_MANY = re.compile(r"(?:vl|ctxt?|engine|lane|prio)?\d+(?:,32)?$", re.IGNORECASE)
_MOST_OTHERS = 48
_UNITS = {"bytes|octets": "bytes", "pkt|packet": "packets"}
_BIG = 2**32


def driver_of(device: Path) -> str:
    """The driver of a device, without its ``_core``; by the device's name where the tree has no link to its driver.

    Names alone mislead: rdma-core renames ``mlx5_0`` to ``ibp59s0`` or ``rocep65s0f1``, ``hfi1_0`` to ``opap2s0``.
    """
    try:
        return (device / "device/driver").readlink().name.removesuffix("_core")
    except OSError:
        match = re.match(r"mlx5|mlx4|hfi1|bnxt_re", device.name)
        return match.group() if match else re.split(r"[\d_]", device.name, maxsplit=1)[0]


def wanted_port_counters(driver: str, present: set[str]) -> tuple[list[str], dict[str, str]]:
    """Which files of ``counters/`` to read, and which are left out, with why."""
    constant = _NOT_COUNTED.get(driver, set())
    names = [name for name in (*TRAFFIC, *ERRORS) if name in present and name not in constant]
    absent = {name: "the kernel does not offer it" for name in (*TRAFFIC, *ERRORS) if name not in present}
    return names, absent | dict.fromkeys(sorted(constant & present), f"{driver} always says 0")


def wanted_hw_counters(present: set[str]) -> list[str]:
    """Which files of ``hw_counters/`` to read."""
    names = present - {"lifespan"}
    known = [name for name in _MLX5 if name in names]
    if known:
        return known
    return [name for name in sorted(names) if _TELLING.search(name) and not _ONE_OF_MANY.search(name)][:_MOST_OTHERS]


def port_field(name: str, driver: str, wide: bool) -> Field:
    """The column of a file of ``counters/``.

    Args:
        name: the file's name.
        driver: the device's driver; Omni-Path counts flits of 8 octets.
        wide: whether the port has the extended counters of 64 bit. Where it has not, the 32 bit ones stop at all ones.
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
    """Whether a port's data and packet counters have 64 bit: it has the extended set, or a value beyond 32 bit.

    ``unicast_*`` comes with the extended set. Ports without it may still count 64 bit (class port information
    ``ExtendedWidthSupportedNoIETF``), which no file tells: there a larger value is the only sign.
    """
    return "unicast_xmit_packets" in present or any(first.get(name, 0) >= _BIG for name in TRAFFIC)


def hw_field(name: str) -> Field:
    """The column of a file of ``hw_counters/``; a name ending in ``,32`` is hfi1's way to say 32 bit."""
    unit = next((unit for words, unit in _UNITS.items() if re.search(words, name, re.IGNORECASE)), "events")
    unit, bits = _MLX5.get(name, (unit, 32 if name.endswith(",32") else 64))
    return Field(f"hw.{name}", "<u8", unit, "counter", bits)
