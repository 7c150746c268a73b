"""Records what NCCL's RAS service says of a job's communicators: ranks that do not answer, counts of collectives.

The protocol is that of src/ras/client_support.cc in NCCL, which answers in JSON since 2.28.7. For each answer, NCCL's
RAS threads collect data from all processes of the job. Only the node of rank 0 asks, therefore, and seldom.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ringtap.collectors.collector_interface import Check, Context
from ringtap.collectors.kernel_files import PROC
from ringtap.collectors.process_facts import environment_of, rank_in, socket_inodes
from ringtap.core.append_only_logs import Field, JsonLinesWriter, RecordWriter
from ringtap.core.json_validation import COUNT, Shape, Text, check, parse_json
from ringtap.core.run_directory_schema import (
    NCCL_RAS_JSONL,
    NCCL_RAS_PORT,
    NCCL_RAS_REC,
    NOT_NEEDED,
    RAS_ANSWERS,
    RAS_BEHIND,
    TIME_FIELDS,
)
from ringtap.core.units import counted

ADDRESS = f"localhost:{NCCL_RAS_PORT}"  # NCCL's default of NCCL_RAS_ADDR
_EVERY_S = 10.0
_BYTES_PER_S = 100_000  # of answers, as a mean: those of large jobs are asked for less often
_MAX_BYTES = 4 << 20  # of an answer; reading one takes 0.1 s and three times its size of memory
_CONNECT_S = 0.2
_LOOK_S = 0.05  # other collectors wait meanwhile; what comes later is read at the next sample
# RAS answers after 10 s at the latest, times NCCL_RAS_TIMEOUT_FACTOR; closing earlier would keep its thread busy
_ANSWER_S = 60.0
_END_S = 1.0
_COST_SHARE = 0.001  # of one core, at most, for finding the service
_QUESTION = b"CLIENT PROTOCOL 2\nSET FORMAT JSON\nSTATUS\n"
_SUCCESS, _IN_PROGRESS = 0, 7  # ncclResult_t
_LISTEN = b"0A"  # state of a socket in /proc/net/tcp

_PLACE: Shape = {"rank": COUNT, "host": str, "pid": int}
_ANSWER: Shape = {
    "nccl_version": str,
    "communicators": [
        {
            "hash": Text("0x[0-9a-f]{1,16}", "a hash"),
            "secondary_hash": str,
            "size": COUNT,
            "ranks": [_PLACE | {"status": {"init_state": int, "async_error": int}, "collective_counts": {str: COUNT}}],
            "missing_ranks": [_PLACE | {"status": {"unresponsive": bool, "considered_dead": bool}}],
        }
    ],
}
_FIELDS = (
    *TIME_FIELDS,
    Field("communicator", "<u8", "", "index"),
    Field("size", "<u4", "ranks", "gauge"),
    Field("answering", "<u4", "ranks", "gauge"),
    Field("missing", "<u4", "ranks", "gauge"),
    Field("unresponsive", "<u4", "ranks", "gauge"),
    Field("dead", "<u4", "ranks", "gauge"),
    Field("failed", "<u4", "ranks", "gauge"),
    Field("least_operations", "<u8", "collectives", "gauge"),
    Field("most_operations", "<u8", "collectives", "gauge"),
)


class _NoJsonError(Exception):
    """A service that does not answer in JSON; the message is a clause that says why."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of a value of ``NCCL_RAS_ADDR``.

    Raises:
        ValueError: it has no port.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{text!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def listening_inodes(net: Path, port: int) -> set[int]:
    """Return the inodes of the sockets of this network namespace that listen on a TCP port.

    Args:
        net: folder with the kernel's files ``tcp`` and ``tcp6``, which name listening sockets first.
        port: the port.
    """
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), (net / name).open("rb") as file:
            next(file, b"")
            for line in file:
                words = line.split()
                if words[3] != _LISTEN:
                    break
                if int(words[1].rpartition(b":")[2], 16) == port:
                    found.add(int(words[9]))
    return found


