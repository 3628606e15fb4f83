"""`python -m pronghorn.cli`."""

import sys

from pronghorn.cli import main

if __name__ == "__main__":
    sys.exit(main())
