"""The small parts: tally, alarm, addresses, receiver limits."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from ringtap.errors import UsageError
from ringtap.trafficgen.flowlog import RECEIVED_FIELDS, FlowLog
from ringtap.trafficgen.protocol import FULL, HELLO_NUMBER, NOTICE, format_address, hello, parse_address
from ringtap.trafficgen.receiver import Receiver
from ringtap.trafficgen.tally import Tally
from ringtap.trafficgen.timer import Alarm


def test_quantiles_are_right_to_one_per_cent() -> None:
    rng, tally = random.Random(1), Tally()
    values = sorted(int(10 ** (9 * rng.random())) for _ in range(5000))
    for value in values:
        tally.add(value)
    for share in (0.01, 0.5, 0.99):
        assert tally.quantile(share) == pytest.approx(values[int(share * 5000) - 1], rel=0.011, abs=1)
    assert tally.mean() == pytest.approx(sum(values) / 5000)
    assert tally.quantile(1.0) == pytest.approx(values[-1], rel=0.011)
    assert tally.greatest == values[-1]


def test_an_empty_tally_has_no_figures() -> None:
    assert (Tally().mean(), Tally().quantile(0.5), Tally().greatest) == (None, None, 0)


def test_zero_and_negative_values_count_as_zero() -> None:
    tally = Tally()
    tally.add(0)
    tally.add(-5)
    assert (tally.mean(), tally.quantile(0.99)) == (0.0, 0.0)


@pytest.mark.parametrize("descriptor", [True, False])
def test_the_alarm_never_rings_early_and_can_be_moved(descriptor: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not descriptor:
        monkeypatch.setattr(Alarm, "_create", lambda _: -1)

    async def ring() -> list[int]:
        rung: list[int] = []
        alarm = Alarm(asyncio.get_running_loop(), lambda: rung.append(time.monotonic_ns()))
        began_ns = time.monotonic_ns()
        alarm.set(began_ns + 10**12)
        alarm.set(began_ns + 20_000_000)
        await asyncio.sleep(0.1)
        alarm.set(began_ns)
        await asyncio.sleep(0.05)
        alarm.close()
        return [at_ns - began_ns for at_ns in rung]

    first, second = asyncio.run(ring())
    assert 20_000_000 <= first < 100_000_000
    assert second > 100_000_000


@pytest.mark.parametrize(
    ("text", "address"), [("a:1", ("a", 1)), ("[::1]:65535", ("::1", 65535)), ("1.2.3.4:0", ("1.2.3.4", 0))]
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
    assert format_address(*address) == text


@pytest.mark.parametrize(
    "text", ["", "a", ":1", "a:", "a:x", "a:-1", "a:65536", "a:99999999999", "a b:1", "a:1\n", "a:٣"]
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


def test_connections_beyond_the_limit_are_turned_away(capsys: pytest.CaptureFixture[str]) -> None:
    async def overfill() -> tuple[bytes, bytes]:
        receiver = Receiver(most_connections=1)
        serving = asyncio.ensure_future(receiver.run("127.0.0.1:0"))
        while "listening" not in (words := capsys.readouterr().err):
            await asyncio.sleep(0.01)
        port = int(words.rsplit(":", 1)[1])
        pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        answers = []
        for reader, writer in pairs:
            writer.write(hello(""))
            answers.append(await reader.readexactly(NOTICE.size))
        receiver.stop()
        summary = await serving
        assert (summary["connections"], summary["refused"]) == (1, 1)
        for _, writer in pairs:
            writer.close()
        return answers[0], answers[1]

    first, second = asyncio.run(overfill())
    assert NOTICE.unpack(first) == (HELLO_NUMBER, 0)
    assert NOTICE.unpack(second) == (HELLO_NUMBER, FULL)
