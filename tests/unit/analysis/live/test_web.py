"""The live view in a browser: parts of the page, the token, who may read, wrong use, and the page in Chromium."""

import contextlib
import dataclasses
import hmac
import http.client
import http.server
import json
import os
import re
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringtap.analysis.commands import live as live_command
from ringtap.analysis.live import snapshot_for_browser, web
from ringtap.analysis.live.build_snapshot import SnapshotSource
from ringtap.analysis.live.snapshot import CollectorState, Diagnosis, Nic, NodeState, Snapshot
from ringtap.analysis.live.snapshot_for_browser import TableChoice, parts_of
from ringtap.cli import main
from ringtap.core.errors import UsageError
from ringtap.core.http_listen_address import listen, names_loopback
from tests.unit.agent_processes import RINGTAP, ended, wait_for
from tests.unit.browser import CHROMIUM, WAIT_S, Browser
from tests.unit.live_run import RunWriter, second_of_training

pytestmark = pytest.mark.shares

TOKEN = "t" * 32
HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\u202e"
NOBODY = 65534


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    with RunWriter(tmp_path_factory.mktemp("live") / "run", "S0", "S1") as run:
        source = SnapshotSource(run.path)
        for second in range(1, 4):
            second_of_training(run, second)
            found = source.take()
        return found


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "ringtap"


def test_parts_are_those_of_the_terminal_view(snapshot: Snapshot) -> None:
    parts = json.loads(json.dumps(parts_of(snapshot, TableChoice())))
    head = ["".join(text for text, _ in line) for line in parts["head"]["lines"]]
    assert "iteration 11  250 ms  median 250 ms" in head[0]
    assert ["iteration 11", "bold"] in parts["head"]["lines"][0]
    assert head[1] == "2 nodes  2 of 2 ranks"
    assert parts["warnings"] == []
    assert parts["iterations"] == {"range": "0–250 ms", "heights": [100] * 11, "symbols": " " * 11}
    ranks = parts["table Ranks"]
    assert ranks["heads"][:2] == [["rank", True], ["node", False]] and ranks["sort"] == [0, False]
    assert [row[:5] for row in ranks["rows"]] == [["", "0", "S0", "11", "250.0"], ["", "1", "S1", "11", "250.0"]]
    cause = {"name": "slow rank", "rank": 1}
    slow = dataclasses.replace(snapshot, diagnosis=Diagnosis(("Rank 1 is slow.", "Next: look."), (cause,), True))
    told = parts_of(slow, TableChoice())
    assert [row[0] for row in told["table Ranks"]["rows"]] == ["", "yellow"]
    assert told["head"]["lines"][2:4] == [[("Rank 1 is slow.", "yellow")], [("Next: look.", "")]]
    assert parts["table GPUs"]["rows"] == []
    assert parts["table GPUs"]["reason"] == "gpu on S0: unavailable. no NVIDIA driver"


def test_rows_are_chosen_sorted_and_bounded(snapshot: Snapshot) -> None:
    nics = tuple(Nic(f"n{number}", HOSTILE, "nic", number * 1e9, *[None] * 6) for number in range(300))
    run = replace(snapshot, nics=nics)
    table = parts_of(run, TableChoice(page="NICs", column=2, descending=True))["table NICs"]
    assert len(table["rows"]) == snapshot_for_browser.MAX_ROWS and table["more"] == 100
    assert table["rows"][0][1:5] == ["n299", HOSTILE.replace("\x1b", "�").replace("\u202e", "�"), "299.0", "-"]
    table = parts_of(run, TableChoice(words="n299", page="NICs", column=99))["table NICs"]
    assert [row[1] for row in table["rows"]] == ["n299"] and table["more"] == 0
    nothing = parts_of(run, TableChoice(words="no such words"))["table NICs"]
    assert nothing["reason"] == "Nothing matches the filter."


def test_one_node_is_shown_with_the_warnings_of_all(snapshot: Snapshot) -> None:
    failed = replace(snapshot.nodes[1], status="failed", why="disk full")
    run = replace(snapshot, nodes=(snapshot.nodes[0], failed))
    parts = parts_of(run, TableChoice(node="S0"))
    assert parts["nodes"] == {"names": ["S0", "S1"], "shown": "S0"}
    assert "".join(text for text, _ in parts["head"]["lines"][1]).startswith("S0  2 of 2 ranks")
    assert parts["warnings"] == ["S1 is failed. disk full"]
    for title in ("NICs", "Queues", "Nodes", "Procs", "State"):
        assert {row[1] for row in parts[f"table {title}"]["rows"]} == {"S0"}, title
    unknown = parts_of(run, TableChoice(node="S2"))
    assert unknown["warnings"][0] == "The run has no node S2: all nodes are shown."
    every = parts_of(run, TableChoice())
    assert {name for name, part in unknown.items() if part != every[name]} == {"warnings"}


