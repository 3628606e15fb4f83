"""What a process of multiprocessing's methods spawn and forkserver imports as `__mp_main__`: the script, with the adaptor.

Python itself runs this module in the child (`Main.__spec__` in running.py names it), in place of the script's file.
"""

import os
import sys

from pronghorn.compat.scripts.running import SCRIPT, run, run_again

if __name__ == "__mp_main__":
    run_again(globals())
elif __name__ == "__main__":  # launchers that repeat the command, as Lightning does: `python -m` and this name
    run(os.environ[SCRIPT], sys.argv[1:], own_process=True)
