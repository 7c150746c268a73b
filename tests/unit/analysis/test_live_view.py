"""The view in an 80 x 24 terminal, fed with snapshots: every key, every page, every size."""

import asyncio
import dataclasses
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from textual.pilot import Pilot

from ringtap.analysis.live.app import LiveApp, Poller
from ringtap.analysis.live.build_snapshot import SnapshotSource
from ringtap.analysis.live.drawing import bars, core_bars, count, gbps, milliseconds
from ringtap.analysis.live.flows import Flow
from ringtap.analysis.live.screen import PAGES, Screenful, ViewState
from ringtap.analysis.live.snapshot import Gpu, Mark, Snapshot
from ringtap.errors import MeasurementError
from tests.unit.live_run import START_NS, RunWriter, second_of_training

Test = Callable[..., Coroutine[Any, Any, None]]


def in_a_loop(test: Test) -> Callable[..., None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    """Five seconds of training on two nodes, with a mark and the job's words."""
    with RunWriter(tmp_path / "run", "S0", "S1") as run:
        for second in range(1, 6):
            second_of_training(run, second)
        run.mark(3.1, "cross traffic on")
        (run.nodes["S0"].folder / "log").mkdir()
        (run.nodes["S0"].folder / "log" / "job.out").write_text("".join(f"epoch {number}\n" for number in range(99)))
        return SnapshotSource(run.path, lambda: START_NS + 5 * 10**9).take()


class Stage:
    """An app, and what it is fed."""

    def __init__(self, snapshot: Snapshot | None, run: Path) -> None:
        self.snapshot = snapshot
        self.app = LiveApp(run, lambda: self.snapshot)

    async def press(self, pilot: Pilot[None], *keys: str) -> None:
        await pilot.press(*keys)
        await pilot.pause()

    def part(self, name: str) -> list[str]:
        """What a part of the screen shows."""
        return [line.plain for line in self.app.query_one(f"#{name}")._shown]  # type: ignore[attr-defined]

    def rows(self) -> list[list[str]]:
        return [line.split() for line in self.part("page")[1:]]


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (40, 12), (200, 60), (20, 5)])
@in_a_loop
async def test_every_page_fits_every_terminal(snapshot: Snapshot, tmp_path: Path, size: tuple[int, int]) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=size) as pilot:
        for key in [*(str((number + 1) % 10) for number in range(len(PAGES))), "question_mark"]:
            await stage.press(pilot, key)
            lines = [line for name in ("title", "top", "bar", "page", "status") for line in stage.part(name)]
            assert max(cell_len(line) for line in lines) <= size[0]
            assert len(lines) <= max(size[1], 7)


@in_a_loop
async def test_at_80_by_24_the_first_page_has_all_that_matters(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.5)
        title, top, page, status = (" ".join(stage.part(name)) for name in ("title", "top", "page", "status"))
        svg = stage.app.export_screenshot()
    assert "running" in title
    assert "2 nodes" in title
    assert "2 of 2 ranks" in title
    assert "iteration 19  250 ms  median 250 ms  p99 250 ms" in top
    assert "slowest rank 1 (100%)" in top
    assert "▾" in top
    for word in ("eth0", "0.403", "training", "S0:40000", "cross", "tbf", "30 kB", "retr/s", "nic ok", "sockets ok"):
        assert word in page
    assert "(4 missed)" in page
    assert "gpu unavailable" in page
    assert "q quit" in status
    assert "training" in svg


@in_a_loop
async def test_sorting_goes_through_the_columns_and_turns_round(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, "2")
        assert [row[0] for row in stage.rows()] == ["training", "training", "cross"]
        assert "by Gbit/s▼" in stage.part("status")[0]
        await stage.press(pilot, "r")
        assert [row[0] for row in stage.rows()] == ["cross", "training", "training"]
        assert "Gbit/s▲" in stage.part("page")[0]
        await stage.press(pilot, *"ssssssss")  # once round to the first column
        assert "by traffic▲" in stage.part("status")[0]
        assert [row[0] for row in stage.rows()] == ["cross", "training", "training"]
        await stage.press(pilot, "r")
        assert [row[0] for row in stage.rows()] == ["training", "training", "cross"]
        # each page keeps its own order
        await stage.press(pilot, "7", "2")
        assert "by traffic▼" in stage.part("status")[0]


