"""A loaded layout: weights mapped once, caches on the device, one executable per entry. It compiles nothing."""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from artifacts.cpu import check_cpu
from artifacts.errors import (
    ClosedError,
    EntryInputError,
    EntryNotFoundError,
    LoadOptionError,
    TargetMismatchError,
    UnfinishedArtifactError,
)
from artifacts.folder import Artifact, open_artifact
from artifacts.manifest import EntryRecord, KvCacheRecord, ModelRecord
from artifacts.signature import OPTIONAL_INPUTS, EntrySignature, TensorSpec
from runtime.pjrt import JAXLIB_VERSION, Buffer, Devices, Executable, compilation_forbidden
from runtime.weights import map_weights
from runtime.wording import shown

MAX_THREADS = 1024
"""Most threads of a pool: XLA starts as many as it is told, and far more than cores only take time to start."""


def load(
    path: str | Path,
    layout: str | None = None,
    *,
    verify: bool = False,
    preload: bool = False,
    warmup: bool = False,
    threads: int | None = None,
) -> "Program":
    """Load one layout of an artifact.

    Args:
        path: the artifact's folder.
        layout: its name; may be left out where there is only one.
        verify: read every file and compare digests first.
        preload: load every entry's executable before returning, and not on first need.
        warmup: preload, then run one dummy step of each entry.
        threads: size of XLA's thread pool; None takes the cores that this process may use.

    Raises:
        ArtifactError: the artifact is missing, unfinished, corrupt, or for another machine.
        LayoutNotFoundError: it does not hold the layout.
    """
    started = time.perf_counter()
    artifact = open_artifact(path, verify=verify)
    program = Program(artifact, layout, threads=threads, manifest_ms=_ms_since(started))
    if preload or warmup:
        program.preload()
    if warmup:
        program.warmup()
    return program


@dataclass(slots=True)
class _Counters:
    compilations: int = 0
    steps: int = 0
    rows: int = 0
    padding_rows: int = 0
    embedding_bytes_copied: int = 0
    load_ms: dict[str, float] = field(default_factory=dict)

    def count_compilation(self) -> None:
        self.compilations += 1


