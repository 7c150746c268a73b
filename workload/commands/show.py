"""``ringtap workload show``: the content of a workload."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ringtap.options import add_json
from ringtap.terminal import text_table
from ringtap.units import counted, format_size


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``workload show``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("workload", type=Path, metavar="W", help="a directory of execution traces")
    parser.add_argument("--rank", default=0, type=int, metavar="R", help="rank whose nodes are listed (0)")
    add_json(parser)
    parser.set_defaults(handler=_show)


def _show(options: argparse.Namespace) -> int:
    from ringtap.errors import UsageError
    from ringtap.workload.execution_trace import NodeType
    from ringtap.workload.workload import kind_of, peer_of, read_workload, size_of, summary

    workload = read_workload(options.workload)
    if not 0 <= options.rank < workload.ranks:
        raise UsageError(f"--rank {options.rank} does not exist: there are ranks 0 to {workload.ranks - 1}")
    item = summary(workload)
    if options.json:
        print(json.dumps(item | {"about": workload.about}))
        return 0
    print(
        f"{counted(item['ranks'], 'rank')}, {counted(item['collectives'], 'collective')} of "
        f"{format_size(item['collective_bytes'])}, {counted(item['messages'], 'message')} of "
        f"{format_size(item['message_bytes'])}; up to {max(item['compute_s']):.4g} s of computation per rank"
    )
    rows = [["node", "name", "what", "bytes", "time", "after"]]
    for node in workload.traces[options.rank]:
        what, size = node.type.name.lower(), ""
        if node.type == NodeType.COMM_COLL:
            what, size = kind_of(node).name.lower(), format_size(size_of(node))
        elif node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
            what = f"{what.removeprefix('comm_')} {peer_of(node)}"
            size = format_size(size_of(node))
        after = " ".join(map(str, sorted(node.deps)))
        rows.append([str(node.id), node.name, what, size, f"{node.duration_us / 1e3:g} ms", after])
    print("\n".join(text_table(rows, left=3)))
    return 0
