"""`python -m pronghorn.unsloth script.py [its arguments]`: the same as `pronghorn run`."""

import sys

from pronghorn.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "run")
    sys.exit(main())