def test_warnings_stay_the_same_while_they_last(snapshot: Snapshot) -> None:
    def warnings(age_s: float, lost: int) -> list[str]:
        node = NodeState("S0", "partial", "disk full", False, age_s, None, None)
        collectors = CollectorState("nic", "nic", "failed", "no memory", 0.1, 0, lost, None, 0, "bad")
        run = replace(snapshot, nodes=(node,) * 30, collectors=(replace(collectors, node="S0"),))
        found: list[str] = parts_of(run, TableChoice())["warnings"]
        return found

    assert warnings(7.0, 1) == warnings(8.0, 2)
    assert warnings(7.0, 1)[:2] == ["S0 has sent no sample for more than 5 s.", "S0 is partial. disk full"]
    assert warnings(7.0, 1)[-1] == "And 42 more."
    alone = replace(snapshot, nodes=(), collectors=(), ended=True, status="failed", why="rank 1 was killed")
    assert parts_of(alone, TableChoice())["warnings"] == ["The run is failed. rank 1 was killed"]


def test_the_token_is_kept_and_private(own_state: Path, tmp_path: Path) -> None:
    path = web.token_file(9465)
    before = os.umask(0)
    try:
        token = web.read_token(path)
    finally:
        os.umask(before)
    assert path.parent == own_state
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(own_state.stat().st_mode) == 0o700
    assert web.read_token(path) == token and len(token) >= 32
    assert web.read_token(web.token_file(9466)) != token
    path.chmod(0o640)
    with pytest.raises(UsageError, match="is not a token that you alone can read: remove it"):
        web.read_token(path)
    path.write_text("short")
    path.chmod(0o600)
    with pytest.raises(UsageError, match="remove it"):
        web.read_token(path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="which holds the page's token, cannot be used: "):
        web.read_token(path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(UsageError, match="remove it"):
        web.read_token(path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be used: File exists"):
        web.read_token(tmp_path / "file" / "live-1.token")


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        *((name, True) for name in ("127.0.0.1", "127.0.0.1:9465", "localhost:80", "LOCALHOST", "[::1]:9465")),
        *((name, False) for name in ("", "evil.example:9465", "127.0.0.1.evil.example", "10.0.0.1", "[::1", "0.0.0.0")),
        *((name, False) for name in ("localhost@evil.example", "evil.example/localhost", "127.0.0.1:x@evil")),
    ],
)
def test_names_of_this_machine(host: str, is_one: bool) -> None:
    assert names_loopback(host) == is_one


@contextlib.contextmanager
def served(snapshot: Snapshot, run: Path = Path("nowhere")) -> Iterator[int]:
    is_wanted = True
    with listen("--web", ":0") as listener:
        server = web.PageServer(listener, TOKEN, run, lambda: snapshot)
        server.timeout = 0.05
        thread = threading.Thread(target=server.serve_while, args=(lambda: is_wanted,))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            is_wanted = False
            thread.join()


@contextlib.contextmanager
def answer(port: int, path: str, **headers: str) -> Iterator[http.client.HTTPResponse]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
        connection.request("GET", path, headers=headers)
        yield connection.getresponse()


def challenge_of(port: int) -> str:
    with answer(port, "/challenge") as found:
        return found.read().decode()


def events(port: int, token: str, challenge: str = "", **fields: str) -> str:
    challenge = challenge or challenge_of(port)
    proof = hmac.new(token.encode(), challenge.encode(), "sha256").hexdigest()
    return "/events?" + urlencode({"challenge": challenge, "proof": proof} | fields)


