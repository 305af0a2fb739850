"""How every command of this project ends: a user's mistake is one line on standard error and an exit code."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from artifacts.errors import AotError

_INTERRUPTED = 130


class Interrupted(BaseException):
    """Ctrl-C. Not a ``KeyboardInterrupt``, which command-line libraries catch and end without a word."""


def run(command: Callable[[], object]) -> NoReturn:
    """Run a command and exit.

    Exit codes: 0 success, 1 a failed check, 2 a user's mistake, 3 complete but for an absent tool, 130 interrupted.
    """
    with _Interrupts() as interrupts:
        try:
            ending = _ending(command, interrupts)
            sys.stdout.flush()  # here and not at exit, where a closed pipe could no longer be met
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that exit does not write there again
            ending = SystemExit(1)
        except Interrupted:
            ending = SystemExit(_INTERRUPTED)
    if ending.code == _INTERRUPTED:
        print("interrupted; the same command starts again", file=sys.stderr)
    raise ending


def report(error: AotError) -> None:
    """Print an error as ``run`` does, for a command that goes on after it."""
    for line in str(error).splitlines():  # a configuration tells of all its faults at once
        print(f"error: {line}", file=sys.stderr)


def _ending(command: Callable[[], object], interrupts: "_Interrupts") -> SystemExit:
    try:
        command()
    except AotError as error:
        report(error)
        return SystemExit(error.exit_code)
    except (Interrupted, KeyboardInterrupt):
        return SystemExit(_INTERRUPTED)
    except SystemExit as ending:
        return SystemExit(_INTERRUPTED) if interrupts.seen else ending
    except Exception:
        if interrupts.seen:  # a library's own words for having been interrupted
            return SystemExit(_INTERRUPTED)
        raise
    return SystemExit(_INTERRUPTED if interrupts.seen else 0)


class _Interrupts:
    """Raises ``Interrupted`` on Ctrl-C; a context manager. Where Python's own handler is not in place it does nothing.

    Python drops what a handler raises inside a callback of the garbage collector (jax has one) or a ``__del__``, prints
    a traceback and goes on. Here nothing is printed, and the interrupt comes once more a moment later.
    """

    def __init__(self) -> None:
        self.seen = False
        self._again: threading.Timer | None = None
        self._hook = sys.unraisablehook
        self._taken = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )

    def __enter__(self) -> "_Interrupts":
        sys.unraisablehook = self._unraisable
        if self._taken:
            signal.signal(signal.SIGINT, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        if self._again is not None:
            self._again.cancel()
        if self._taken:
            # After an interrupt there is only exit: a second Ctrl-C then ends the process at once.
            signal.signal(signal.SIGINT, signal.SIG_DFL if self.seen else signal.default_int_handler)
        sys.unraisablehook = self._hook

    def _raise(self, number: int, frame: FrameType | None) -> NoReturn:
        self.seen = True
        raise Interrupted

    def _unraisable(self, fault: "sys.UnraisableHookArgs") -> None:
        if not isinstance(fault.exc_value, Interrupted):
            self._hook(fault)
            return
        self._again = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        self._again.daemon = True
        self._again.start()
