"""``ringtap workload`` from the command line."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from ringtap import cli
from ringtap.core.sweep_plans.sweep_plan import Testbed
from ringtap.core.testbed_options import LinkOptions
from ringtap.workload.command_options import add_network, topology

pytestmark = [pytest.mark.computes, pytest.mark.long]

LINKS = ("--capacity", "25gbit")


def workload(*arguments: object, cwd: Path, code: int = 0) -> str:
    """Output of a command, or its error."""
    output, errors, before = io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(cwd)
    try:
        with redirect_stdout(output), redirect_stderr(errors):
            found = cli.main(["workload", *map(str, arguments)])
    finally:
        os.chdir(before)
    return checked(code, found, output.getvalue(), errors.getvalue())


def workload_process(*arguments: object, cwd: Path, code: int = 0, **environment: str) -> str:
    """Likewise, of a process of its own."""
    command = [sys.executable, "-m", "ringtap", "workload", *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, timeout=120, env=os.environ | environment
    )
    return checked(code, done.returncode, done.stdout, done.stderr)


def checked(code: int, found: int, output: str, errors: str) -> str:
    assert found == code, errors
    assert code == 0 or errors.startswith("ringtap: ")
    assert errors.count("\n") <= 1
    return errors if code else output


def test_one_collective_is_counted(tmp_path: Path) -> None:
    ring = json.loads(
        workload("lower", "--collective", "ring", "--workers", 4, "--bytes", "1MB", "--json", cwd=tmp_path)
    )
    assert ring["sent_bytes"] == ring["received_bytes"] == [1_500_000] * 4
    assert (ring["messages"], ring["steps"]) == (24, 6)
    text = workload_process("lower", "--collective", "parameter-server", "--workers", 3, "--bytes", "1MB", cwd=tmp_path)
    assert text.startswith("parameter-server of 1 MB over 3 workers: 6 messages in 2 steps")
    assert "server 0" in text


def test_leaves_have_as_many_hosts_as_those_of_a_plan() -> None:
    parser = argparse.ArgumentParser()
    add_network(parser)
    assert int(parser.parse_args([]).per_leaf) == LinkOptions.per_leaf == Testbed.per_leaf == 2
    network, _ = topology(parser.parse_args([*LINKS, "--topology", "leaf-spine"]), 6)
    assert sum(link.startswith("leaf") and link.endswith("up") for link in network.links) == 3


def test_from_a_model_to_points_and_other_simulators(tmp_path: Path) -> None:
    made = workload("new", "--model", "vgg16", "--workers", 3, "-o", "w", cwd=tmp_path)
    assert made.startswith("VGG-16 on 3 workers: 6 buckets of ")
    assert "Assumed: forward pass" in made
    shown = workload("show", "w", *LINKS, cwd=tmp_path)
    assert "all_reduce" in shown
    listed = json.loads(workload("show", "w", "--json", cwd=tmp_path))
    assert (listed["collective_bytes"], listed["critical_path"]) == (4 * 138_357_544, None)
    simulated = json.loads(workload("simulate", "w", *LINKS, "--loads", "0:0.8:0.4", "--json", cwd=tmp_path))
    times = [point["iteration_s"] for point in simulated["points"]]
    # no load: computation, and what the all-reduce of the last bucket adds; heavy load: D over what is left, at least
    assert times[0] == pytest.approx(0.356, rel=0.02)
    demand_bytes = 4 / 3 * 4 * 138_357_544
    assert demand_bytes * 8 / 5e9 < times[2] < demand_bytes * 8 / 5e9 + 0.356
    counted = json.loads(workload("lower", "w", *LINKS, "--topology", "ring", "-o", "p", "--json", cwd=tmp_path))
    # each rank sends 4/3 of the gradients to its neighbour, and nobody uses the links the other way round
    assert sorted(counted["link_bytes"].values()) == pytest.approx([0.0] * 3 + [demand_bytes] * 3, rel=1e-6)
    path = counted["critical_path"]
    assert path["compute_s"] + path["communication_s"] == pytest.approx(times[0], rel=1e-6)
    for verb in ("show", "lower"):
        assert "Not simulated: for links and the critical path, give the network with --capacity\n" in workload(
            verb, "w", cwd=tmp_path
        )
    alone = json.loads(workload("lower", "w", "--json", cwd=tmp_path))
    assert [alone[key] for key in ("messages", "critical_path", "link_bytes")] == [counted["messages"], None, None]
    text = workload("lower", "w", *LINKS, cwd=tmp_path)
    assert "Bytes per iteration on 6 links: 737.9 MB on each, on a star of 25gbit\n" in text
    assert "Critical path: " in text
    text = workload("lower", "w", *LINKS, "--topology", "ring", cwd=tmp_path)
    assert "Bytes per iteration on 6 links: 737.9 MB on each of 3 (" in text
    assert "; none on 3 links, on a ring of 25gbit\n" in text
    text = workload("lower", "w", *LINKS, "--collective", "tree", "--pieces", 4, cwd=tmp_path)
    assert "Bytes per iteration on 6 links: 1.107 GB on each of 2 (h0 up, h0 down); 553.4 MB on each of 4 (" in text
    text = workload("simulate", "w", *LINKS, "--loads", "0:10gbit:40%", cwd=tmp_path)
    assert "Time of an iteration, by the share of h0 down (25 Gbit/s) that cross traffic takes:\n" in text
    lowered = json.loads(workload("simulate", "p", *LINKS, "--loads", "0.4", "--json", cwd=tmp_path))
    assert lowered["points"][0]["iteration_s"] == pytest.approx(times[1])
    scaled = json.loads(
        workload(
            "scale", "w", "--workers", 8, "--batch", "2x", "--parameters", "0.5x", "-o", "w8", "--json", cwd=tmp_path
        )
    )
    assert (scaled["ranks"], scaled["about"]["workers"]) == (8, 8)
    assert scaled["collective_bytes"] == pytest.approx(2 * 138_357_544, rel=1e-6)
    assert scaled["compute_s"] == pytest.approx([0.356] * 8, rel=1e-4)
    assert sum("times" in text for text in scaled["about"]["assumptions"]) == 2
    for format_, begins in (("goal", "num_ranks 3"), ("astra1", "DATA\n6\n"), ("param", "[\n {")):
        text = workload("export", "w", *LINKS, "--to", format_, "-o", f"{format_}.txt", cwd=tmp_path)
        assert (tmp_path / f"{format_}.txt").read_text().startswith(begins)
        assert ("Warning: PARAM replays no computations" in text) == (format_ == "param")


def test_the_flow_plan_of_a_workload_is_the_one_that_traffic_plan_makes(tmp_path: Path) -> None:
    workload("new", "--model", "resnet50", "--workers", 2, "-o", "w", cwd=tmp_path)
    nodes = ["--node", "10.0.0.1:5001", "--node", "10.0.0.2:5001"]
    workload("export", "w", "--to", "plan", *nodes, "--iterations", 3, "-o", "exported", cwd=tmp_path)
    workload("lower", "w", "-o", "messages", cwd=tmp_path)
    made = ["--kind", "workload", "--from", str(tmp_path / "messages"), *nodes, "--iterations", "3"]
    assert cli.main(["traffic", "plan", *made, "-o", str(tmp_path / "made")]) == 0
    exported, planned = ((tmp_path / name).read_text().partition("\n")[2] for name in ("exported", "made"))
    assert exported
    assert exported == planned
    assert "--node is missing" in workload("export", "w", "--to", "plan", "-o", "x", cwd=tmp_path, code=2)


LAYOUT = """\
[model]
layers = 4
hidden_size = 64
attention_heads = 4
vocabulary_size = 100
sequence_length = 32

