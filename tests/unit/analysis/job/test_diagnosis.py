import json
import math
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ringtap.analysis.job import diagnose_job, iteration_budget
from ringtap.analysis.job.diagnosis import FlowSum, NetworkRecords
from ringtap.analysis.job.run import open_job
from ringtap.analysis.job.summary_text import answer
from ringtap.analysis.job.verdict import is_open, named, parts_rows, verdict
from ringtap.core.append_only_logs import open_records
from ringtap.core.units import format_rate
from tests.gold.job_run import Truth, as_horovod, rewrite, write_ddp_job, write_run_delays

pytestmark = [pytest.mark.computes, pytest.mark.together]
PAYLOAD_SHARE = 1448 / 1514


def written(path, *, rates_bps=(), second=(), **truth):
    """A job of 40 iterations of 200 ms, 20 ms of which are the network's; interfaces have these rates.

    ``second`` has the network and the rate of an interface eth1 of each node, which the job does not use.
    """
    known = {
        "iterations": 40,
        "compute_ms": (100, 100, 100),
        "offsets_ns": (0, 0, 0),
        "cross_bytes": 0,
        "resent_bytes": 0,
    }
    write_ddp_job(path, Truth(**known | truth))
    for rank, rate_bps in enumerate(rates_bps):
        node = path / "nodes" / f"n{rank}" / "node.json"
        nic = {"mtu": 1500, "addresses": [f"10.0.0.{rank + 1}"]}
        facts = {"cpus": 4, "nics": {"eth0": nic}, "links": {"eth0": {"qdisc": "tbf", "rate_bps": rate_bps}}}
        for network, second_bps in second[rank : rank + 1]:
            facts["nics"]["eth1"] = {"mtu": 1500, "isup": True, "addresses": ["10.1.0.1"], "networks": [network]}
            facts["links"]["eth1"] = {"qdisc": "tbf", "rate_bps": second_bps}
        node.write_text(json.dumps(json.loads(node.read_text()) | {"before": facts}))
    return open_job(path)


def seconds_of(job):
    return {part["name"]: part["seconds"] for part in job.diagnosed["parts"]}


def test_a_healthy_job_has_no_cause_and_its_parts_add_up(tmp_path):
    job = written(tmp_path / "job")
    found = job.diagnosed
    assert (found["why"], found["causes"], found["iterations"]) == ("", [], 38)
    assert sum(part["seconds"] for part in found["parts"]) == pytest.approx(found["iteration_s"])
    assert seconds_of(job) == pytest.approx(
        {"compute": 0.1, "optimizer": 0.08, "elsewhere": 0, "uneven ranks": 0, "network": 0.02}, abs=1e-6
    )
    assert job.diagnosis.empty
    first, unknown = verdict(found)
    assert (
        first
        == "No fault found: the ranks' own work takes 90% of an iteration, a faster network would save at most 10%."
    )
    assert unknown == (
        "Cannot be told: slow link (it is not known how fast the interface of n0 with the address 10.0.0.1 is)."
    )
    assert [row[1] for row in parts_rows(found)] == ["100 ms", "80 ms", "0 s", "0 s", "20 ms"]
    json.dumps(found, allow_nan=False)


def test_a_slow_rank_is_named_with_what_takes_it_longer(tmp_path):
    job = written(tmp_path / "job", compute_ms=(100, 130, 100))
    (row,) = job.diagnosis.to_dict("records")
    assert (row["cause"], row["rank"], row["node"], row["within"]) == ("slow rank", 1, "n1", "compute")
    assert (row["seconds"], row["share"], row["here_s"], row["usual_s"]) == pytest.approx((0.03, 0.15, 0.13, 0.1))
    first, without, step, *_ = verdict(job.diagnosed)
    assert first == (
        "Rank 1 (node n1) makes the others wait: 30 ms (15%) of the mean iteration; compute (forward and backward "
        "pass) takes it 130 ms, the others 100 ms."
    )
    assert without == "Without it an iteration would take 170 ms instead of 200 ms."
    assert step == (
        "Next: compare n1 with a node without this fault: clock rate and temperature, other programs, the rank's batch."
    )


