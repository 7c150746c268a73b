"""Real sshds on the hosts of a standing testbed, with keys, configuration and known hosts of their own, for tests.

Everything is in one folder, and in the testbed. The homes of sessions are folders there, too, with a .bashrc that says
what login shells say. The ssh of `SshServers.path` runs on the first host, which plays the controller's machine.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import pytest

from ringtap.agents.hosts.ssh import SshHost
from ringtap.agents.node.job_processes import descendants
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.collectors.kernel_files import text_of

BASHRC = """\
echo "Welcome to a busy server; {"
printf '\\0 ringtap-hos \\033[1mno newline' >&2
echo '"op": 1}\\n' >&2
"""
SERVER = """\
Port 22
ListenAddress {address}
HostKey {folder}/host.{host}
AuthorizedKeysFile {folder}/user.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin yes
Banner {folder}/banner
SetEnv HOME={home} TESTED_BY={tester} PYTHONPATH={modules} {more}
"""
CLIENT = """\
Host *
  IdentityFile {folder}/user
  IdentitiesOnly yes
  IdentityAgent none
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""


class SshServers:
    """An sshd on every host of a testbed but its first; used as a context manager.

    Args:
        folder: a new folder.
        spec: the testbed.
    """

    def __init__(self, folder: Path, spec: TestbedSpec) -> None:
        self.folder, self._spec = folder, spec
        self.names = spec.hosts[1:]
        self.config = folder / "ssh_config"
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "SshServers":
        if os.geteuid() != 0:
            pytest.skip("needs root: only root's sshd gives sessions the rights of their users")
        self.folder.mkdir()
        (self.folder / "banner").write_text("Nobody may come in here.\n")
        for name in ("user", *(f"host.{host}" for host in self.names)):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(command, check=True)
        keys = [f"{self.address(host)} {(self.folder / f'host.{host}.pub').read_text()}" for host in self.names]
        (self.folder / "known_hosts").write_text("".join(keys))
        aliases = [f"Host {host}.lab\n  HostName {self.address(host)}\n  User root\n" for host in self.names]
        self.config.write_text("".join(aliases) + CLIENT.format(folder=self.folder))
        client = self._enter(self._spec.hosts[0], "/usr/bin/ssh")
        (self.folder / "bin").mkdir()
        (self.folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
        (self.folder / "bin" / "ssh").chmod(0o755)
        for host in self.names:
            self.start(host)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in list(self._running):
            self.kill(host)

    def _enter(self, host: str, *command: str) -> list[str]:
        return [sys.executable, "-m", "ringtap.agents.testbed.run_on_host", self._spec.name, host, *command]

    def run(self, host: str, *command: str) -> str:
        """What a command on a host of the testbed answers."""
        done = subprocess.run(self._enter(host, *command), capture_output=True, text=True, check=True)
        return done.stdout

    def address(self, host: str) -> str:
        """A host's address."""
        return self._spec.training_ip(host)

    @property
    def path(self) -> str:
        """$PATH with the ssh of the controller's machine in front."""
        return f"{self.folder / 'bin'}:{os.environ['PATH']}"

    def home(self, host: str) -> Path:
        """Home of sessions on a host."""
        return self.folder / f"home.{host}"

    def hosts(self) -> list[SshHost]:
        """The servers, each with a disk (a folder) of its own."""
        return [SshHost(host, f"{host}.lab", workdir=f"{self.folder}/disk of '{host}'") for host in self.names]

    def start(self, host: str, before: str = "true", variables: str = "") -> None:
        """Start a host's sshd; returns when it listens.

        Args:
            host: the host.
            before: shell words to run first, in the mount namespace that the host's sessions will have.
            variables: more environment variables of sessions, as sshd_config(5) has them.
        """
        self.home(host).mkdir(exist_ok=True)
        (self.home(host) / ".bashrc").write_text(BASHRC)
        config = self.folder / f"sshd_config.{host}"
        home, tester = self.home(host), os.environ["TESTED_BY"]
        modules = os.environ.get("PYTHONPATH", "")  # the hosts run the code that is tested
        about = {"address": self.address(host), "folder": self.folder, "host": host, "home": home, "tester": tester}
        text = SERVER.format(**about, modules=modules, more=variables)
        config.write_text(text)
        words = f"{before} && mkdir -p /run/sshd && exec /usr/sbin/sshd -D -e -f '{config}'"
        with (self.folder / f"sshd.{host}.log").open("wb") as log:
            self._running[host] = subprocess.Popen(
                self._enter(host, "sh", "-c", words), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 10
        while "Server listening" not in (self.folder / f"sshd.{host}.log").read_text():
            assert time.monotonic() < deadline, (self.folder / f"sshd.{host}.log").read_text()
            time.sleep(0.02)

    def root(self, host: str) -> Path:
        """The root folder of a host's sessions, which may have disks of their own."""
        return Path(f"/proc/{self._running[host].pid}/root")

    def processes(self, host: str) -> list[int]:
        """The sshd of a host and everything below it."""
        return descendants([self._running[host].pid])

    def sessions(self, host: str) -> list[int]:
        """What a host's sshd has started."""
        sshd = next(pid for pid in self.processes(host) if text_of(f"/proc/{pid}/comm") == "sshd")
        return [pid for pid in descendants([sshd]) if pid != sshd]

    def kill(self, host: str) -> None:
        """End a host's sshd and everything below it at once."""
        for pid in self.processes(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._running.pop(host).wait()
