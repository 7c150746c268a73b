"""The small parts: tally, addresses, logs, channels, schedules."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_file import PlanFile
from ringtap.core.host_port import format_address, parse_address
from ringtap.core.run_directory_schema import FLOW_HEADER_BYTES
from ringtap.trafficgen.flow_log import RECEIVED_FIELDS, FlowLog
from ringtap.trafficgen.plans.sending_requirements import requirements
from ringtap.trafficgen.protocol import FLOW
from ringtap.trafficgen.sender import ipc
from ringtap.trafficgen.sender.flow_launcher import NEVER, FlowQueue
from ringtap.trafficgen.sender.ipc import Channel, pair
from ringtap.trafficgen.statistics import LogHistogram

pytestmark = pytest.mark.shares


def test_quantiles_are_right_to_one_per_cent() -> None:
    rng, tally = random.Random(1), LogHistogram()
    values = sorted(int(10 ** (9 * rng.random())) for _ in range(5000))
    for value in values:
        tally.add(value)
    for share in (0.01, 0.5, 0.99):
        assert tally.quantile(share) == pytest.approx(values[int(share * 5000) - 1], rel=0.011, abs=1)
    assert tally.mean() == pytest.approx(sum(values) / 5000)
    assert tally.quantile(1.0) == pytest.approx(values[-1], rel=0.011)
    assert tally.greatest == values[-1]


def test_an_empty_tally_has_no_figures() -> None:
    assert (LogHistogram().mean(), LogHistogram().quantile(0.5), LogHistogram().greatest) == (None, None, 0)


def test_zero_and_negative_values_count_as_zero() -> None:
    tally = LogHistogram()
    tally.add(0)
    tally.add(-5)
    assert (tally.mean(), tally.quantile(0.99)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "address"), [("a:1", ("a", 1)), ("[::1]:65535", ("::1", 65535)), ("1.2.3.4:0", ("1.2.3.4", 0))]
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
    assert format_address(*address) == text


def test_the_header_before_a_flow_has_the_size_that_captures_are_read_with() -> None:
    assert FLOW.size == FLOW_HEADER_BYTES


@pytest.mark.parametrize(
    "text", ["", "a", ":1", "a:", "a:x", "a:-1", "a:65536", "a:99999999999", "a:0000080000", "a b:1", "a:1\n", "a:٣"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_address(text)


def test_a_log_without_a_path_keeps_nothing() -> None:
    log = FlowLog(None, RECEIVED_FIELDS, {})
    log.add(1, 2, 3)
    log.close()


def test_a_log_in_a_file_used_as_a_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be written|exists"):
        FlowLog(tmp_path / "file" / "x.rec", RECEIVED_FIELDS, {})


@pytest.mark.parametrize("size", [1, 3, 1000, 70_000])
def test_a_merged_tally_is_the_tally_of_all(size: int) -> None:
    rng = random.Random(size)
    values = [rng.randrange(10**6) for _ in range(size)]
    whole, first, second = LogHistogram(), LogHistogram(), LogHistogram()
    for at, value in enumerate(values):
        whole.add(value)
        (first if at % 3 else second).add(value)
    first.merge(second)
    assert (first.count, first.mean(), first.greatest) == (whole.count, whole.mean(), whole.greatest)
    assert [first.quantile(share / 10) for share in range(11)] == [whole.quantile(share / 10) for share in range(11)]


def test_a_channel_keeps_messages_and_files_in_order_however_slow_its_reader_is() -> None:
    """Far more than the kernel's buffer holds, with files in between, into a reader that begins late."""
    ours, theirs = pair()
    sender, receiver = Channel(ours), Channel(theirs)
    wanted: list[tuple[int, int, int, int]] = []
    with open(os.devnull, "rb") as file:  # noqa: PTH123
        for number in range(100_000):
            if number % 500 < 3:
                sender.put_file(number, number, file.fileno())
                wanted.append((ipc.SOCKET, number, number, 0))
            else:
                sender.put(ipc.FREE, number, number, -number)
                wanted.append((ipc.FREE, number, number, -number))
            if number % 37 == 0:
                sender.flush()
    got: list[tuple[int, int, int, int]] = []
    files = 0
    while len(got) < len(wanted):
        sender.flush()
        got.extend(tuple(message) for message in receiver.messages())
        while receiver.files:
            os.close(receiver.files.popleft())
            files += 1
    assert got == wanted
    assert files == sum(message[0] == ipc.SOCKET for message in wanted)
    sender.close()
    assert list(receiver.messages()) == []
    assert receiver.ended
    receiver.close()


