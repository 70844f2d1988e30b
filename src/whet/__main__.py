"""Entry point of ``python -m whet``."""

import sys

from whet.cli import main

if __name__ == "__main__":
    sys.exit(main())
