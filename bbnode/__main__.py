"""`python -m bbnode` is the `bbnode` command."""

from __future__ import annotations

import sys

from bbnode.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
