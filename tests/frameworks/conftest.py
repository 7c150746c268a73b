"""An interpreter that all jobs of these tests are forked from that are not recorded."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frameworks.ranks import WarmInterpreter, quick, warm_interpreter

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmInterpreter]:
    with warm_interpreter(**quick(str(ROOT))) as found:
        yield found
