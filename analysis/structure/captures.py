"""Where the streams come from: capture files, or a run directory's packets with its clocks, addresses and step logs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ringtap.analysis.job.logs import NodeLogs
from ringtap.analysis.job.run import Job, open_job
from ringtap.analysis.job.sockets import socket_log
from ringtap.analysis.pcap import read_captures
from ringtap.analysis.structure.rhythm import Integers
from ringtap.analysis.structure.steps import check_against_steps
from ringtap.analysis.structure.streams import Vantage, streams_of
from ringtap.analysis.structure.structure import Structure, find_structure
from ringtap.errors import UsageError

_LOCAL = re.compile(r"(127\.|::1$|0\.0\.0\.0$|::$|fe80:)")


def read_structure(
    *paths: str | Path,
    bin_s: float = 0.001,
    hosts: Mapping[str, Sequence[str]] | None = None,
    words: str | None = None,
    cache: bool = True,
) -> Structure:
    """The structure of training traffic in captures.

    Args:
        paths: capture files, each of one place or a part of one, their clocks in step; or one run directory with
            ``packets/``, whose clock offsets are applied and whose step logs are compared with.
        bin_s: width of the time bins.
        hosts: name to addresses of hosts that have several, or shall have a name.
        words: a filter in tcpdump's language; the rest of the traffic is left out.
        cache: whether the scans of the captures are kept beside them, for the next time.

    Raises:
        UsageError: not captures, or nothing in them that could be training.
        MeasurementError: there is no training in them; says what there was instead.
    """
    places = [Path(path) for path in paths]
    folders = [path for path in places if path.is_dir()]
    if folders and len(places) > 1:
        raise UsageError(f"{folders[0]} is a run directory: name it alone, or capture files without it")
    job = open_job(folders[0]) if folders else None
    names = {address: name for name, addresses in (hosts or {}).items() for address in addresses}
    vantages = _of_run(job, bin_s, words, cache) if job is not None else _of_files(places, bin_s, words, cache)
    found = find_structure(streams_of(vantages, names))
    if job is not None:
        found = replace(found, steps=check_against_steps(job, found.boundaries_ns))
    return found


def _of_files(paths: Sequence[Path], bin_s: float, words: str | None, cache: bool) -> list[Vantage]:
    if not paths:
        raise UsageError("name at least one capture file or a run directory")
    return [_vantage(str(path), [path], bin_s, words, cache) for path in paths]


def _of_run(job: Job, bin_s: float, words: str | None, cache: bool) -> list[Vantage]:
    vantages = []
    for name, logs in job.nodes.items():
        files = [logs.path / each for each in logs.names("packets/*.pcap*")]
        if files:
            clock = logs.clock.to_reference
            vantages.append(_vantage(name, files, bin_s, words, cache, clock, own_addresses(logs)))
    if not vantages:
        raise UsageError(
            f"{job.path} has no packets of any node: record them with 'ringtap run --collect default,packets'"
        )
    return vantages


def _vantage(
    name: str,
    files: Sequence[Path],
    bin_s: float,
    words: str | None,
    cache: bool,
    to_reference: Callable[[Integers], Integers] | None = None,
    addresses: frozenset[str] = frozenset(),
) -> Vantage:
    traffic = read_captures(files, bin_s=bin_s, cache=cache)
    return Vantage(name, traffic.select(words) if words else traffic, to_reference, addresses)


def own_addresses(logs: NodeLogs) -> frozenset[str]:
    """Addresses of a node by its sockets, without those that every node has."""
    log = socket_log(logs)
    if log is None:
        return frozenset()
    found = {str(address).removeprefix("::ffff:") for address in log.sockets["local"]}
    return frozenset(address for address in found if not _LOCAL.match(address))