[layout]
tensor_parallel = 2
pipeline_parallel = 2
data_parallel = 2
micro_batch_size = 3
micro_batches = 4

[processor]
flop_per_s = 1e9
utilisation = 0.5
gpus_per_node = 2
"""


def test_from_a_layout_to_times_and_other_simulators(tmp_path: Path) -> None:
    (tmp_path / "gpt.toml").write_text(LAYOUT)
    text = workload("new", "--layout", "gpt.toml", "-o", "w", cwd=tmp_path)
    # 12 l h^2 + 13 l h + (V + s) h; 4 x 4 x 4 all-reduces of layers and micro-batches in 2 replicas, 4 of gradients
    assert text.startswith("208,384 parameters on 8 ranks (tensor 2 x data 2 x pipeline 2): 132 collectives of ")
    assert "and 32 messages of 393.2 kB, up to " in text
    assert "Assumed: computations reach 0.5 of 1e+09 FLOP/s\n" in text
    item = json.loads(workload("new", "--layout", "gpt.toml", "-o", "v", "--json", cwd=tmp_path))
    assert item["about"]["layout"]["feed_forward_size"] == 256
    assert item["about"]["model"] == "gpt"
    assert item["collective_bytes"] == 128 * 12288 + 4 * 208_384
    simulated = json.loads(workload("simulate", "w", "--capacity", "1gbit", "--json", cwd=tmp_path))
    assert simulated["hosts"] == 4
    assert simulated["points"][0]["iteration_s"] > max(item["compute_s"])
    assert "tensor-parallel" in workload("show", "w", "--rank", 5, cwd=tmp_path)
    scaled = json.loads(
        workload("scale", "w", "--compute", "2x", "--gpus-per-node", 4, "-o", "x", "--json", cwd=tmp_path)
    )
    assert max(scaled["compute_s"]) == pytest.approx(2 * max(item["compute_s"]))
    exported = json.loads(workload("export", "w", "--to", "goal", "-o", "goal.txt", "--json", cwd=tmp_path))
    assert exported == {"format": "goal", "ranks": 8, "files": ["goal.txt"], "warnings": []}
    assert (tmp_path / "goal.txt").read_text().startswith("num_ranks 8")
    for format_ in ("astra1", "param"):
        refused = workload("export", "w", "--to", format_, "-o", "refused", cwd=tmp_path, code=2)
        assert "has collectives of all ranks only, and rank.0.et node 2 is a collective of 2 of 8 ranks" in refused
        assert not (tmp_path / "refused").exists()
    says = workload("new", "--layout", "gpt.toml", "--workers", 2, "-o", "y", cwd=tmp_path, code=2)
    assert "--workers does not go with --layout" in says
    layout = ["new", "--layout", "gpt.toml", "--gpus-per-node", 2, "-o", "y"]
    assert "--gpus-per-node does not go with --layout: the file says it" in workload(*layout, cwd=tmp_path, code=2)
    assert "not allowed with" in workload(
        "new", "--layout", "gpt.toml", "--model", "vgg16", "-o", "y", cwd=tmp_path, code=2
    )
    assert "nowhere.toml cannot be read" in workload("new", "--layout", "nowhere.toml", "-o", "y", cwd=tmp_path, code=2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lower", "--workers", "4"], "--bytes is missing"),
        (
            ["lower", "--workers", "2", "--bytes", "1MB", "--collective", "parameter-server", "--shards", "3"],
            "3 shards",
        ),
        (["lower", "--workers", "2", "--bytes", "1MB", "--collective", "rings"], "did you mean 'ring'"),
        (["lower", "--workers", "2", "--bytes", "1MB", "--shards", "0"], "--shards 0 is below 1"),
        (["lower", "w", "--workers", "2"], "--workers and --bytes are those of one collective"),
        (["lower", "w", *LINKS, "--topology", "torus", "--sides", "1"], "the topology has 1 host for 2 ranks"),
        (["new", "--model", "vgg", "--workers", "2", "-o", "v"], "did you mean"),
        (["new", "--model", "vgg16", "--workers", "0", "-o", "v"], "0 workers"),
        (["new", "--model", "vgg16", "--workers", "2", "-o", "w"], "w cannot be created"),
        (["new", "--kineto", "nowhere", "-o", "v"], "nowhere cannot be read"),
        (["new", "--kineto", "nowhere", "--workers", "2", "-o", "v"], "--workers goes with --model"),
        (["new", "--model", "vgg16", "--execution-trace", "x", "-o", "v"], "--execution-trace goes with --kineto"),
        (["new", "--model", "vgg16", "--workers", "2", "--alike", "-o", "v"], "--alike goes with --kineto"),
        (
            ["new", "--model", "vgg16", "--workers", "2", "--gpus-per-node", "0", "-o", "v"],
            "--gpus-per-node 0 is outside",
        ),
        (["show", "nowhere"], "nowhere is not a directory"),
        (["show", "w", "--rank", "2"], "--rank 2 does not exist"),
        (["simulate", "w"], "--capacity is missing: give the rate of each host's links, such as 25gbit; ethtool NIC"),
        (["simulate", "w", "--capacity", "0gbit"], "--capacity 0gbit is not a positive rate"),
        (["show", "w", "--timeline", "t.svg"], "--capacity is missing"),
        (["show", "w", "--latency", "10us"], "--capacity is missing"),
        (["lower", "w", "--topology", "ring"], "--capacity is missing"),
        (["export", "w", "--to", "chakra", "-o", "x"], "--capacity is missing"),
        (["export", "w", "--to", "hpcc", "-o", "x"], "--capacity is missing"),
        (["simulate", "w", *LINKS, "--loads", "0:2:0.5"], "--loads '2' has no unit"),
        (["simulate", "w", *LINKS, "--loads", "0:1"], "is neither a load nor"),
        (["simulate", "w", *LINKS, "--loads", "120%"], "outside 0 to 0.99"),
        (["simulate", "w", "-o", "w"], "w exists: name another directory"),
        (["simulate", "w", *LINKS, "--loads", "0", "--cross", "p"], "give one of them"),
        (["simulate", "w", *LINKS, "--cross", "nowhere"], "nowhere cannot be read"),
        (["export", "w", "--to", "param", "-o", "nowhere/p"], "nowhere/p"),
        (["simulate", "w", *LINKS, "--topology", "stars"], "did you mean 'star'"),
        (["simulate", "w", *LINKS, "--topology", "torus", "--sides", "1"], "the topology has 1 host for 2 ranks"),
        (["simulate", "w", *LINKS, "--bottleneck", "x"], "is no link of the star"),
        (["simulate", "w", *LINKS, "--iterations", "1"], "outside 2 to"),
        (["simulate", "w", *LINKS, "--collective", "broadcast"], "is no all-reduce"),
        (["export", "w", "--to", "goal", "-o", "w"], "w exists"),
        (["export", "w", *LINKS, "--to", "chakra", "-o", "w", "--force"], "w exists: name another directory"),
        (["export", "w", *LINKS, "--to", "chakra", "--gpus-per-node", "2", "-o", "x"], "needs one rank per host"),
        (["export", "w", *LINKS, "--to", "chakra", "-o", "w/workload.json/x"], "x cannot be written"),
        (["export", "w", *LINKS, "--to", "hpcc", "--gpus-per-node", "2", "-o", "x"], "no message of the workload goes"),
        (["simulate", "w", *LINKS, "--with", "astra-sim"], "is not NAME=PATH"),
        (["simulate", "w", *LINKS, "--with", "ns3=x"], "with a name of astra-sim, loggopsim"),
        (["simulate", "w", *LINKS, "--with", "astra-sim=x", "--gpus-per-node", "2"], "needs one rank per host"),
        (["simulate", "w", *LINKS, "--with", "astra-sim=nowhere"], "nowhere cannot be run: No such file"),
        (["scale", "w", "-o", "v"], "nothing is scaled"),
        (["scale", "w", "--workers", "0", "-o", "v"], "--workers 0 is outside"),
        (["scale", "w", "--flop-per-s", "0", "-o", "v"], "--flop-per-s '0' is not a rate per s"),
        (["scale", "w", "--bytes-per-s", "1e9", "-o", "v"], "--bytes-per-s goes with --flop-per-s"),
        (["scale", "w", "--batch", "twice", "-o", "v"], "--batch 'twice' is not a factor"),
    ],
)
def test_wrong_calls_end_in_one_sentence(tmp_path: Path, arguments: list[str], says: str) -> None:
    workload("new", "--model", "resnet50", "--workers", 2, "-o", "w", cwd=tmp_path)
    assert says in workload(*arguments, cwd=tmp_path, code=2)


# values as in the log of a run of ASTRA-sim 1.0: a 1 MiB all-reduce on a ring of eight nodes
ASTRA_1 = """\
info: all-reduce weight grad collective issued for layer: allreduce with size: 1048576, involved dimensions: 1, 1,
Layer id: allreduce
id: allreduce ,Total cycles spent on fwd pass compute: 0
id: allreduce ,Total cycles spent on weight grad compute: 0 id: allreduce ,Total cycles spent on input grad compute: 0
id: allreduce ,Total cycles spent idle waiting for fwd finish: O
id: allreduce ,Total cycles spent idle waiting for weight grad finish: 45681
id: allreduce ,Total cycles spent on weight grad comm: 45681
all passes finished at time: 45681, id of first layer: allreduce
Total streams injected: 4
Total streams finished: 4
"""
ASTRA_2 = """\
[workload] [info] sys[0] finished, 43000 cycles, exposed communication 43000 cycles.
[workload] [info] sys[1] finished, 42000 cycles, exposed communication 41000 cycles.
"""


def test_logs_of_astra_sim(tmp_path: Path) -> None:
    (tmp_path / "one.log").write_text(ASTRA_1)
    one = json.loads(workload("import", "one.log", "--json", cwd=tmp_path))
    assert (one["simulator"], one["cycles"], one["warnings"]) == ("ASTRA-sim 1.0", 45681, [])
    (layer,) = one["layers"]
    assert layer["name"] == "allreduce"
    assert layer["weight_grad_comm_cycles"] == layer["idle_waiting_for_weight_grad_finish_cycles"] == 45681
    assert layer["idle_waiting_for_fwd_finish_cycles"] == layer["input_grad_compute_cycles"] == 0
    assert workload("import", "one.log", cwd=tmp_path).startswith("45,681 cycles (0.045681 ms at 1 ns per cycle)")
    (tmp_path / "two.log").write_text(ASTRA_2)
    two = json.loads(workload("import", "two.log", "--json", cwd=tmp_path))
    assert (two["simulator"], two["cycles"]) == ("ASTRA-sim 2.x", 43000)
    assert two["ranks"][1] == {"rank": 1, "cycles": 42000, "exposed_communication_cycles": 41000}
    (tmp_path / "two.log").write_text(ASTRA_2 + "[critical] warning! a callable\n")
    assert "Warning: the log has an error: '[critical] warning! a callable'\n" in workload(
        "import", "two.log", cwd=tmp_path
    )
    (tmp_path / "two.log").write_text(ASTRA_2.replace("sys[0]", "sys[2]"))
    assert "two.log is of a run that did not finish" in workload("import", "two.log", cwd=tmp_path, code=2)
    (tmp_path / "none.log").write_text("nothing\n")
    assert "is no log of a finished run of ASTRA-sim" in workload("import", "none.log", cwd=tmp_path, code=2)


def test_another_simulator_beside_ringtap(tmp_path: Path) -> None:
    workload("new", "--model", "resnet50", "--workers", 2, "-o", "w", cwd=tmp_path)
    (tmp_path / "astra").write_text(f"#!/bin/sh\ntest -f rank.1.et && cat {tmp_path}/two.log\n")
    (tmp_path / "astra").chmod(0o755)
    (tmp_path / "two.log").write_text(ASTRA_2)
    options = ("--topology", "ring", "--latency", "10us")
    text = workload("simulate", "w", *LINKS, *options, "--with", "astra-sim=./astra", cwd=tmp_path)
    found = json.loads(
        workload("simulate", "w", *LINKS, *options, "--with", "astra-sim=./astra", "--json", cwd=tmp_path)
    )
    assert found["simulators"][0]["cycles"] == 43000
    beside = f"beside {1e3 * found['one_iteration_s']:.6g} ms in ringtap"
    assert f"One iteration alone: 43,000 cycles (0.043 ms at 1 ns per cycle) in ASTRA-sim 2.x, -100.0% {beside}" in text
    ended = (
        "ASTRA-sim 2.x ended after 0.043 ms, but the longest chain of computations and messages of the workload takes "
    )
    assert f"\nWarning: {ended}" in text
    assert found["simulators"][0]["warnings"][0].startswith(ended)
    text = workload("import", "two.log", "--workload", "w", *LINKS, *options, cwd=tmp_path)
    assert beside in text
    assert f"Warning: {ended}" in text
    workload("new", "--model", "resnet50", "--workers", 3, "-o", "w3", cwd=tmp_path)
    text = workload("import", "two.log", "--workload", "w3", *LINKS, *options, cwd=tmp_path, code=2)
    assert (
        "two.log: rank 2 did not finish, or it is of another workload: it has 2 ranks, and the workload has 3" in text
    )
    assert "--capacity is missing" in workload("import", "two.log", "--workload", "w", cwd=tmp_path, code=2)
    imported = json.loads(workload("import", "two.log", "--workload", "w", *LINKS, *options, "--json", cwd=tmp_path))
    assert (imported["cycles"], imported["one_iteration_s"]) == (43000, found["one_iteration_s"])
    assert "wrote x" in workload("export", "w", *LINKS, "--to", "chakra", "-o", "x", cwd=tmp_path).lower()
    assert {each.name for each in (tmp_path / "x").iterdir()} == {
        "rank.0.et", "rank.1.et", "comm_group.json", "network.yml", "remote_memory.json", "system.json",
    }  # fmt: skip
    again = json.loads(workload("export", "w", *LINKS, "--to", "chakra", "-o", "y", "--json", cwd=tmp_path))
    assert {Path(each).name for each in again["files"]} == {each.name for each in (tmp_path / "x").iterdir()}
    workload("export", "w", "--to", "hpcc", *LINKS, *options, "-o", "flows", cwd=tmp_path)
    count, first = (tmp_path / "flows").read_text().splitlines()[:2]
    assert int(count) == 4 * json.loads(workload("show", "w", "--json", cwd=tmp_path))["collectives"]
    assert first.split()[:4] == ["0", "1", "3", "100"]


def test_without_protobuf_the_remedy_is_named(tmp_path: Path) -> None:
    (tmp_path / "google").mkdir()
    (tmp_path / "google" / "__init__.py").write_text("raise ModuleNotFoundError('no google', name='google')")
    text = workload_process("new", "--model", "resnet50", "--workers", 2, "-o", "w", cwd=tmp_path, code=2)
    assert "execution traces need protobuf: " in text
    assert "[workload]" in text
    assert not (tmp_path / "w").exists()


def test_without_a_place_for_machine_code_it_simulates(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    workload("new", "--model", "resnet50", "--workers", 2, "-o", "w", cwd=tmp_path)
    assert "s per iteration" in workload_process(
        "simulate", "w", *LINKS, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path / "file")
    )