def test_only_who_knows_the_token_reads_the_run(snapshot: Snapshot) -> None:
    with served(snapshot) as port:
        with answer(port, "/") as page:
            assert page.status == 200 and b"S0" not in page.read()
            assert "default-src 'none'" in str(page.headers["Content-Security-Policy"])
            assert "unsafe" not in str(page.headers["Content-Security-Policy"])
            assert page.headers["Cache-Control"] == "no-store"
        for path in (
            "/events",
            "/events?proof=",
            events(port, "wrong" * 8),
            events(port, ""),
            events(port, TOKEN, "made-up"),
            events(port, TOKEN).replace("proof=", "proof=0"),
            "/events?" + urlencode({"challenge": challenge_of(port), "proof": "ü"}),
        ):
            with answer(port, path) as found:
                assert found.status == 403 and found.read() == b"The token is wrong\n"
        right = events(port, TOKEN, words="S1", sort="NICs,2,descending", node="S0")
        with answer(port, right) as found:
            assert found.status == 200 and found.headers["Content-Type"] == "text/event-stream"
            parts = json.loads(found.readline().removeprefix(b"data: "))
            expected = parts_of(snapshot, TableChoice("S1", "NICs", 2, True, "S0")) | {"tunnel": parts["tunnel"]}
            assert parts == json.loads(json.dumps(expected))
            assert re.fullmatch(rf"ssh -N -L {port}:127\.0\.0\.1:{port} \S+@\S+", parts["tunnel"])
        with answer(port, right) as found:
            assert found.status == 403, "a proof is good for once"


def test_requests_that_are_refused(snapshot: Snapshot) -> None:
    with served(snapshot) as port:
        for path, status, headers in (
            ("/", 403, {"Host": f"evil.example:{port}"}),
            ("/live.js", 403, {"Host": ""}),
            ("/../web.py", 404, {}),
            ("/static/live.html", 404, {}),
            (events(port, TOKEN, sort="NICs"), 400, {}),
            (events(port, TOKEN, sort="NICs,two,descending"), 400, {}),
            ("/events?" + "&".join(f"a{number}=1" for number in range(99)), 400, {}),
        ):
            with answer(port, path, **headers) as found:
                assert found.status == status, path
                assert "S0" not in found.read().decode()
        with socket.create_connection(("127.0.0.1", port), WAIT_S) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 403")
        before = threading.active_count()
        with contextlib.ExitStack() as idle:
            connections = [idle.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S)) for _ in range(90)]
            assert connections[0].recv(1) == b"", "more than are served: the one that has waited longest ends"
            wait_for(lambda: before < threading.active_count() < before + 80, WAIT_S)
            assert challenge_of(port), "idle connections make room"
        wait_for(lambda: threading.active_count() <= before, WAIT_S)
        assert challenge_of(port)


def test_a_slow_request_makes_room_and_an_answered_one_stays(snapshot: Snapshot) -> None:
    with served(snapshot) as port, contextlib.ExitStack() as stack:
        stream = stack.enter_context(answer(port, events(port, TOKEN)))
        slow = stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
        slow.sendall(b"POST /mark HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n")
        for _ in range(90):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
        assert slow.recv(1) == b""
        for _ in range(2):
            assert stream.readline().startswith(b"data: ") and stream.readline() == b"\n"


def test_any_number_of_challenges_leaves_the_right_token_right(monkeypatch: pytest.MonkeyPatch) -> None:
    challenges = web.Challenges(TOKEN)
    mine = challenges.new()
    others = [challenges.new() for _ in range(10_000)]
    assert len(set(others)) == len(others)
    proof = hmac.new(TOKEN.encode(), mine.encode(), "sha256").hexdigest()
    assert not challenges.is_answered(mine, "0" * 64), "a wrong answer does not use it up"
    assert challenges.is_answered(mine, proof)
    assert not challenges.is_answered(mine, proof)
    assert list(challenges._answered) == [mine]
    late = challenges.new()
    at_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: at_s + 61)
    assert not challenges.is_answered(late, hmac.new(TOKEN.encode(), late.encode(), "sha256").hexdigest())
    for forged in ("", ".", "..", "a.1.b", mine.replace(".", ".9", 1), "ü.1.ü", web.Challenges(TOKEN).new()):
        assert not challenges.is_answered(forged, hmac.new(TOKEN.encode(), forged.encode(), "sha256").hexdigest())


def mark(port: int, token: str = TOKEN, path: str = "/mark", host: str = "localhost", **fields: str) -> tuple[int, str]:
    challenge = challenge_of(port)
    proof = hmac.new(token.encode(), challenge.encode(), "sha256").hexdigest()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
        body = urlencode({"challenge": challenge, "proof": proof} | fields)
        connection.request("POST", path, body, {"Host": host})
        found = connection.getresponse()
        return found.status, found.read().decode()