@in_a_loop
async def test_rows_without_a_value_come_last_either_way(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, "2", "s")
        for _ in range(2):
            assert "retr/s" in stage.part("status")[0]
            assert [row[0] for row in stage.rows()] == ["training", "training", "cross"]
            await stage.press(pilot, "r")


@in_a_loop
async def test_the_filter_works_while_typing_and_is_taken_back(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, "2", "slash", *"cross")
        assert [row[0] for row in stage.rows()] == ["cross"]
        await stage.press(pilot, "enter")
        assert "filter: cross" in stage.part("status")[0]
        await stage.press(pilot, "s")  # the keys are keys again
        assert stage.app.state.words == "cross"
        await stage.press(pilot, "slash", "q", "1", "enter")  # as letters, they neither leave nor turn the page
        assert stage.part("page") == ["Nothing matches the filter."]
        await stage.press(pilot, "escape")
        assert len(stage.rows()) == 3
        await stage.press(pilot, "slash", *"S1:29500 train", "enter")
        assert len(stage.rows()) == 2


@in_a_loop
async def test_a_pause_holds_the_picture(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, "p")
        assert "PAUSED" in stage.part("title")[0]
        stage.snapshot = dataclasses.replace(snapshot, elapsed_s=4000.0)
        await pilot.pause(0.5)
        assert "0:00:05" in stage.part("title")[0]
        await stage.press(pilot, "space")
        assert "1:06:40" in stage.part("title")[0]
        assert "PAUSED" not in stage.part("title")[0]


@in_a_loop
async def test_a_mark_has_the_time_of_the_key_and_goes_into_the_run(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    (tmp_path / "run.json").touch()
    async with stage.app.run_test(size=(80, 24)) as pilot:
        before_ns = time.time_ns()
        await stage.press(pilot, "m")
        pressed_ns = time.time_ns()
        await pilot.pause(0.2)
        await stage.press(pilot, *"q: für 2", "enter")
        assert "Marked: q: für 2" in stage.part("status")[0]
        await stage.press(pilot, "m", *"not this", "escape")
        await stage.press(pilot, "m", "enter")
        await stage.press(pilot, "q")
    first, second = map(json.loads, (tmp_path / "marks.jsonl").read_text().splitlines())
    assert first["text"] == "q: für 2"
    assert before_ns <= first["t_ns"] <= pressed_ns
    assert second["text"] == ""


@in_a_loop
async def test_a_mark_that_cannot_be_written_is_said(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path / "gone")
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, "m", "x", "enter")
        assert "cannot be written" in stage.part("status")[0]
        await stage.press(pilot, "2")
        assert stage.app.is_running
    assert not (tmp_path / "gone").exists()


@in_a_loop
async def test_nodes_are_shown_one_by_one(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, "3")
        assert {row[0] for row in stage.rows()} == {"S0", "S1"}
        for node in ("S0", "S1"):
            await stage.press(pilot, "n")
            assert {row[0] for row in stage.rows()} == {node}
            assert node in stage.part("title")[0].split()
        await stage.press(pilot, "2")
        assert {row[0] for row in stage.rows()} == {"training"}  # S1 has no part in the cross traffic
        await stage.press(pilot, "3", "n")
        assert {row[0] for row in stage.rows()} == {"S0", "S1"}


