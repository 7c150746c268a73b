"""Records packets and sockets of a node in a process beside its agent.

The command is ``python -m ringtap.agents.node.packet_recorder_process JSON``.

The JSON object has ``interfaces`` and options of `ringtap.collectors.packets.PacketsCollector`. With ``folder``, a
node's folder, both are recorded until SIGTERM, as ``packets/<part>-…``. Their files move there at the end: until then,
their folder has a name with a dot, and files below it are not copied from other hosts. Without ``folder``, the
collectors' checks are printed.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path

from ringtap.agents.node.sampling import Entry, Sampler
from ringtap.collectors.collector_interface import Collector, Context
from ringtap.collectors.packets import PacketsCollector
from ringtap.collectors.sockets import SocketsCollector
from ringtap.core.errors import MeasurementError
from ringtap.core.run_directory_schema import CAPTURED_SOCKETS, SOCKETS_REC
from ringtap.core.terminal_escaping import as_command

READY = "recording packets"
_PACKETS_EVERY_S, _SOCKETS_EVERY_S = 1.0, 0.02


def record(collectors: list[Collector]) -> None:
    """Record until SIGTERM or SIGINT; a capture of packets that ends early says so in its JSON file.

    Raises:
        MeasurementError: packets cannot be recorded.
    """
    alarm, waker = os.pipe2(os.O_CLOEXEC)
    for number in (signal.SIGTERM, signal.SIGINT):  # not blocked: the capture programs would inherit that
        signal.signal(number, lambda *_: os.write(waker, b"."))
    entries = [
        Entry(collector.name, collector, partial(print, file=sys.stderr, flush=True)) for collector in collectors
    ]
    samplers = [Sampler(entry.name, [entry]) for entry in entries]
    for sampler in samplers:
        sampler.start()
    for sampler in samplers:
        sampler.ready.wait()
    failed = [entry.facts["reason"] for entry in entries if entry.name == PacketsCollector.name and not entry.running]
    if not failed:
        print(READY, flush=True)
        select.select([alarm], [], [])
    for sampler in samplers:
        sampler.stop()
    for sampler in samplers:
        sampler.join()
    if failed:
        raise MeasurementError("; ".join(failed))


def main() -> int:
    """Run the module as a command."""
    item = json.loads(sys.argv[1])
    node, interfaces = item.pop("folder", ""), item.pop("interfaces")
    hidden = Path(node, f".packets-{item['part']}") if node else Path(tempfile.gettempdir())
    captures = [
        PacketsCollector(Context(hidden, _PACKETS_EVERY_S, options=item | {"interface": nic})) for nic in interfaces
    ]
    if not node:
        print(json.dumps({capture.interface: vars(capture.check()) for capture in captures}))
        return 0
    try:
        record([*captures, SocketsCollector(Context(hidden, _SOCKETS_EVERY_S))])
    finally:
        (target := Path(node, PacketsCollector.name)).mkdir(exist_ok=True)
        for path in sorted(hidden.glob(f"{target.name}/*")):
            path.rename(target / path.name)
        if (sockets := hidden / SOCKETS_REC).exists():
            sockets.rename(Path(node, CAPTURED_SOCKETS.format(part=item["part"])))
        shutil.rmtree(hidden, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(as_command(main))