def test_a_mark_has_the_time_at_which_it_was_asked_for(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0") as run, served(SnapshotSource(run.path).take(), run.path) as port:
        before_ns = time.time_ns()
        assert mark(port, text=HOSTILE, age_s="2.5") == (200, "")
        after_ns = time.time_ns()
        (line,) = map(json.loads, (run.path / "marks.jsonl").read_text().splitlines())
        assert line["text"] == HOSTILE and before_ns <= line["t_ns"] + 2_500_000_000 <= after_ns
        assert [item.text for item in SnapshotSource(run.path).take().marks] == [HOSTILE]

        unreadable = 400, "The mark cannot be read\n"
        for age_s in ("", "-1", "nan", "inf", "1e9", "now"):
            assert mark(port, text="x", age_s=age_s) == unreadable
        assert mark(port, text="x" * 20_000, age_s="1") == unreadable
        assert mark(port, path="/events", text="x", age_s="1") == unreadable
        assert mark(port, "wrong" * 8, text="x", age_s="1") == (403, "The token is wrong\n")
        assert mark(port, host="evil.example", text="x", age_s="1")[0] == 403
        with answer(port, "/mark") as found:
            assert found.status == 404
        (run.path / "run.json").unlink()
        status, said = mark(port, text="x", age_s="1")
        assert status == 500 and said == f"The mark cannot be written to {run.path}: No such file or directory"
        assert len((run.path / "marks.jsonl").read_text().splitlines()) == 1


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=20), st.text(max_size=10), st.integers(), st.booleans())
def test_any_choice_gives_a_page(snapshot: Snapshot, words: str, page: str, column: int, descending: bool) -> None:
    for title in ("Flows", page):
        assert json.dumps(parts_of(snapshot, TableChoice(words, title, column, descending)))


@pytest.mark.needs_root("run a process as another user")
def test_a_second_user_cannot_read_it(snapshot: Snapshot) -> None:
    path = web.token_file(1)
    path.parent.parent.parent.chmod(0o755)
    web.read_token(path)
    for folder in path.parents:
        if folder.stat().st_mode & 0o077 == 0 and folder != path.parent:
            folder.chmod(0o711)  # pytest's own folders are private, too
    path.parent.chmod(0o755)  # as if somebody had opened it
    code = (
        "import sys, urllib.request\n"
        "try:\n open(sys.argv[1])\nexcept PermissionError:\n print('no token')\n"
        "try:\n urllib.request.urlopen(sys.argv[2])\nexcept urllib.error.HTTPError as error:\n print(error.code)\n"
    )
    with served(snapshot) as port:
        command = ["/usr/bin/python3", "-c", code, str(path), f"http://127.0.0.1:{port}{events(port, 'x' * 32)}"]
        done = subprocess.run(
            command, check=False, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True
        )
    assert done.stdout.split("\n")[:2] == ["no token", "403"], done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--web", "9465"], "--web 9465: an address is :PORT or HOST:PORT"),
        (["--web", "0.0.0.0:0"], "--web 0.0.0.0:0 would show the run to other machines: give :0"),
        (["--web", "--metrics", ":0"], "--web and --metrics are different views: give one of them"),
        (["--web", "--plain"], "--plain and --web are different views"),
        (["--web", ":0"], "is not a run directory: it has no run.json"),
        (["--web", ":" + "9" * 5000], "an address is :PORT or HOST:PORT"),
        (["--web", "DIR"], "--web DIR: an address is :PORT or HOST:PORT"),
    ],
)
def test_wrong_use_is_one_sentence(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_command, "_APPEARS_S", 0.1)
    (tmp_path / "empty").mkdir()
    assert main(["live", str(tmp_path / "empty"), *options]) == 2
    *waits, said = capsys.readouterr().err.splitlines()
    assert said.startswith("ringtap: ") and words in said
    assert all(line.startswith("Waiting") for line in waits)


def test_the_run_may_follow_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with listen("--web", ":0") as taken:
        port = taken.getsockname()[1]
        for words, said in (
            (["--web"], "name the run directory: ringtap live DIR"),
            (["--web", f":{port}"], "name the run directory: ringtap live DIR"),
            (["--web", f":{port}", str(tmp_path)], f"--web :{port} cannot be used"),
            (["--web", str(tmp_path / "file")], f"{tmp_path}/file is not a run directory: it is a file"),
        ):
            assert main(["live", *words]) == 2
            assert capsys.readouterr().err.startswith(f"ringtap: {said}")


