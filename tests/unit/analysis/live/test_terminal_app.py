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
from textual.widgets import Footer, Input, TabbedContent, Tabs

from ringtap.analysis.live.build_snapshot import SnapshotSource
from ringtap.analysis.live.flows import LiveFlow
from ringtap.analysis.live.iterations import LiveIteration
from ringtap.analysis.live.poller import Poller
from ringtap.analysis.live.snapshot import Diagnosis, Gpu, Host, Mark, NodeState, Snapshot, Throughput
from ringtap.analysis.live.summary import iteration_plot, throughput_plot
from ringtap.analysis.live.tables import FLOWS, NODES, core_bars, count, gbps, milliseconds
from ringtap.analysis.live.terminal_app import Bars, Lines, LiveApp, RunTable
from ringtap.core.errors import MeasurementError
from tests.unit.live_run import START_NS, RunWriter, second_of_training

pytestmark = pytest.mark.shares

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
        # On a busy machine, Pilot takes a process that waits for a processor for an idle one, and pauses too briefly.
        # In each round here, every widget handles what it has got: a page, its layout, its rows, their picture.
        for _ in range(3):
            await pilot.pause(0)
        await pilot.pause()

    async def until(self, pilot: Pilot[None], happened: Callable[[], object]) -> None:
        """Wait until something has happened: on a busy machine, the app draws late."""
        end_s = time.monotonic() + 20
        while not happened() and time.monotonic() < end_s:
            await pilot.pause(0.02)

    def text(self) -> str:
        """Return the whole screen as one text."""
        return " ".join(self.screen())

    def part(self, name: str) -> list[str]:
        """Return the lines of a text; none if it is not displayed."""
        widget = self.app.query_one(f"#{name}", Lines)
        return [line.plain for line in widget.shown] if widget.display else []

    def tables(self) -> list[RunTable]:
        """Return the tables in sight."""
        tables = self.app.query(f"#{self.app.query_one(TabbedContent).active} RunTable").results(RunTable)
        return [table for table in tables if table.display]

    def heads(self, table: RunTable | None = None) -> list[str]:
        columns = (table or self.tables()[0]).ordered_columns
        return [column.label.plain.strip() for column in columns]

    def rows(self, table: RunTable | None = None) -> list[list[str]]:
        table = table or self.tables()[0]
        return [[cell.plain.strip() for cell in table.get_row_at(number)] for number in range(table.row_count)]

    def screen(self) -> list[str]:
        """Return the lines of the whole screen."""
        width = self.app.size.width
        return [strip.crop(0, width).text for strip in self.app.screen._compositor.render_strips()]


KEYS = [*"1234567890", "question_mark"]


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (40, 12), (200, 60), (20, 5)])
@in_a_loop
async def test_every_page_fits_every_terminal(snapshot: Snapshot, tmp_path: Path, size: tuple[int, int]) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=size) as pilot:
        for key in KEYS:
            await stage.press(pilot, key)
            assert all(cell_len(line) == size[0] for line in stage.screen())
            assert stage.screen()[0].startswith("running")
            if size[1] < 12 or key == "question_mark":
                continue
            assert stage.tables()
            if size[0] >= 80:
                await stage.until(pilot, lambda: "q quit" in stage.screen()[-1])
                assert "q quit" in stage.screen()[-1]
            for table in stage.tables()[: 1 if size[1] < 24 else None]:
                assert table.region.bottom <= stage.app.query_one(Footer).region.y
                assert table.virtual_size.width <= size[0] + 1  # the last column has a space behind it, too
                assert table.row_count == min(table.size.height - 1, max(1, len(table.items))) >= 1


