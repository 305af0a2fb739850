"""The one module of the runtime that touches jax internals: PJRT's CPU client, programs and buffers.

jax serves as a PJRT client only. Every ``Devices`` makes a client of its own, beside jax's, so that two layouts live in
one process. Private names move between releases: jax is pinned in pyproject.toml.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax import monitoring
from jaxlib import version
from jaxlib import xla_client as xc

from artifacts.errors import CompilationForbiddenError, CorruptArtifactError

JAXLIB_VERSION: str = version.__version__
"""Release that programs must have been serialised by."""

Buffer = jax.Array
"""A buffer on one device of a ``Devices``."""

_ZERO_COPY = xc.HostBufferSemantics.ZERO_COPY
_COPY_DURING_CALL = xc.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL


class Devices:
    """The devices of one layout: one CPU device per rank, in this process.

    Args:
        ranks: how many.
        threads: size of XLA's thread pool; None takes the cores that this process may use.
    """

    def __init__(self, ranks: int, threads: int | None = None) -> None:
        with _environment("NPROC", None if threads is None else str(threads)):
            self._client = xc.make_cpu_client(num_devices=ranks)
        self._devices = tuple(self._client.devices()[:ranks])
        self._sharding = xc.SingleDeviceSharding(self._devices[0])
        self._avals: dict[tuple[tuple[int, ...], np.dtype], jax.core.ShapedArray] = {}

    def load(self, program: bytes, name: str) -> "Executable":
        """Load a serialised program; nothing is compiled.

        Raises:
            CorruptArtifactError: XLA does not take the bytes.
        """
        ranks = len(self._devices)
        options = xc.CompileOptions()
        build = options.executable_build_options
        options.num_replicas = build.num_replicas = ranks
        options.num_partitions = build.num_partitions = 1
        build.device_assignment = xc.DeviceAssignment.create(np.arange(ranks).reshape(ranks, 1))
        try:
            loaded = self._client.deserialize_executable(program, xc.DeviceList(self._devices), options)
        except xc.XlaRuntimeError as error:
            raise CorruptArtifactError(
                found=f"program {name} is refused by XLA ({str(error).splitlines()[0]})",
                expected="a program that the pinned jaxlib serialised",
                action="rebuild the artifact",
            ) from error
        return Executable(loaded)

    def map(self, array: np.ndarray) -> Buffer:
        """Make a buffer that shares an aligned, read-only host array's memory; the array stays alive with it."""
        return self._put(array, force_copy=False, semantics=_ZERO_COPY)

    def copy(self, array: np.ndarray) -> Buffer:
        """Make a buffer with a copy of a host array, which may be changed as soon as this returns."""
        return self._put(array, force_copy=True, semantics=_COPY_DURING_CALL)

    def _put(self, array: np.ndarray, *, force_copy: bool, semantics: Any) -> Buffer:
        key = array.shape, array.dtype
        aval = self._avals.get(key)
        if aval is None:
            aval = self._avals[key] = jax.core.ShapedArray(array.shape, array.dtype)
        buffer: Buffer = xc.batched_device_put(
            aval,
            self._sharding,
            [array],
            list(self._devices),
            committed=True,
            force_copy=force_copy,
            host_buffer_semantics=semantics,
        )
        return buffer


class Executable:
    """A loaded program."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded

    def execute(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """Run one step on one device. Buffers that the program aliases to outputs are consumed."""
        results = self._loaded.execute_sharded(arguments).disassemble_into_single_device_arrays()
        return [shards[0] for shards in results]

    def cost_analysis(self) -> dict[str, float]:
        """XLA's own count of flops and bytes accessed per step."""
        return dict(self._loaded.cost_analysis())


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Set an environment variable for as long as a client is being made: XLA reads it once, there."""
    if value is None:
        yield
        return
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_forbidden = threading.local()


@contextmanager
def compilation_forbidden(count: Callable[[], None]) -> Iterator[None]:
    """Make any tracing or compiling by jax on this thread an error, for as long as a program loads or steps.

    jax announces each trace, lowering and compilation by a monitoring event before it starts; the listener below raises
    there. Other threads, and this one outside the context, may use jax as they like.

    Args:
        count: called once for each attempt.

    Raises:
        CompilationForbiddenError: from inside the attempt.
    """
    before = getattr(_forbidden, "count", None)
    _forbidden.count = count
    try:
        yield
    finally:
        _forbidden.count = before


def _on_scalar_event(event: str, value: float, **_: Any) -> None:
    count = getattr(_forbidden, "count", None)
    if count is not None and event.startswith("/jax/core/compile/"):
        count()
        raise CompilationForbiddenError(
            found=f"jax event {event} while a program was loaded or stepped",
            expected="no tracing and no compilation after the artifact was built",
            action="report this: a step must only run what the artifact holds",
        )


monitoring.register_scalar_listener(_on_scalar_event)
