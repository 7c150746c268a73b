"""Reads captures as streams: capture files, or a run directory's packets with its clocks, addresses and step logs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path

import numpy as np

from ringtap.analysis.job.captured_payload_per_iteration import dropped_packets, undecided_warnings
from ringtap.analysis.job.run import Job, open_job
from ringtap.analysis.pcap import read_captures
from ringtap.analysis.pcap.capture_text import notes as notes_of
from ringtap.analysis.pcap.duplicates import copies_note
from ringtap.analysis.pcap.scan_captures import Progress
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.analysis.runs.sockets import socket_log
from ringtap.analysis.structure.iterations_against_step_logs import check_against_steps
from ringtap.analysis.structure.payload_time_series import Streams, Vantage, streams_of
from ringtap.analysis.structure.period_from_silences import Integers
from ringtap.analysis.structure.structure import Structure, find_structure
from ringtap.core.check_api_arguments import instance_of, paths_of
from ringtap.core.errors import UsageError
from ringtap.core.units import format_duration

_LOCAL = re.compile(r"(127\.|::1$|0\.0\.0\.0$|::$|fe80:)")


@dataclass(frozen=True)
class _CapturePoint:
    """A file, or a node of a run with its clock and addresses."""

    name: str
    files: Sequence[Path]
    to_reference: Callable[[Integers], Integers] | None = None
    addresses: frozenset[str] = frozenset()
    warning: str = ""


def read_structure(
    paths: str | Path | Sequence[str | Path],
    filter: str | None = None,
    *,
    bin_s: float | str = 0.001,
    hosts: Mapping[str, str | Sequence[str]] | None = None,
    cache: bool = True,
    progress: Progress | None = None,
) -> Structure:
    """Find the structure of training traffic in captures.

    Args:
        paths: one capture file or several, each of one capture point or a part of it, with synchronised clocks; or one
            run directory with ``packets/``, whose clock offsets are applied and whose step logs are compared.
        filter: use only the traffic that this filter in tcpdump's language accepts.
        bin_s: width of the time bins, in seconds or as text such as ``1ms``.
        hosts: addresses by name, for hosts that have several addresses or need a name.
        cache: True to store the scans of the captures beside them for later calls.
        progress: called with the bytes read of each capture and its size.

    Raises:
        UsageError: a path is not a capture or a run directory, or there is no payload in the captures, or they are of
            different times.
        MeasurementError: there is no training in the captures; the message describes the traffic instead.
    """
    named = [Path(path) for path in paths_of(paths, "capture")]
    given = _checked_hosts(instance_of(hosts or {}, dict, "hosts", "addresses by name"))
    folders = [path for path in named if path.is_dir()]
    if folders and len(named) > 1:
        raise UsageError(f"{folders[0]} is a run directory: name it alone, or capture files without it")
    job = open_job(folders[0]) if folders else None
    points = [_CapturePoint(str(path), [path]) for path in named] if job is None else _capture_points(job)
    vantages, warnings, notes = _vantages(points, filter, bin_s, cache, progress, skips=job is not None)
    names = {address: name for name, addresses in given.items() for address in addresses}
    for vantage in vantages:
        warnings += copies_note(vantage.name, vantage.traffic.counts)
    found = replace(find_structure(streams_of(vantages, names)), warnings=tuple(warnings), notes=tuple(notes))
    return found if job is None else replace(found, steps=check_against_steps(job, found.boundaries_ns))


def run_streams(job: Job, filter: str | None = None, *, bin_s: float | str = 0.001) -> tuple[Streams, list[str]]:
    """Read the captures of a run as streams between its nodes, on the reference clock.

    Args:
        job: the run.
        filter: as for `read_structure`.
        bin_s: width of the time bins, in seconds or as text.

    Returns:
        The streams, and a sentence for each part that is missing.

    Raises:
        UsageError: the run has no packets, or none with payload.
    """
    vantages, warnings, _ = _vantages(_capture_points(job), filter, bin_s, True, None, skips=True)
    return streams_of(vantages), warnings


def _vantages(
    points: Sequence[_CapturePoint],
    filter: str | None,
    bin_s: float | str,
    cache: bool,
    progress: Progress | None,
    skips: bool,
) -> tuple[list[Vantage], list[str], list[str]]:
    """Read capture points; return them with warnings and notes. With ``skips``, leave out those that are unreadable."""
    vantages: list[Vantage] = []
    notes: list[str] = []
    warnings = [point.warning for point in points if point.warning]
    errors: list[UsageError] = []
    for point in points:
        try:
            traffic = read_captures(point.files, bin_s=bin_s, cache=cache, progress=progress)
            if not traffic.bins:
                raise UsageError(
                    f"{', '.join(traffic.files)}: no packet has a time, so there are no iterations to find: "
                    "capture again in a format that keeps times, as tcpdump does"
                )
        except UsageError as error:
            if not skips:
                raise
            errors.append(error)
            warnings.append(f"{point.name} is left out: {error}")
            continue
        notes += [f"{point.name}: {note}" for note in notes_of(traffic)]
        try:
            chosen = traffic.select(filter) if filter else traffic
        except UsageError as error:
            errors.append(error)
            continue
        vantages.append(Vantage(point.name, chosen, point.to_reference, point.addresses))
    if not vantages:
        raise errors[0]
    _check_times(vantages)
    return vantages, warnings, notes


def _check_times(vantages: Sequence[Vantage]) -> None:
    """Refuse captures of different times: one begins later than all before it have ended, by more than the longest."""
    spans = []
    for vantage in vantages:
        times_ns = np.array([vantage.traffic.scanned.first_ns, vantage.traffic.scanned.last_ns])
        first_ns, last_ns = times_ns if vantage.to_reference is None else vantage.to_reference(times_ns)
        spans.append((int(first_ns), int(last_ns), vantage.name))
    longest_ns = max(last_ns - first_ns for first_ns, last_ns, _ in spans)
    spans.sort()
    _, end_ns, ended = spans[0]
    for first_ns, last_ns, name in spans[1:]:
        if first_ns - end_ns > longest_ns:
            raise UsageError(
                f"{name} begins {format_duration((first_ns - end_ns) / 1e9)} after {ended} has ended, so they did not "
                "capture the same job: give captures of one time"
            )
        if last_ns > end_ns:
            end_ns, ended = last_ns, name


def _checked_hosts(hosts: Mapping[str, str | Sequence[str]]) -> dict[str, list[str]]:
    """Return the addresses of each host, of which one may be given as text.

    Raises:
        UsageError: a text is not an IP address.
    """
    found = {name: [one] if isinstance(one, str) else list(one) for name, one in dict(hosts).items()}
    for name, addresses in found.items():
        for address in addresses:
            try:
                ip_address(address)
            except ValueError:
                raise UsageError(f"host {name}: {address!r} is not an IP address") from None
    return found


def _capture_points(job: Job) -> list[_CapturePoint]:
    """Return the nodes of a run that captured packets."""
    points = []
    for name, logs in job.logs.nodes.items():
        files = [logs.path / each for each in logs.captures]
        if files:
            points.append(_CapturePoint(name, files, logs.clock.on_reference, own_addresses(logs), _warning(logs)))
    if not points:
        raise UsageError(
            f"{job.path} has no packets of any node: record them with 'ringtap run --collect default,packets'"
        )
    return points


def _warning(logs: NodeLogs) -> str:
    """Return a warning if the node's capture is known to lack packets, or has too many; else an empty string."""
    lost = dropped_packets(logs)
    loss = [f"the capture of {logs.name} lost {lost:,} packets: volumes are too small there"] if lost else []
    return "; ".join([*loss, *undecided_warnings(logs)])


def own_addresses(logs: NodeLogs) -> frozenset[str]:
    """Return the addresses of a node by its sockets, without those that every node has (loopback, link-local)."""
    log = socket_log(logs)
    if log is None:
        return frozenset()
    found = {str(address).removeprefix("::ffff:") for address in log.sockets["local"]}
    return frozenset(address for address in found if not _LOCAL.match(address))
