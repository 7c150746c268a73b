"""Describes the options for sending a plan, and holds the payload of its flows."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ringtap.trafficgen.outgoing_sockets import Transport

# The payload is random, so that no link or tunnel can compress it; a send call gets at most this much
PAYLOAD_BYTES = 1 << 19
PAYLOAD = memoryview(random.Random(0).randbytes(PAYLOAD_BYTES))
# Payload of a flow that the launcher sends itself: more would make the next flow late
FIRST_BYTES = 1 << 16


@dataclass(frozen=True)
class SendOptions:
    """Options for sending a plan.

    Attributes:
        log_path: per-flow record file to create, or None.
        duration_s: time after which to stop launching; None: at the plan's end.
        token: the receivers' token.
        transport: options of every connection; the plan's header may set those that are None.
        source: source address of flows for which the plan names none; empty: the routing table's choice.
        only_source: send only the plan's flows from this source; empty: all.
        connections: ``kept`` and reused, or a ``new`` one for each flow.
        start_at_ns: CLOCK_REALTIME of the launch; None: as soon as connected.
        patience_s: time to wait for outstanding flows after the last launch; those of a destination that is silent
            for this long count as failed.
        max_connections: most connections from a source to a destination; None: as many as the plan starts at once,
            but at least 1024.
        workers: sender worker processes.
        threads: threads in each process, each with a loop.
        spin_ns: time before a flow is due at which the launcher stops sleeping and polls the clock.
        launcher_cpu: processor that the launcher is pinned to, or None.
        method: system call that hands long flows to the kernel.
        arrivals: Unix socket for completion notices from this host's receivers, or None.
        capacity_bps: capacity of the link, for slowdowns; 0: unknown.
        receivers_wait_s: time to wait for receivers that have not started yet.
    """

    log_path: Path | None = None
    duration_s: float | None = None
    token: str = ""
    transport: Transport = field(default_factory=Transport)
    source: str = ""
    only_source: str = ""
    connections: Literal["kept", "new"] = "kept"
    start_at_ns: int | None = None
    patience_s: float = 5.0
    max_connections: int | None = None
    workers: int = 1
    threads: int = 1
    spin_ns: int = 50_000
    launcher_cpu: int | None = None
    method: Literal["send", "sendfile"] = "send"
    arrivals: Path | None = None
    capacity_bps: float = 0.0
    receivers_wait_s: float = 0.0
