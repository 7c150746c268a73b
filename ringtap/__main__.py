"""Runs the ``ringtap`` command as ``python -m ringtap``."""

import sys

from ringtap.cli import main

if __name__ == "__main__":
    sys.exit(main())