def with_run_delays(path, *shares, compute_ms=(100, 130, 100), slow=None):
    """The job, whose ranks wait for a processor for these shares of the time; NaN: the kernel does not count it."""
    known = {"compute_ms": compute_ms} | ({} if slow is None else {"slow": slow})
    written(path, **known)
    for rank, share in enumerate(shares):
        write_run_delays(path / "nodes" / f"n{rank}", 100 + rank, share, 12)
    return open_job(path)


def test_a_rank_that_waits_for_a_processor_is_told_from_one_that_is_slow(tmp_path):
    job = with_run_delays(tmp_path / "busy", 0.01, 0.13, 0.01)
    (row,) = job.diagnosis.to_dict("records")
    assert (row["cause"], row["rank"], row["node"]) == ("busy processors", 1, "n1")
    assert (row["seconds"], row["run_delay_s"], row["usual_run_delay_s"]) == pytest.approx((0.03, 0.026, 0.002))
    first, _, step, *_ = verdict(job.diagnosed)
    assert first == (
        "Rank 1 (node n1) has to wait for a processor: 30 ms (15%) of the mean iteration; it waits 26 ms for one in "
        "each, the others 2 ms."
    )
    assert step == "Next: look at what else runs on n1 (top), and which processors rank 1 may use (taskset -p)."
    assert ("waiting for rank 1, which waits for a processor", "30 ms", "-", "15.0%") in parts_rows(job.diagnosed)
    # less than half of what the rank takes longer
    slow = with_run_delays(tmp_path / "slow", 0.01, 0.05, 0.01)
    assert slow.diagnosis["cause"].tolist() == ["slow rank"]
    assert not any("busy processors" in line for line in verdict(slow.diagnosed))
    # all wait, but this one no longer than the others
    even = with_run_delays(tmp_path / "even", 0.09, 0.09, 0.09)
    assert even.diagnosis["cause"].tolist() == ["slow rank"]


@pytest.mark.parametrize("shares", [(), (math.nan,) * 3], ids=["no collector", "old kernel"])
def test_whether_a_slow_rank_lacks_a_processor_cannot_be_told_without_the_collector(tmp_path, shares):
    job = with_run_delays(tmp_path / "job", *shares)
    assert job.diagnosis["cause"].tolist() == ["slow rank"]
    assert any(line.startswith("Cannot be told: busy processors (how long") for line in verdict(job.diagnosed))


def test_samples_once_a_second_do_not_tell_of_a_shorter_time(tmp_path):
    job = with_run_delays(tmp_path / "job", 0.01, 0.2, 0.01, compute_ms=(100, 100, 100), slow=(1, 20, 28, 30))
    (row,) = job.diagnosis.to_dict("records")
    assert (row["cause"], row["iterations"], row["seconds"]) == ("slow rank", 8, pytest.approx(30e-3 * 8 / 38))
    assert any(line.startswith("Cannot be told: busy processors (") for line in verdict(job.diagnosed))


def test_when_a_cause_began_and_ended_has_an_interval(tmp_path):
    """The iterations take 200 ms, but 230 ms from the 20th to the 30th."""
    job = written(tmp_path / "job", compute_ms=(100, 100, 100), slow=(1, 20, 30, 30))
    (row,) = job.diagnosis.to_dict("records")
    names = ("from_low_s", "from_s", "from_high_s", "to_low_s", "to_s", "to_high_s")
    assert [row[name] for name in names] == pytest.approx([3.8, 4.0, 4.23, 6.07, 6.3, 6.5])
    assert " in each of 10 iterations from 4.0 ± 0.2 to 6.3 ± 0.2 s;" in verdict(job.diagnosed)[0]
    throughout = written(tmp_path / "throughout", compute_ms=(100, 130, 100))
    assert throughout.diagnosis[["from_low_s", "to_high_s"]].isna().all(axis=None)


