"""``python -m ringtap``: the same as the ``ringtap`` command."""

import sys

from ringtap.cli import main

sys.exit(main())