class _Question:
    """A question to a RAS service, and what has arrived of its answer.

    Attributes:
        t_ns, mono_ns: time at which it was asked.
        data: what has arrived.

    Raises:
        OSError: nobody listens there.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self.data = bytearray()
        self._socket = socket.create_connection(address, _CONNECT_S)
        self.t_ns, self.mono_ns = time.time_ns(), time.monotonic_ns()
        try:
            self._socket.sendall(_QUESTION)
        except OSError:
            self._socket.close()
            raise

    def has_ended(self, wait_s: float) -> bool:
        """Read what has arrived within a time; True at the end of the connection, or if the answer is too long."""
        deadline_s = time.monotonic() + wait_s
        while len(self.data) <= _MAX_BYTES:
            self._socket.settimeout(max(0.001, deadline_s - time.monotonic()))
            try:
                more = self._socket.recv(1 << 16)
            except TimeoutError:
                return False
            except OSError:  # the process has ended
                return True
            if not more:
                return True
            self.data += more
        return True

    def answer(self) -> Any:
        """Return the answer.

        Raises:
            ValueError: it is damaged, or ends early.
            _NoJsonError: the service does not answer in JSON.
        """
        protocol, answer, rest = (bytes(self.data) + b"\n\n").split(b"\n", 2)
        if not b"SERVER PROTOCOL ".startswith(protocol[:16].upper()):
            raise _NoJsonError("what listens there is no RAS service of NCCL")
        if answer.strip().upper() not in (b"OK", b""):
            raise _NoJsonError("its RAS service has no JSON, which came with NCCL 2.28.7")
        found = parse_json(rest)
        check(found, _ANSWER)
        return found

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class NcclRasCollector:
    """Recorder of ``nccl-ras/``: a record per communicator and answer, and the states of ranks.

    The job's service is asked if a process of rank 0 listens for it on this node.
    """

    name = "nccl-ras"
    slow = True
    proc = PROC
    net = Path("/proc/net")

    def __init__(self, context: Context) -> None:
        self._folder, self._pids = context.folder, context.pids
        self.every_s = max(context.every_s, _EVERY_S)
        self._question: _Question | None = None
        self._find_due_s = self._ask_due_s = 0.0
        self._first_pids: set[int] = set()  # processes of rank 0
        self._refusal = ""
        self._version = ""
        self._counts = dict.fromkeys(("answers", "unanswered", "damaged", "of_other_jobs"), 0)
        self._states: dict[tuple[str, str, int], str] = {}
        self._operations: dict[tuple[str, str], dict[int, int]] = {}

    def check(self) -> Check:
        """Check that NCCL's variables do not turn the service off."""
        if os.environ.get("NCCL_RAS_ENABLE") == "0":
            return Check("unavailable", "NCCL_RAS_ENABLE=0 turns NCCL's RAS service off", "unset NCCL_RAS_ENABLE")
        address = os.environ.get("NCCL_RAS_ADDR") or ADDRESS
        try:
            _, port = parse_address(address)
        except ValueError as error:
            return Check("unavailable", f"NCCL_RAS_ADDR={error}", "set it to HOST:PORT, or unset it")
        who = "a process" if listening_inodes(self.net, port) else "nothing"
        what = f"asks NCCL's RAS service (2.28.7 or later) on the node of rank 0, at {address}"
        return Check("ok", f"{what}, where {who} listens now")

    def start(self) -> None:
        """Do nothing: the job begins now, and the logs with the first answer."""

    def _open(self) -> None:
        about = {"collector": self.name, "source": f"RAS service of NCCL {self._version}", "every_s": self.every_s}
        self._writer = RecordWriter(self._folder / NCCL_RAS_REC, _FIELDS, about)
        self._ranks = JsonLinesWriter(self._folder / NCCL_RAS_JSONL)

    def sample(self) -> None:
        """Ask, or read what has arrived since."""
        if self._question is None:
            self._ask()
        self._read(_LOOK_S)

    def stop(self) -> dict[str, Any]:
        """Wait a second for an open answer, and close the logs.

        Returns:
            ``answers``; questions ``unanswered``, and answers that were ``damaged`` or ``of_other_jobs``; ``reason``:
            the version of NCCL, or why there is no answer.
        """
        try:
            self._read(_END_S)
        finally:
            self._end_question()
            if self._counts["answers"]:
                self._writer.close()
                self._ranks.close()
        if self._counts["answers"]:
            said = f"{counted(self._counts['answers'], 'answer')} of the RAS service of NCCL {self._version}"
            return self._counts | {"reason": said}
        why = self._refusal or "no process of rank 0 on this node listened for NCCL's RAS service"
        if any(self._counts.values()):
            why = "NCCL's RAS service gave no answer that can be used"
        remedy = f"{NOT_NEEDED}, without NCCL and on the nodes of other ranks; else use NCCL 2.28.7 or later"
        return self._counts | {"state": "unavailable", "reason": why, "remedy": remedy}

    def _ask(self) -> None:
        now_s = time.monotonic()
        if self._refusal or now_s < max(self._find_due_s, self._ask_due_s):
            return
        begun_s = time.thread_time()
        address = self._find()
        self._find_due_s = now_s + (time.thread_time() - begun_s) / _COST_SHARE
        if address is None:
            return
        try:
            self._question = _Question(address)
        except OSError:
            self._counts["unanswered"] += 1

    def _find(self) -> tuple[str, int] | None:
        """Return the address at which a process of rank 0 listens for questions."""
        environments = {pid: environment_of(pid, self.proc) for pid in self._pids()}
        first = {pid: variables for pid, variables in environments.items() if rank_in(variables) == 0}
        self._first_pids = set(first)
        for pid, variables in first.items():
            with contextlib.suppress(ValueError):
                address = parse_address(variables.get("NCCL_RAS_ADDR") or ADDRESS)
                if listening_inodes(self.net, address[1]) & socket_inodes(pid, self.proc):
                    return address
        return None

    def _read(self, wait_s: float) -> None:
        """Read what has arrived of the answer, and record it when it is whole."""
        question = self._question
        if question is None:
            return
        if not question.has_ended(wait_s):
            if time.monotonic_ns() - question.mono_ns > _ANSWER_S * 1e9:
                self._counts["unanswered"] += 1
                self._end_question()
            return
        self._end_question()
        if not question.data:
            self._counts["unanswered"] += 1
            return
        if len(question.data) > _MAX_BYTES:
            self._refusal = f"an answer of its RAS service has more than {_MAX_BYTES >> 20} MiB"
            return
        self._ask_due_s = time.monotonic() + len(question.data) / _BYTES_PER_S
        try:
            answer = question.answer()
        except _NoJsonError as error:
            self._refusal = str(error)
        except ValueError:
            self._counts["damaged"] += 1
        else:
            self._record(answer, question)

    def _end_question(self) -> None:
        if self._question is not None:
            self._question.close()
            self._question = None

    def _record(self, answer: Mapping[str, Any], question: _Question) -> None:
        communicators = answer["communicators"]
        pids = {one["pid"] for communicator in communicators for one in _ranks_of(communicator)}
        # jobs of one user may share the address, and any of them may have answered
        if pids and not pids & self._first_pids:
            self._counts["of_other_jobs"] += 1
            return
        if not self._counts["answers"]:
            self._version = answer["nccl_version"][:40]
            self._open()
        self._counts["answers"] += 1
        rows, states, operations = [], {}, {}
        for communicator in communicators:
            key = communicator["hash"], communicator["secondary_hash"]
            counts = {one["rank"]: sum(one["collective_counts"].values()) for one in communicator["ranks"]}
            operations[key] = counts
            if counts:
                rows.append((question.t_ns, question.mono_ns, *_row(communicator, counts)))
            behind = _behind(counts) if counts == self._operations.get(key) else set()
            for one, state in _states_of(communicator, behind):
                place = (*key, one["rank"])
                states[place] = state
                if state != self._states.get(place, RAS_ANSWERS):
                    self._note(question.t_ns, communicator, one, state, counts)
        self._states, self._operations = states, operations
        self._writer.append_many(rows)

    def _note(
        self, t_ns: int, communicator: Mapping[str, Any], one: Mapping[str, Any], state: str, counts: dict[int, int]
    ) -> None:
        line = {"t_ns": t_ns, "communicator": communicator["hash"], "size": communicator["size"]}
        line |= {name: one[name] for name in _PLACE} | {"state": state}
        if state == RAS_BEHIND:
            line |= {"operations": counts[one["rank"]], "most_operations": max(counts.values())}
        self._ranks.append(line)


