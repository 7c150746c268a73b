"""Reaches servers that share no files with this machine, with the system's OpenSSH client."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import which

import ringtap
from ringtap.agents.hosts import message_frames
from ringtap.agents.hosts.copy_growing_files import FrameWriter
from ringtap.agents.hosts.remote import LOST_CODE, WORKER_COMMAND, Answer, Hosts
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.parent_death import die_with_parent, run_helper
from ringtap.core.run_directory import RunDirectory
from ringtap.core.run_directory_schema import RUN_JSON

_SETTINGS_S = 10.0
_TRY_S = 20.0
_STDERR_BYTES = 1 << 16
_SSH_FAILED = 255


def jump_hosts(ssh: Sequence[str], destination: str) -> tuple[str, ...]:
    """Return the jump hosts on the way to a destination, in the order in which they are passed; empty if unknown.

    Args:
        ssh: ssh and its options.
        destination: a destination as ssh(1) takes it.
    """
    try:
        done = run_helper([*ssh, "-G", "--", destination], _SETTINGS_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    settings = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    hops = settings.get("proxyjump", "none")
    return () if hops == "none" else tuple(hops.split(","))


def failing_jump(ssh: Sequence[str], hops: Sequence[str]) -> tuple[str, str] | None:
    """Return the first jump host that ssh cannot use, and ssh's message; None if all can be used or it is not known.

    Args:
        ssh: ssh and its options.
        hops: the jump hosts, in the order in which they are passed.
    """
    for number, hop in enumerate(hops):
        jumps = ["-J", ",".join(hops[:number])] if number else []
        target = hop if "://" in hop else f"ssh://{hop}"  # a hop may end in a port, which ssh accepts only in this form
        with tempfile.TemporaryFile() as stderr:
            try:
                done = subprocess.run(
                    [*ssh, *jumps, "--", target, "true"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    start_new_session=True,  # ssh to an earlier hop might prompt on the terminal
                    check=False,
                    timeout=_TRY_S,
                    preexec_fn=die_with_parent(),
                )
            except (OSError, subprocess.TimeoutExpired):  # a hanging login is not a fault of the jump host
                return None
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _STDERR_BYTES))
            message = stderr.read().decode(errors="replace")
        if done.returncode == _SSH_FAILED:
            return hop, message
    return None


_CONNECT_S = 10
_ANSWER_S = 20.0
_CLEAN_S = 60.0
_MAX_NAME_BYTES = 200  # bytes
_MAX_MESSAGE_LENGTH = 300  # characters
# separates the login's standard error from ringtap's; sh prints it, as login shells differ in their redirections
_STARTED = "ringtap is being started"
_START = f'echo "{_STARTED}" >&2; exec "$0" "$@"'
_TRY = " (try: ssh "
# commands that hang or print must not run at a login without a terminal
_LOGIN = "begin its login files (.bashrc) with [ -t 1 ] || return, as ringtap logs in without a terminal"
_NOT_PASSED_ON = "administratively prohibited"
# messages of ssh that follow from an earlier error of it or of the ssh to a jump host; ssh ends its lines in CR LF
_AFTERMATH = re.compile(
    r"kex_exchange_identification: |stdio forwarding failed|Connection (to|closed by|reset by) UNKNOWN port|"
    r"Host key verification failed"
)
# the user's configuration applies, but prompts and other uses of the connection are off
_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": _CONNECT_S,
    "ServerAliveInterval": 3,  # ends ssh even if this process was killed and the host is lost
    "ServerAliveCountMax": 4,
    "ClearAllForwardings": "yes",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
}


@dataclass(frozen=True)
class SshHost:
    """Server reached over ssh.

    Attributes:
        name: name of the server in the run.
        destination: a destination as ssh(1) takes it: a host, ``user@host`` or a name of the user's configuration.
        python: interpreter on the server that has ringtap.
        workdir: folder on the server for the files of runs; empty: ``/tmp/ringtap-<user>``.
    """

    name: str
    destination: str
    python: str = sys.executable
    workdir: str = ""


@dataclass(frozen=True)
class Leftover:
    """Folder that a sweep left on a host.

    Attributes:
        host: name of the host.
        path: path of the folder on the host.
        size_bytes: total size of its files.
        run: the run directory that it belongs to, as ``machine:path``.
    """

    host: str
    path: str
    size_bytes: int
    run: str


class SshHosts(Hosts):
    """Servers, each reached over one connection; files below their run directories are copied here as they grow.

    Args:
        hosts: the servers.
        config: a configuration file for ssh that replaces the user's.
        all_needed: if True, an unusable host is an error; otherwise it counts as lost.

    Raises:
        UsageError: a server cannot be reached, or does not have this version of ringtap, and all are needed.
    """

    connect_s = _CONNECT_S + 20.0

    def __init__(self, hosts: Sequence[SshHost], *, config: Path | None = None, all_needed: bool = True) -> None:
        super().__init__([host.name for host in hosts])
        if not which("ssh"):
            raise UsageError("ssh is not installed on this machine: install an OpenSSH client")
        for host in hosts:
            if host.workdir and not host.workdir.startswith("/"):
                raise UsageError(f"workdir {host.workdir!r} of {host.name} is not an absolute path")
        self._hosts = {host.name: host for host in hosts}
        self._config = ["-F", str(config)] if config else []
        self._receiver = FrameWriter(self._forward)
        self._runs: dict[Path, str] = {}  # folder names on the hosts, by run directory here
        self._remote_logs: dict[tuple[str, Path], str] = {}  # paths on the hosts of logs outside run directories
        self._workdirs: dict[str, str] = {}
        self._token = secrets.token_hex(3)
        self._jumps: dict[tuple[str, ...], tuple[str, str] | None] = {}  # first unusable jump host and the reason
        self._jump_lock = threading.Lock()
        try:
            self._connect(all_needed)
        except BaseException:
            self.close()
            raise

    def _connect(self, all_needed: bool) -> None:
        """Connect to all hosts in parallel."""
        for host in self.names:
            self.channel(host)
        failures: dict[str, list[str]] = {}
        for host in self.names:
            try:
                facts = self.channel(host).facts.result()
                self._workdirs[host] = self._hosts[host].workdir or str(facts["workdir"])
            except MeasurementError:
                reason = self.channel(host).lost.partition(_TRY)[0]  # hosts behind one jump host often share it
                failures.setdefault(reason, []).append(host)
        if failures and all_needed:
            problems = [
                f"{', '.join(hosts)} cannot be used over ssh: {self.channel(hosts[0]).lost}"
                for hosts in failures.values()
            ]
            raise UsageError("; ".join(problems))

    def command(self, host: str) -> list[str]:
        """Return the ssh command of a host; of the plan, only the interpreter's path reaches the remote shell."""
        target = self._hosts[host]
        # starts in /, as a folder named ringtap in the home would be taken for the package
        start = f"exec sh -c {shlex.quote(_START)} {shlex.quote(target.python)}"
        worker = f'cd /; {start} {shlex.join(WORKER_COMMAND)} "$HOME"'
        return [*self._ssh(), "--", target.destination, worker]

    def _ssh(self) -> list[str]:
        options = [word for name, value in _OPTIONS.items() for word in ("-o", f"{name}={value}")]
        return ["ssh", "-T", *self._config, *options]

    def explain(self, host: str, stderr: str, why: str, code: int) -> str:
        """Return the reason for the loss of a host, with the last message of ssh, the login or the interpreter."""
        login, started, output = stderr.partition(_STARTED)
        last = _last_message(output if started else login)
        if started and host not in self._workdirs and not why and code != LOST_CODE:
            return self._no_worker(host, output, last, code)
        destination = self._hosts[host].destination
        if started:
            reason = " - ".join(filter(None, [why or "its connection ended", last]))
            hops = jump_hosts(self._ssh(), destination) if why or code == LOST_CODE else ()
            return reason + (f" (the way there leads over the jump host {', '.join(hops)})" if hops else "")
        if why:
            reason = f"{why}{f'; its login said at last: {last}' if last else ''}; {_LOGIN}"
        elif code != LOST_CODE:
            reason = f"its login ended with exit code {code} before ringtap was started"
            reason += f", and said at last: {last}" if last else ""
        else:
            hops = jump_hosts(self._ssh(), destination)
            if found := self._failing_jump(hops):
                return f"the jump host {found[0]} cannot be used: {found[1]}{_TRY}{shlex.quote(found[0])} true)"
            reason = " - ".join(filter(None, ["its connection ended", last]))
            if hops and _NOT_PASSED_ON in last:
                reason += f"; the jump host {hops[-1]} does not pass connections on (AllowTcpForwarding of its sshd)"
            elif hops:
                reason = f"{reason.removesuffix('.')}; the jump host {hops[-1]} can be used"
        return f"{reason}{_TRY}{shlex.quote(destination)} true)"

    def _failing_jump(self, hops: tuple[str, ...]) -> tuple[str, str] | None:
        """Return the first unusable jump host and the reason; it is tried once for all hosts behind it."""
        with self._jump_lock:
            if hops not in self._jumps:
                failing = failing_jump(self._ssh(), hops)
                self._jumps[hops] = failing and (failing[0], _last_message(failing[1]))
            return self._jumps[hops]

    def _no_worker(self, host: str, output: str, last: str, code: int) -> str:
        """Return the reason that the host's interpreter did not start ringtap."""
        python = self._hosts[host].python
        advice = "name the interpreter that has ringtap as python in [[hosts]]"
        if code in (126, 127):
            return f"it has no program {python} that this user may run: {advice}"
        if re.search(r"No module named '?ringtap", output):
            return f"its {python} has no ringtap: install ringtap {ringtap.__version__} there, or {advice}"
        return f"its {python} cannot start ringtap: {last or f'exit code {code}'}"

    def python(self, host: str) -> str:
        """Python interpreter on a host that has ringtap."""
        return self._hosts[host].python

    def path(self, host: str, path: Path) -> str:
        """Location of a path below a published run directory on a host.

        Raises:
            UsageError: the path is below no published run directory.
        """
        found = self._remote(host, path)
        if found is None:
            raise UsageError(f"{path} is below no run directory that {host} knows of")
        return found

    def _remote(self, host: str, path: Path) -> str | None:
        path = path.absolute()
        for run, name in self._runs.items():
            if path.is_relative_to(run):
                return str(self._folder(host, name) / path.relative_to(run))
        return None

    def _folder(self, host: str, name: str) -> Path:
        """Folder of a run on a host; its name differs by host, as two hosts may be one machine."""
        return Path(self._workdirs[host], f"{name}-{self.names.index(host)}")

    def log_path(self, host: str, log: Path) -> str:
        """Path on a host to which a command writes its output so that it arrives in a log file on this machine."""
        log = log.absolute()
        found = self._remote(host, log)
        if found is not None and any(log.is_relative_to(run / "nodes") for run in self._runs):
            return found
        if (host, log) not in self._remote_logs:
            key = f"{self._token}-words-{len(self._remote_logs)}"
            self._remote_logs[host, log] = str(self._folder(host, f"words-{self._token}") / key)
            self._receiver.expect(key, log, owner=host)
            item = {"op": "follow", "key": key, "workdir": self._workdirs[host], "path": self._remote_logs[host, log]}
            self.channel(host).tell(item)
        return self._remote_logs[host, log]

    def receive(self, host: str, item: Answer, data: bytes) -> None:
        """Write a chunk of a file that a host sends."""
        self._receiver.take(host, item, data)

    def publish(self, run: Path) -> None:
        """Announce a new run directory to every host.

        Raises:
            MeasurementError: a host does not accept it.
        """
        run = run.absolute()
        key = f"{os.fsdecode(os.fsencode(run.name)[:_MAX_NAME_BYTES])}-{self._token}-{len(self._runs)}"
        self._runs[run] = key
        self._receiver.expect(key, run, self._reference(run))
        waiting = []
        for host in self.names:
            item = {"op": "make", "key": key, "workdir": self._workdirs[host]}
            item |= {"path": self.path(host, run), "run": _origin(run)}
            waiting.append((host, self.channel(host).request(item).answer))
            for name in (RUN_JSON, "reference"):
                if (run / name).exists():
                    waiting.append((host, self._send(host, run / name)))
        for host, answer in waiting:
            _accepted(host, answer)

    def _reference(self, run: Path) -> str:
        """Return the run's reference node; if none is named, name the first host, as the hosts cannot elect one."""
        named = RunDirectory.open(run).info.get("reference")
        path = run / "reference"
        if not named and not path.exists():
            path.write_text(f"{self.names[0]}\n")
        return str(named or path.read_text().strip())

    def put(self, host: str, local: Path) -> None:
        """Copy a file below a published run directory to its `path` on a host.

        Raises:
            MeasurementError: the host does not accept it.
        """
        _accepted(host, self._send(host, local))

    def _send(self, host: str, local: Path) -> Future[Answer]:
        mode = stat.S_IMODE(local.stat().st_mode)
        with local.open("rb") as file:
            *chunks, (last, data) = _chunks(self.path(host, local), file.read(), mode)
        for item, chunk in chunks:
            self.channel(host).tell(item, chunk)
        return self.channel(host).request(last, data).answer

    def _forward(self, key: str, name: str, content: bytes, source: str, target: str | None) -> None:
        """Send a file of a host to one other host, or to all others."""
        for host, channel in list(self._channels.items()):
            if host != source and target in (None, host):
                for item, chunk in _chunks(str(self._folder(host, key) / name), content, 0o600):
                    channel.tell(item, chunk)

    def gather(self, run: Path) -> None:
        """Wait until all files below a published run directory have arrived from the hosts; lost hosts are skipped.

        Raises:
            MeasurementError: a file could not be written here.
        """
        del run  # the files of a host arrive in order in one stream
        live = [channel for channel in self._channels.values() if not channel.lost]
        waiting = [channel.request({"op": "sync"}).answer for channel in live]
        for answer in waiting:
            with suppress(MeasurementError):
                answer.result()
        if self._receiver.failures:
            failures = [
                f"{host}: {why}; {host} keeps its files in {self._workdirs[host]}"
                for host, why in self._receiver.failures.items()
            ]
            raise MeasurementError("; ".join(failures))

    def clean(self, run: Path | None = None) -> list[Leftover]:
        """Remove folders that ended sweeps left on the hosts; lost hosts are skipped.

        Args:
            run: remove only folders of this run directory; None: those of all sweeps of this user.

        Returns:
            The removed folders.
        """
        waiting = []
        for host, workdir in self._workdirs.items():
            item = {"op": "clean", "workdir": workdir, "run": _origin(run.absolute()) if run else ""}
            waiting.append((host, self.channel(host).request(item).answer))
        found = []
        for host, answer in waiting:
            # a host may send anything
            with suppress(MeasurementError, FutureTimeoutError, KeyError, TypeError, ValueError):
                removed = answer.result(_CLEAN_S).get("removed", [])
                found += [Leftover(host, str(item["path"]), int(item["bytes"]), str(item["run"])) for item in removed]
        return found

    def close(self) -> None:
        """End all processes, copy the remaining files here, and remove the run folders on the hosts.

        The files of a host stay on it if not all of them could be copied. A lost host is not an error.
        """
        self.stop_all()
        with suppress(MeasurementError):
            self.gather(Path())
        waiting = []
        for host in self._workdirs:
            names = [*self._runs.values(), *([f"words-{self._token}"] if self._remote_logs else [])]
            for name in names if host not in self._receiver.failures else []:
                item = {"op": "remove", "path": str(self._folder(host, name))}
                with suppress(MeasurementError):
                    waiting.append(self.channel(host).request(item).answer)
        for answer in waiting:
            with suppress(MeasurementError, FutureTimeoutError):
                answer.result(_ANSWER_S)
        super().close()


