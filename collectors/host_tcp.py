"""TCP counters of this network namespace: /proc/net/snmp and /proc/net/netstat."""

from __future__ import annotations

from pathlib import Path

# our name -> file, line, the kernel's name, unit, kind
COUNTERS: dict[str, tuple[str, str, str, str]] = {
    "tcp.active_opens": ("Tcp", "ActiveOpens", "connections", "counter"),
    "tcp.passive_opens": ("Tcp", "PassiveOpens", "connections", "counter"),
    "tcp.attempt_fails": ("Tcp", "AttemptFails", "connections", "counter"),
    "tcp.resets_while_established": ("Tcp", "EstabResets", "connections", "counter"),
    "tcp.established": ("Tcp", "CurrEstab", "connections", "gauge"),
    "tcp.segments_received": ("Tcp", "InSegs", "packets", "counter"),
    "tcp.segments_sent": ("Tcp", "OutSegs", "packets, without retransmissions", "counter"),
    "tcp.segments_retransmitted": ("Tcp", "RetransSegs", "packets", "counter"),
    "tcp.segments_in_error": ("Tcp", "InErrs", "packets", "counter"),
    "tcp.resets_sent": ("Tcp", "OutRsts", "packets", "counter"),
    "tcp.timeouts": ("TcpExt", "TCPTimeouts", "events", "counter"),
    "tcp.fast_retransmits": ("TcpExt", "TCPFastRetrans", "packets", "counter"),
    "tcp.slow_start_retransmits": ("TcpExt", "TCPSlowStartRetrans", "packets", "counter"),
    "tcp.lost_retransmits": ("TcpExt", "TCPLostRetransmit", "packets", "counter"),
    "tcp.syn_retransmits": ("TcpExt", "TCPSynRetrans", "packets", "counter"),
    "tcp.tail_loss_probes": ("TcpExt", "TCPLossProbes", "packets", "counter"),
    "tcp.duplicate_sacks_received": ("TcpExt", "TCPDSACKRecv", "packets", "counter"),
    "tcp.out_of_order_queued": ("TcpExt", "TCPOFOQueue", "packets", "counter"),
    "tcp.listen_overflows": ("TcpExt", "ListenOverflows", "connections", "counter"),
    "tcp.listen_drops": ("TcpExt", "ListenDrops", "connections", "counter"),
    "tcp.backlog_drops": ("TcpExt", "TCPBacklogDrop", "packets", "counter"),
    "tcp.receive_queue_drops": ("TcpExt", "TCPRcvQDrop", "packets", "counter"),
    "tcp.receive_prunes": ("TcpExt", "PruneCalled", "events", "counter"),
    "tcp.zero_window_advertised": ("TcpExt", "TCPToZeroWindowAdv", "events", "counter"),
    "ip.congestion_experienced_received": ("IpExt", "InCEPkts", "packets", "counter"),
}


def read_counters(net: Path) -> dict[str, int]:
    """The counters of `COUNTERS` that this kernel has, from the files ``snmp`` and ``netstat`` in a folder.

    Raises:
        OSError: a file cannot be read.
    """
    found: dict[tuple[str, str], int] = {}
    for name in ("snmp", "netstat"):
        lines = (net / name).read_text().splitlines()
        for heads, numbers in zip(lines[::2], lines[1::2], strict=False):
            protocol, _, names = heads.partition(":")
            if numbers.startswith(f"{protocol}:"):
                values = numbers.partition(":")[2].split()
                found.update({(protocol, one): int(value) for one, value in zip(names.split(), values, strict=False)})
    return {name: found[key[:2]] for name, key in COUNTERS.items() if key[:2] in found}
