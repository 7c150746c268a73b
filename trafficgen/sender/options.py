"""Options for sending a plan."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ringtap.trafficgen.socket_options import Transport

# Noise, so that no link or tunnel compresses it away; as much as one send call is handed at most
PAYLOAD_BYTES = 1 << 19
PAYLOAD = memoryview(random.Random(0).randbytes(PAYLOAD_BYTES))
# What of a flow the launcher sends itself: more would make the next flow late
FIRST_BYTES = 1 << 16


@dataclass(frozen=True)
class SendOptions:
    """Options for sending a plan.

    Attributes:
        log_path: per-flow record file to create, or None.
        duration_s: stop launching then; None: at the plan's end.
        token: the receivers' token.
        transport: options of every connection; what it leaves open, the plan's header may say.
        source: source address of flows for which the plan names none; empty: the routes' choice.
        only_source: send only the plan's flows from this source; empty: all.
        connections: ``kept`` and reused, or a ``new`` one for each flow.
        start_at_ns: CLOCK_REALTIME of the launch; None: as soon as connected.
        patience_s: how long to wait for outstanding flows after the last launch, and how long a destination with
            flows outstanding may be silent before they count as failed.
        most_connections: connections to each destination; None: as many as the plan starts at once, and 1024 at least.
        workers: carrier processes.
        threads: threads, each with a loop, in each of them.
        spin_ns: how long before a flow's time the launcher stops sleeping and watches the clock.
        launcher_cpu: processor that the launcher keeps to, or None.
        method: how long flows are handed to the kernel.
        arrivals: Unix socket on which the receivers of this host say what has arrived, or None.
        line_rate_bps: rate of the empty link, for slowdowns; 0: unknown.
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
    most_connections: int | None = None
    workers: int = 1
    threads: int = 1
    spin_ns: int = 50_000
    launcher_cpu: int | None = None
    method: Literal["send", "sendfile"] = "send"
    arrivals: Path | None = None
    line_rate_bps: float = 0.0
