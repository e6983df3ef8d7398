"""``python -m neuvar`` is the same as ``neuvar``."""

import sys

from neuvar.cli import main

if __name__ == "__main__":
    sys.exit(main())