def test_ranks_that_all_wait_for_processors_are_not_called_healthy(tmp_path):
    job = with_run_delays(tmp_path / "job", 0.2, 0.22, 0.24, compute_ms=(100, 100, 100))
    waits, step, rest, *_ = verdict(job.diagnosed)
    assert waits == (
        "Ranks wait for a processor for 44 ms (22%) of an iteration (median), which other threads or programs use, or "
        "which is slow to wake."
    )
    assert step.startswith("Next: run fewer ranks")
    assert rest.startswith("No other fault found: the ranks' own work takes 90%")


def test_waiting_for_processors_is_named_beside_a_cause(tmp_path):
    """The cause is still there when the ranks have processors."""
    job = with_run_delays(tmp_path / "job", 0.2, 0.22, 0.24)
    first, *_, besides = (line for line in verdict(job.diagnosed) if not line.startswith("Cannot"))
    assert first.startswith("Rank 1 (node n1) makes the others wait")
    assert besides.startswith("Besides, ranks wait for a processor for 44 ms (22%) of an iteration (median)")


def test_a_cost_that_may_be_less_is_said_to_be_at_most_that(tmp_path):
    job = written(tmp_path / "job", compute_ms=(100, 130, 100))
    (cause,) = job.diagnosed["causes"]
    lines = verdict(job.diagnosed | {"causes": [cause | {"is_at_most": True, "nodes": 1}]})
    assert lines[0].startswith("Rank 1 (node n1) makes the others wait: at most 30 ms (15%)")
    assert lines[1] == "Without it an iteration would take at least 170 ms instead of 200 ms."
    assert lines[2] == "Next: compare rank 1 with another one of n1: its batch, its GPU, the processors it may use."


def test_a_slow_rank_of_horovod_is_named_although_forward_passes_are_not_timed(tmp_path):
    """Of 100 ms of compute, 30 are the forward pass."""
    write_ddp_job(tmp_path / "job", Truth(iterations=40, compute_ms=(100, 130, 100), offsets_ns=(0, 0, 0)))
    as_horovod(tmp_path / "job")
    job = open_job(tmp_path / "job")
    assert job.diagnosed["source"] == "horovod"
    seconds = seconds_of(job)
    assert {name: seconds[name] for name in ("backward", "outside", "slow rank", "network")} == pytest.approx(
        {"backward": 0.07, "outside": 0.03, "slow rank": 0.03, "network": 0.02}, abs=1e-6
    )
    assert sum(seconds.values()) == pytest.approx(job.diagnosed["iteration_s"])
    assert verdict(job.diagnosed)[0] == (
        "Rank 1 (node n1) makes the others wait: 30 ms (15%) of the mean iteration; the backward pass takes it 100 ms, "
        "the others 70 ms."
    )
    text = "\n".join(answer(job.summary()))
    assert "40.0% backward pass" in text
    assert "15.0% forward pass, and not attributed" in text


def test_the_next_step_of_a_horovod_job_is_one_of_horovod(tmp_path):
    rate_bps = 8 * Truth(compute_ms=(1, 1, 1)).rank_bytes / 0.12 / PAYLOAD_SHARE
    job = written(tmp_path / "job", rates_bps=[rate_bps] * 3, compute_ms=(52, 52, 52), network_ms=120)
    assert "fp16_compress_hook" in verdict(job.diagnosed)[1]
    as_horovod(job.path)
    assert "compression=hvd.Compression.fp16" in verdict(open_job(job.path).diagnosed)[1]


def test_a_rank_that_costs_little_is_not_named(tmp_path):
    job = written(tmp_path / "job", compute_ms=(100, 103, 100))
    assert named(job.diagnosed) == []
    assert verdict(job.diagnosed)[0].startswith("No fault found: ")