class Program:
    """One layout, loaded. ``run`` may be called from any thread; steps take turns.

    Args:
        artifact: a checked artifact.
        layout: name of the layout, or None for the only one.
        threads: size of XLA's thread pool.
        manifest_ms: time that opening the artifact took, for ``stats``.
    """

    def __init__(
        self, artifact: Artifact, layout: str | None = None, *, threads: int | None = None, manifest_ms: float = 0.0
    ) -> None:
        self._artifact = artifact
        self._layout = artifact.layout(layout)
        self._records = {entry.signature.name: entry for entry in self._layout.entries}
        self._counters = _Counters(load_ms={"manifest": manifest_ms})
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._executables: dict[str, Future[Executable]] = {}
        self._background: threading.Thread | None = None
        _check_threads(threads)
        _check_programs(artifact, self._layout.entries)
        with self._stage("client"):
            self._devices = Devices(self._layout.ranks, threads)
        with self._stage("weights"):
            self._weights_on_host = map_weights(artifact, self._layout.parameters)
            self._weights = [self._devices.map(self._weights_on_host[spec.name]) for spec in self._layout.parameters]
        with self._stage("caches"):
            self._caches = self._new_caches()
        self._standing: dict[TensorSpec, Buffer] = {}
        self._entries = MappingProxyType({name: record.signature for name, record in self._records.items()})

    @property
    def entries(self) -> Mapping[str, EntrySignature]:
        """Signature of every entry, by name."""
        return self._entries

    @property
    def model(self) -> ModelRecord:
        """What the manifest says of the model."""
        return self._artifact.manifest.model

    @property
    def kv_cache(self) -> KvCacheRecord:
        """Block size and number of blocks of the cache."""
        return self._artifact.manifest.kv_cache

    @property
    def artifact(self) -> Artifact:
        """The artifact that this was loaded from."""
        return self._artifact

    @property
    def embedding_table(self) -> np.ndarray:
        """The model's embedding rows, [V, H] in the model dtype: a read-only view of the mapped weights."""
        self._check_open()
        return self._weights_on_host[self.model.embedding]

    @property
    def stats(self) -> dict[str, Any]:
        """Counts since load; ``compilations`` is always 0. ``load_ms`` tells each stage's time in milliseconds."""
        counters = self._counters
        return {
            "compilations": counters.compilations,
            "programs_loaded": sum(future.done() for future in self._executables.values()),
            "programs": len(self._records),
            "steps": counters.steps,
            "rows": counters.rows,
            "padding_rows": counters.padding_rows,
            "embedding_bytes_copied": counters.embedding_bytes_copied,
            "load_ms": dict(counters.load_ms),
        }

    def run(self, entry: str, **inputs: Any) -> np.ndarray:
        """Run one step.

        Args:
            entry: name of an entry.
            inputs: one array for each input of its signature; ``inputs_embeds`` and ``is_token_ids`` may be left out.
                Arrays are copied before this returns.

        Returns:
            Logits, [1, V] or [B, V] float32. The caches stay in the program.

        Raises:
            EntryNotFoundError: no such entry.
            EntryInputError: inputs that are not its own, or that point outside the cache or the vocabulary.
            ClosedError: the program has been closed.
        """
        self._check_open()
        signature = self._signature(entry)
        arrays = _checked_inputs(signature, inputs, self._limits(signature))
        executable = self._executable(entry)
        with self._lock, compilation_forbidden(self._counters.count_compilation):
            step = [self._input_buffer(spec, arrays.get(spec.name)) for spec in signature.inputs]
            try:
                logits, *self._caches = executable.execute([*step, *self._caches, *self._weights])
                host = np.asarray(logits)
            except Exception:
                self._caches = self._new_caches()  # a step that fails after dispatch has consumed them
                raise
            self._count(signature, arrays)
        if self._background is None:
            self._load_rest_in_background()
        return host

    def preload(self) -> None:
        """Load the executable of every entry."""
        for name in self._records:
            self._executable(name)

    def warmup(self) -> None:
        """Run one step of padding rows in every entry."""
        for name, signature in self._entries.items():
            self.run(name, **signature.padding_inputs())

    def close(self) -> None:
        """Free weights, caches and executables. May be called more than once; steps after it are refused."""
        self._closed = True
        if self._background is not None:
            self._background.join()
        with self._lock:
            self._weights, self._caches, self._weights_on_host = [], [], {}
            self._executables.clear()
            self._standing.clear()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Program({str(self._artifact.root)!r}, layout={self._layout.name!r}, entries={len(self._entries)})"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(found=f"{self!r} has been closed", expected="an open program", action="load it again")
        if self._process != os.getpid():
            raise ClosedError(
                found=f"{self!r} was loaded before a fork",
                expected="a program of this process: XLA's threads do not outlive a fork",
                action="load it in the child",
            )

    def _signature(self, entry: str) -> EntrySignature:
        if not isinstance(entry, str) or entry not in self._entries:
            raise EntryNotFoundError(
                found=f"entry {shown(entry)}",
                expected=f"one of {', '.join(self._entries)}",
                action="name one of these, or add the bucket to the configuration and rebuild",
            )
        return self._entries[entry]

    def _limits(self, signature: EntrySignature) -> dict[str, int]:
        """One above the largest value of each integer input: graphs take indices as in bounds and do not look."""
        cache = self.kv_cache
        return {
            "input_ids": self.model.vocab_size,
            "positions": signature.context,
            "slot_mapping": cache.blocks * cache.block_size,
            "block_table": cache.blocks,
            "output_positions": signature.rows,
        }

    def _input_buffer(self, spec: TensorSpec, array: np.ndarray | None) -> Buffer:
        if array is not None:
            return self._devices.copy(array)
        if spec not in self._standing:
            self._standing[spec] = self._devices.copy(
                np.full(spec.shape, spec.name == "is_token_ids", spec.numpy_dtype)
            )
        return self._standing[spec]

    def _count(self, signature: EntrySignature, arrays: Mapping[str, np.ndarray]) -> None:
        counters = self._counters
        counters.steps += 1
        counters.rows += signature.rows
        counters.padding_rows += int(np.count_nonzero(arrays["slot_mapping"] == 0))
        if "inputs_embeds" in arrays:
            counters.embedding_bytes_copied += arrays["inputs_embeds"].nbytes

    def _new_caches(self) -> list[Buffer]:
        return [self._devices.copy(np.zeros(spec.shape, spec.numpy_dtype)) for spec in self._layout.caches]

    def _executable(self, entry: str) -> Executable:
        """The entry's executable, loaded by whoever needs it first."""
        with self._loading:
            future = self._executables.get(entry)
            owner = future is None
            if future is None:
                future = self._executables[entry] = Future()
        if owner:
            try:
                with self._stage(f"program {entry}"), compilation_forbidden(self._counters.count_compilation):
                    record = self._records[entry].program
                    assert record is not None
                    future.set_result(self._devices.load(self._artifact.read(record.file), record.file))
            except BaseException as error:
                with self._loading:
                    self._executables.pop(entry, None)  # `close` may have cleared them
                future.set_exception(error)
        return future.result()

    def _load_rest_in_background(self) -> None:
        def load_rest() -> None:
            for name in self._records:
                if self._closed or not threading.main_thread().is_alive():
                    return
                try:
                    self._executable(name)
                except Exception:
                    return  # whoever needs the entry meets the error

        with self._loading:
            if self._background is None:
                self._background = threading.Thread(target=load_rest, name="aot-program-loader")
                self._background.start()

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._counters.load_ms[name] = _ms_since(started)


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3


