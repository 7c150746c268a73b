"""Shows a run without a full screen: one line of ``key=value`` per second, for pipes, logs and small screens."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from ringtap.analysis.live.build_snapshot import sum_known
from ringtap.analysis.live.snapshot import Snapshot
from ringtap.core.terminal_escaping import one_line, shell_word


def line_of(snapshot: Snapshot) -> str:
    """Return one line, always with the same keys in the same order; ``-`` where something is not recorded."""
    iterations = snapshot.iterations
    last = iterations.history[-1] if iterations.history else None
    nics = [nic for nic in snapshot.nics if nic.name != "lo" or snapshot.is_over_loopback]
    flow_bps = {
        kind: sum(flow.rate_bps for flow in snapshot.flows if flow.traffic == kind) / 1e9
        for kind in ("training", "cross", "other")
    }
    silent = [node.age_s for node in snapshot.nodes if node.age_s is not None]
    states = [collector for collector in snapshot.collectors if collector.health != "good"]
    cores = [core for host in snapshot.hosts for core in host.cores]
    values = {
        "time": time.strftime("%H:%M:%S", time.localtime(snapshot.t_ns / 1e9)),
        "status": snapshot.status,
        "iteration": str(last.number) if last else "-",
        "iteration_s": _number(iterations.last_s, 4),
        "median_s": _number(iterations.median_s, 4),
        "p99_s": _number(iterations.p99_s, 4),
        **_diagnosis(snapshot),
        "tx_gbps": _number(sum_known(nic.tx_bps for nic in nics), 4, 1e9),
        "rx_gbps": _number(sum_known(nic.rx_bps for nic in nics), 4, 1e9),
        "training_gbps": _number(flow_bps["training"], 4) if snapshot.sockets is not None else "-",
        "cross_gbps": _number(flow_bps["cross"], 4) if snapshot.sockets is not None else "-",
        "nic_drops_per_s": _number(sum_known(nic.drops_per_s for nic in nics), 0),
        "queue_bytes": _number(sum_known(queue.backlog_bytes for queue in snapshot.queues), 0),
        "queue_drops_per_s": _number(sum_known(queue.drops_per_s for queue in snapshot.queues), 0),
        "retransmissions_per_s": _number(sum_known(host.retransmissions_per_s for host in snapshot.hosts), 0),
        "cpu_share": _number(sum(cores) / len(cores) if cores else None, 2),
        "sample_age_s": _number(max(silent) if silent else None, 1),
        "disk_bytes": _number(sum_known(node.disk_bytes for node in snapshot.nodes), 0),
        "disk_bytes_per_hour": _number(sum_known(node.disk_bytes_per_hour for node in snapshot.nodes), 0),
        "not_ok": ",".join(sorted({f"{collector.name}:{collector.state}" for collector in states})) or "-",
    }
    return " ".join(f"{key}={value}" for key, value in values.items())


def _diagnosis(snapshot: Snapshot) -> dict[str, str]:
    """Return the costliest cause that goes on, with its rank, or its node and interface, and what it costs now."""
    diagnosis = snapshot.diagnosis
    if not diagnosis.causes:
        return {"cause": "none" if diagnosis.is_known else "-", "cause_s": "-"}
    first = diagnosis.causes[0]
    where = [first["rank"]] if first["rank"] is not None else [first["node"], first["nic"]]
    words = [first["name"].replace(" ", "_"), *(str(part) for part in where if part is not None)]
    return {"cause": shell_word(":".join(words)), "cause_s": _number(first["seconds"], 4)}


def _number(value: float | None, digits: int, unit: float = 1) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def follow_plain(take: Callable[[], Snapshot], out: TextIO, every_s: float = 1.0) -> Snapshot:
    """Print a line every ``every_s`` seconds until the run ends.

    Args:
        take: returns a new snapshot.
        out: stream to print to.
        every_s: seconds between lines.

    Returns:
        The last snapshot.

    Raises:
        KeyboardInterrupt: the user interrupted it.
        BrokenPipeError: the reader of the pipe closed it.
    """
    due_s = time.monotonic()
    while True:
        snapshot = take()
        print(one_line(line_of(snapshot)), file=out, flush=True)
        if snapshot.ended:
            return snapshot
        due_s = max(due_s + every_s, time.monotonic())
        time.sleep(due_s - time.monotonic() if due_s > time.monotonic() else 0)


def say_next(snapshot: Snapshot | None, verb: str, path: str) -> None:
    """Print the state of the run and the next command to standard error, after the view has ended.

    Args:
        snapshot: the last one; None if there was none.
        verb: the command that shows the result of the run.
        path: the run directory.
    """
    if snapshot is None:
        return
    if snapshot.ended:
        why = f": {one_line(snapshot.why)}" if snapshot.why else ""
        following = f"Next: ringtap {verb} {shell_word(path)}" if snapshot.nodes else "Nothing was recorded"
        print(f"The run is {snapshot.status}{why}. {following}", file=sys.stderr)
    else:
        print(f"The recording goes on. To come back: ringtap live {shell_word(path)}", file=sys.stderr)