def test_what_came_once_is_named_only_if_it_cost_much():
    cause = {"share": 0.05, "low_s": None, "iterations": 3}
    once = cause | {"iterations": 1}
    much = once | {"share": 0.12}
    uncertain = cause | {"low_s": -0.001}
    assert named({"causes": [cause, once, much, uncertain, cause | {"share": 0.019}]}) == [cause, much]


def test_bytes_at_the_rate_of_the_interfaces_are_told_from_the_rest_of_the_exchange(tmp_path):
    """5.33 MB of a rank need 30 ms, of which 20 ms pass during the backward pass."""
    rate_bps = 8 * Truth(compute_ms=(1, 1, 1)).rank_bytes / 0.03 / PAYLOAD_SHARE
    job = written(tmp_path / "job", rates_bps=[rate_bps] * 3)
    seconds = seconds_of(job)
    assert (seconds["bandwidth"], seconds["network"]) == pytest.approx((0.01, 0.01), rel=0.01)
    assert job.diagnosed["unknown"] == []
    line = job.diagnosed["line"]
    assert (line["nic"], line["seconds"]) == ("eth0", pytest.approx(0.03, rel=0.01))


def test_an_interface_that_is_slower_than_the_others_is_named(tmp_path):
    fast_bps = 8 * Truth(compute_ms=(1, 1, 1)).rank_bytes / 0.025 / PAYLOAD_SHARE
    job = written(tmp_path / "job", rates_bps=[fast_bps, fast_bps * 25 / 35, fast_bps])
    (row,) = job.diagnosis.to_dict("records")
    assert (row["cause"], row["node"], row["nic"], row["is_computed"]) == ("slow link", "n1", "eth0", True)
    assert row["seconds"] == pytest.approx(0.01, rel=0.02)
    first, _, step = verdict(job.diagnosed)
    assert first.startswith("The interface eth0 of n1 is slow: about ")
    assert "ethtool eth0" in step


def test_a_faster_interface_that_the_job_does_not_use_is_named(tmp_path):
    """The bytes need 50 ms, of which 20 ms pass during the backward pass, and would need 35 ms on eth1."""
    slow_bps = 8 * Truth(compute_ms=(1, 1, 1)).rank_bytes / 0.05 / PAYLOAD_SHARE
    second = ("10.1.0.0/24", slow_bps / 0.7)
    known = {"rates_bps": [slow_bps] * 3, "network_ms": 30}
    job = written(tmp_path / "job", second=[second] * 3, **known)
    (row,) = job.diagnosis.to_dict("records")
    assert (row["cause"], row["nic"], row["faster_nic"], row["is_computed"]) == (
        "unused interface",
        "eth0",
        "eth1",
        True,
    )
    assert row["seconds"] == pytest.approx(0.015, rel=0.02)
    first, _, step = verdict(job.diagnosed)
    assert first.startswith(f"The exchange uses eth0 of {row['node']}, although eth1 is faster: about 15")
    assert f"carries at most {format_rate(row['rate_bps'])} of payload, eth1 {format_rate(row['usual_bps'])}" in first
    assert "GLOO_SOCKET_IFNAME=eth1" in step
    # of an untimed job, what that costs is not known
    first, step, *_ = verdict(untimed(tmp_path / "untimed", second=[second] * 3, **known).diagnosed)
    assert first.endswith("although eth1 is faster; what that costs cannot be told.")
    assert "GLOO_SOCKET_IFNAME=eth1" in step
    for number, others in enumerate(
        (
            [second, second],  # a node has none
            [second, second, ("10.2.0.0/24", slow_bps / 0.7)],  # one is in another network
            [second, second, ("10.1.0.0/24", slow_bps / 0.95)],  # one is hardly faster
        )
    ):
        assert written(tmp_path / f"{number}", second=others, **known).diagnosis.empty
    # one interface is slow, and eth1 is as fast as those of the others
    (row,) = written(
        tmp_path / "slow", rates_bps=[slow_bps / 0.7, slow_bps, slow_bps / 0.7], second=[second] * 3, network_ms=30
    ).diagnosis.to_dict("records")
    assert row["cause"] == "slow link"


