"""Large JSON files are read up to a bound, whose last byte counts."""

import json
from pathlib import Path

import pytest

from ringtap.core import large_json
from ringtap.core.json_validation import ShapeError

pytestmark = [pytest.mark.computes, pytest.mark.together]


def test_a_file_of_the_largest_size_is_read_and_a_larger_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schema": 1, "traceEvents": [{"ts": 1}, {"ts": 2}]}))
    size = path.stat().st_size
    monkeypatch.setattr(large_json, "MAX_BYTES", size)
    found = [("schema", 1), ("traceEvents", {"ts": 1}), ("traceEvents", {"ts": 2})]
    assert list(large_json.members(path, "traceEvents")) == found
    monkeypatch.setattr(large_json, "MAX_BYTES", size - 1)
    with pytest.raises(ShapeError, match="it has more than"):
        list(large_json.members(path, "traceEvents"))