@in_a_loop
async def test_the_end_of_the_run_is_said_and_the_view_stays(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        stage.snapshot = dataclasses.replace(snapshot, ended=True, status="partial", why="S0: the agent was killed")
        await pilot.pause(0.5)
        assert "partial" in stage.part("title")[0]
        assert "The run is partial: S0: the agent was killed." in stage.part("status")[0]
        assert stage.app.is_running
        await stage.press(pilot, "q")
    assert not stage.app.is_running


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
@in_a_loop
async def test_leaving(snapshot: Snapshot, tmp_path: Path, key: str) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, key)
        await pilot.pause(0.1)
        assert not stage.app.is_running
    assert stage.app.return_code == 0


@in_a_loop
async def test_pages_turn_and_scroll_and_help_shows(snapshot: Snapshot, tmp_path: Path) -> None:
    flows = tuple(Flow("other", f"10.0.0.{number}:1", "10.1.0.0:2", 1e9 - number) for number in range(100))
    stage = Stage(dataclasses.replace(snapshot, flows=flows), tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, "tab")
        assert stage.rows()[0][1] == "10.0.0.0:1"
        await stage.press(pilot, "down", "down", "pagedown", "up")
        assert stage.rows()[0][1] == "10.0.0.11:1"
        await stage.press(pilot, "end")
        assert stage.rows()[-1][1] == "10.0.0.99:1"
        await stage.press(pilot, "home", "right", "left", "question_mark")
        assert "marks.jsonl" in " ".join(stage.part("page"))
        assert not any(line.endswith("…") for line in stage.part("page"))
        await stage.press(pilot, "escape")
        assert stage.rows()[0][1] == "10.0.0.0:1"
        await stage.press(pilot, "shift+tab", "shift+tab")
        assert stage.part("page")[-1].endswith("▾ cross traffic on")
        assert stage.part("page")[-2] == "epoch 98"
        await stage.press(pilot, "up")
        assert stage.part("page")[-1] == "epoch 98"


@in_a_loop
async def test_a_terminal_that_changes_its_size(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.3)
        await pilot.resize_terminal(130, 50)
        await pilot.pause(0.2)
        assert len(stage.part("top")) == 10
        assert max(cell_len(line) for line in stage.part("top")) > 110
        await pilot.resize_terminal(60, 15)
        await pilot.pause(0.2)
        assert len(stage.part("top")) == 3
        assert max(cell_len(line) for line in stage.part("page")) <= 60