def test_other_traffic_that_is_there_throughout_costs_what_it_takes_of_the_capacity(tmp_path):
    """It takes a third of n0's capacity, so that 30 ms become 45 ms."""
    rank_bytes = Truth(compute_ms=(1, 1, 1)).rank_bytes
    rate_bps = 8 * rank_bytes / 0.03 / PAYLOAD_SHARE
    cross_bytes = round(rate_bps * PAYLOAD_SHARE / 3 * 0.2 / 8)
    job = written(tmp_path / "job", rates_bps=[rate_bps] * 3, cross_bytes=cross_bytes, network_ms=30)
    (row,) = job.diagnosis.to_dict("records")
    assert (row["cause"], row["source"], row["destination"]) == ("other traffic", "n0", "n1")
    assert row["seconds"] == pytest.approx(0.015, rel=0.05)
    assert row["is_computed"]
    # without the capacity its cost is not known
    unknown = written(tmp_path / "unknown", cross_bytes=cross_bytes).diagnosed
    assert unknown["causes"] == []
    (found,) = (item for item in unknown["unknown"] if item["cause"] == "other traffic")
    assert (found["why"], found["source"], found["destination"]) == ("0 of 38 iterations are without it", "n0", "n1")
    first, cost, step, *_ = verdict(unknown)
    rate = format_rate(8 * cross_bytes / 0.2)
    assert first == (
        f"Whether there is a fault cannot be told: there is other traffic of {rate}, mostly from n0 to n1, and too few "
        "iterations are without it."
    )
    assert cost == "It costs at most 10% of an iteration, which is what the exchange takes beside its bytes."
    assert step.startswith("Next: record a run without it")
    assert is_open(unknown)
    # a little does not cost much
    assert not is_open(unknown | {"unknown": [found | {"of_training": 0.05}]})
    assert not is_open(job.diagnosed)


def test_other_traffic_over_a_macvlan_takes_from_the_interface_below():
    """The training needs 30 ms of eth0; the other traffic, with an address of its own, takes a third of that."""
    nics = {"eth0": {"mtu": 1500, "addresses": ["10.0.0.1"]}, "cross0": {"mtu": 1500, "addresses": ["10.9.0.1"]}}
    links = {"eth0": {"rate_bps": 100e6, "below": []}, "cross0": {"below": ["eth0"]}}
    payload_bps = 100e6 * PAYLOAD_SHARE

    def shared_s(below):
        facts = {"nics": nics, "links": links | {"cross0": {"below": below}}}
        flows = [
            FlowSum("n0", "10.0.0.1", "n1", "10.0.0.2", True, 20 * 0.03 * payload_bps / 8, 0.0),
            FlowSum("n0", "10.9.0.1", "n1", "10.9.0.2", False, payload_bps / 3 * 4 / 8, 0.0),
        ]
        training, none = np.full(20, 0.03 * payload_bps / 8), np.zeros(20)
        nodes = {"n0": [facts], "n1": [{"nics": {"eth0": nics["eth0"] | {"addresses": ["10.0.0.2"]}}, "links": links}]}
        found = NetworkRecords.of(training, none, none, flows, 4.0, nodes.__getitem__)
        assert found.evidence.line_s == pytest.approx(0.03)
        return found.evidence.shared_line_s

    assert shared_s(["eth0"]) == pytest.approx(0.045)
    assert shared_s([]) == pytest.approx(0.03)  # a link of its own