def _checked_inputs(
    signature: EntrySignature, inputs: Mapping[str, Any], limits: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """Inputs as arrays of the signature's dtypes; only what changes no value is converted."""
    names = [spec.name for spec in signature.inputs]
    unknown = [name for name in inputs if name not in names]
    missing = [name for name in names if inputs.get(name) is None and name not in OPTIONAL_INPUTS]
    if unknown or missing:
        faults = [f"no input {name}" for name in missing] + [f"unknown input {name}" for name in unknown]
        raise EntryInputError(
            found=f"entry {signature.name}: {', '.join(faults)}",
            expected=", ".join(names),
            action="pass each input of the entry's signature",
        )
    arrays = {}
    for spec in signature.inputs:
        if inputs.get(spec.name) is None:
            continue
        try:
            array = np.asarray(inputs[spec.name])
        except Exception as error:  # a ragged list, a tensor with a gradient, or on another device
            raise EntryInputError(
                found=f"entry {signature.name}: {spec.name} is no array ({shown(error)})",
                expected=str(spec),
                action="pass a numpy array or what converts to one",
            ) from error
        if array.shape != spec.shape or not np.can_cast(array.dtype, spec.numpy_dtype, "same_kind"):
            raise EntryInputError(
                found=f"entry {signature.name}: {spec.name} is {array.dtype}{list(array.shape)}",
                expected=str(spec),
                action="pad to the entry's shape, or choose another entry",
            )
        if spec.name in limits and not (array.min() >= 0 and array.max() < limits[spec.name]):
            raise EntryInputError(
                found=f"entry {signature.name}: {spec.name} holds {array.min()} to {array.max()}",
                expected=f"0 to {limits[spec.name] - 1}",
                action="correct the value; padding rows have 0",
            )
        arrays[spec.name] = array.astype(spec.numpy_dtype, copy=False)
    return arrays


def _check_threads(threads: object) -> None:
    if threads is None or (isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= MAX_THREADS):
        return
    raise LoadOptionError(
        found=f"threads is {shown(threads)}",
        expected=f"None or an integer from 1 to {MAX_THREADS}",
        action="None takes the cores that this process may use",
    )


def _check_programs(artifact: Artifact, entries: tuple[EntryRecord, ...]) -> None:
    """Refuse, before any native code is opened, what this process could not run."""
    target, toolchain = artifact.manifest.target, artifact.manifest.toolchain
    if target.platform != "cpu":
        raise TargetMismatchError(
            found=f"{artifact.root.name} has programs for {target.platform}",
            expected="programs for cpu",
            action="load it on a machine of that platform, or build with target: cpu",
        )
    if toolchain.get("jaxlib") != JAXLIB_VERSION:
        raise TargetMismatchError(
            found=f"{artifact.root.name} has programs of jaxlib {toolchain.get('jaxlib')}",
            expected=f"jaxlib {JAXLIB_VERSION}, which this process has: a serialised program belongs to one release",
            action="install that jaxlib, or rebuild the artifact",
        )
    if any(entry.program is None for entry in entries):
        raise UnfinishedArtifactError(
            found=f"{artifact.root.name} holds entries without a program",
            expected="a program for every entry",
            action="build it again on a machine that has the compiler of the target",
        )
    required = {feature for entry in entries if entry.program for feature in entry.program.requires}
    check_cpu(target.architecture, sorted(required))
