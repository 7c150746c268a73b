"""``ringtap workload lower``: collectives as messages."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ringtap.errors import UsageError
from ringtap.options import add_json
from ringtap.terminal import text_table
from ringtap.units import counted, format_size, parse_size_bytes, whole_number

_ALL_REDUCE = "ring, halving-doubling, tree, double-tree, hierarchical, parameter-server or in-network"


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``workload lower``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("workload", nargs="?", type=Path, metavar="W", help="a directory of execution traces")
    parser.add_argument("--collective", default="ring", metavar="NAME", help=f"algorithm of all-reduce: {_ALL_REDUCE}")
    parser.add_argument("--workers", metavar="N", help="without W: one collective of so many workers")
    parser.add_argument("--bytes", metavar="SIZE", help="without W: bytes of the data of each worker, such as 1MB")
    parser.add_argument("--group", default="1", metavar="G", help="workers per node, for hierarchical")
    parser.add_argument("--shards", default="1", metavar="K", help="parameter servers (1)")
    parser.add_argument("--pieces", default="1", metavar="P", help="pieces that trees and switches pass on one by one (1)")
    parser.add_argument("-o", dest="output", metavar="P", type=Path, help="write the messages as execution traces")
    add_json(parser)
    parser.set_defaults(handler=_lower)


def _lower(options: argparse.Namespace) -> int:
    from ringtap.workload.collectives import Shape, message_graph

    group, shards, pieces = (
        whole_number(getattr(options, name), f"--{name}") for name in ("group", "shards", "pieces")
    )
    if options.workload is not None:
        return _lower_workload(options, group, shards, pieces)
    for name in ("workers", "bytes"):
        if getattr(options, name) is None:
            raise UsageError(f"--{name} is missing: name a workload, or give --workers and --bytes of one collective")
    workers, size_bytes = whole_number(options.workers, "--workers"), parse_size_bytes(options.bytes)
    graph = message_graph(options.collective, Shape(workers, size_bytes, group, shards, pieces))
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


def _lower_workload(options: argparse.Namespace, group: int, shards: int, pieces: int) -> int:
    from ringtap.workload.lowering import Algorithms, lower
    from ringtap.workload.workload import read_workload, summary, write_workload

    if options.output is None:
        raise UsageError("-o is missing: name the directory for the lowered workload")
    lowered = lower(read_workload(options.workload), Algorithms(options.collective, group, shards, pieces))
    write_workload(lowered, options.output)
    item = dict(summary(lowered))
    if options.json:
        print(json.dumps(item))
    else:
        print(f"{counted(item['messages'], 'message')} between {counted(item['ranks'], 'rank')}, in {options.output}")
    return 0
