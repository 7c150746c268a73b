"""Implements ``ringtap workload lower``: turns collectives into messages."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ringtap.core.command_options import add_json
from ringtap.core.errors import UsageError
from ringtap.core.terminal_escaping import text_table
from ringtap.core.units import counted, format_size, parse_size_bytes, whole_number
from ringtap.workload.command_options import NO_NETWORK, add_network, algorithms, counts, network_if_given


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``workload lower``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("workload", nargs="?", type=Path, metavar="W", help="a directory of execution traces")
    parser.add_argument("--workers", metavar="N", help="without W: one collective of so many workers")
    parser.add_argument("--bytes", metavar="SIZE", help="without W: bytes of the data of each worker, such as 1MB")
    add_network(parser)
    parser.add_argument("-o", dest="output", metavar="P", type=Path, help="write the messages as execution traces")
    add_json(parser)
    parser.set_defaults(handler=_lower)


def _lower(options: argparse.Namespace) -> int:
    if options.workload is not None:
        return _lower_workload(options)
    from ringtap.workload.collectives import Shape, message_graph

    for name in ("workers", "bytes"):
        if getattr(options, name) is None:
            raise UsageError(f"--{name} is missing: name a workload, or give --workers and --bytes of one collective")
    if options.output is not None:
        raise UsageError("-o needs a workload: one collective alone is only counted")
    workers, size_bytes = whole_number(options.workers, "--workers"), parse_size_bytes(options.bytes, "--bytes")
    graph = message_graph(options.collective, Shape(workers, size_bytes, *counts(options)))
    item: dict[str, Any] = {"collective": options.collective, "workers": workers, "bytes": size_bytes}
    item |= {"messages": len(graph), "steps": graph.steps}
    item |= {"sent_bytes": graph.sent_bytes.tolist(), "received_bytes": graph.received_bytes.tolist()}
    if options.json:
        print(json.dumps(item))
        return 0
    print(
        f"{options.collective} of {format_size(size_bytes)} over {counted(workers, 'worker')}: "
        f"{counted(len(graph), 'message')} in {counted(graph.steps, 'step')}"
    )
    rows = [["rank", "sends", "receives"]]
    for rank, (sent, received) in enumerate(zip(graph.sent_bytes, graph.received_bytes, strict=True)):
        name = f"{rank}" if rank < workers else f"server {rank - workers}"
        rows.append([name, format_size(int(sent)), format_size(int(received))])
    print("\n".join(text_table(rows)))
    return 0


def _lower_workload(options: argparse.Namespace) -> int:
    from ringtap.workload.lowering import lower
    from ringtap.workload.simulate_iterations import busiest_links, critical_path
    from ringtap.workload.workload import assumed_of_others, read_workload, summary, write_workload

    if options.workers is not None or options.bytes is not None:
        raise UsageError("--workers and --bytes are those of one collective: leave them out beside a workload")
    workload = read_workload(options.workload)
    used = network_if_given(options, workload)
    lowered = lower(workload, algorithms(options))
    if options.output is not None:
        write_workload(lowered, options.output)
    item = summary(lowered) | {"topology": None, "critical_path": None, "link_bytes": None}
    item["assumptions"], where = assumed_of_others(workload), NO_NETWORK
    if used is not None:
        simulated, topology = used.simulate(workload, 2), used.topology
        path, links = critical_path(workload, simulated), busiest_links(topology, simulated.link_bytes)
        item |= {"topology": topology.name, "critical_path": path._asdict()}
        item["link_bytes"] = dict(zip(topology.links, simulated.link_bytes.tolist(), strict=True))
        where = f"{links}, on a {topology.name} of {options.capacity}\n{path.sentence()}"
    if options.json:
        print(json.dumps(item))
        return 0
    file = f", in {options.output}" if options.output is not None else ""
    for text in assumed_of_others(workload):
        print(f"Assumed: {text}")
    print(f"{counted(item['messages'], 'message')} between {counted(item['ranks'], 'rank')}{file}\n{where}")
    return 0
