"""Plans of flows that belong together: incast and all-to-all, round by round, and ring all-reduce with its waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ringtap.errors import UsageError
from ringtap.trafficgen.flow import MOST, Flow
from ringtap.trafficgen.planparts import Frame, Load
from ringtap.trafficgen.protocol import parse_address

_MOST_PAIRS = 100_000


class RoundsPlan:
    """Every pair of a list gets a flow, all at the same instant, round after round.

    Args:
        kind: what the header calls it: ``incast`` or ``all-to-all``.
        frame: duration, destinations and so on.
        pairs: (source, destination) of a round's flows.
        period_ns: time from one round to the next.
        demand: size of each flow in bytes; or the load, of which each round has its part in equal flows.
        about: further header keys.

    Attributes:
        header: what the first line of its file says.

    Raises:
        UsageError: the asked plan makes no sense or cannot be made exact.
    """

    def __init__(
        self,
        kind: str,
        frame: Frame,
        pairs: Sequence[tuple[str, str]],
        period_ns: int,
        demand: int | Load,
        about: dict[str, Any],
    ) -> None:
        frame.check()
        if not 1 <= len(pairs) <= _MOST_PAIRS:
            raise UsageError(f"a round of {len(pairs)} flows is not usable: it must have from 1 to {_MOST_PAIRS}")
        if period_ns < 1:
            raise UsageError("--period must be above 0")
        self._frame, self._pairs, self._period_ns = frame, pairs, period_ns
        rounds = -(-frame.duration_ns // period_ns)
        more: dict[str, Any] = {"period_ns": period_ns} | about
        if isinstance(demand, Load):
            demand.check()
            self._load = Load(demand.bps, demand.counts, demand.mtu, frame.ipv6())
            total = self._load.bytes_until(frame.duration_ns)
            more = self._load.header() | more
        elif demand < 1:
            raise UsageError("--size must be 1 byte or more")
        else:
            total = demand * rounds * len(pairs)
            more |= {"size_bytes": demand}
        self._demand = demand
        self.header = frame.header(kind, rounds * len(pairs), total, **more)
        for number in {0, rounds - 1}:
            if self._budget(number) < len(pairs):
                raise UsageError(
                    f"the load leaves {self._budget(number)} bytes for the {len(pairs)} flows of round {number}: ask "
                    "for more load, a longer --period, or a --duration of whole periods"
                )

    def flows(self) -> Iterator[Flow]:
        """The flows in order of their starts."""
        count = len(self._pairs)
        for number, start_ns in enumerate(range(0, self._frame.duration_ns, self._period_ns)):
            budget = self._budget(number)
            for place, (source, destination) in enumerate(self._pairs):
                size_bytes = budget * (place + 1) // count - budget * place // count
                yield Flow(start_ns, source, destination, size_bytes)

    def _budget(self, number: int) -> int:
        """Bytes of a round; a last one that does not fit has its part of the load."""
        if not isinstance(self._demand, Load):
            return self._demand * len(self._pairs)
        start_ns, until = number * self._period_ns, self._load.bytes_until
        return until(min(start_ns + self._period_ns, self._frame.duration_ns)) - until(start_ns)


class RingPlan:
    """Ring all-reduce: 2(N-1) steps, in each of which every node sends the next one a chunk that it has just received.

    A step's chunk waits for the step before it at the same node; an iteration's first one waits for the last one of
    the iteration before it and then for the compute time.

    Args:
        frame: duration, and the nodes as sources and destinations.
        nodes: ``host:port`` of the nodes in the ring's order; each one also sends from its host.
        size_bytes: what is reduced; chunks are a node's part of it.
        compute_ns: time from an iteration's last chunk to the next one's first.
        iterations: how many.

    Attributes:
        header: what the first line of its file says.

    Raises:
        UsageError: the asked plan makes no sense.
    """

    def __init__(self, frame: Frame, nodes: Sequence[str], size_bytes: int, compute_ns: int, iterations: int) -> None:
        frame.check()
        count = len(nodes)
        if count < 2:
            raise UsageError("a ring needs two nodes or more: give --node ADDRESS:PORT for each, in order")
        if size_bytes < count:
            raise UsageError(f"{size_bytes} bytes do not make a chunk for each of {count} nodes: ask for more --bytes")
        if compute_ns < 0 or iterations < 1:
            raise UsageError("--iterations must be 1 or more and --compute 0 or more")
        if (iterations - 1) * compute_ns >= frame.duration_ns:
            raise UsageError(
                f"{iterations} iterations compute for longer than the duration: ask for fewer or a longer --duration"
            )
        self._iterations, self._compute_ns = iterations, compute_ns
        self._hosts, self._nodes = [parse_address(node)[0] for node in nodes], list(nodes)
        self._chunks = [size_bytes * (part + 1) // count - size_bytes * part // count for part in range(count)]
        steps = 2 * (count - 1)
        about = {"nodes": list(nodes), "size_bytes": size_bytes, "compute_ns": compute_ns, "iterations": iterations}
        # A step moves every chunk once
        total = iterations * steps * size_bytes
        if total > MOST:
            raise UsageError(f"a plan of {total} bytes is too large: at most {MOST}")
        self.header = frame.header("ring", iterations * steps * count, total, **about)

    def flows(self) -> Iterator[Flow]:
        """The flows; their starts are the earliest possible ones, with a network that takes no time."""
        count = len(self._nodes)
        steps = 2 * (count - 1)
        for row in range(self._iterations * steps):
            iteration, step = divmod(row, steps)
            delay_ns = self._compute_ns if step == 0 and iteration else 0
            for node in range(count):
                # What brought this node its chunk is the row above, from its left
                after = (row - 1) * count + (node - 1) % count if row else -1
                source, destination = self._hosts[node], self._nodes[(node + 1) % count]
                size_bytes = self._chunks[(node - step) % count]
                yield Flow(iteration * self._compute_ns, source, destination, size_bytes, after, delay_ns)
