"""``ringtap bundle``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def register(subparsers: Any, name: str, summary: str) -> None:
    """Add the ``bundle`` verb."""
    parser = subparsers.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=here, metavar="X.Y", help=f"version of Python there (default: {here})")
    parser.add_argument("--site", metavar="SITE", help="cluster, or a profile's path (default: as of ringtap submit)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(handler=_bundle)


def _bundle(options: argparse.Namespace) -> int:
    from ringtap.slurm.bundle import write_bundle
    from ringtap.slurm.sites import load_site
    from ringtap.units import format_size

    site = load_site(options.site)
    bundle = write_bundle(options.python, site, options.output)
    if options.json:
        print(json.dumps({"folder": str(bundle.folder), "files": bundle.files, "from_site": bundle.from_site}))
        return 0
    for name in bundle.files:
        print(f"  {name}")
    if bundle.from_site:
        print(f"  from the wheels of {site.name}: {', '.join(bundle.from_site)}")
    size = sum(path.stat().st_size for path in options.output.iterdir())
    print(f"Wrote {options.output} ({format_size(size)}) for {site.name}: Python {options.python}, {site.architecture}")
    print(f"Next: copy it to {site.name}, and there: ringtap submit --wheels DIR -- COMMAND")
    return 0
