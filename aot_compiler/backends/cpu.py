"""The CPU back end: XLA:CPU in worker processes, each started with the instruction set that programs may use.

XLA reads the highest instruction set from its flags once, when a process first compiles; the option of a single
compilation is accepted and ignored. So the workers are started with it, and the parent's flags are left alone.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import SpawnContext, SpawnProcess
from types import TracebackType
from typing import Any

from aot_compiler.backends.isa import features_beyond, max_isa_flag
from artifacts.errors import CompileError


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledProgram:
    """One entry compiled for a target."""

    program: bytes
    requires: tuple[str, ...]
    """CPU features that the program's own instructions need."""
    seconds: float


class CpuBackend:
    """A pool of compile workers; a context manager.

    Args:
        isa: highest instruction set, by its name in the configuration.
        workers: processes; each holds one compilation at a time.
    """

    suffix = "xla"
    """Ending of program files."""

    def __init__(self, isa: str, workers: int) -> None:
        self._isa = isa
        self._processes = _KnownProcesses()
        self._pool = ProcessPoolExecutor(
            max_workers=workers,
            mp_context=self._processes,
            initializer=_start_worker,
            initargs=(max_isa_flag(isa),),
        )

    def __enter__(self) -> "CpuBackend":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._processes.terminate()  # else an interrupted build would wait for compilations that nobody wants
        self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, hlo: bytes, ranks: int, entry: str) -> Future[CompiledProgram]:
        """Compile the module of ``entry`` in a worker.

        Raises:
            CompileError: a worker has died.
        """
        try:
            with _interrupts_held_back():
                return self._pool.submit(_compile, hlo, ranks)
        except BrokenProcessPool as error:
            raise _worker_died(entry) from error

    def result(self, future: Future[CompiledProgram], entry: str) -> CompiledProgram:
        """The program of ``entry``, or what went wrong in a user's words.

        Raises:
            CompileError: the worker died, XLA refused the module, or the program needs more than the instruction set.
        """
        try:
            compiled = future.result()
        except BrokenProcessPool as error:
            raise _worker_died(entry) from error
        except RuntimeError as error:
            raise CompileError(
                found=f"XLA:CPU refused {entry} ({str(error).splitlines()[0]})",
                expected="a module that XLA compiles",
                action="report this with the graph",
            ) from error
        beyond = features_beyond(self._isa, compiled.requires)
        if beyond:
            raise CompileError(
                found=f"the program of {entry} uses {', '.join(beyond)}",
                expected=f"instructions of {self._isa} alone; XLA does not keep to that level on this machine",
                action="choose a higher target.isa, or build on an older machine",
            )
        return compiled


def _worker_died(entry: str) -> CompileError:
    return CompileError(
        found=f"the compiler's process died at {entry} (killed, out of memory, or it could not start)",
        expected="enough memory for every worker, and in a Python script that builds the usual "
        'if __name__ == "__main__": around what it does, because each worker imports the script',
        action="build with fewer workers, or add that line to the script",
    )


class _KnownProcesses(SpawnContext):
    """A way to start processes that remembers them: the pool tells no one which processes are its own."""

    def __init__(self) -> None:
        super().__init__()
        self._started: list[SpawnProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]  # noqa: N802
        process = SpawnProcess(*args, **kwargs)
        self._started.append(process)
        return process

    def terminate(self) -> None:
        """End those that still run."""
        for process in self._started:
            if process.is_alive():
                process.terminate()


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach before they ignore it: they inherit what this thread holds back.

    Ctrl-C in a terminal goes to every process of the command, and only the main process is to answer. It answers when
    the start is complete, even where another thread is given the signal: a half-started process would show a traceback.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.getsignal(signal.SIGINT)
    in_charge = threading.current_thread() is threading.main_thread() and callable(handler)
    came: list[int] = []
    if in_charge:
        signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        if in_charge:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        if came:
            signal.raise_signal(signal.SIGINT)


def _start_worker(flag: str | None) -> None:
    """Leave Ctrl-C to the main process, end with it, and set XLA's flags before jax is imported in this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if flag is not None:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def _end_with_parent() -> None:
    """A killed build leaves no worker behind: whoever reads its output would wait for the worker's end of the pipe."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _compile(hlo: bytes, ranks: int) -> CompiledProgram:
    from aot_compiler.backends.cpu_instructions import required_cpu_features
    from aot_compiler.backends.cpu_rewrites import put_weights_on_the_left
    from aot_compiler.xla import compile_for_cpu

    started = time.perf_counter()
    program = compile_for_cpu(put_weights_on_the_left(hlo), ranks)
    return CompiledProgram(
        program=program, requires=required_cpu_features(program), seconds=time.perf_counter() - started
    )
