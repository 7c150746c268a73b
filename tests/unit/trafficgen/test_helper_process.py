"""The process that sends or receives for a caller in Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtap.trafficgen.helper_process import Helper

pytestmark = pytest.mark.shares


def test_it_ends_by_itself_with_the_block_and_removes_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with Helper(folder) as helper:
        pass
    assert helper._process.returncode == 0
    assert not folder.exists()
