"""Frames come out as they went in, however the bytes are cut on their way."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringtap
from ringtap.agents.hosts import message_frames
from ringtap.agents.hosts.message_frames import ANSWER_BYTES, BEAT_S, CHUNK_BYTES, ORPHAN_S, SILENT_S, Unpacker, pack
from ringtap.agents.hosts.remote import WorkerConnection
from ringtap.core.errors import MeasurementError

pytestmark = pytest.mark.shares

# what os.fsdecode makes of any file name
NAMES = st.binary(max_size=20).map(lambda name: name.decode(errors="surrogateescape"))
FRAMES = st.lists(st.tuples(st.dictionaries(st.sampled_from(["op", "name", "é"]), NAMES), st.binary(max_size=200)))


@settings(max_examples=50, deadline=None)
@given(FRAMES, st.data())
def test_frames_survive_being_cut_anywhere(frames: list[tuple[dict[str, str], bytes]], data: st.DataObject) -> None:
    stream = b"".join(pack(item, content) for item, content in frames)
    unpacker, found, at = Unpacker(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        found += unpacker.feed(stream[at : at + size])
        at += size
    assert [({name: value for name, value in item.items() if name != "bytes"}, content) for item, content in found] == [
        (item, content) for item, content in frames
    ]


def test_the_longest_answer_of_a_command_is_a_frame() -> None:
    item = {"op": "answer", "id": 1, "code": 0, "out": "\ufffd" * ANSWER_BYTES, "err": "\0" * ANSWER_BYTES}
    unpacker, stream = Unpacker(), pack(item)
    found = [frame for at in range(0, len(stream), 1 << 18) for frame in unpacker.feed(stream[at : at + (1 << 18)])]
    assert found == [(item, b"")]


@pytest.mark.parametrize("line", [b'{"bytes":%d}\n' % size for size in (CHUNK_BYTES + 1, 10**12, -1)])
def test_a_frame_that_announces_more_than_a_chunk_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=f"^{message_frames.NOISE}$"):
        Unpacker().feed(line)


@pytest.mark.parametrize("end", [b"", b'"}\n'])
def test_a_line_without_an_end_is_not_collected(end: bytes) -> None:
    unpacker, fed = Unpacker(), 0
    unpacker.feed(b'{"op":"')
    with pytest.raises(ValueError, match=f"^{message_frames.NOISE}$"):
        while fed < 17 << 20:
            fed += 1 << 20
            unpacker.feed(b"x" * (1 << 20) + (end if fed >= 17 << 20 else b""))
    assert fed <= 17 << 20


FACTS = b'%s{"protocol":%d,"ringtap":"%s","workdir":"/tmp"}\n' % (
    *(message_frames.MARKER, message_frames.PROTOCOL),
    ringtap.__version__.encode(),
)


@pytest.mark.parametrize(
    "said",
    [
        message_frames.MARKER + b"x" * (1 << 21),
        message_frames.MARKER + b"[1, 2]\n",
        message_frames.MARKER + b'{"protocol":1}\n',
        *(FACTS + line for line in (b"{}\n", b'{"op":[]}\n', b'{"op":"exit","id":1}\n', b'{"op":"exit","code":1}\n')),
        FACTS + b'{"op":"answer","id":1,"code":0,"out":1,"err":""}\n',
        FACTS + b'{"op":"done","id":1,"why":[]}\n',
        FACTS + b"[" * 100_000 + b"\n",
    ],
)
def test_a_host_that_answers_what_it_should_not_is_lost(said: bytes, tmp_path: Path) -> None:
    (tmp_path / "said").write_bytes(said)

    def explain(_host: str, _said: str, why: str, _code: int) -> str:
        return why

    def sink(*_: object) -> None:
        raise AssertionError("nothing is to be written")

    command = ["sh", "-c", 'cat "$1"; exec sleep 60', "sh", str(tmp_path / "said")]
    channel = WorkerConnection("S1", command, (20.0, 20.0), sink, explain)
    try:
        call = channel.request({"op": "start"})
        with pytest.raises(MeasurementError, match=f"^S1 is lost: {message_frames.NOISE}$"):
            call.answer.result(20)
    finally:
        channel.close()


@pytest.mark.parametrize("line", [b"[" * 50_000, b'{"workdir": "/tmp"', b"\xff", b"[]", b'{"workdir": 1}'])
def test_a_host_that_says_no_facts_is_lost(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "said").write_bytes(message_frames.MARKER + line + b"\n")
    command = ["sh", "-c", 'cat "$1"; exec sleep 60', "sh", str(tmp_path / "said")]
    channel = WorkerConnection("S1", command, (20.0, 20.0), lambda *_: None, lambda _host, _said, why, _code: why)
    try:
        with pytest.raises(MeasurementError, match=f"^S1 is lost: {message_frames.NOISE}$"):
            channel.request({"op": "start"}).answer.result(20)
    finally:
        channel.close()


@pytest.mark.parametrize("words", [b"Connection closed\n", b"\0\xff{}\n", b"12\n", b'{"op":1} x\n'])
def test_what_is_no_frame_is_refused(words: bytes) -> None:
    with pytest.raises(ValueError, match=r"^it says other things than ringtap does$"):
        Unpacker().feed(words)


def test_a_host_is_lost_within_15_s_and_not_for_a_moment_of_silence() -> None:
    assert 3 * BEAT_S < SILENT_S < 15 - BEAT_S / 2
    assert ORPHAN_S > 2 * SILENT_S, "who has been given up is not the first to give up"
