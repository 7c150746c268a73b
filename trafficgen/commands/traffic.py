"""The ``ringtap traffic`` command and its sub-verbs."""

from __future__ import annotations

from typing import Any

from ringtap.trafficgen.commands.bundle import add_bundle
from ringtap.trafficgen.commands.calibrate import add_calibrate
from ringtap.trafficgen.commands.plan import add_plan
from ringtap.trafficgen.commands.send import add_send
from ringtap.trafficgen.commands.serve import add_serve


def register(subparsers: Any, name: str, summary: str) -> Any:
    """Add the ``traffic`` verb and its sub-verbs; return the object to which further ones can be added."""
    parser = subparsers.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="traffic_verb", metavar="COMMAND", required=True)
    for add in (add_plan, add_serve, add_send, add_calibrate, add_bundle):
        add(verbs)
    return verbs