def test_segments_that_were_only_late_are_not_lost(tmp_path):
    """Rank 0 sends a segment again in each iteration; a log without the receiver's reports does not tell why."""
    job = written(tmp_path / "job", resent_bytes=1448)
    (found,) = (item for item in job.diagnosed["unknown"] if item["cause"] == "loss")
    assert (found["why"], found["lost_segments"]) == ("0 of 38 iterations are without it", pytest.approx(1))
    assert ": 1 segments are lost in each iteration, mostly from n0 to n1, " in verdict(job.diagnosed)[0]
    # where the log tells nothing of losses, nothing is said of them
    untold = {"cause": "loss", "why": "a socket log does not tell lost segments from delayed ones"}
    assert not is_open(job.diagnosed | {"unknown": [untold]})

    def in_vain(records, at):
        for record in records:
            record[at["dsack_dups"]] = record[at["total_retrans"]]
        return records

    for node in ("n0", "n1", "n2"):
        rewrite(tmp_path / "job" / "nodes" / node / "sockets" / "sockets.rec", in_vain)
    assert "loss" not in [item["cause"] for item in open_job(tmp_path / "job").diagnosed["unknown"]]


@pytest.mark.parametrize(("buffer", "node"), [("rwnd_limited_us", "n2"), ("sndbuf_limited_us", "n1")])
def test_a_full_buffer_is_found_at_any_connection(tmp_path, buffer, node):
    """Rank 1 sends to rank 2 for 20 ms of an iteration, but a full buffer limits it for 16 ms of them."""
    fast_bps = 8 * Truth(compute_ms=(1, 1, 1)).rank_bytes / 0.005 / PAYLOAD_SHARE
    written(tmp_path / "job", rates_bps=[fast_bps] * 3, busy_ms=(20, 20, 20))

    def limited(records, at):
        for record in records:
            record[at[buffer]] = round(0.8 * record[at["busy_time_us"]])
        return records

    rewrite(tmp_path / "job" / "nodes" / "n1" / "sockets" / "sockets.rec", limited)
    (cause,) = open_job(tmp_path / "job").diagnosed["causes"]
    assert (cause["name"], cause["node"], cause["source"], cause["destination"]) == ("socket buffers", node, "n1", "n2")
    # the bytes need 5 ms, which pass during the backward pass: all 20 ms of the exchange could be saved
    assert cause["seconds"] == pytest.approx(0.8 * 0.02)
    first, _, step, *_ = verdict(open_job(tmp_path / "job").diagnosed)
    whose = {"n2": "n2, which receives from n1", "n1": "n1, which sends to n2"}[node]
    assert first.endswith(f"; most often that of {whose}.")
    kind = {"n2": "tcp_rmem", "n1": "tcp_wmem"}[node]
    assert f"let {node} use larger buffers" in step
    assert kind in step


def test_what_was_not_recorded_is_said(tmp_path):
    write_ddp_job(tmp_path / "no sockets", Truth(iterations=40), sockets=False)
    found = open_job(tmp_path / "no sockets").diagnosed
    assert [cause["name"] for cause in found["causes"]] == ["slow rank"]
    sockets, processors = verdict(found)[-2:]
    assert sockets == "Cannot be told: other traffic, loss, slow link (sockets were not recorded (--collect sockets))."
    assert processors == (
        "Cannot be told: busy processors (how long ranks wait for a processor is not recorded, or not for long enough "
        "(--collect host))."
    )
    write_ddp_job(tmp_path / "silent", Truth(iterations=40))  # no connection was open: the logs have no record
    for log in (tmp_path / "silent").glob("nodes/*/sockets/sockets.rec"):
        with log.open("r+b") as file:
            file.truncate(open_records(log).offset)
    lines = verdict(open_job(tmp_path / "silent").diagnosed)
    assert "Cannot be told: other traffic, loss, slow link (no TCP connection was seen)." in lines
    write_ddp_job(tmp_path / "killed", Truth(iterations=40))
    node = tmp_path / "killed" / "nodes" / "n1"
    for log in (node / "sockets" / "sockets.rec", node / "nic" / "nic.rec"):
        with log.open("r+b") as file:
            file.truncate(log.stat().st_size // 2)
    (node / "DONE").unlink()
    *_, sockets, _ = verdict(open_job(tmp_path / "killed").diagnosed)
    assert "the sockets of a node were not recorded in 2" in sockets
    assert verdict(untimed(tmp_path / "no phases").diagnosed) == [
        "No cause found: no stretch of iterations is longer than the others, and none stalls.",
        "Cannot be told: slow rank (neither DDP's own times (--collect ddp) nor Horovod's were recorded).",
        "Cannot be told: slow link (it is not known how fast the interface of n0 with the address 10.0.0.1 is).",
    ]
    write_ddp_job(tmp_path / "few", Truth(iterations=21))
    assert "19 iterations after warm-up are too few" in open_job(tmp_path / "few").diagnosed["why"]
    write_ddp_job(tmp_path / "half", Truth(iterations=60))
    (log,) = (tmp_path / "half").glob("nodes/n1/steps/*.ddp.rec")
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 4])
    half = open_job(tmp_path / "half").diagnosed
    assert (half["source"], half["unknown"][0]["cause"]) == ("iteration", "slow rank")
    assert half["unknown"][0]["why"] == "all ranks are timed in 3 of 58 iterations"
    write_ddp_job(tmp_path / "none", Truth(iterations=3))
    for folder in (tmp_path / "none").glob("nodes/*/steps"):
        shutil.rmtree(folder)
    assert open_job(tmp_path / "none").diagnosed["why"].startswith("0 iterations after warm-up are too few")