def _last_message(output: str) -> str:
    """Return the last line of an output; lines of ssh that only follow from an earlier error are skipped."""
    lines = [line for line in output.splitlines(keepends=True) if line.strip()]
    while len(lines) > 1 and _AFTERMATH.match(lines[-1].strip()) and lines[-2].endswith("\r\n"):
        lines.pop()
    return lines[-1].strip()[:_MAX_MESSAGE_LENGTH] if lines else ""


def _origin(run: Path) -> str:
    """Return the name of a run directory in the marks of its folders on hosts: ``machine:path``."""
    return f"{os.uname().nodename}:{run}"


def _chunks(path: str, content: bytes, mode: int) -> list[tuple[Answer, bytes]]:
    """Return the frames that write a file on a host."""
    found = []
    for at in range(0, max(1, len(content)), message_frames.CHUNK_BYTES):
        chunk = content[at : at + message_frames.CHUNK_BYTES]
        whole = at + len(chunk) >= len(content)
        found.append(({"op": "put", "path": path, "at": at, "mode": mode, "whole": whole}, chunk))
    return found


def _accepted(host: str, answer: Future[Answer]) -> None:
    """Wait until a host has carried out a request.

    Raises:
        MeasurementError: the host refused, did not answer in time, or is lost.
    """
    try:
        why = answer.result(_ANSWER_S).get("why", "")
    except FutureTimeoutError:
        why = f"no answer within {_ANSWER_S:g} s"
    if why:
        raise MeasurementError(f"{host} does not take the run's files: {why}")
