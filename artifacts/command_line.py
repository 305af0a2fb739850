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
        command()
    except AotError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that exit does not write there again
        sys.exit(1)
    sys.exit(0)
