"""The small sweep that tests measure, on a testbed and over ssh, and how they run it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ringtap.workload.execution_trace import Collective, Node, NodeType
from ringtap.workload.lowering import Algorithms, lower
from ringtap.workload.workload import Workload, check_workload

RINGTAP = [sys.executable, "-m", "ringtap.cli"]
WORKERS = ("S0", "S1", "S3")
# 50 ms of computing and 33 ms of the empty link an iteration: at this load the link needs more than the computing
SMALL = """\
[sweep]
name = "small"
scale = 100
capacity = "{capacity}"
loads = [0, 0.7]
traffic = ["iperf"]

[window]
warmup_iterations = 2
settle = "500ms"
min_time = "2500ms"
min_iterations = 5
max_time = "10s"

[[models]]
name = "small"
parameters = 25_000_000
compute = "50ms"
layers = 8
"""


def start(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*RINGTAP, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | dict(environment or {}),
    )


def run(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    with start(*arguments, environment=environment) as process:
        try:
            out, errors = process.communicate(timeout=120)
        finally:
            process.kill()  # one that hangs would disturb the tests that follow
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def wait_for(condition: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    """Wait until something has come about in a sweep that runs."""
    deadline_s = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def status(out: Path) -> tuple[str, str]:
    """How a run ended, and why."""
    info = json.loads((out / "run.json").read_text())
    return info["status"], info["why"]


def one_sentence(errors: str) -> str:
    """The one sentence of an error."""
    assert "Traceback" not in errors
    said = [line for line in errors.splitlines() if line.startswith("ringtap:")]
    assert len(said) == 1, errors
    return said[0]


# as SMALL's model: 25 million parameters / 100 in eight equal layers, 50 ms, one layer per bucket of 25 MiB / 100
LAYER_BYTES, FORWARD_US, BACKWARD_US = 125_000, 16_667, 4_167


def small_messages() -> Workload:
    """The messages of an iteration of SMALL's model.

    DDP puts two layers into a bucket of 262 kB, and the last one into the first.
    """
    nodes = [Node(1, "forward", NodeType.COMP, duration_us=FORWARD_US)]
    before = 0
    for number, layers in enumerate((1, 2, 2, 2, 1)):
        backward = Node(2 * number + 2, "backward", NodeType.COMP, [nodes[-1].id if not number else 2 * number])
        backward.duration_us = layers * BACKWARD_US
        attributes = {"comm_type": int(Collective.ALL_REDUCE), "comm_size": layers * LAYER_BYTES}
        after = [backward.id, before] if before else [backward.id]
        reduce = Node(2 * number + 3, "bucket", NodeType.COMM_COLL, after, attributes=dict(attributes))
        nodes += [backward, reduce]
        before = reduce.id
    copies = [[Node(n.id, n.name, n.type, [*n.control_deps], duration_us=n.duration_us, attributes={**n.attributes})
               for n in nodes] for _ in WORKERS]  # fmt: skip
    lowered = lower(Workload(copies), Algorithms())
    check_workload(lowered)
    return lowered