def test_a_port_in_use_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with listen("--web", ":0") as taken:
        port = taken.getsockname()[1]
        assert main(["live", str(tmp_path), "--web", f":{port}"]) == 2
    assert (
        capsys.readouterr().err == f"ringtap: --web :{port} cannot be used: Address already in use: give another port\n"
    )
    assert not (tmp_path / "state").exists()


def test_a_terminal_gets_the_whole_url(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", "S0") as run:
        ours, theirs = os.openpty()
        command = [*RINGTAP, "live", str(run.path), "--web", ":0"]
        with ended(subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, text=True)) as process:
            os.close(theirs)
            line = ""
            while "\n" not in line:
                line += os.read(ours, 1000).decode()
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 0
        os.close(ours)
    found = re.fullmatch(r"Live view at http://127\.0\.0\.1:(\d+)/#(\S+)\s+", line)
    assert found and web.token_file(int(found[1])).read_text() == found[2]


def start(run: Path, port: int) -> "subprocess.Popen[str]":
    """Start a server whose output goes to a file, as that of a batch job does."""
    with (run.parent / "output").open("a") as output:
        process = subprocess.Popen([*RINGTAP, "live", str(run), "--web", f":{port}"], stdout=output, stderr=output)
    wait_for(lambda: "Live view at" in (run.parent / "output").read_text(), WAIT_S)
    return process


def requests_to_a_stranger(port: int) -> str:
    """Return what a page sends to somebody else's server at its port, which answers as far as it can."""
    heard: list[str] = []

    class Stranger(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(f"{self.requestline}\n{self.headers}")
            if self.path == "/challenge":
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"abc")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Stranger) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        try:
            wait_for(lambda: any("/events" in request for request in heard), WAIT_S)
        finally:
            server.shutdown()
    return "".join(heard)


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """It starts, updates, comes back after the server has restarted, and never sends or shows its token."""
    with (
        RunWriter(tmp_path / "run", "S0", "S1") as run,
        Browser(tmp_path / "profile") as browser,
        contextlib.ExitStack() as stack,
    ):
        with listen("--web", ":0") as listener:
            port = listener.getsockname()[1]
        second_of_training(run, 1)
        run.mark(0.9, HOSTILE)
        process = stack.enter_context(ended(start(run.path, port)))
        token = web.token_file(port).read_text()
        browser.call("Runtime.enable")
        browser.call("Log.enable")
        connection = "(document.getElementById('connection') || {}).textContent"
        cells = "[...document.querySelectorAll('#table-Ranks tbody tr')].map((row) => row.cells[2].textContent)"

        nodes = "[...document.querySelectorAll('#table-Ranks tbody tr')].map((row) => row.cells[1].textContent)"

        browser.open(f"http://127.0.0.1:{port}/")
        browser.wait(connection, lambda text: text == "This page needs its token.")
        assert not browser.value("document.getElementById('door').hidden")
        assert browser.value("document.activeElement.id") == "token"

        for typed, said in (("wrong" * 8, "The token is wrong."), (token, "Live")):
            browser.call("Input.insertText", text=typed)
            press(browser, "Enter", 13, "\r")
            browser.wait(connection, lambda text, said=said: text == said)
        browser.wait(cells, lambda found: found == ["3", "3"])

        # it updates, in the same elements; the name of a mark is text
        browser.value("window.row = document.querySelector('#table-Ranks tbody tr'); 1")
        second_of_training(run, 2)
        browser.wait(cells, lambda found: found == ["7", "7"])
        assert browser.value("window.row === document.querySelector('#table-Ranks tbody tr')")
        assert "<img src=x" in browser.value("document.getElementById('table-Log').textContent")
        assert browser.value("document.querySelectorAll('img').length") == 0
        assert "iteration 7" in browser.value("document.title")

        # headers sort, by keyboard too; words choose rows
        head = "document.querySelector('#table-Ranks thead button')"
        browser.value(f"{head}.focus(); {head}.click()")
        browser.wait(f"{head}.parentNode.getAttribute('aria-sort')", lambda order: order == "descending")
        browser.value("document.getElementById('words').focus()")
        browser.call("Input.insertText", text="S1")
        browser.wait(cells, lambda found: len(found) == 1)

        # one node, by keyboard; the URL leads to it
        browser.value("document.getElementById('words').value = ''; document.getElementById('node').focus()")
        press(browser, "ArrowDown", 40)
        browser.wait(nodes, lambda found: found == ["S0"])
        assert browser.value("location.hash") == "#node=S0"
        browser.open(f"http://127.0.0.1:{port}/#node=S1&table=Ranks")
        browser.wait(nodes, lambda found: found == ["S1"])
        browser.wait("document.activeElement.id", lambda found: found == "table-Ranks")
        assert browser.value("document.getElementById('node').value") == "S1"

        # a mark, by keyboard; in a paused view, too
        browser.value("document.getElementById('pause').click(); document.getElementById('mark').focus()")
        press(browser, "Enter", 13, "\r")
        assert browser.value("document.activeElement.id") == "mark-text"
        browser.call("Input.insertText", text="learning rate lowered")
        press(browser, "Enter", 13, "\r")
        browser.wait(
            "document.getElementById('said').textContent", lambda said: said == "Marked: learning rate lowered"
        )
        assert json.loads((run.path / "marks.jsonl").read_text().splitlines()[-1])["text"] == "learning rate lowered"
        assert browser.value("document.activeElement.id") == "mark"
        browser.value("document.getElementById('pause').click()")
        browser.wait(
            "document.getElementById('table-Log').textContent", lambda text: text.endswith("▾ learning rate lowered")
        )

        # the server ends; whoever has the port then does not learn the token
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
        browser.wait(connection, lambda text: text.startswith("The connection is lost"))
        heard = requests_to_a_stranger(port)
        assert "/events?challenge=abc&proof=" in heard and token not in heard

        # it is back, with a token in the URL, which leaves the address bar
        (run.path.parent / "output").rename(tmp_path / "output-before")
        with ended(start(run.path, port)) as process:
            browser.wait(connection, lambda text: text == "Live")
            browser.open(f"http://127.0.0.1:{port}/?again#{token}")
            browser.wait(cells, lambda found: found == ["7", "7"])
            assert browser.value("location.href") == f"http://127.0.0.1:{port}/"
            check_page(browser)
            run.finish("failed", "rank 1 was killed")
            browser.wait("document.getElementById('warnings').textContent", lambda text: "rank 1 was killed" in text)
            assert "Next: ringtap analyze" in browser.value("document.getElementById('ending').textContent")
        said = (tmp_path / "output").read_text() + (tmp_path / "output-before").read_text()
        assert token not in said and f"The page asks for the token in {web.token_file(port)}" in said
        assert "Traceback" not in said and "The recording goes on. To come back: ringtap live" in said
        failures = [event for event in browser.events if event["method"] == "Runtime.exceptionThrown"]
        blocked = [event for event in browser.events if "Content Security Policy" in json.dumps(event)]
        assert failures == [] and blocked == []


