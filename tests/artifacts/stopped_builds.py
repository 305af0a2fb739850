"""Builds the example again and again in forked processes, each stopped before another of its changes to the disk.

Run as a script: ``stopped_builds.py HOW BASE START``. HOW is "kill", or "full" for a disk without room. Step k builds
in ``BASE/k``, which begins as a copy of START where that is not ``-``. Prints the number of steps of a whole build.
"""

import errno
import os
import shutil
import signal
import sys
from pathlib import Path

from artifacts.errors import OutputFolderError
from tests.artifacts.example import build_example

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


def stop_before(step: int, how: str, output: Path) -> None:
    """Stop this process, or fail its system call, when it is about to make a change below ``output``."""
    changes = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal changes
        if event == "open":
            path, _, flags = arguments
            if not (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)):
                return
        elif event in CHANGES:
            path = arguments[0]
        else:
            return
        if isinstance(path, int) or not Path(os.fsdecode(path)).is_relative_to(output):  # type: ignore[arg-type]
            return
        if event == "os.mkdir" and os.path.isdir(path):  # type: ignore[arg-type]
            return  # changes nothing
        changes += 1
        if changes == step:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sys.addaudithook(hook)


def build_stopped(step: int, how: str, output: Path) -> int:
    """In a process of its own. Exit status: 0 when the build ended before that step, 1 when it was refused."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    status = 2
    try:
        stop_before(step, how, output)
        build_example(output, revision=1, chat_template=False)
        status = 0
    except OutputFolderError as error:
        output.with_name(f"{output.name}.error").write_text(str(error))
        status = 1
    finally:
        os._exit(status)


def main() -> None:
    """See the module."""
    how, base, start = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    os.fsync = lambda fd: None  # a kill loses nothing that was written
    for step in range(1, 1000):
        output = base / str(step)
        if start != "-":
            shutil.copytree(start, output)
        status = build_stopped(step, how, output)
        if status == 0:
            break
        assert status == (signal.SIGKILL if how == "kill" else 1 << 8), status
    print(step - 1)


if __name__ == "__main__":
    main()