@in_a_loop
async def test_before_the_first_snapshot_and_without_a_job(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(None, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, "2", "s", "n", "p", "p", "down")
        assert "Looking" in stage.part("top")[0]
        without = dataclasses.replace(snapshot, iterations=type(snapshot.iterations)(), ranks=(), flows=())
        stage.snapshot = without
        await pilot.pause(0.5)
        assert "no steps so far   all interfaces: sent 0.806" in stage.part("top")[0]
        assert "█" in "".join(stage.part("top")[1:])
        assert stage.part("page") == ["Nothing yet (sockets)."]


def test_only_what_differs_is_drawn_again(snapshot: Snapshot, tmp_path: Path) -> None:
    async def drawn() -> list[int]:
        stage = Stage(snapshot, tmp_path)
        updates: list[int] = []
        async with stage.app.run_test(size=(80, 24)) as pilot:
            await pilot.pause(0.4)
            for name in ("title", "top", "bar", "page", "status"):
                part = stage.app.query_one(f"#{name}")
                part.update = lambda *_, name=name: updates.append(name)  # type: ignore[attr-defined]
            stage.snapshot = dataclasses.replace(snapshot, elapsed_s=6.0)
            await pilot.pause(0.5)
        return updates

    assert asyncio.run(drawn()) == ["title"]


def test_the_gpu_page_and_a_reason_where_there_is_none(snapshot: Snapshot) -> None:
    state = ViewState(page=PAGES.index("GPUs"))
    (line,) = Screenful(snapshot, state, 80, 24).parts()["page"]
    assert line.plain == "gpu on S0: unavailable. no NVIDIA driver"
    gpu = Gpu("S0", "0 H200", 0.87, 140e9, 652.4, 1e10, None)
    _, row = Screenful(dataclasses.replace(snapshot, gpus=(gpu,)), state, 80, 24).parts()["page"]
    assert row.plain.split() == ["S0", "0", "H200", "87%", "140", "GB", "652", "10.00", "-", "-", "-"]


def test_the_first_page_says_why_a_collector_failed(snapshot: Snapshot) -> None:
    first, *others = snapshot.collectors
    failed = dataclasses.replace(first, state="failed", health="bad", reason="stopped early: No space left on device")
    run = dataclasses.replace(snapshot, collectors=(failed, *others))
    page = Screenful(run, ViewState(), 80, 24).parts()["page"]
    assert len(page) == 16
    assert "nic failed" in page[-3].plain
    assert page[-1].plain == "       nic on S0: stopped early: No space left on device"


def test_bars_show_the_last_values_and_cut_the_outlier() -> None:
    lines, top = bars([9.0, 1.0, 2.0, 1.0, 1.0, 90.0], 5, 2, ticks=[False, True])
    assert top == 3.0
    assert [line.plain for line in lines] == ["▾▃  ▲", "▅█▅▅█"]
    assert bars([], 3, 1)[0][0].plain == "   "
    lines, top = bars([0.0, 0.0], 2, 1)
    assert (lines[0].plain, top) == ("  ", 0.0)


def test_core_bars_of_many_cores_share_their_blocks() -> None:
    assert core_bars([0.0, 0.5, 1.0], 8) == "▁▄█"
    assert core_bars([0.1] * 63 + [1.0], 32) == "▁" * 31 + "█"


def test_numbers_are_short() -> None:
    assert [gbps(value) for value in (None, 0, 1e6, 9.9994e9, 24.51e9, 399.99e9)] == [
        "-", "0.000", "0.001", "9.999", "24.51", "400.0",
    ]  # fmt: skip
    assert [count(value) for value in (None, 0, 0.25, 9, 950, 12_345, 2.5e9)] == [
        "-", "0", "0.2", "9", "950", "12.3k", "2500M",
    ]  # fmt: skip
    assert [milliseconds(value) for value in (None, 0.00025, 0.0123, 3.0)] == ["-", "0.25", "12.3", "3000"]


def test_marks_without_text_and_markup_in_texts_are_shown_as_they_are(snapshot: Snapshot) -> None:
    nasty = "[bold]/[/] [red"
    flow = Flow("training", "S0:1", "S1:2", 1e9, command=nasty)
    run = dataclasses.replace(snapshot, flows=(flow,), output=(nasty,), marks=(Mark(0, ""),))
    lines = Screenful(run, ViewState(page=1), 160, 24).parts()["page"]
    assert nasty in lines[1].plain
    assert Screenful(run, ViewState(page=9), 160, 24).parts()["page"][0].plain == nasty


def test_the_poller_keeps_going_and_says_what_ended_it(snapshot: Snapshot) -> None:
    taken = []

    def take() -> Snapshot:
        taken.append(1)
        if len(taken) == 4:
            raise MeasurementError("the disk is gone")
        return snapshot

    poller = Poller(take, every_s=0.01)
    poller.start()
    poller.join(10)
    assert len(taken) == 4
    assert poller.latest is snapshot
    assert isinstance(poller.error, MeasurementError)


def test_without_textual_one_sentence_and_plain_goes_on(tmp_path: Path) -> None:
    """A process in which textual and rich cannot be imported."""
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('textual', 'rich', 'numpy', 'pandas', 'psutil'):\n"
        "            raise ModuleNotFoundError(f'No module named {name}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from ringtap.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    with RunWriter(tmp_path / "run", "S0", "S1") as run:
        second_of_training(run, 1)
        run.finish()

    def live(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", block, "live", str(tmp_path / "run"), *options]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    done = live()
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("ringtap: rich is not installed here: ")
    assert "[tui]" in line
    assert line.endswith(", or use --plain: the live view needs it")
    done = live("--plain")
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert "status=complete" in line
    assert "iteration=3" in line
