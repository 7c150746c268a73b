"""Headless browsers for tests: Chromium, through a pipe by the DevTools protocol, and Firefox, by Marionette."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
WAIT_S = 60.0
_TALL = 15_000  # what is below the end of a frame is not drawn
_OPTIONS = ("--headless", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe")
# what a browser looks for by itself has no address
_STAY_HOME = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1, EXCLUDE ::1"


class Browser:
    """A browser with one tab.

    Args:
        profile: its folder.

    Attributes:
        events: what it has reported of the domains that are enabled.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM
        read, write = os.pipe(), os.pipe()
        self.events: list[dict[str, Any]] = []
        self._to, self._from, self._rest, self._number = read[1], write[0], b"", 0
        # the browser reads commands from descriptor 3 and writes answers to 4
        redirect = f'exec "$0" "$@" 3<&{read[0]} 4>&{write[1]}'
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [
            "bash",
            "-c",
            redirect,
            CHROMIUM,
            *_OPTIONS,
            _STAY_HOME,
            *sandbox,
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        self._process = subprocess.Popen(command, pass_fds=(read[0], write[1]), stderr=subprocess.DEVNULL)
        os.close(read[0])
        os.close(write[1])
        self._session = ""
        try:
            targets = self.call("Target.getTargets")["targetInfos"]
            target = next(item["targetId"] for item in targets if item["type"] == "page")
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        except BaseException:
            self._process.kill()
            self.__exit__()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        os.close(self._to)  # the browser ends with its pipe
        self._process.wait(WAIT_S)
        os.close(self._from)

    def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(
            self._to, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        deadline = time.monotonic() + WAIT_S
        while True:
            while b"\0" in self._rest:
                text, _, self._rest = self._rest.partition(b"\0")
                answer = json.loads(text)
                if "method" in answer:
                    self.events.append(answer)
                if answer.get("id") == self._number:
                    assert "result" in answer, answer
                    return answer["result"]
            assert select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0], (
                f"no answer to {method}"
            )
            more = os.read(self._from, 1 << 16)
            assert more, f"the browser ended before it answered {method}"
            self._rest += more

    def open(self, url: str) -> None:
        """Go to a URL."""
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str, is_wanted: Callable[[Any], bool] = bool) -> Any:
        """Wait until an expression has a value that is wanted, and return it."""
        deadline = time.monotonic() + WAIT_S
        while not is_wanted(found := self.value(expression)):
            assert time.monotonic() < deadline, f"{expression} is {found!r}"
            time.sleep(0.05)
        return found


class Firefox:
    """A Firefox with one tab, which Marionette drives on loopback.

    Args:
        profile: the folder to make for it.
    """

    def __init__(self, profile: Path) -> None:
        assert FIREFOX
        profile.mkdir()
        (profile / "user.js").write_text('user_pref("marionette.port", 0);\nuser_pref("network.dns.disabled", true);\n')
        command = [FIREFOX, "--headless", "--no-remote", "--marionette", "--profile", str(profile)]
        home = os.environ | {"HOME": str(profile)}
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=home)
        self._number, self._rest = 0, b""
        try:
            deadline, port = time.monotonic() + WAIT_S, profile / "MarionetteActivePort"
            while not (port.is_file() and port.read_text()):
                assert time.monotonic() < deadline and self._process.poll() is None, "Firefox does not listen"
                time.sleep(0.05)
            self._socket = socket.create_connection(("127.0.0.1", int(port.read_text())), WAIT_S)
            assert self._message()["marionetteProtocol"] == 3
            self.call("NewSession")
        except BaseException:
            self._process.kill()
            self._process.wait(WAIT_S)
            raise

    def __enter__(self) -> Firefox:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(WAIT_S)

    def _message(self) -> Any:
        while b":" not in self._rest:
            self._receive()
        length, _, self._rest = self._rest.partition(b":")
        while len(self._rest) < int(length):
            self._receive()
        text, self._rest = self._rest[: int(length)], self._rest[int(length) :]
        return json.loads(text)

    def _receive(self) -> None:
        more = self._socket.recv(1 << 20)
        assert more, "Firefox ended"
        self._rest += more

    def call(self, command: str, **parameters: Any) -> Any:
        """Call a command of WebDriver, and return its value."""
        self._number += 1
        data = json.dumps([0, self._number, f"WebDriver:{command}", parameters]).encode()
        self._socket.sendall(b"%d:%s" % (len(data), data))
        kind, number, error, result = self._message()
        assert (kind, number, error) == (1, self._number, None), error
        return result["value"] if isinstance(result, dict) and "value" in result else result

    def open(self, page: Path, width: int) -> None:
        """Show a page in a frame of this width, as a window of Firefox has a least one; what follows is about it."""
        frame = page.with_name("frame.html")
        frame.write_text(f'<iframe src="{page.name}" style="width:{width}px;height:{_TALL}px;border:0"></iframe>')
        self.call("SwitchToFrame", id=None)
        self.call("Navigate", url=frame.as_uri())
        (found,) = self.call("FindElements", using="css selector", value="iframe")
        self.call("SwitchToFrame", element=next(iter(found.values())))

    def value(self, script: str) -> Any:
        """Return what the body of a function returns in the page."""
        return self.call("ExecuteScript", script=script, args=[])

    def pictures(self, selector: str) -> list[bytes]:
        """Return the elements of a CSS selector as PNG files."""
        found = self.call("FindElements", using="css selector", value=selector)
        shots = [self.call("TakeScreenshot", id=next(iter(one.values())), full=False, scroll=False) for one in found]
        return [base64.b64decode(shot) for shot in shots]
