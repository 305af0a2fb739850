"""How every command of this project ends: a user's mistake is one line on standard error and an exit code."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from artifacts.errors import AotError

_INTERRUPTED = 130


class Interrupted(BaseException):
    """Ctrl-C. Not a ``KeyboardInterrupt``, which command-line libraries catch and end without a word."""


_interrupted = False


def run(command: Callable[[], object]) -> NoReturn:
    """Run a command and exit.

    Exit codes: 0 success, 1 a failed check, 2 a user's mistake, 3 complete but for an absent tool, 130 interrupted.
    """
    with _interrupts():
        try:
            ending = _ending(command)
            sys.stdout.flush()  # here and not at exit, where a closed pipe could no longer be met
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that exit does not write there again
            ending = SystemExit(1)
        except Interrupted:
            ending = SystemExit(_INTERRUPTED)
        if ending.code == _INTERRUPTED:
            print("interrupted; the same command starts again", file=sys.stderr)
    raise ending


def stop_if_interrupted() -> None:
    """End a long command at its next stage where Ctrl-C came inside a library that swallowed it.

    Raises:
        Interrupted: Ctrl-C was pressed since ``run`` began.
    """
    if _interrupted:
        raise Interrupted


def report(error: AotError) -> None:
    """Print an error as ``run`` does, for a command that goes on after it."""
    for line in str(error).splitlines():  # a configuration tells of all its faults at once
        print(f"error: {line}", file=sys.stderr)


def _ending(command: Callable[[], object]) -> SystemExit:
    try:
        command()
        stop_if_interrupted()
    except AotError as error:
        report(error)
        return SystemExit(error.exit_code)
    except (Interrupted, KeyboardInterrupt):
        return SystemExit(_INTERRUPTED)
    except SystemExit as ending:
        return SystemExit(_INTERRUPTED) if _interrupted else ending
    except Exception:
        if _interrupted:  # a library's own words for having been interrupted
            return SystemExit(_INTERRUPTED)
        raise
    return SystemExit(0)


@contextmanager
def _interrupts() -> Iterator[None]:
    """Raise ``Interrupted`` on Ctrl-C, and never a traceback for one that came where nothing can be raised."""
    global _interrupted
    _interrupted = False
    try:
        taken = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if taken:
            signal.signal(signal.SIGINT, _interrupt)
    except ValueError:  # not the main thread, which alone takes signals
        taken = False
    hook = sys.unraisablehook
    sys.unraisablehook = lambda fault: None if isinstance(fault.exc_value, Interrupted) else hook(fault)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if taken:
            # After an interrupt there is only exit: a second Ctrl-C then ends the process at once.
            signal.signal(signal.SIGINT, signal.SIG_DFL if _interrupted else signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    global _interrupted
    _interrupted = True
    raise Interrupted
