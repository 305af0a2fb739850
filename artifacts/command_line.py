"""How every command of this project ends: a user's mistake is one line on standard error and an exit code."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from artifacts.errors import AotError


def run(command: Callable[[], object]) -> NoReturn:
    """Run a command and exit.

    Exit codes: 0 success, 1 a failed check, 2 a user's mistake, 3 complete but for an absent tool, 130 interrupted.
    """
    try:
        ending = _ending(command)
        sys.stdout.flush()  # here and not at exit, where a closed pipe could no longer be met
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that exit does not write there again
        ending = SystemExit(1)
    raise ending


def _ending(command: Callable[[], object]) -> SystemExit:
    try:
        command()
    except AotError as error:
        for line in str(error).splitlines():  # a configuration tells of all its faults at once
            print(f"error: {line}", file=sys.stderr)
        return SystemExit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return SystemExit(130)
    except SystemExit as ending:
        return ending
    return SystemExit(0)
