"""Implements ``ringtap workload show``: lists the content of a workload, and draws an iteration of it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ringtap.core.command_options import add_force, add_json
from ringtap.core.terminal_escaping import text_table
from ringtap.core.units import counted, format_size
from ringtap.core.untrusted_files import refuse_existing
from ringtap.workload.command_options import NO_NETWORK, add_network, network, network_if_given

# of an element of a parameter: 1, and its bytes
_WEIGHTS = (lambda _one: 1, lambda one: one["element_bytes"])


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the arguments of the verb ``workload show``."""
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("workload", type=Path, metavar="W", help="a directory of execution traces")
    parser.add_argument("--rank", default=0, type=int, metavar="R", help="rank whose nodes are listed (0)")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="draw an iteration on a network into a .png, .svg or .pdf file"
    )
    add_network(parser)
    add_force(parser)
    add_json(parser)
    parser.set_defaults(handler=_show)


def _show(options: argparse.Namespace) -> int:
    from ringtap.core.errors import UsageError
    from ringtap.workload.execution_trace import NodeType
    from ringtap.workload.simulate_iterations import critical_path
    from ringtap.workload.timeline_plot import write_timeline
    from ringtap.workload.workload import assumed_of_others, kind_of, peer_of, read_workload, size_of, summary

    refuse_existing(options.timeline, options.force)
    workload = read_workload(options.workload)
    if not 0 <= options.rank < workload.ranks:
        raise UsageError(f"--rank {options.rank} does not exist: there are ranks 0 to {workload.ranks - 1}")
    item = summary(workload)
    path, where, drawn = None, NO_NETWORK, options.timeline is not None
    if used := network(options, workload) if drawn else network_if_given(options, workload):
        simulated = used.simulate(workload, 2)
        path, on = critical_path(workload, simulated), f"on a {used.topology.name} of {options.capacity}"
        where = f"{path.sentence()}, {on}"
        if drawn:
            title = f"{options.workload.resolve().name}: an iteration {on}"
            write_timeline(simulated.spans, options.timeline, title)
    if options.json:
        print(json.dumps(item | {"critical_path": path and path._asdict(), "about": workload.about}))
        return 0
    print(
        f"{counted(item['ranks'], 'rank')}, {counted(item['collectives'], 'collective')} of "
        f"{format_size(item['collective_bytes'])}, {counted(item['messages'], 'message')} of "
        f"{format_size(item['message_bytes'])}; up to {max(item['compute_s']):.4g} s of computation per rank"
    )
    for line in [*_known(workload.about), *(f"Assumed: {text}" for text in assumed_of_others(workload))]:
        print(line)
    print(where)
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


def _known(about: dict[str, Any]) -> list[str]:
    """Return what a profile knows beside the nodes, in lines."""
    found = []
    if parameters := about.get("parameters"):
        total, size = (sum(one["elements"] * weight(one) for one in parameters) for weight in _WEIGHTS)
        found.append(f"{counted(total, 'parameter')} of {format_size(size)} in {counted(len(parameters), 'tensor')}")
    if "variation" in about:
        spread = [f"{name} {value:.1%}" for name, value in about["variation"].items() if value is not None]
        total = about["iterations"]
        used = about.get("typical_iterations", total)
        alike = "" if used == total else f" alike, of {total}"
        unknown = "not known, as no two iterations can be compared" if used == 1 else "not known"
        found.append(
            f"Profile of {about['profile_of']}: {about['iteration_s']:.4g} s per iteration (median of {used}{alike}); "
            f"standard deviation over mean: {', '.join(spread) or unknown}"
        )
    return found
