"""Packets of a node for some time, beside its agent: ``python -m ringtap.agents.node.packet_capture JSON``.

The JSON object has ``interfaces`` and options of `ringtap.collectors.packets.PacketsCollector`. With ``folder``, a
node's folder, packets are recorded until SIGTERM. They move there when the recording ends: until then, their folder has
a name with a dot, whose files are not copied from other hosts. Without ``folder``, the collectors' checks are printed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
from pathlib import Path

from ringtap.collectors.base import Context
from ringtap.collectors.packets import PacketsCollector
from ringtap.errors import MeasurementError, error_message
from ringtap.terminal import as_command

READY = "recording packets"
_EVERY_S = 1.0


def record(collectors: list[PacketsCollector]) -> None:
    """Record packets until SIGTERM or SIGINT; a capture that ends early says so in its JSON file.

    Raises:
        MeasurementError: a capture does not start.
    """
    alarm, waker = os.pipe2(os.O_CLOEXEC)
    for number in (signal.SIGTERM, signal.SIGINT):  # not blocked: the capture programs would inherit that
        signal.signal(number, lambda *_: os.write(waker, b"."))
    running: list[PacketsCollector] = []
    try:
        for collector in collectors:
            collector.start()
            running.append(collector)
        print(READY, flush=True)
        while not select.select([alarm], [], [], _EVERY_S)[0]:
            for collector in running:
                try:
                    collector.sample()
                except OSError as error:
                    print(error_message(error), file=sys.stderr)
    except OSError as error:
        raise MeasurementError(error_message(error)) from error
    finally:
        for collector in running:
            collector.stop()


def main() -> int:
    """Run the module as a command."""
    item = json.loads(sys.argv[1])
    node, interfaces = item.pop("folder", ""), item.pop("interfaces")
    hidden = Path(node, f".packets-{item['part']}") if node else Path(tempfile.gettempdir())
    collectors = [PacketsCollector(Context(hidden, _EVERY_S, options=item | {"interface": nic})) for nic in interfaces]
    if not node:
        print(json.dumps({collector.interface: vars(collector.check()) for collector in collectors}))
        return 0
    try:
        record(collectors)
    finally:
        target = Path(node, PacketsCollector.name)
        target.mkdir(exist_ok=True)
        for path in sorted((hidden / PacketsCollector.name).iterdir()):
            path.rename(target / path.name)
        (hidden / PacketsCollector.name).rmdir()
        hidden.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(as_command(main))
