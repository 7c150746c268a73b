"""Writes Perfetto traces: processes, tracks, slices, counters and arrows, in a stream of bounded memory.

Packets are track events (perfetto.dev/docs/reference/synthetic-track-event). All tracks have the clock REALTIME.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from io import BufferedIOBase
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringtap.analysis.runs.samples_to_iterations import Integers

_PACKETS_AT_ONCE = 4096
_SEQUENCE = 1  # all packets are of one writer
Fact = int | float | str


class TrackSlice(NamedTuple):
    """A span of time on a track.

    Attributes:
        begin_ns: begin, CLOCK_REALTIME.
        end_ns: end.
        name: name; slices whose names differ in more than numbers have different colours.
        category: category, by which queries choose.
        arrows: numbers of arrows; each leads through the slices that have its number, in order of time.
        parts: slices within this one, in order of time.
        facts: names and values of further facts.
    """

    begin_ns: int
    end_ns: int
    name: str
    category: str
    arrows: Sequence[int] = ()
    parts: Sequence[TrackSlice] = ()
    facts: Sequence[tuple[str, Fact]] = ()


class TraceWriter:
    """Writer of one trace.

    Args:
        stream: receives the trace.
        begin_ns: a time near the begin of the trace.

    Attributes:
        slices: number of slices written.
        values: number of values of counters written.
        untimed: number of slices, moments and values left out because their times are before 1970, as in damaged logs.
    """

    def __init__(self, stream: BufferedIOBase, begin_ns: int) -> None:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder

        self._protos, self._new_builder = protos, TraceProtoBuilder
        self._stream = stream
        self._builder = TraceProtoBuilder()
        self._tracks = self._processes = 0
        self.slices = self.values = self.untimed = 0
        self._add_clocks(begin_ns)

    def _add_clocks(self, begin_ns: int) -> None:
        """Add a packet that makes the trace's clock CLOCK_REALTIME, which viewers can then show as UTC."""
        snapshot = self._packet().clock_snapshot
        for clock in (self._protos.BUILTIN_CLOCK_BOOTTIME, self._protos.BUILTIN_CLOCK_REALTIME):
            snapshot.clocks.add(clock_id=clock, timestamp=begin_ns)

    def _packet(self) -> Any:
        if len(self._builder.trace.packet) >= _PACKETS_AT_ONCE:
            self.flush()
        packet = self._builder.add_packet()
        packet.trusted_packet_sequence_id = _SEQUENCE
        return packet

    def _event(self, t_ns: int, track: int, kind: str) -> Any:
        """Add an event of a kind of ``TrackEvent.Type``, and return it."""
        packet = self._packet()
        packet.timestamp = t_ns
        packet.track_event.type, packet.track_event.track_uuid = getattr(self._protos.TrackEvent, kind), track
        return packet.track_event

    def flush(self) -> None:
        """Write the packets that wait in memory."""
        self._stream.write(self._builder.serialize())
        self._builder = self._new_builder()

    def process(self, name: str) -> int:
        """Add a process after those before, and return the number of its track."""
        descriptor = self._track()
        self._processes += 1
        descriptor.process.pid = self._processes
        descriptor.process.legacy_sort_index = self._processes
        descriptor.process.process_name = name
        descriptor.child_ordering = self._protos.TrackDescriptor.EXPLICIT
        return self._tracks

    def track(self, parent: int, name: str) -> int:
        """Add a track below the others of its parent, and return its number."""
        descriptor = self._track()
        descriptor.parent_uuid, descriptor.name = parent, name
        descriptor.sibling_order_rank = self._tracks
        descriptor.child_ordering = self._protos.TrackDescriptor.EXPLICIT
        return self._tracks

    def _track(self) -> Any:
        self._tracks += 1
        descriptor = self._packet().track_descriptor
        descriptor.uuid = self._tracks
        return descriptor

    def counter(self, parent: int, name: str, unit: str, times_ns: Integers, values: npt.NDArray[Any]) -> None:
        """Add a counter; each of its values holds until the next one.

        Args:
            parent: track or process that it belongs to.
            name: its name.
            unit: unit of the values.
            times_ns: times of the values, ascending.
            values: the values; those that are not known (NaN) are left out, so that the one before holds.
        """
        values = np.asarray(values, np.float64)
        self.untimed += int((times_ns < 0).sum())
        known = ~np.isnan(values) & (times_ns >= 0)
        times_ns, values = times_ns[known], values[known]
        if not len(values):
            return
        descriptor = self._track()
        descriptor.parent_uuid, descriptor.name, descriptor.sibling_order_rank = parent, name, self._tracks
        descriptor.counter.unit_name = unit
        track = self._tracks
        changes = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
        for t_ns, value in zip(times_ns[changes].tolist(), values[changes].tolist(), strict=True):
            event = self._event(t_ns, track, "TYPE_COUNTER")
            if value.is_integer() and abs(value) < 2**62:
                event.counter_value = int(value)
            else:
                event.double_counter_value = value
        self.values += len(changes)

    def lanes(self, parent: int, name: str, slices: Iterable[TrackSlice]) -> None:
        """Add slices on as many tracks of one name as overlapping ones need.

        Args:
            parent: track or process that they belong to.
            name: name of the tracks.
            slices: the slices, in order of their begins.
        """
        tracks: list[tuple[int, int]] = []  # end of the last slice, track
        for one in slices:
            if one.begin_ns < 0:
                self.untimed += 1
                continue
            is_free = tracks and tracks[0][0] <= one.begin_ns
            track = heapq.heappop(tracks)[1] if is_free else self.track(parent, name)
            self._add_slice(track, one)
            heapq.heappush(tracks, (max(one.begin_ns, one.end_ns), track))

    def _add_slice(self, track: int, one: TrackSlice) -> None:
        event = self._event(one.begin_ns, track, "TYPE_SLICE_BEGIN")
        event.name = one.name
        event.categories.append(one.category)
        if one.arrows:
            event.flow_ids.extend(one.arrows)
        for name, value in one.facts:
            fact = event.debug_annotations.add(name=name)
            if isinstance(value, str):
                fact.string_value = value
            elif isinstance(value, float):
                fact.double_value = value
            else:
                fact.int_value = value
        for part in one.parts:
            self._add_slice(track, part)
        self._event(max(one.begin_ns, one.end_ns), track, "TYPE_SLICE_END")
        self.slices += 1

    def instants(self, parent: int, name: str, instants: Iterable[tuple[int, str]]) -> None:
        """Add a track of moments: time, name."""
        track = 0
        for t_ns, text in instants:
            if t_ns < 0:
                self.untimed += 1
                continue
            track = track or self.track(parent, name)
            self._event(t_ns, track, "TYPE_INSTANT").name = text
