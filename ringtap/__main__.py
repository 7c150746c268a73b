"""``python -m ringtap``: the same as the ``ringtap`` command."""

import sys

from ringtap.cli import main

if __name__ == "__main__":
    sys.exit(main())
