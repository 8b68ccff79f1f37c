"""`python -m workmem`: the command line, for when its script is not on the path."""

from __future__ import annotations

import sys

from workmem.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
