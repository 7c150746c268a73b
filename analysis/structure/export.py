"""A job's structure on disk: figures with the numbers behind them, tables, structure.json."""

from __future__ import annotations

import json
from pathlib import Path

from ringtap.analysis.structure.figures import draw
from ringtap.analysis.structure.structure import Structure
from ringtap.errors import UsageError


def write(found: Structure, folder: Path, samples: int | None = None) -> list[Path]:
    """Write everything into a folder, which is made; returns the files' paths.

    Args:
        found: what was found.
        folder: where to; files of the same names are overwritten.
        samples: bins of the moving average in the figure of the flows; None: `figures.SAMPLES` at most.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths, captions = [], {}
        for drawn in draw(found, samples):
            paths += drawn.write(folder)
            captions[drawn.name] = drawn.caption
        for name, table in (("streams", found.table()), ("flow-rates", found.flow_rates)):
            paths.append(folder / f"{name}.csv")
            table.to_csv(paths[-1], index=False)
        paths.append(folder / "structure.json")
        data = found.to_json() | {"captions": captions}
        paths[-1].write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise UsageError(f"{error.filename or folder} cannot be written: {error.strerror}") from error
    return paths
