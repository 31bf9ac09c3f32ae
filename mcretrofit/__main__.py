"""`python -m mcretrofit`."""

from __future__ import annotations

import sys

from mcretrofit.cli import main

if __name__ == "__main__":
    sys.exit(main())