def untimed(path, **known):
    """A job as from `written`, without times of computation and communication."""
    written(path, **known)
    for log in path.glob("nodes/*/steps/*.ddp.rec"):
        log.unlink()
    return open_job(path)


def test_iterations_of_an_untimed_job_that_take_longer_for_a_while_are_found(tmp_path):
    job = untimed(tmp_path / "job", iterations=120, slow=(1, 40, 80, 60))
    (row,) = job.diagnosis.to_dict("records")
    assert (row["cause"], row["iterations"], row["seconds"]) == (
        "slower iterations",
        40,
        pytest.approx(60e-3 * 40 / 118),
    )
    first, without, step, unknown, *_ = verdict(job.diagnosed)
    assert first.startswith(
        "Iterations take longer for a while: 20.3 ms (9%) of the mean iteration, 60 ms in each of 40"
    )
    assert without == "Without it an iteration would take 200 ms instead of 220 ms."
    assert step.startswith("Next: look at what the ranks do in them")
    assert unknown.startswith("Cannot be told: slow rank (neither DDP's own times")
    assert is_open(untimed(tmp_path / "even").diagnosed)


def test_what_a_few_timed_iterations_miss_is_found_by_the_length_of_all(tmp_path):
    found = {}
    for name, known in (("even", {}), ("slower", {"slow": (1, 40, 80, 60)})):
        written(tmp_path / name, iterations=120, **known)
        for log in (tmp_path / name).glob("nodes/*/steps/*.ddp.rec"):
            file = open_records(log)
            begin = log.stat().st_size - file.count * file.record_bytes
            log.write_bytes(log.read_bytes()[: begin + 25 * file.record_bytes])
        found[name] = open_job(tmp_path / name).diagnosed
    assert (found["even"]["source"], found["even"]["iterations"]) == ("ddp", 23)
    assert found["slower"]["unknown"][0]["why"] == "all ranks are timed in 23 of 118 iterations"
    assert [cause["name"] for cause in found["slower"]["causes"]] == ["slower iterations"]


def test_a_slow_interface_of_an_untimed_job_is_named_without_its_cost(tmp_path):
    fast_bps = 8 * Truth(compute_ms=(1, 1, 1)).rank_bytes / 0.025 / PAYLOAD_SHARE
    job = untimed(tmp_path / "job", rates_bps=[fast_bps, fast_bps * 25 / 35, fast_bps])
    first, step, *_ = verdict(job.diagnosed)
    assert first.startswith("The interface eth0 of n1 carries at most ")
    assert first.endswith("; what that costs cannot be told.")
    assert "ethtool eth0" in step
    line = verdict(untimed(tmp_path / "even", rates_bps=[fast_bps] * 3).diagnosed)[1]
    assert line == "The interfaces need 12% of an iteration for its bytes (5.333 MB of payload at 1.707 Gbit/s)."


