"""What tests of sweeps share: one small sweep, measured once on a testbed."""

from pathlib import Path

import pytest

from tests.testbed import sweeps


@pytest.fixture(scope="session")
def testbed_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of the small sweep on a testbed of its own."""
    folder = tmp_path_factory.mktemp("testbed sweep")
    plan = folder / "small plan.toml"
    plan.write_text(sweeps.SMALL.format(capacity="25gbit"))
    done = sweeps.run("sweep", plan, "-o", folder / "out dir", "--json")
    assert done.returncode == 0, done.stderr
    return folder / "out dir"
