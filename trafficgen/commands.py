"""``ringtap traffic``: its sub-verbs."""

from __future__ import annotations

from typing import Any

from ringtap.trafficgen.bundle_command import add_bundle
from ringtap.trafficgen.calibrate_command import add_calibrate
from ringtap.trafficgen.plan_command import add_plan
from ringtap.trafficgen.send_command import add_send
from ringtap.trafficgen.serve_command import add_serve


def register(subparsers: Any, name: str, summary: str) -> Any:
    """Add the ``traffic`` verb and its sub-verbs; returns what further ones are added to."""
    parser = subparsers.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="traffic_verb", metavar="COMMAND", required=True)
    for add in (add_plan, add_serve, add_send, add_calibrate, add_bundle):
        add(verbs)
    return verbs
