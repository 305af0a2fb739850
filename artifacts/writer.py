"""Writing an artifact so that nothing half-written is ever taken for whole.

Graphs, programs and weights bear their digest as their name, and each file appears by rename. The manifest comes last, by
rename: until then the folder is unfinished (and says so by a marker), or still is the artifact that stood there before.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from artifacts.errors import OutputFolderError
from artifacts.folder import BUILD_MARKER, MANIFEST, is_manifest
from artifacts.manifest import FileRecord, Manifest, encode_manifest


OWNED_FOLDERS = ("graphs", "programs", "weights", "tokenizer")
"""Folders whose files come and go with builds; whatever else a user keeps beside the manifest is left alone."""


class ArtifactWriter:
    """Builds one artifact in ``output``; a context manager that holds the folder's lock.

    Raises:
        OutputFolderError: the folder holds something else, is being built by another process, or cannot be written.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.files: dict[str, FileRecord] = {}
        self._lock: BinaryIO | None = None

    def __enter__(self) -> "ArtifactWriter":
        check_output(self.output)
        with self._reported():
            self.output.mkdir(parents=True, exist_ok=True)
            self._lock = (self.output / BUILD_MARKER).open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise OutputFolderError(
                found=f"{self.output} is being built by another process",
                expected="one build of a folder at a time",
                action="wait for it, or choose another output",
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._lock is not None
        self._lock.close()

    def add_bytes(self, relative: str, data: bytes) -> str:
        """Write one small file and list it; a file that already has these bytes is kept. Returns ``relative``."""
        record = FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())
        self.files[relative] = record
        path = self.output / relative
        with self._reported():
            if path.is_file() and path.read_bytes() == data:
                return relative
            with self._replaced(path) as file:
                file.write(data)
        return relative

    def add_program(self, target: str, suffix: str, program: bytes) -> str:
        """Write a program under its digest, ``programs/<target>/<sha256>.<suffix>``, and return that path."""
        return self.add_bytes(f"programs/{target}/{hashlib.sha256(program).hexdigest()}.{suffix}", program)

    def add_stream(self, template: str, write: Callable[[BinaryIO], FileRecord]) -> str:
        """Write one large file and list it under ``template`` with its digest in place of ``{sha256}``.

        Args:
            template: relative path, such as ``weights/{sha256}.safetensors``.
            write: writes the content and returns its size and digest.

        Returns:
            The relative path.
        """
        folder = (self.output / template).parent
        with self._reported():
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f".{os.getpid()}.tmp"
            try:
                with temporary.open("wb") as file:
                    record = write(file)
                    _sync(file)
                relative = template.format(sha256=record.sha256)
                temporary.replace(self.output / relative)
            finally:
                temporary.unlink(missing_ok=True)
        self.files[relative] = record
        return relative

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, then remove the files of earlier builds that it does not list, and the marker."""
        with self._reported():
            with self._replaced(self.output / MANIFEST) as file:
                file.write(encode_manifest(manifest))
            for folder in OWNED_FOLDERS:
                for path in sorted((self.output / folder).rglob("*"), reverse=True):
                    if path.is_dir():
                        if not any(path.iterdir()):
                            path.rmdir()
                    elif path.relative_to(self.output).as_posix() not in self.files:
                        path.unlink()
            (self.output / BUILD_MARKER).unlink()

    @contextmanager
    def _replaced(self, path: Path) -> Iterator[BinaryIO]:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                yield file
                _sync(file)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Turn what the file system refuses into a user's error."""
        try:
            yield
        except OSError as error:
            raise OutputFolderError(
                found=f"{self.output}: {error.strerror or error}",
                expected="a folder that can be written, with room for the artifact",
                action="free the way there, or choose another output",
            ) from error


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def check_output(output: Path) -> None:
    """Refuse an output that is neither new, nor empty, nor an artifact, finished or not; nothing is ever deleted there.

    Raises:
        OutputFolderError: says what stands there.
    """
    if output.is_dir():
        if not any(output.iterdir()) or (output / BUILD_MARKER).is_file() or is_manifest(output / MANIFEST):
            return
        found = f"{output} is not empty and not an artifact"
    elif output.exists():
        found = f"{output} is a file"
    else:
        return
    raise OutputFolderError(
        found=found, expected="a new or empty folder, or an earlier artifact", action="choose another output"
    )
