"""A sweep whose bottleneck is counted at an InfiniBand port: a recorded tree that grows while the recorder reads it.

No RDMA device is on a test machine. In a mount namespace of its own, the sweep finds the tree of
tests/gold/sysfs-mlx5.txt at /sys/class/infiniband, where the port of mlx5_0 belongs to the loopback interface. A thread
lets its counters grow at planted rates. The loopback interface is that of a network namespace of its own, so that
nothing else sends over it.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ringtap

pytestmark = pytest.mark.alone(1)

GOLD = Path(__file__).parents[1] / "gold"
JOB = """\
import os, ringtap, time
print({name: value for name, value in os.environ.items() if name.startswith("NCCL_")}, flush=True)
while True: time.sleep(0.05); ringtap.step()
"""
PLAN = f"""\
[sweep]
capacity = "200gbit"
loads = [0]
traffic = ["iperf"]
[window]
warmup_iterations = 2
settle = "500ms"
min_time = "4s"
min_iterations = 5
[cluster]
reach = "local"
workers = ["here"]
[[hosts]]
name = "here"
training = "127.0.0.1"
[[models]]
name = "marks"
parameters = 1
transport = "rdma"
command = {json.dumps([sys.executable, "-c", JOB])}
"""
RECEIVED_BPS = 12e9  # of the port's packets, between start delimiter and variant checksum
# /sys/class with the tree beside what it has; the interfaces' links lead to ../../devices, as from /sys/class
MOUNTED = """\
ip link set lo up && mount -t sysfs sysfs /sys && mkdir "$0/class/net" || exit 1
mount --bind /sys/class/net "$0/class/net" && mount --rbind "$0/class" /sys/class && exec "$@"
"""


@contextmanager
def growing(counter: Path, per_s: float) -> Iterator[None]:
    """Let a counter grow evenly in place, so that a reader never sees an empty file."""
    value, ended = int(counter.read_text()), threading.Event()
    width, begin_s, file = len(str(value)), time.monotonic(), os.open(counter, os.O_WRONLY)

    def write() -> None:
        while not ended.wait(0.002):
            text = f"{value + round((time.monotonic() - begin_s) * per_s):0{width}d}\n"
            os.pwrite(file, text.encode(), 0)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        os.close(file)


def test_a_sweep_over_rdma_is_counted_at_the_port(tmp_path: Path) -> None:
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    lines = (GOLD / "sysfs-mlx5.txt").read_text().splitlines()
    for line in [*lines, "mlx5_0/ports/1/gid_attrs/ndevs/0=lo"]:
        path, _, value = line.partition("=")
        (tmp_path / "class/infiniband" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "class/infiniband" / path).write_text(value + "\n")
    plan, out = tmp_path / "plan.toml", tmp_path / "out"
    plan.write_text(PLAN)
    sweep = [sys.executable, "-m", "ringtap", "sweep", plan, "-o", out, "--force"]
    own = ["--mount", "--net", "--propagation", "private", *(["--map-root-user"] if os.geteuid() else [])]
    inside = ["unshare", *own, "sh", "-c", MOUNTED, tmp_path, *sweep]
    with growing(port / "counters/port_rcv_data", RECEIVED_BPS / 8 / 4):
        done = subprocess.run(inside, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    info = json.loads((out / "run.json").read_text())
    counter = {"node": "here", "nic": "lo", "direction": "rx", "source": "infiniband", "port": "mlx5_0-1"}
    assert info["bottleneck"]["total"] == [counter]
    assert "RDMA" not in [item["what"] for item in info["not_collected"]]
    point = ringtap.open_sweep(out).points.iloc[0]
    assert (point.series, point.transport) == ("marks-iperf-rdma", "rdma")
    # the writer may be late by a few periods of its own at either end of the window
    assert point.unscaled_total_bps == pytest.approx(RECEIVED_BPS, rel=0.02)
    assert point.unscaled_training_bps == pytest.approx(point.unscaled_total_bps, rel=0.001)
    assert 0 < point.unscaled_counting_error_bps <= 0.06 * RECEIVED_BPS  # two samples' time, of 0.1 s each, in 4 s
    printed = next((out / point.directory).glob("nodes/*/log/job.out")).read_text()
    assert "'NCCL_IB_HCA': '=mlx5_0:1'" in printed
    assert "'NCCL_IB_DISABLE': '0'" in printed
    assert "'NCCL_NET': 'IB'" in printed


def test_a_host_without_a_device_is_refused_before_anything_runs(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    command = [sys.executable, "-m", "ringtap", "sweep", plan, "-o", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "host here, model marks over rdma: lo, which has the training address, belongs to no RDMA" in done.stderr
    assert not (tmp_path / "out").exists()
