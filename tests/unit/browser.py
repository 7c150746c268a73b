"""A headless Chromium for tests, driven through a pipe by the DevTools protocol."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WAIT_S = 60.0
_OPTIONS = ("--headless", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe")


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
        command = ["bash", "-c", redirect, CHROMIUM, *_OPTIONS, *sandbox, f"--user-data-dir={profile}", "about:blank"]
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
