"""Draw the ranks' slices of a Perfetto trace, decoded with Perfetto's own protocol buffers."""

from __future__ import annotations

import argparse
import gzip
from collections import defaultdict
from pathlib import Path
from typing import BinaryIO, NamedTuple

from matplotlib.figure import Figure
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

# Okabe and Ito's colours, which can be distinguished with any colour vision
COLOURS = {
    "forward": "#0072B2",
    "backward": "#56B4E9",
    "optimizer step": "#009E73",
    "hidden": "#E69F00",
    "exposed": "#D55E00",
}


class Track(NamedTuple):
    """A track of a trace.

    Attributes:
        path: names of its process, its groups and itself.
        unit: unit of a counter; empty for slices.
        slices: begin in ns, end in ns, name, depth and arrows of each slice, by begin.
        values: time in ns and value of each value of a counter; time and name of each instant.
    """

    path: tuple[str, ...]
    unit: str
    slices: list[tuple[int, int, str, int, tuple[int, ...]]]
    values: list[tuple[int, float | str]]


def read_trace(path: Path | BinaryIO) -> list[Track]:
    """Read the tracks of a trace, in the order of the file."""
    with gzip.open(path) as stream:
        packets = Trace.FromString(stream.read()).packet
    tracks: dict[int, Track] = {}
    is_open: defaultdict[int, list[tuple[int, str, tuple[int, ...]]]] = defaultdict(list)
    for packet in packets:
        if packet.HasField("track_descriptor"):
            one = packet.track_descriptor
            above = tracks[one.parent_uuid].path if one.parent_uuid else ()
            tracks[one.uuid] = Track((*above, one.process.process_name or one.name), one.counter.unit_name, [], [])
        elif packet.HasField("track_event"):
            event = packet.track_event
            track, begun = tracks[event.track_uuid], is_open[event.track_uuid]
            if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                begun.append((packet.timestamp, event.name, tuple(event.flow_ids)))
            elif event.type == TrackEvent.TYPE_SLICE_END:
                begin_ns, name, arrows = begun.pop()
                track.slices.append((begin_ns, packet.timestamp, name, len(begun), arrows))
            elif event.type == TrackEvent.TYPE_COUNTER:
                is_double = event.HasField("double_counter_value")
                value = event.double_counter_value if is_double else event.counter_value
                track.values.append((packet.timestamp, value))
            else:
                track.values.append((packet.timestamp, event.name))
    for track in tracks.values():
        track.slices.sort(key=lambda one: (one[0], one[3]))  # parts after their whole
    return list(tracks.values())


def draw(tracks: list[Track], first: int, iterations: int) -> Figure:
    """Return a figure of some iterations of all ranks.

    Args:
        tracks: as from `read_trace`.
        first: number of the first iteration.
        iterations: number of iterations.
    """
    spans = {name: (begin, end) for track in tracks if track.path[0] == "job" for begin, end, name, *_ in track.slices}
    begin_ns, end_ns = spans[f"iteration {first}"][0], spans[f"iteration {first + iterations - 1}"][1]
    lanes = [track for track in tracks if track.path[0].startswith("rank ") and track.slices]
    figure = Figure(figsize=(9, 0.8 + 0.22 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for lane, track in enumerate(lanes):
        for begin, end, name, *_ in track.slices:
            if end <= begin_ns or begin >= end_ns:
                continue
            colour = next((found for known, found in COLOURS.items() if name == known), "#DDDDDD")
            begin_ms, length_ms = (begin - begin_ns) / 1e6, (end - begin) / 1e6
            axes.broken_barh([(begin_ms, length_ms)], (lane + 0.1, 0.8), facecolors=colour, edgecolors="white", lw=0.5)
    axes.set_xlim(0, (end_ns - begin_ns) / 1e6)
    axes.set_ylim(len(lanes), 0)
    titles = [f"{track.path[0].partition(' (')[0]}: {track.path[-1]}" for track in lanes]
    axes.set_yticks([lane + 0.5 for lane in range(len(lanes))], titles, fontsize=8)
    axes.set_xlabel(f"time since the begin of iteration {first}, ms")
    for name, colour in COLOURS.items():
        axes.broken_barh([], (0, 0), facecolors=colour, label=name)
    figure.legend(loc="outside lower center", ncols=len(COLOURS), frameon=False, fontsize=8)
    return figure


def main() -> None:
    """Draw the trace that is named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="trace of ringtap export --to perfetto")
    parser.add_argument("image", type=Path, help="file to write: .png, .svg or .pdf")
    parser.add_argument("--first", type=int, default=10, help="first iteration (default: 10)")
    parser.add_argument("--iterations", type=int, default=3, help="number of iterations (default: 3)")
    options = parser.parse_args()
    draw(read_trace(options.trace), options.first, options.iterations).savefig(options.image, dpi=160)


if __name__ == "__main__":
    main()
