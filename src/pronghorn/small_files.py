"""Files that are read whole: regular ones, up to a size.

In the place of any file that somebody else may have written there can be a link to /dev/zero, which never ends, a pipe, which
may never begin, or a file larger than memory. All errors are OSErrors whose `strerror` is a sentence, so whoever reports files
that cannot be read reports these, too.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

LARGEST = 64_000_000  # bytes; the largest tokenizer.json seen has 33 MB
_GIVEN = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")  # pipes of the shell: `pronghorn check <(make-recipe)`


def read_small(path: Path, most: int = LARGEST) -> bytes:
    """The content of a regular file of at most `most` bytes, or of a pipe that the shell names."""
    # Without O_NONBLOCK, opening a pipe that nobody writes to would wait.
    pipe = str(path).startswith(_GIVEN)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | (0 if pipe else os.O_NONBLOCK))
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not (stat.S_ISREG(found.st_mode) or (pipe and stat.S_ISFIFO(found.st_mode))):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        content = file.read(most + 1) if found.st_size <= most else b""
        if found.st_size > most or len(content) > most:
            size = f"{found.st_size:,}" if found.st_size > most else f"more than {most:,}"
            raise OSError(errno.EFBIG, f"it has {size} bytes; the limit is {most:,} bytes", str(path))
        return content


def read_small_text(path: Path, most: int = LARGEST) -> str:
    """As UTF-8, with line ends as Python has them; raises UnicodeDecodeError, too."""
    return read_small(path, most).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
