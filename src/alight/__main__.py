"""`python -m alight` is `alight`."""

import sys

from alight.cli import main

if __name__ == "__main__":
    sys.exit(main())
