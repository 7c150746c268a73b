"""Writes the result of a benchmark as one JSON object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_result(found: dict[str, Any], output: Path | None) -> None:
    """Print a result in the last line, and write it to a file if one is named."""
    text = json.dumps(found)
    if output:
        output.write_text(text)
    print(text)
