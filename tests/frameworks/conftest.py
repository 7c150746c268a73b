"""Interpreters that jobs of these tests are forked from: those that are not recorded, and those that are."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frameworks.ranks import RecordedInterpreter, WarmInterpreter, quick, recorded_interpreter, warm_interpreter

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmInterpreter]:
    with warm_interpreter(**quick(str(ROOT))) as found:
        yield found


@pytest.fixture(scope="session")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedInterpreter]:
    with recorded_interpreter(tmp_path_factory.mktemp("warm")) as found:
        yield found
