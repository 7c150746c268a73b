"""Runs a sender or receiver for a Python program in a helper process: a fresh interpreter with one thread.

Sender and receiver fork their workers and set signal handlers. A notebook, a thread or a program with an event loop can
do neither safely, so library calls start this process and talk to it over a pair of sockets. It has a session of its
own, where no Ctrl-C of a terminal reaches it, and it ends when its pair is closed: also when its parent is killed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ringtap.core.errors import MeasurementError, RingtapError, RingtapWarning, UsageError, exit_words
from ringtap.core.terminal_escaping import fill_standard_descriptors

if TYPE_CHECKING:
    from ringtap.trafficgen.calibrate_host_limits import Calibration
    from ringtap.trafficgen.receiver.receiver import ReceiveOptions
    from ringtap.trafficgen.sender.options import SendOptions

_END_PATIENCE_S = 15.0  # the sender and the receiver wait 10 s for their own processes


class Warned(NamedTuple):
    """A sentence that the caller should read."""

    sentence: str


class Progress(NamedTuple):
    """Seconds since the launch, and those of the whole plan."""

    passed_s: float
    all_s: float


class Failed(NamedTuple):
    """The error that ended the work, by its exit code."""

    sentence: str
    exit_code: int


class HelperResult(NamedTuple):
    """The result of the work."""

    result: Any


class Helper:
    """Parent's side of a helper process, as a context manager: the process has ended after the block.

    Args:
        folder: temporary folder, which the process removes when it ends, even if its parent is killed; None: none.

    Raises:
        UsageError: no interpreter can be started.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def __enter__(self) -> Helper:
        self._connection, childs_end = Pipe()
        number = childs_end.fileno()
        # modules are found where this process finds them, as with multiprocessing's "spawn"
        code = f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!r}; "
        arguments = f"{number}, {self._folder and str(self._folder)!r}"
        code += f"from ringtap.trafficgen import helper_process; helper_process.main({arguments})"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[number],
                start_new_session=True,
            )
        except OSError as error:
            self._connection.close()
            raise UsageError(f"no Python interpreter can be started ({sys.executable}): {error.strerror}") from error
        finally:
            childs_end.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        try:
            self._process.wait(_END_PATIENCE_S)
        except BaseException as error:  # its own children end with it
            self._process.kill()
            self._process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise

    @property
    def pid(self) -> int:
        """Process ID."""
        return self._process.pid

    def ask(self, work: str, *arguments: object) -> None:
        """Start its work, once: ``serve``, ``send`` or ``calibrate``.

        Raises:
            MeasurementError: the process died.
        """
        try:
            self._connection.send((work, arguments))
        except OSError as error:
            raise self._loss() from error

    def receive(self) -> Any:
        """Return the next message: an address, ``Progress`` or ``HelperResult``; warn of what it warns of.

        Raises:
            UsageError: the work cannot be done as asked.
            MeasurementError: the work failed, or the process died.
        """
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError) as error:
                raise self._loss() from error
            if isinstance(message, Failed):
                raise (UsageError if message.exit_code == UsageError.exit_code else MeasurementError)(message.sentence)
            if not isinstance(message, Warned):
                return message
            warnings.warn(message.sentence, RingtapWarning, stacklevel=3)  # of the caller of `send`

    def stop(self) -> None:
        """Ask it to end its work; its result still arrives."""
        with suppress(OSError):  # it has ended: `receive` finds out why
            self._connection.send(None)

    def result(self) -> Any:
        """Return the result of the work, after all other messages.

        Raises:
            UsageError: the work cannot be done as asked.
            MeasurementError: the work failed, or the process died.
        """
        while not isinstance(message := self.receive(), HelperResult):
            pass
        return message.result

    def _loss(self) -> MeasurementError:
        try:
            code = self._process.wait(_END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return MeasurementError(f"the traffic's process (pid {self.pid}) has closed its connection")
        return MeasurementError(f"the traffic's process (pid {self.pid}) ended unexpectedly with {exit_words(code)}")


def _serve(parent: Connection, options: ReceiveOptions) -> dict[str, Any]:
    from ringtap.trafficgen.receiver.receiver import Receiver

    return Receiver(options, parent).run()


def _send(parent: Connection, plan: Path, options: SendOptions) -> dict[str, Any]:
    from ringtap.core.flow_plan_file import PlanFile
    from ringtap.trafficgen.calibrate_host_limits import load
    from ringtap.trafficgen.sender.sender import Sender

    def tell(message: object) -> None:
        with suppress(OSError):  # the parent has ended, which the sender notices
            parent.send(message)

    calibration = load()
    sender = Sender(
        PlanFile(plan),
        options if calibration is None else calibration.applied_to(options),
        parent,
        lambda sentence: tell(Warned(sentence)),
        lambda passed_s, all_s: tell(Progress(passed_s, all_s)),
    )
    if calibration is not None and (doubt := calibration.doubt(sender)):
        tell(Warned(doubt))
    return sender.run() | {"first_failure": sender.first_failure}


def _calibrate(parent: Connection) -> Any:
    from ringtap.trafficgen.calibrate_host_limits import calibrate

    return calibrate(until=parent)


def calibrate() -> Calibration:
    """Measure this host in a helper process, which takes 10 s.

    Raises:
        MeasurementError: flows failed over loopback.
    """
    with Helper() as helper:
        helper.ask("calibrate")
        result: Calibration = helper.result()
    return result


_WORK: dict[str, Callable[..., Any]] = {"serve": _serve, "send": _send, "calibrate": _calibrate}


def main(number: int, folder: str | None) -> None:
    """Do what the parent asks for over the socket with this number, answer, wait for its end, remove the folder."""
    fill_standard_descriptors()
    parent = Connection(number)
    try:
        with suppress(EOFError, OSError, KeyboardInterrupt):  # the parent has ended
            work, arguments = parent.recv()
            try:
                answer: NamedTuple = HelperResult(_WORK[work](parent, *arguments))
            except RingtapError as error:
                answer = Failed(str(error), error.exit_code)
            parent.send(answer)
            while True:
                parent.recv()
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