def press(browser: Browser, key: str, code: int, text: str = "") -> None:
    for kind in ("rawKeyDown", "char", "keyUp") if text else ("rawKeyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, text=text, windowsVirtualKeyCode=code)


def check_page(browser: Browser) -> None:
    """Check what screen readers get, what fits a phone, and what is printed."""
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    roles = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]]
    named = {role: [name for found, name in roles if found == role] for role, _ in roles}
    for landmark in ("banner", "navigation", "main", "contentinfo"):
        assert len(named[landmark]) == 1, landmark
    assert "rank ▲" in named["columnheader"] and "0" in named["rowheader"]
    assert "Rows with these words" in named["searchbox"] and {"Pause", "Mark"} <= {*named["button"]}
    assert named["combobox"] == ["Node"]
    assert any(name.startswith("The last 7, 0–250 ms") for name in named["image"])
    assert all(name for role in ("button", "link", "region", "image", "searchbox", "combobox") for name in named[role])
    polite = browser.value("[...document.querySelectorAll('[aria-live]')].map((node) => node.id)")
    assert polite == ["warnings"]
    browser.call("Emulation.setDeviceMetricsOverride", width=360, height=640, deviceScaleFactor=2, mobile=True)
    assert browser.value("document.documentElement.scrollWidth") <= 360
    small = "[...document.querySelectorAll('button, input')].filter((one) => one.offsetParent && one.offsetHeight < 24)"
    assert browser.value(f"{small}.length") == 0
    colour = "getComputedStyle(document.body).backgroundColor"
    for scheme, background in (("dark", "rgb(20, 23, 26)"), ("light", "rgb(255, 255, 255)")):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        assert browser.value(colour) == background
    browser.call("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.value("getComputedStyle(document.getElementById('tools')).display") == "none"
    assert browser.value("getComputedStyle(document.querySelector('.wide')).overflowX") == "visible"
    browser.call("Emulation.setEmulatedMedia", media="")
