"""Implements ``ringtap testbed``: builds, uses, shows and removes virtual testbeds."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ringtap.core.command_options import add_json
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.testbed_options import TOPOLOGIES, LinkOptions
from ringtap.core.units import counted


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the subcommand ``testbed``."""
    testbed = subparsers.add_parser(name, help=summary, description=summary)
    verbs = testbed.add_subparsers(dest="testbed_verb", metavar="up|exec|status|down", required=True)
    _register_up(verbs)
    execute = verbs.add_parser("exec", help="run a command on a host")
    execute.add_argument("--testbed", help="the testbed, if there are several")
    execute.add_argument("host", help="a host, or a switch")
    execute.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command to run")
    execute.set_defaults(handler=_exec)
    status = verbs.add_parser("status", help="show the testbeds that are up")
    add_json(status)
    status.set_defaults(handler=_status)
    down = verbs.add_parser("down", help="remove a testbed and everything that runs in it")
    down.add_argument("name", nargs="?", help="the testbed, if several are up")
    down.add_argument(
        "--all", action="store_true", help="remove every testbed of this user, and what is left of crashed ones"
    )
    down.set_defaults(handler=_down)


def _register_up(verbs: Any) -> None:
    up = verbs.add_parser("up", help="build a testbed and measure the rates of its links")
    up.add_argument("--name", default="lab", help="name of the testbed (default: lab)")
    up.add_argument("--hosts", default="S0,S1,S2,S3", help="a number, or names with commas (default: S0,S1,S2,S3)")
    up.add_argument(
        "--capacity", default="250mbit", metavar="RATE", help="of every link in each direction (default: 250mbit)"
    )
    up.add_argument("--queue", default="400kB", help="queue before each limit (default: 400kB)")
    up.add_argument("--mtu", type=int, default=LinkOptions.mtu, help="bytes of an IP packet (default: %(default)s)")
    up.add_argument(
        "--congestion-control", default="cubic", help="congestion control of every TCP connection (default: cubic)"
    )
    up.add_argument("--burst", default="64KiB", help="bucket size of each limit (default: 64KiB)")
    up.add_argument(
        "--offload-segments", type=int, default=4, help="packets that TCP may pass to a link in one piece (default: 4)"
    )
    up.add_argument("--topology", default="star", metavar="KIND", help=f"{', '.join(TOPOLOGIES)} (default: star)")
    up.add_argument(
        "--per-leaf", type=int, default=LinkOptions.per_leaf, metavar="H",
        help=f"hosts per leaf switch, for leaf-spine (default: {LinkOptions.per_leaf})",
    )  # fmt: skip
    up.add_argument("--spines", type=int, default=1, metavar="S", help="spine switches, for leaf-spine (default: 1)")
    up.add_argument(
        "--oversubscription",
        type=float,
        default=1.0,
        metavar="X",
        help="rate of a leaf's hosts over that of its links to the spines, for leaf-spine (default: 1)",
    )
    up.add_argument("--sides", default="", metavar="AxB", help="lengths of the sides, for torus")
    up.add_argument("--delay", default="0s", metavar="TIME", help="delay of each link in each direction (default: 0s)")
    add_json(up)
    up.set_defaults(handler=_up)


def _up(options: argparse.Namespace) -> int:
    from inspect import signature

    from ringtap.agents.testbed.forwarding_capacity import excess
    from ringtap.agents.testbed.registry import all_testbeds
    from ringtap.agents.testbed.start_testbed import rate_warnings, testbed

    # its parameters have the names of the options
    built = testbed(**{name: getattr(options, name) for name in signature(testbed).parameters})
    if too_much := excess(built.state.spec, len(built.hosts)):
        print(f"warning: {too_much}: links may give less than their rate", file=sys.stderr)
    built.stay()
    spec, warnings = built.state.spec, rate_warnings(built.state.links)
    if options.json:
        print(json.dumps(_describe(built.state) | {"warnings": warnings}))
    else:
        _print_links(built.state.links)
        for warning in warnings:
            print(f"warning: {warning}")
        several = sum(other.alive() for other in all_testbeds()) > 1
        first = f"--testbed {spec.name} {spec.hosts[0]}" if several else spec.hosts[0]
        print(f"Testbed {spec.name} is up. Next: ringtap testbed exec {first} -- ping -c 1 {spec.hosts[1]}")
    if warnings:
        raise MeasurementError(
            f"testbed {spec.name} is up, but the rate of {counted(len(warnings), 'link direction')} is off by over 5 %"
        )
    return 0


def _print_links(links: list[dict[str, Any]]) -> None:
    width = max((len(link["direction"]) for link in links), default=0)
    for link in links:
        rate = f"{link['measured_bps'] / 1e6:9.1f} of {link['asked_bps'] / 1e6:.1f} Mbit/s"
        print(f"{link['host']:>10} {link['direction']:<{width}} {rate}, {link['congestion_control']}")


def _describe(testbed: Any) -> dict[str, Any]:
    spec = testbed.spec
    hosts = [
        {"host": host, "training_ip": spec.training_ip(host), "cross_ip": spec.cross_ip(host)} for host in spec.hosts
    ]
    item = {"name": spec.name, "standing": testbed.alive(), "pid": testbed.pid, "owner_pid": testbed.owner_pid}
    return item | {"spec": spec.to_json(), "hosts": hosts, "links": testbed.links}


def _exec(options: argparse.Namespace) -> int:
    from ringtap.agents.testbed import registry
    from ringtap.agents.testbed.run_on_host import enter
    from ringtap.core.installation import with_shipped_examples

    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError("nothing to run: ringtap testbed exec HOST -- COMMAND")
    command = with_shipped_examples(command, lambda text: print(f"ringtap: {text}", file=sys.stderr))
    return enter(registry.find(options.testbed), options.host, command)


def _status(options: argparse.Namespace) -> int:
    from ringtap.agents.testbed import registry

    found, problems = registry.read_records()
    testbeds = [_describe(testbed) for testbed in found]
    _warn(problems)
    if options.json:
        print(json.dumps(testbeds))
        return 0
    for testbed in testbeds:
        spec = testbed["spec"]
        state = "is up" if testbed["standing"] else "is gone (ringtap testbed down --all clears its record)"
        print(
            f"{testbed['name']} {state}: pid {testbed['pid']}, {spec['topology']} of {len(spec['hosts'])} hosts, "
            f"{spec['rate_bps'] / 1e6:g} Mbit/s"
        )
        for host in testbed["hosts"]:
            print(f"  {host['host']:>10}  training {host['training_ip']}  cross {host['cross_ip']}")
        _print_links(testbed["links"])
    if not testbeds:
        print("No testbed is up.")
    return 0


def _down(options: argparse.Namespace) -> int:
    from ringtap.agents.testbed import registry

    if options.all and options.name:
        raise UsageError("give a name or --all, not both")
    failures = []
    with registry.locked():
        found, problems = registry.read_records()
        _warn(problems)
        testbeds = found if options.all else [registry.find(options.name)]
        for testbed in testbeds:
            try:
                result = "removed" if registry.remove(testbed) else "was gone; record cleared"
                print(f"{testbed.spec.name}: {result}")
            except MeasurementError as error:
                failures.append(str(error))
    if failures:
        raise MeasurementError("; ".join(failures))
    if not testbeds:
        print("No testbed is up.")
    return 0


def _warn(problems: list[str]) -> None:
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
