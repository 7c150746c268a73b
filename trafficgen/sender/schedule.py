"""The order of flows: a plan's lines, and the flows that wait for others to complete."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from heapq import heappop, heappush

from ringtap.errors import UsageError
from ringtap.flow_plan import Flow
from ringtap.trafficgen.plans.plan_file import PlanFile
from ringtap.trafficgen.plans.requirements import PlanRequirements

NEVER = 2**63 - 1


class Schedule:
    """A plan as a queue ordered by time; times are CLOCK_MONOTONIC.

    Args:
        plan: the plan file, read one line ahead of the launches.
        needs: requirements that the plan's check found.
        only_source: leave out flows of other sources; empty: none.

    Attributes:
        next_ns: time at which the next flow is due, NEVER if there is none.
    """

    def __init__(self, plan: PlanFile, needs: PlanRequirements, only_source: str) -> None:
        self.next_ns = NEVER
        self._lines: Iterator[tuple[int, Flow]] = enumerate(plan.flows())
        self._only_source = only_source
        self._path, self._needs = plan.path, needs
        self._line: tuple[int, Flow] | None = None
        self._line_ns = NEVER
        self._origin_ns = self._until_ns = 0
        self._ready: list[tuple[int, int, Flow]] = []
        self._parked: dict[int, list[tuple[int, Flow]]] = {}
        # Completion time of each flow: eight bytes per flow, only for plans in which some flow waits for another
        self._arrived_ns = array("q", bytes(8 * needs.flows)) if needs.dependent else None

    def begin(self, origin_ns: int, until_ns: int) -> None:
        """Set the origin of times and the end; flows due at ``until_ns`` or later are left out."""
        self._origin_ns, self._until_ns = origin_ns, until_ns
        self._advance()

    def pop(self) -> tuple[int, Flow, int]:
        """Take the flow that is due at ``next_ns``; return its number, the flow and its due time.

        Raises:
            UsageError: the line after it is wrong, because the plan was changed after it was checked.
        """
        if self._ready and self._ready[0][0] <= self._line_ns:
            due_ns, number, flow = heappop(self._ready)
            self._renew()
            return number, flow, due_ns
        assert self._line is not None
        number, flow = self._line
        due_ns = self._line_ns
        self._advance()
        return number, flow, due_ns

    def arrived(self, number: int, at_ns: int) -> None:
        """Record the completion of a flow; flows that waited for it become ready."""
        if self._arrived_ns is None or number >= len(self._arrived_ns):
            return
        self._arrived_ns[number] = at_ns
        for waiting, flow in self._parked.pop(number, ()):
            self._make_ready(waiting, flow, at_ns)
        self._renew()

    def _advance(self) -> None:
        """Go to the next line whose flow waits for no other; put aside the flows that do."""
        self._line, self._line_ns = None, NEVER
        for number, flow in self._lines:
            self._recognize(number, flow)
            due_ns = self._origin_ns + flow.start_ns
            if due_ns >= self._until_ns:
                break
            if self._only_source and flow.source != self._only_source:
                continue
            if flow.after < 0 or self._arrived_ns is None:
                self._line, self._line_ns = (number, flow), due_ns
                break
            arrived_ns = self._arrived_ns[flow.after]
            if arrived_ns:
                self._make_ready(number, flow, arrived_ns)
            else:
                self._parked.setdefault(flow.after, []).append((number, flow))
        self._renew()

    def _recognize(self, number: int, flow: Flow) -> None:
        """Check that the flow was in the plan when it was checked; nothing is prepared for others."""
        needs = self._needs
        known = number < needs.flows and (flow.source, flow.destination) in needs.most_at_once
        if not known or (flow.after >= 0 and not needs.dependent):
            raise UsageError(f"{self._path} was changed after it was checked, at flow {number}: send it again")

    def _make_ready(self, number: int, flow: Flow, arrived_ns: int) -> None:
        due_ns = max(self._origin_ns + flow.start_ns, arrived_ns + flow.delay_ns)
        if due_ns < self._until_ns:
            heappush(self._ready, (due_ns, number, flow))

    def _renew(self) -> None:
        self.next_ns = min(self._line_ns, self._ready[0][0]) if self._ready else self._line_ns
