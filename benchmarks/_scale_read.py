"""Program that measures the time in which Dask workers read captures.

python benchmarks/_scale_read.py SCHEDULER COUNTS FILE...

COUNTS (``1,2,5,10``) are numbers of files to read at a time, until all have been read, without a cache. The last line
contains the seconds until the workers are ready, and for each number the mean seconds of a reading, and the packets and
bytes on the wire of all files.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import _checkout  # noqa: F401

from ringtap.analysis.dask_workers import workers
from ringtap.analysis.pcap import cache
from ringtap.analysis.pcap.reader import read_captures
from ringtap.core.errors import RingtapError


def main() -> int:
    """Run the command line above; return the exit code."""
    scheduler, counts, files = sys.argv[1], sys.argv[2], list(map(Path, sys.argv[3:]))
    begun_s = time.perf_counter()
    try:
        with workers(scheduler) as executor:
            read_captures(files[:2], cache=False, bin_s=1.0, workers=executor)  # afterwards every worker is ready
            times = {"start_s": time.perf_counter() - begun_s, "sets": []}
            for count in map(int, counts.split(",")):
                for file in files:
                    cache.places(file)[0].unlink(missing_ok=True)
                groups = [files[first : first + count] for first in range(0, len(files), count)]
                begun_s = time.perf_counter()
                found = [read_captures(group, workers=executor).counts for group in groups]
                item = {"files": count, "groups": len(groups), "seconds": (time.perf_counter() - begun_s) / len(groups)}
                times["sets"].append(item | {name: sum(one[name] for one in found) for name in ("packets", "bytes")})
    except RingtapError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
