"""Keeps a second command out of a workdir."""

from pathlib import Path
from typing import IO

import jax

from train.config import RunError

try:
    import fcntl
except ImportError:  # not POSIX
    fcntl = None

LOCK = "lock"  # stays in the workdir; what counts is who holds it


class WorkdirLock:
    """Holds a workdir while in use; let go with the process, however it ends."""

    def __init__(self, workdir: Path) -> None:
        """Takes the lock in the name of all processes of the run, or raises."""
        self._file: IO[str] | None = None
        if fcntl is None or jax.process_index() != 0:
            return
        self._file = (workdir / LOCK).open("a")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise RunError(
                f"Another command is at work in {workdir}. Wait for its end, or choose "
                "another --workdir."
            ) from None
        except OSError:
            # A file system without locks: as if there were none.
            self._file.close()

    def __enter__(self) -> "WorkdirLock":
        """Returns the lock."""
        return self

    def __exit__(self, *_: object) -> None:
        """Lets go."""
        if self._file is not None:
            self._file.close()
