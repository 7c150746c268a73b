"""Whether the machine kept time during a window: on a busy one, links of a virtual testbed stall and a window
measures that.

A recorder takes a sample every few milliseconds. When the machine has no processor for it, or its host none for the
virtual machine, samples come late; so do the timers that let frames through the links. The share of late samples says
how much of a window was disturbed, and it knows nothing of the iteration times.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from ringtap.errors import UsageError
from ringtap.rundir import open_log

# Quiet windows had at most 2.1 % of late samples, windows that measured visibly wrong times 4 to 17 % (docs/method.md)
MOST_LATE_SHARE = 0.03
_LATE_PERIODS = 1.5


def late_share(log: Path, start_ns: int, end_ns: int) -> float:
    """Share of a recorder's samples within a window that came more than half a period late.

    Args:
        log: a nic.rec file, being written or not.
        start_ns: start of the window (CLOCK_REALTIME).
        end_ns: its end.
    """
    if not log.exists():  # none has come from the host yet
        return 1.0
    records = open_log(log)
    if not records.about.get("every_s"):
        raise UsageError(f"{log} cannot be used: it does not say how often it was sampled")
    period_ns = records.about["every_s"] * 1e9
    # the newest samples are enough: the window has only just closed
    newest = int((end_ns - start_ns) / period_ns * 1.2) + 500
    times = [row[0] for row in records.tail(max(0, records.count - newest)) if start_ns <= row[0] <= end_ns]
    gaps = [after - before for before, after in pairwise(times)]
    return sum(gap > _LATE_PERIODS * period_ns for gap in gaps) / len(gaps) if gaps else 1.0
