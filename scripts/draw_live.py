"""Draw the live view of a run that is being written, as it is some seconds later, at 80 x 24 characters."""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

from ringtap.analysis.live.build_snapshot import SnapshotSource
from ringtap.analysis.live.poller import Poller
from ringtap.analysis.live.terminal_app import LiveApp


async def draw(run: Path, seconds: float) -> str:
    """Watch a run, and return the picture as SVG."""
    poller = Poller(SnapshotSource(run).take)
    poller.start()
    app = LiveApp(run, lambda: poller.latest)
    async with app.run_test(size=(80, 24)) as pilot:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            await pilot.pause(0.2)
        picture = app.export_screenshot(title=f"ringtap live {run}")
    poller.finish()
    return picture


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    parser.add_argument("--seconds", type=float, default=10.0, help="time to watch before (10)")
    options = parser.parse_args()
    options.picture.write_text(asyncio.run(draw(options.run, options.seconds)))


if __name__ == "__main__":
    main()
