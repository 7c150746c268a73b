"""Rules by which ui.perfetto.dev takes a trace as it was meant: perfetto.dev/docs/reference/synthetic-track-event."""

from collections import defaultdict

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

EVENTS = {
    TrackEvent.TYPE_SLICE_BEGIN: "slice",
    TrackEvent.TYPE_SLICE_END: "slice",
    TrackEvent.TYPE_INSTANT: "slice",
    TrackEvent.TYPE_COUNTER: "counter",
}


def check_trace(data: bytes) -> int:
    """Check a trace, and return its number of events."""
    packets = Trace.FromString(data).packet
    clocks = packets[0].clock_snapshot.clocks  # makes times without a clock, of BOOTTIME, those of REALTIME
    assert len({clock.clock_id for clock in clocks}) == 2
    assert len({clock.timestamp for clock in clocks}) == 1
    kinds: dict[int, str] = {}
    pids = set()
    latest_ns: defaultdict[int, int] = defaultdict(int)
    is_open: defaultdict[int, int] = defaultdict(int)
    events = 0
    for packet in packets:
        assert packet.trusted_packet_sequence_id
        assert not packet.HasField("interned_data")
        if packet.HasField("track_descriptor"):
            one = packet.track_descriptor
            assert one.uuid and one.uuid not in kinds, "a track described twice"
            assert not one.parent_uuid or one.parent_uuid in kinds, "a track before its parent"
            assert one.name or one.process.process_name
            kinds[one.uuid] = "counter" if one.HasField("counter") else "slice"
            if one.HasField("process"):
                assert one.process.pid not in pids
                pids.add(one.process.pid)
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        track, events = event.track_uuid, events + 1
        assert kinds.get(track) == EVENTS[event.type], "an event of a track that is not described, or of another kind"
        assert packet.timestamp >= latest_ns[track], "a track's events are not in order"
        latest_ns[track] = packet.timestamp
        assert not event.name_iid and not event.category_iids  # names that nothing would explain
        if event.type == TrackEvent.TYPE_SLICE_END:
            is_open[track] -= 1
            assert is_open[track] >= 0, "an end without a begin"
        elif event.type == TrackEvent.TYPE_COUNTER:
            assert event.HasField("counter_value") or event.HasField("double_counter_value")
        else:
            assert event.name
            is_open[track] += event.type == TrackEvent.TYPE_SLICE_BEGIN
    assert not any(is_open.values()), "a slice is never closed"
    return events
