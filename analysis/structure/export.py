"""Export of a job's structure: figures with their data, tables, structure.json."""

from __future__ import annotations

import json
from pathlib import Path

from ringtap.analysis.structure.figures import draw
from ringtap.analysis.structure.structure import Structure
from ringtap.errors import UsageError


def write(found: Structure, folder: Path, samples: int | None = None) -> list[Path]:
    """Write figures, tables and structure.json into a folder, which is created; return the files' paths.

    Args:
        found: the structure.
        folder: target folder; files of the same names are overwritten.
        samples: bins of the moving average in the figure of the flows; None: `figures.SAMPLES` at most.

    Raises:
        UsageError: the folder or a file cannot be written.
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