def test_messages_of_a_side_that_has_ended_are_read_although_it_takes_no_more() -> None:
    """A launcher ends once it has reported the unfinished flows; workers that still report others learn of them."""
    ours, theirs = pair()
    launcher, worker = Channel(ours), Channel(theirs)
    worker.put(ipc.FREE, 1, 1)
    worker.flush()
    for slot in range(100):
        launcher.put(ipc.GONE, slot, 10)
    launcher.put(ipc.END, 0)
    launcher.flush()
    launcher.close()  # with a message unread
    worker.put(ipc.FREE, 2, 2)
    worker.flush()
    found = []
    while not worker.ended:
        found += [message[0] for message in worker.messages()]
    worker.close()
    assert found == [ipc.GONE] * 100 + [ipc.END]


def test_a_schedule_gives_dependent_flows_when_what_they_wait_for_has_arrived(tmp_path: Path) -> None:
    path = tmp_path / "p.plan"
    header = {"format": "ringtap-flow-plan", "version": 2, "duration_ns": 1000, "flows": 5, "bytes": 50}
    lines = "0\t-\ta:1\t10\t-\n5\t-\ta:1\t10\t0+7\n6\t-\ta:1\t10\t1\n8\t-\ta:1\t10\t-\n8\t-\ta:1\t10\t0\n"
    path.write_text(json.dumps(header | {"destinations": ["a:1"], "sources": []}) + "\n" + lines)
    plan = PlanFile(path)
    schedule = FlowQueue(plan, requirements(plan), "")
    schedule.begin(100, 1000)
    assert schedule.next_ns == 100
    assert (schedule.pop()[0], schedule.next_ns) == (0, 108)
    schedule.arrived(0, 103)
    assert schedule.next_ns == 108
    assert [(number, due_ns) for number, _, due_ns in (schedule.pop(), schedule.pop())] == [(3, 108), (4, 108)]
    assert (schedule.pop()[0], schedule.next_ns) == (1, NEVER)
    schedule.arrived(1, 150)
    assert schedule.pop()[::2] == (2, 150)
    assert schedule.next_ns == NEVER


def test_a_schedule_tells_the_end_of_iterations_and_ends_with_the_last(tmp_path: Path) -> None:
    path = tmp_path / "p.plan"
    header = {"format": "ringtap-flow-plan", "version": 3, "duration_ns": 10**6, "flows": 4, "bytes": 40}
    header |= {"iterations": 2, "destinations": ["a:1", "b:1"], "sources": ["a", "b"]}
    lines = ["0\ta\t-\t0\t-", "0\ta\tb:1\t10\t0+7", "0\tb\ta:1\t10\t1", "0\ta\t-\t0\t1,2+5"]
    lines += ["0\ta\t-\t0\t3", "0\ta\tb:1\t10\t4+7", "0\tb\ta:1\t10\t5", "0\ta\t-\t0\t5,6+5"]
    path.write_text("\n".join([json.dumps(header), *lines, ""]))
    plan = PlanFile(path)
    schedule = FlowQueue(plan, requirements(plan), "a")
    schedule.begin(100, 10**6)
    number, flow, due_ns = schedule.pop()
    assert (number, flow.destination, due_ns) == (0, "", 100)
    schedule.arrived(0, 100)
    assert schedule.pop()[::2] == (1, 107)
    schedule.arrived(2, 130)  # from b, before this host knows that its own flow has arrived
    assert schedule.next_ns == NEVER
    schedule.arrived(1, 131)
    assert schedule.pop()[::2] == (3, 135)
    assert schedule.iteration_ends_ns == []
    schedule.arrived(3, 135)
    assert schedule.iteration_ends_ns == [135]
    for number in (4, 5, 7):
        assert not schedule.is_complete
        found, _, due_ns = schedule.pop()
        assert found == number
        schedule.arrived(number, due_ns)
        if number == 5:
            schedule.arrived(6, 300)
    assert schedule.iteration_ends_ns == [135, 305]


def test_a_schedule_knows_what_arrived_before_it_began(tmp_path: Path) -> None:
    path = tmp_path / "p.plan"
    header = {"format": "ringtap-flow-plan", "version": 3, "duration_ns": 10**6, "flows": 2, "bytes": 20}
    header |= {"destinations": ["a:1", "b:1"], "sources": ["a", "b"]}
    path.write_text("\n".join([json.dumps(header), "0\tb\ta:1\t10\t-", "0\ta\tb:1\t10\t0+3", ""]))
    plan = PlanFile(path)
    schedule = FlowQueue(plan, requirements(plan), "a")
    schedule.arrived(0, 90)
    schedule.begin(100, 10**6)
    assert schedule.pop()[::2] == (1, 100)
    assert schedule.is_complete
