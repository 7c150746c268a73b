"""Measures the payload that a job sends over each link in an iteration, by counters read while no rank communicates.

A frame's headers have a known size, and an acknowledgement has no payload. So the bytes of a link's frames without
their headers are the payload that it carried, with what was sent again. Between two pauses of the same length in
iterations, that is the payload of whole iterations.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from ringtap.agents.testbed.topology import LinkCount
from ringtap.core.ethernet import IPV4, headers_bytes

_EVERY_S = 0.005


class LinkPayload:
    """Counters of all links, as samples of which some lie in a pause.

    Args:
        read: reads the counters of all links.
        bundles: name of each link's bundle, whose payload is summed up.
        pause_s: time from an iteration's end on in which no rank sends: its forward pass.
    """

    def __init__(self, read: Callable[[], Sequence[LinkCount]], bundles: Sequence[str], pause_s: float) -> None:
        self._read, self._bundles, self._pause_ns = read, bundles, round(pause_s * 1e9)
        self._samples: list[Sequence[LinkCount]] = []

    def sample(self, seconds: float) -> None:
        """Read the counters every few milliseconds."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self._samples.append(self._read())
            time.sleep(_EVERY_S)

    def per_iteration(self, ends_ns: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return the payload of each bundle in an iteration, as parts of a record of points.jsonl; and forget it.

        Args:
            ends_ns: the end of each iteration at its first and at its last rank (CLOCK_MONOTONIC, ns).
        """
        samples, self._samples = self._samples, []
        payload_bytes = dict.fromkeys(self._bundles, 0.0)
        fewest = len(ends_ns)
        for number, bundle in enumerate(self._bundles):
            counts = [sample[number] for sample in samples]
            iterations_of = [self._iteration(count, ends_ns) for count in counts]
            paused = [(at, count) for at, count in zip(iterations_of, counts, strict=True) if at is not None]
            if not paused or (iterations := paused[-1][0] - paused[0][0]) < 1:
                return {"link_why": "the counters were not read in the pauses of two iterations: is this machine busy?"}
            (_, first), (_, last) = paused[0], paused[-1]
            counted = last.since(first)
            if counted is None:
                return {"link_why": f"a counter of {bundle} was reset"}
            size_bytes, packets = counted
            payload_bytes[bundle] += (size_bytes - headers_bytes(IPV4) * packets) / iterations
            fewest = min(fewest, iterations)
        rounded = {name: round(size_bytes, 1) for name, size_bytes in payload_bytes.items()}
        return {"link_payload_bytes": rounded, "link_iterations": fewest}

    def _iteration(self, count: LinkCount, ends_ns: Sequence[tuple[int, int]]) -> int | None:
        """Return the number of iterations before the pause in which counters were read; None: in no pause."""
        number = bisect_right(ends_ns, count.begin_ns, key=itemgetter(1)) - 1
        return number if number >= 0 and count.end_ns <= ends_ns[number][0] + self._pause_ns else None
