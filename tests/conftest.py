"""What all tests share: a machine must look the same after a test as before it, and with CI=true nothing is skipped."""

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

# an example may take long on a busy machine
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")
# what make test gives as -m in its two parts (Makefile)
SHARES, KEEPS_TIME = "shares and not alone", "not shares or alone"
# a variable of all processes that tests start; where a test empties the environment, it sets this one again
TESTED_BY = "TESTED_BY"
os.environ[TESTED_BY] = str(os.getpid())
# without bytecode, each of six workers and each process that a test starts would compile tests and ringtap anew
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# only what no test machine can be given
HARDWARE = ("an mlx5 NIC", "a GPU")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files without tests of the part that runs: each worker reads all others, which takes seconds."""
    wanted = {SHARES: ["shares"], KEEPS_TIME: ["alone", "computes"]}.get(config.option.markexpr)
    if wanted is None or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text()
    return not any(f"pytest.mark.{kind}" in text for kind in wanted) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Keep what is imported for good: to look for garbage among it takes a third of a second after each module."""
    gc.disable()
    found = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run a test that computes beside one that keeps time with what that one leaves of the processors."""
    workers = hasattr(item.config, "workerinput") and item.config.option.markexpr == KEEPS_TIME
    # others may not take their former priority again
    if not workers or os.geteuid() != 0 or not item.get_closest_marker("computes"):
        return (yield)
    before = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        return (yield)
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))


def groups_file(controller: int) -> Path:
    """The file in which a worker tells its controller which tests stay together."""
    return Path(tempfile.gettempdir(), f"ringtap-tests-{controller}.json")


class Together(LoadScopeScheduling):  # type: ignore[misc]
    """Gives tests of a group to one worker, one after the other, and the others one by one to any.

    This is xdist's loadgroup, which writes the group into a test's name, where pytest 9.2 ignores it.
    """

    def schedule(self) -> None:
        if self.collection is None:
            file = groups_file(os.getpid())
            self.groups = json.loads(file.read_text())
            file.unlink()
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        group: str = self.groups.get(nodeid, nodeid)
        return group


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    # as they are collected: the rows come first and take longest
    config.option.loadscopereorder = config.option.markexpr != KEEPS_TIME
    return Together(config, log)


def group_of(item: pytest.Item) -> str | None:
    alone, together = item.get_closest_marker("alone"), item.get_closest_marker("together")
    if alone:
        # without privilege, a command for all testbeds ends those of the other row
        return f"row {alone.args[0] if os.geteuid() == 0 else 1}"
    if together:
        return together.args[0] if together.args else item.path.stem
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        what = item.get_closest_marker("needs_root")
        if what and os.geteuid() != 0:
            item.add_marker(pytest.mark.skip(reason=f"needs root: only root can {what.args[0]}"))
    # what keeps time takes longest; last where one process runs all: the cluster stands until the end
    slurm = Path(__file__).parent / "slurm"
    items.sort(key=lambda item: (slurm in item.path.parents, item.get_closest_marker("computes") is not None))
    if getattr(config, "workerinput", {}).get("workerid") == "gw0":
        groups = {item.nodeid: group for item in items if (group := group_of(item)) is not None}
        groups_file(os.getppid()).write_text(json.dumps(groups))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name bytes by their length: their text may hold a time stamp, and workers of xdist must agree on names."""
    return f"{len(val)}_bytes" if isinstance(val, bytes) else None


@pytest.fixture(scope="module", autouse=True)
def own_environment() -> Iterator[None]:
    """A module's tests leave ringtap's variables as they were: every process of the tests after them inherits them."""
    before = {name: value for name, value in os.environ.items() if name.startswith("RINGTAP_")}
    yield
    assert {name: value for name, value in os.environ.items() if name.startswith("RINGTAP_")} == before


@pytest.fixture(scope="module", autouse=True)
def closed_files() -> Iterator[None]:
    """Collect garbage after each module, so that a file or process left open fails a test of that module."""
    yield
    gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """A module that skips all its tests is not run, so its skip reaches no test's report."""
    report = yield
    fail_if_skipped(report)
    return report


def fail_if_skipped(report: Any) -> None:
    if report.skipped and os.environ.get("CI") == "true":
        reason = str(report.longrepr)
        if not any(word in reason for word in HARDWARE):
            report.outcome = "failed"
            report.longrepr = f"skipped with CI=true: {reason}"


def machine() -> dict[str, object]:
    """Things that a testbed could leave behind: namespaces, interfaces, processes of ours, kernel settings.

    Ours are the processes that this process, a worker of xdist or the only one, has started: others may test, too.
    """

    def text(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    # by their command lines: a test may start what others use anew
    ours, mark = [], f"{TESTED_BY}={os.environ[TESTED_BY]}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if mark in (process / "environ").read_bytes().split(b"\0"):
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if any(word in line for word in ("ringtap.", "iperf3", "tcpdump", "scale_model")):
                    ours.append(line[:200])
    settings = {}
    # a thousand files, twice per test: without pathlib and buffers this takes half as long
    for folder, _, names in os.walk("/proc/sys/net"):
        # the kernel's own clocks and caches move by themselves
        for path in (f"{folder}/{name}" for name in names if not re.search("flush|stat|random|count", name)):
            try:
                with open(path, "rb", buffering=0) as file:  # noqa: PTH123
                    settings[path] = file.read()
            except OSError:
                settings[path] = b""
    ours.sort()
    mounts = Path("/proc/self/mounts").read_text()
    links = text("ip", "-oneline", "-brief", "link")
    return {"netns": text("ip", "netns"), "links": links, "processes": ours, "settings": settings, "mounts": mounts}


@pytest.fixture
def unchanged_machine() -> Iterator[None]:
    """Fails a test that leaves anything behind."""
    before = machine()
    yield
    assert machine() == before
