"""Frames come out as they went in, however the bytes are cut on their way."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.agents.hosts.frames import BEAT_S, ORPHAN_S, SILENT_S, Unpacker, pack

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


@pytest.mark.parametrize("words", [b"Connection closed\n", b"\0\xff{}\n", b"12\n", b'{"op":1} x\n'])
def test_what_is_no_frame_is_refused(words: bytes) -> None:
    with pytest.raises(ValueError, match=r"^it says other things than ringtap does$"):
        Unpacker().feed(words)


def test_a_host_is_lost_within_15_s_and_not_for_a_moment_of_silence() -> None:
    assert 3 * BEAT_S < SILENT_S < 15 - BEAT_S / 2
    assert ORPHAN_S > 2 * SILENT_S, "who has been given up is not the first to give up"