def test_a_pause_between_two_readings_of_a_clock_costs_no_iteration(tmp_path):
    """A clock that is set does: the times that DDP reports at it are on no clock that is known."""
    write_ddp_job(tmp_path / "paused", Truth(iterations=40, offsets_ns=(0, 0)))
    write_ddp_job(tmp_path / "set", Truth(iterations=40, offsets_ns=(0, 0)))

    def later(records, at, end):
        for record in records[20:end]:
            record[at["mono_ns"]] += 50_000_000
        return records

    for name, end in (("paused", 21), ("set", None)):
        log = tmp_path / name / "nodes" / "n0" / "steps" / "rank0-100.ddp.rec"
        rewrite(log, partial(later, end=end))
    paused, was_set = (open_job(tmp_path / name).diagnosed for name in ("paused", "set"))
    assert (paused["iterations"], paused["of"]) == (38, 38)
    assert [cause["seconds"] for cause in paused["causes"]] == pytest.approx([0.03])
    assert (was_set["iterations"], was_set["of"]) == (36, 38)
    assert "(mean of the 36 of 38 iterations whose times are known)" in verdict(was_set)[1]


def test_parts_that_do_not_add_up_are_refused(tmp_path, monkeypatch):
    def refuse(*_):
        raise ValueError("the parts of an iteration are 3 s in all, the iteration 2 s")

    job = written(tmp_path / "job")
    monkeypatch.setattr(iteration_budget, "split", refuse)
    assert verdict(job.diagnosed) == [
        "Why an iteration takes this long cannot be told: the parts of an iteration are 3 s in all, the iteration 2 s."
    ]
    write_ddp_job(tmp_path / "apart", Truth(iterations=40))

    def slow_down(records, at):
        for number, record in enumerate(records):  # by this clock, iterations take 10 ms longer
            for name in ("start_mono_ns", "end_mono_ns"):
                record[at[name]] += number * 10_000_000
        return records

    for path in (tmp_path / "apart").glob("nodes/n0/steps/rank0-???.rec"):
        rewrite(path, slow_down)
    assert (
        open_job(tmp_path / "apart").diagnosed["why"] == "the iterations of the ranks do not add up to those of the job"
    )


def test_a_job_of_one_rank_has_parts(tmp_path):
    write_ddp_job(tmp_path / "job", Truth(iterations=40, compute_ms=(100,), offsets_ns=(0,)), sockets=False)
    job = open_job(tmp_path / "job")
    assert seconds_of(job)["compute"] == pytest.approx(0.1)
    assert job.diagnosed["causes"] == []


def test_a_long_job_is_read_in_blocks(tmp_path, monkeypatch):
    whole = written(tmp_path / "job", compute_ms=(100, 130, 100), iterations=60).diagnosed
    monkeypatch.setattr(diagnose_job, "_BLOCK_CELLS", 10)
    assert open_job(tmp_path / "job").diagnosed == whole
    # evenly spread iterations stand for all
    monkeypatch.setattr(diagnose_job, "_MAX_CELLS", 90)
    spread = open_job(tmp_path / "job").diagnosed
    assert (whole["iterations"], spread["iterations"]) == (58, 29)
    assert spread["causes"][0]["seconds"] == pytest.approx(0.03)


def test_a_rank_that_is_not_recorded_may_be_the_slow_one(tmp_path):
    job = written(tmp_path / "job")
    words = "3 of 4 ranks recorded steps here, rank 3 did not"
    job.logs.__dict__["work"] = replace(job.logs.work, missing_ranks=words)
    assert verdict(job.diagnosed) == [f"Why an iteration takes this long cannot be told: {words}."]