def _ranks_of(communicator: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*communicator["ranks"], *communicator["missing_ranks"]]


def _has_failed(status: Mapping[str, Any]) -> bool:
    return any(status[name] not in (_SUCCESS, _IN_PROGRESS) for name in ("init_state", "async_error"))


def _row(communicator: Mapping[str, Any], counts: Mapping[int, int]) -> tuple[int, ...]:
    """Return the columns of a communicator; ``counts`` are the collectives that each of its ranks has launched."""
    missing = [one["status"] for one in communicator["missing_ranks"]]
    return (
        int(communicator["hash"], 16),
        communicator["size"],
        len(counts),
        len(missing),
        sum(one["unresponsive"] for one in missing),
        sum(one["considered_dead"] for one in missing),
        sum(_has_failed(one["status"]) for one in communicator["ranks"]),
        min(counts.values()),
        max(counts.values()),
    )


def _behind(counts: Mapping[int, int]) -> set[int]:
    """Return ranks that have launched fewer collectives than others, those furthest behind."""
    least, most = min(counts.values(), default=0), max(counts.values(), default=0)
    return {rank for rank, count in counts.items() if count == least < most}


def _states_of(communicator: Mapping[str, Any], behind: set[int]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield the ranks of a communicator with their states."""
    for one in communicator["ranks"]:
        yield one, "failed" if _has_failed(one["status"]) else RAS_BEHIND if one["rank"] in behind else RAS_ANSWERS
    for one in communicator["missing_ranks"]:
        status = one["status"]
        yield one, "dead" if status["considered_dead"] else "unresponsive" if status["unresponsive"] else "missing"