@in_a_loop
async def test_at_80_by_24_the_first_page_has_all_that_matters(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.until(pilot, lambda: "q quit" in stage.text() and "nic ok" in stage.text())
        lines = stage.screen()
        svg = stage.app.export_screenshot()
    assert lines[0].rstrip() == "running  0:00:05  iteration 19  250 ms  median 250 ms  p99 250 ms of 19"
    assert lines[1].rstrip() == "2 nodes  2 of 2 ranks  run"
    assert lines[2].startswith("0–250 ms ")
    assert "▾" in lines[2]
    assert lines[5].rstrip().endswith("█" * 19)
    assert lines[6].rstrip() == "1 All 2 Flows 3 NICs 4 Queues 5 Ranks 6 Nodes 7 Procs 8 GPUs 9 State 0 Log"
    page = " ".join(lines[7:23])
    for word in ("eth0", "0.403", "training", "S0:40000", "cross", "tbf", "30 kB", "retr/s", "nic ok", "sockets ok"):
        assert word in page
    assert "(4 missed)" in page
    assert "gpu unavailable" in page
    assert "q quit" in lines[23]
    assert "training" in svg


CAUSES = (
    "Rank 1 (node S1) makes the others wait: at most 48.6 ms (30%) of an iteration since 22:53:40; 153 ms, not 103 ms.",
    "Without it an iteration would take at least 115 ms instead of 163 ms.",
    "Next: compare rank 1 with another one of vm: its batch, its GPU, the processors it may use.",
)


@pytest.mark.parametrize(("size", "shown"), [((80, 24), 3), ((120, 40), 3), ((80, 16), 1)])
@in_a_loop
async def test_the_verdict_stands_below_the_headline_and_goes_when_it_is_over(
    snapshot: Snapshot, tmp_path: Path, size: tuple[int, int], shown: int
) -> None:
    diagnosis = Diagnosis(CAUSES, ({"name": "slow rank", "rank": 1},), True)
    stage = Stage(dataclasses.replace(snapshot, diagnosis=diagnosis), tmp_path)
    async with stage.app.run_test(size=size) as pilot:
        await stage.until(pilot, lambda: "makes the others wait" in stage.text())
        text = " ".join(" ".join(line.split()) for line in stage.screen()[2:8])
        for sentence in CAUSES[:shown] if shown > 1 else (CAUSES[0][:60],):
            assert sentence in text
        assert stage.tables()
        healthy = Diagnosis(("No fault found: the ranks' own work takes 96% of an iteration.",), (), True)
        stage.snapshot = dataclasses.replace(snapshot, diagnosis=healthy)
        await stage.until(pilot, lambda: "No fault found" in stage.text())
        assert "makes the others wait" not in stage.text()
        stage.snapshot = snapshot
        await stage.until(pilot, lambda: "No fault found" not in stage.text())
        assert stage.part("verdict") == []


@in_a_loop
async def test_sorting_goes_through_the_columns_and_turns_round(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, "2")
        assert [row[0] for row in stage.rows()] == ["training", "training", "cross"]
        assert "Gbit/s▼" in stage.heads()
        await stage.press(pilot, "r")
        assert [row[0] for row in stage.rows()] == ["cross", "training", "training"]
        assert "Gbit/s▲" in stage.heads()
        await stage.press(pilot, *"ssssss")
        assert stage.heads()[-1] == "unsent▲"  # it had no room before
        await stage.press(pilot, *"ss")  # once round to the first column
        assert stage.heads()[0] == "traffic▲"
        assert [row[0] for row in stage.rows()] == ["cross", "training", "training"]
        await stage.press(pilot, "r")
        assert [row[0] for row in stage.rows()] == ["training", "training", "cross"]
        # each page keeps its own order
        await stage.press(pilot, "7", "2")
        assert stage.heads()[0] == "traffic▼"
        # the overview and the log have theirs
        for key in "10":
            await stage.press(pilot, key)
            before = [stage.rows(table) for table in stage.tables()]
            await stage.press(pilot, "s", "r")
            assert [stage.rows(table) for table in stage.tables()] == before


@in_a_loop
async def test_rows_without_a_value_come_last_either_way(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, "2", "s")
        for arrow in "▼▲":
            assert f"retr/s{arrow}" in stage.heads()
            assert [row[0] for row in stage.rows()] == ["training", "training", "cross"]
            await stage.press(pilot, "r")


@in_a_loop
async def test_the_filter_works_while_typing_and_is_taken_back(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, "2", "slash", *"cross")
        assert [row[0] for row in stage.rows()] == ["cross"]
        assert stage.screen()[-2].rstrip() == "cross"
        assert stage.part("note") == []
        await stage.press(pilot, "enter")
        assert stage.part("note") == ["filter: cross"]
        await stage.press(pilot, "s")  # the keys are keys again
        assert stage.app.words == "cross"
        await stage.press(pilot, "slash", "q", "1", "enter")  # as letters, they neither leave nor turn the page
        assert stage.rows() == [["Nothing matches the filter."]]
        await stage.press(pilot, "escape")
        assert len(stage.rows()) == 3
        await stage.press(pilot, "slash", *"S1:29500 train", "enter")
        assert len(stage.rows()) == 2


@in_a_loop
async def test_a_pause_holds_the_picture(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, "p")
        assert stage.part("headline")[0].startswith("PAUSED  running")
        stage.snapshot = dataclasses.replace(snapshot, elapsed_s=4000.0)
        await pilot.pause(0.5)
        assert "0:00:05" in stage.part("headline")[0]
        await stage.press(pilot, "space")
        assert "1:06:40" in stage.part("headline")[0]
        assert "PAUSED" not in stage.part("headline")[0]


@in_a_loop
async def test_a_mark_has_the_time_of_the_key_and_goes_into_the_run(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    (tmp_path / "run.json").touch()
    async with stage.app.run_test(size=(80, 24)) as pilot:
        before_ns = time.time_ns()
        await stage.press(pilot, "m")
        pressed_ns = time.time_ns()
        await stage.until(pilot, lambda: "text of the mark" in stage.screen()[-2])
        assert "text of the mark" in stage.screen()[-2]
        await stage.press(pilot, *"q: für 2", "enter")
        assert stage.part("note") == ["Marked: q: für 2"]
        await stage.press(pilot, "m", *"not this", "escape")
        await stage.press(pilot, "m", "enter")
        assert not stage.app.query_one(Input).display
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
        assert "cannot be written" in stage.part("note")[0]
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
            assert stage.part("headline")[1].split()[0] == node
        await stage.press(pilot, "2")
        assert {row[0] for row in stage.rows()} == {"training"}  # S1 has no part in the cross traffic
        await stage.press(pilot, "3", "n")
        assert {row[0] for row in stage.rows()} == {"S0", "S1"}


@in_a_loop
async def test_the_end_of_the_run_is_said_and_the_view_stays(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        stage.snapshot = dataclasses.replace(snapshot, ended=True, status="partial", why="S0: the agent was killed")
        await stage.until(pilot, lambda: "The run is partial" in stage.screen()[-2])
        assert stage.part("headline")[0].startswith("partial")
        assert "The run is partial: S0: the agent was killed. q quit, then: ringtap analyze" in stage.screen()[-2]
        await stage.press(pilot, "slash", "c", "enter")
        assert stage.part("note")[0].startswith("filter: c  The run is partial")
        assert stage.app.is_running
        await stage.press(pilot, "q")
    assert not stage.app.is_running


@in_a_loop
async def test_a_node_that_is_silent_stands_in_the_first_line(snapshot: Snapshot, tmp_path: Path) -> None:
    nodes = (snapshot.nodes[0], dataclasses.replace(snapshot.nodes[1], age_s=12.3))
    stage = Stage(dataclasses.replace(snapshot, nodes=nodes), tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.until(pilot, lambda: "no sample" in stage.text())
        assert stage.part("headline")[0].startswith("running  no sample for 12 s  0:00:05")


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
@in_a_loop
async def test_leaving(snapshot: Snapshot, tmp_path: Path, key: str) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, key)
        await stage.until(pilot, lambda: not stage.app.is_running)
        assert not stage.app.is_running
    assert stage.app.return_code == 0


@in_a_loop
async def test_pages_turn_and_scroll_and_help_shows(snapshot: Snapshot, tmp_path: Path) -> None:
    flows = tuple(LiveFlow("other", f"10.0.0.{number}:1", "10.1.0.0:2", 1e9 - number) for number in range(100))
    stage = Stage(dataclasses.replace(snapshot, flows=flows), tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, "tab")
        assert stage.rows()[0][1] == "10.0.0.0:1"
        await stage.press(pilot, "down", "j", "pagedown", "up")
        assert stage.rows()[0][1] == "10.0.0.11:1"
        await stage.press(pilot, "end")
        assert stage.rows()[-1][1] == "10.0.0.99:1"
        await stage.press(pilot, "k")
        assert stage.rows()[-1][1] == "10.0.0.98:1"
        await stage.press(pilot, "home", "right", "left", "question_mark")
        help_lines = stage.part("help")
        assert [line.rstrip() for line in stage.screen()[6 : 6 + len(help_lines)]] == help_lines  # none is cut
        assert "marks.jsonl" in " ".join(help_lines)
        await stage.press(pilot, "escape")
        assert stage.part("help") == []
        assert stage.rows()[0][1] == "10.0.0.0:1"
        await stage.press(pilot, "shift+tab", "shift+tab")
        assert stage.app.query_one(Tabs).active_tab.label_text == "0 Log"  # type: ignore[union-attr]
        assert stage.rows()[-1][0].endswith("▾ cross traffic on")
        assert stage.rows()[-2] == ["epoch 98"]
        await stage.press(pilot, "up")
        assert stage.rows()[-1] == ["epoch 98"]
        # the place is counted from the end
        stage.snapshot = dataclasses.replace(stage.snapshot, output=stage.snapshot.output[:-1])  # type: ignore[type-var, union-attr]
        await stage.until(pilot, lambda: stage.rows()[-1] == ["epoch 97"])
        assert stage.rows()[-1] == ["epoch 97"]


@in_a_loop
async def test_keys_and_the_end_come_at_any_moment(snapshot: Snapshot, tmp_path: Path) -> None:
    """A key before the first picture, and the end while the next is drawn, raise nothing."""
    for delay_s in (0.0, 0.02, 0.1, 0.2, 0.4):
        stage = Stage(snapshot, tmp_path)

        async def keys(app: LiveApp = stage.app, delay_s: float = delay_s) -> None:
            await asyncio.sleep(delay_s)
            for key in ("3", "s", "question_mark", "tab", "slash", "x"):
                app.simulate_key(key)
            await asyncio.sleep(delay_s)
            app.exit()

        task = asyncio.create_task(keys())
        await stage.app.run_async(headless=True, size=(80, 24))
        await task
        assert stage.app.return_code == 0


@in_a_loop
async def test_a_terminal_that_changes_its_size(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        plots = {name: stage.app.query_one(f"#{name}") for name in ("plots", "iterations", "throughput")}
        await stage.until(pilot, lambda: plots["iterations"].size.width == 80)
        assert (plots["iterations"].size.width, plots["throughput"].display) == (80, False)
        await pilot.resize_terminal(130, 50)
        bars = stage.app.query_one("#throughput Bars", Bars)
        await stage.until(pilot, lambda: plots["plots"].size.height == 9 and len(bars.data or []) == 64)
        assert plots["plots"].size.height == 9
        assert plots["throughput"].display
        assert plots["iterations"].size.width + plots["throughput"].size.width >= 128
        assert len(bars.data or []) == 64 == plots["throughput"].size.width
        await pilot.resize_terminal(60, 15)
        await stage.until(pilot, lambda: plots["plots"].size.height == 2)
        assert plots["plots"].size.height == 2
        assert not plots["throughput"].display
        await stage.press(pilot, "3")
        assert "drops" in stage.heads()
        assert "tx pkt/s" not in stage.heads()  # it does not fit, and half a number would mislead
        assert all(cell_len(line) == 60 for line in stage.screen())


@in_a_loop
async def test_before_the_first_snapshot_and_without_a_job(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(None, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, "2", "s", "n", "p", "p", "down")
        assert "Looking" in stage.part("headline")[0]
        stage.snapshot = dataclasses.replace(snapshot, iterations=type(snapshot.iterations)(), ranks=(), flows=())
        await stage.until(pilot, lambda: "no steps so far" in stage.text() and "█" in stage.text())
        first, second = stage.part("headline")
        assert first == "running  0:00:05  no steps so far"
        assert second.startswith("2 nodes  all interfaces: sent 0.806 received 0.806 Gbit/s")
        assert "█" in "".join(stage.screen()[3:6])
        assert not stage.app.query_one("#iterations").display
        assert stage.heads() == ["Flows"]
        assert stage.rows() == [["Nothing yet (sockets)."]]


def test_only_what_differs_is_drawn_again(snapshot: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def drawn(changed: Snapshot) -> list[str]:
        stage = Stage(snapshot, tmp_path)
        updates: list[str] = []
        async with stage.app.run_test(size=(80, 24)) as pilot:
            await stage.press(pilot, "3")
            with monkeypatch.context() as patch:
                patch.setattr(Lines, "update", lambda lines, _: updates.append(str(lines.id)))
                patch.setattr(Bars, "watch_data", lambda bars, _: updates.append("bars"), raising=False)
                patch.setattr(RunTable, "clear", lambda table, **_: updates.append("clear"))
                patch.setattr(
                    RunTable, "update_cell", lambda table, row, column, value: updates.append(value.plain.strip())
                )
                stage.snapshot = changed
                await stage.until(pilot, lambda: updates)
                await pilot.pause(0.5)
        return updates

    nic, *others = snapshot.nics
    faster = dataclasses.replace(nic, tx_bps=1.25e9)
    assert asyncio.run(drawn(dataclasses.replace(snapshot, elapsed_s=6.0))) == ["headline"]
    assert asyncio.run(drawn(dataclasses.replace(snapshot, nics=(faster, *others)))) == ["1.250", "12%"]


@in_a_loop
async def test_of_thousands_of_rows_the_table_holds_those_in_sight(snapshot: Snapshot, tmp_path: Path) -> None:
    flows = tuple(LiveFlow("other", f"10.0.{number}.0:1", "10.1.0.0:2", 1e9 - number) for number in range(5000))
    stage = Stage(dataclasses.replace(snapshot, flows=flows), tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, "2", "end")
        assert stage.rows()[-1][1] == "10.0.4999.0:1"
        assert stage.tables()[0].row_count == 15
        await stage.press(pilot, "1")
        assert sum(table.row_count for table in stage.tables()) < 15


@in_a_loop
async def test_the_gpu_page_and_a_reason_where_there_is_none(snapshot: Snapshot, tmp_path: Path) -> None:
    stage = Stage(snapshot, tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.press(pilot, "8")
        assert stage.rows() == [["gpu on S0: unavailable. no NVIDIA driver"]]
        await pilot.resize_terminal(30, 24)
        await stage.until(pilot, lambda: "…" in stage.rows()[0][0])
        assert stage.rows() == [["gpu on S0: unavailable. no NV…"]]
        await pilot.resize_terminal(80, 24)
        gpu = Gpu("S0", "0 H200", 0.87, 140e9, 652.4, 1e10, None)
        stage.snapshot = dataclasses.replace(snapshot, gpus=(gpu,))
        await stage.until(pilot, lambda: stage.rows()[0][0] == "S0")
        assert stage.rows() == [["S0", "0 H200", "87%", "140 GB", "652", "10.00", "-", "-", "-"]]


@in_a_loop
async def test_the_first_page_says_why_a_collector_failed(snapshot: Snapshot, tmp_path: Path) -> None:
    first, *others = snapshot.collectors
    failed = dataclasses.replace(first, state="failed", health="bad", reason="stopped early: No space left on device")
    stage = Stage(dataclasses.replace(snapshot, collectors=(failed, *others)), tmp_path)
    async with stage.app.run_test(size=(80, 24)) as pilot:
        await stage.until(pilot, lambda: "nic failed" in stage.text() and "stopped early" in stage.screen()[-2])
        assert "nic failed" in "".join(stage.screen()[-4:-2])
        assert stage.screen()[-2].rstrip() == "nic on S0: stopped early: No space left on device"


def _with_iterations(snapshot: Snapshot, *seconds: float, **first: bool) -> Snapshot:
    history = [LiveIteration(number, number * 10**12, value) for number, value in enumerate(seconds, 1)]
    history[0] = dataclasses.replace(history[0], **first)
    stats = dataclasses.replace(snapshot.iterations, history=tuple(history), median_s=1.0)
    return dataclasses.replace(snapshot, iterations=stats, marks=(Mark(2 * 10**12 - 1, ""),))


def test_a_plot_shows_the_last_values_and_cuts_the_outlier(snapshot: Snapshot) -> None:
    run = _with_iterations(snapshot, 1.0, 1.0, 2.0, 1.0, 1.0, 90.0, skipped=True)
    line, bars = iteration_plot(run, 22)
    assert line.plain == "0–3 s           ×▾•  ▲"
    assert bars == [0.0] * 16 + [1.0, 1.0, 2.0, 1.0, 1.0, 3.0]
    line, bars = iteration_plot(run, 19)
    assert (line.plain[16:], bars[16:]) == ("  ▲", [1.0, 1.0, 3.0])
    run = dataclasses.replace(snapshot, throughput=())
    assert throughput_plot(run, 20)[0].plain.strip() == ""
    run = dataclasses.replace(snapshot, throughput=(Throughput(0, 0.0, 0.0), Throughput(1, 2e9, 1e9)))
    line, bars = throughput_plot(run, 18)
    assert (line.plain.rstrip(), bars) == ("0–2 Gbit/s", [0.0] * 17 + [2e9])


def test_core_bars_of_many_cores_share_their_blocks() -> None:
    assert core_bars([0.0, 0.5, 1.0]) == "▁▄█"
    assert core_bars([0.1] * 63 + [1.0]) == "▁" * 31 + "█"
    assert core_bars([]) == ""


def test_nodes_are_sorted_by_their_busiest_core() -> None:
    nodes = tuple(NodeState(name, "running", "", False, None, None, None) for name in "abc")
    hosts = tuple(Host(name, cores, None, None, None) for name, cores in (("a", (0.5, 0.5)), ("b", (0.1, 0.9))))
    run = Snapshot(0, "run", nodes=nodes, hosts=hosts)
    cores = [column.title for column in NODES.columns].index("cores")
    assert [node.name for node, _ in NODES.select(run, "", cores, True)] == ["b", "a", "c"]


def test_columns_that_do_not_fit_are_left_out_and_texts_are_cut() -> None:
    heads = [column.title for column in FLOWS.columns]
    row = ["training", "a-node-with-a-long-name:40000", "S1:29500", "9.999", "0", "0.25", "40", "0", "9.9", "1 kB", "p"]
    for width in range(30, 140):
        head, texts = FLOWS.lay_out([heads, row], width)
        assert sum(map(len, head)) == sum(map(len, texts)) <= width + 1
        assert [text.strip() for text in texts][3:] == row[3 : len(texts)]  # no number is cut
    assert FLOWS.lay_out([heads, row], 80)[1][1] == "a-node-with-a-long-n… "
    assert [text.strip() for text in FLOWS.lay_out([heads, row], 140)[1]] == row


def test_numbers_are_short() -> None:
    assert [gbps(value) for value in (0, 1e6, 9.9994e9, 24.51e9, 399.99e9)] == [
        "0.000", "0.001", "9.999", "24.51", "400.0",
    ]  # fmt: skip
    assert [count(value) for value in (0, 0.25, 9, 950, 12_345, 2.5e9)] == ["0", "0.2", "9", "950", "12.3k", "2500M"]
    assert [milliseconds(value) for value in (0.00025, 0.0123, 3.0)] == ["0.25", "12.3", "3000"]
    retransmissions = FLOWS.columns[4]
    assert [retransmissions.text(LiveFlow("other", "", "", 1.0, value)) for value in (None, 0)] == ["-", "0"]


@in_a_loop
async def test_texts_of_others_are_shown_as_they_are_and_do_not_steer(snapshot: Snapshot, tmp_path: Path) -> None:
    nasty = "[bold]/[/] [red \x1b[2J\u202e"
    shown = "[bold]/[/] [red \ufffd[2J\ufffd"
    flow = LiveFlow("training", "S0:1", "S1:2", 1e9, command=nasty)
    first, *others = snapshot.collectors
    failed = dataclasses.replace(first, state="failed", health="bad", reason=nasty)
    run = dataclasses.replace(
        snapshot,
        flows=(flow,),
        output=(nasty,),
        marks=(Mark(0, ""),),
        collectors=(failed, *others),
        path=nasty.replace("/", ""),
    )
    stage = Stage(run, tmp_path / nasty)
    async with stage.app.run_test(size=(160, 24)) as pilot:
        await stage.until(pilot, lambda: len(stage.part("states")) > 1)
        assert stage.part("headline")[1].endswith(shown.replace("/", ""))
        assert stage.part("states")[1].endswith(shown)
        screens = stage.screen()
        await stage.press(pilot, "m", "x", "enter")
        assert shown in stage.part("note")[0]
        await stage.press(pilot, "2")
        assert stage.rows()[0][-1] == shown
        screens += stage.screen()
        await stage.press(pilot, "0")
        assert stage.rows()[0] == [shown]
        screens += stage.screen()
        stage.snapshot = dataclasses.replace(run, ended=True, status="failed", why=nasty, flows=())
        await stage.press(pilot, "9")
        await stage.until(pilot, lambda: shown in "".join(stage.rows()[0]))
        assert shown in "".join(stage.rows()[0])
        screens += stage.screen()
    assert any(shown in line for line in screens)
    assert not any("\x1b" in line or "\u202e" in line for line in screens)


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
