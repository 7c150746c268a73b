"""The mark of tests that run Horovod itself."""

from importlib.util import find_spec

import pytest

needs_horovod = pytest.mark.skipif(
    find_spec("horovod") is None,
    reason="Horovod is not installed: python -m ringtap.examples.build_horovod --install",
)
