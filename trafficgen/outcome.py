"""What became of a plan's flows: the per-flow log, the counts and the summary."""

from __future__ import annotations

import time
from typing import Any

from ringtap.trafficgen.connections import SentFlow
from ringtap.trafficgen.flowlog import STATES, FlowLog
from ringtap.trafficgen.tally import Tally

_MISSED_NS = 1_000_000


class Outcome:
    """Counts and logs flows as they end.

    Args:
        log: where each flow is recorded.
        origin_ns: CLOCK_MONOTONIC of the launch.
        origin_real_ns: CLOCK_REALTIME of the launch.

    Attributes:
        first_failure: why the first flow that failed did, empty while none has.
        launched_bytes: payload of the flows whose time has come.
    """

    def __init__(self, log: FlowLog, origin_ns: int, origin_real_ns: int) -> None:
        self.log = log
        self.first_failure = ""
        self.launched_bytes = 0
        self.counts = dict.fromkeys(STATES, 0)
        self._origin_ns = origin_ns
        self._origin_real_ns = origin_real_ns
        self._acked_bytes = 0
        self._last_finish_ns = 0
        self._missed = 0
        self._lateness, self._completion = Tally(), Tally()

    def finished(self, flow: SentFlow) -> None:
        """The receiver has all of the flow."""
        self._last_finish_ns = time.monotonic_ns()
        # On the monotonic clock: a step of the wall clock must not become a completion time
        self._completion.add(self._last_finish_ns - flow.due_ns - flow.lateness_ns)
        self._record(flow, "finished")

    def failed(self, flow: SentFlow, why: str) -> None:
        """The flow's connection failed, or its receiver went silent."""
        self.first_failure = self.first_failure or why
        self._record(flow, "failed")

    def unfinished(self, flow: SentFlow) -> None:
        """The sender stopped while the flow was on its way or waiting for a connection."""
        self._record(flow, "unfinished")

    def summary(self, launched_s: float) -> dict[str, Any]:
        """Everything in figures; ``launched_s`` is how long flows were launched, in seconds."""
        elapsed_s = max(launched_s, (self._last_finish_ns - self._origin_ns) / 1e9)
        late, completion = self._lateness, self._completion
        return {
            "flows": sum(self.counts.values()),
            **self.counts,
            "bytes": self.launched_bytes,
            "acked_bytes": self._acked_bytes,
            "duration_s": launched_s,
            "offered_bps": _rate(self.launched_bytes, launched_s),
            "achieved_bps": _rate(self._acked_bytes, elapsed_s),
            "fct_mean_s": _over(completion.mean(), 1e9),
            "fct_p50_s": _over(completion.quantile(0.5), 1e9),
            "fct_p99_s": _over(completion.quantile(0.99), 1e9),
            "lateness_p50_us": _over(late.quantile(0.5), 1e3),
            "lateness_p99_us": _over(late.quantile(0.99), 1e3),
            "lateness_max_us": late.greatest / 1e3,
            "missed_slots": self._missed,
        }

    def _record(self, flow: SentFlow, state: str) -> None:
        self.counts[state] += 1
        self._acked_bytes += flow.acked_bytes
        if flow.start_ns:
            self._lateness.add(flow.lateness_ns)
            self._missed += flow.lateness_ns > _MISSED_NS
        intended_ns = self._origin_real_ns + flow.due_ns - self._origin_ns
        times = (intended_ns, flow.start_ns, flow.finish_ns, flow.received_ns, flow.lateness_ns)
        volumes = (flow.size_bytes, flow.sent_bytes, flow.acked_bytes)
        self.log.add(flow.number, *times, *volumes, STATES[state], flow.destination)


def _rate(size_bytes: int, seconds: float) -> float:
    return size_bytes * 8 / seconds if seconds > 0 else 0.0


def _over(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor
