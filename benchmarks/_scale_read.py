"""Program that measures the time in which Dask workers read captures.

python benchmarks/_scale_read.py SCHEDULER COUNTS FILE...

COUNTS (``1,2,5,10``) are numbers of files to read, one set after the other, each without a cache. The last line
contains the seconds until the workers are ready, and for each set its seconds, packets and bytes on the wire.
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
from ringtap.errors import RingtapError


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
                begun_s = time.perf_counter()
                found = read_captures(files[:count], workers=executor)
                item = {"files": count, "seconds": time.perf_counter() - begun_s}
                times["sets"].append(item | {name: found.counts[name] for name in ("packets", "bytes")})
    except RingtapError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
