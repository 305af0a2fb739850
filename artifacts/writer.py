"""Writing an artifact so that nothing half-written is ever taken for whole.

Graphs, programs and weights bear their digest as their name, and each file appears by rename. Files with a name of
their own (config.yaml, tokenizer/) are written beside their places, and moved there only when all else is on disk. The
manifest comes last, by rename: until then the folder is unfinished (and says so by a marker), or still is the artifact
that stood there before.
"""

import errno
import fcntl
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from artifacts.consistency import check_consistency, is_addressed
from artifacts.errors import OutputFolderError
from artifacts.folder import BUILD_MARKER, MANIFEST, OWNED_FOLDERS, files_below, is_below, is_manifest
from artifacts.manifest import FileRecord, Manifest, decode_manifest, encode_manifest

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_TEMPORARY = ".aot-partial"
_MADE_BY_BUILDS = re.compile(rf"[0-9a-f]{{64}}\..+|\..+{re.escape(_TEMPORARY)}")
"""Names that only builds give. In the artifact's own folders, commit removes such files when no manifest lists them."""


class ArtifactWriter:
    """Builds one artifact in ``output``; a context manager that holds the folder's lock.

    Raises:
        OutputFolderError: the folder holds something else, is being built by another process, or cannot be written.
    """

    def __init__(self, output: Path) -> None:
        self.output = output
        self.files: dict[str, FileRecord] = {}
        self._lock: BinaryIO | None = None
        self._temporaries: set[Path] = set()
        self._staged: dict[Path, Path] = {}
        """Temporary files that are complete, and the places to which commit moves them."""
        self._earlier_files: set[str] = set()
        """What earlier builds put in place, by path. Where one was killed, its marker tells what no manifest does."""
        self._made_folder = False
        self._made_marker = False

    def __enter__(self) -> "ArtifactWriter":
        with self._reported():
            check_output(self.output)
            self._made_folder = not self.output.exists()
            self.output.mkdir(parents=True, exist_ok=True)
            self._lock = self._locked_marker()
            self._earlier_files = _listed_files(self.output / MANIFEST) | set(
                self._lock.read().decode(errors="replace").splitlines()
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._lock is not None
        with suppress(OSError):  # what is left is removed by the next build, and must not hide this one's error
            for temporary in self._temporaries:
                temporary.unlink(missing_ok=True)
            if kind is not None and not self.files:
                self._leave_as_found()
        self._lock.close()

    def add_bytes(self, relative: str, data: bytes) -> str:
        """Write one file and list it. Returns ``relative``.

        A file that bears its digest as its name is in place at once, or kept where it is. Any other name may belong to
        an earlier artifact in the same folder, and is taken over at ``commit``.
        """
        record = FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())
        path = self.output / relative
        addressed = is_addressed(relative, record)
        with self._reported():
            if not (addressed and _holds(path, data)):
                with self._beside(path) as (file, temporary):
                    file.write(data)
                if addressed:
                    temporary.replace(path)
                else:
                    self._staged[temporary] = path
        self.files[relative] = record
        return relative

    def add_program(self, target: str, suffix: str, program: bytes) -> str:
        """Write a program under its digest, ``programs/<target>/<sha256>.<suffix>``, and return that path."""
        return self.add_bytes(f"programs/{target}/{hashlib.sha256(program).hexdigest()}.{suffix}", program)

    def add_stream(self, template: str, write: Callable[[BinaryIO], FileRecord]) -> str:
        """Write one large file and list it under ``template`` with its digest in place of ``{sha256}``.

        Args:
            template: relative path, such as ``weights/{sha256}.safetensors``.
            write: writes the content and returns its size and digest. What it raises of its own is passed on.

        Returns:
            The relative path.
        """
        with self._beside(self.output / template) as (file, temporary):
            record = write(file)
        relative = template.format(sha256=record.sha256)
        with self._reported():
            temporary.replace(self.output / relative)
        self.files[relative] = record
        return relative

    def commit(self, manifest: Manifest) -> None:
        """Move staged files into place, then the manifest; then remove the files of earlier builds, and the marker.

        Each step is on disk before the next begins, so that a loss of power leaves a state that was passed through.

        Args:
            manifest: lists ``files`` of this writer.

        Raises:
            CorruptArtifactError: the manifest contradicts itself, which is a fault of its maker.
        """
        data = encode_manifest(manifest)
        check_consistency(decode_manifest(data, MANIFEST), MANIFEST)
        if manifest.files != self.files:
            raise ValueError("the manifest does not list the files that were written")
        with self._reported():
            with self._beside(self.output / MANIFEST) as (file, temporary):
                file.write(data)
            self._note_files_in_marker()
            for staged in sorted(self._staged):
                staged.replace(self._staged[staged])
            for folder in sorted({parent for path in self.files for parent in PurePosixPath(path).parents}):
                _sync_folder(self.output / folder)
            temporary.replace(self.output / MANIFEST)
            _sync_folder(self.output)
            self._remove_earlier_files()
            (self.output / BUILD_MARKER).unlink()

    def _locked_marker(self) -> BinaryIO:
        """Open the marker and lock it: the file in place, not one that the end of another build removed since."""
        marker = self.output / BUILD_MARKER
        while True:
            self._made_marker = not marker.exists()
            lock = os.fdopen(os.open(marker, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if marker.exists() and os.path.samestat(os.fstat(lock.fileno()), marker.stat()):
                    return lock
                lock.close()
            except BlockingIOError as error:
                lock.close()
                raise OutputFolderError(
                    found=f"{self.output} is being built by another process",
                    expected="one build of a folder at a time",
                    action="wait for it, or choose another output",
                ) from error

    def _note_files_in_marker(self) -> None:
        """So that the next build knows what to remove, should this one be killed before it has done so."""
        assert self._lock is not None
        self._lock.write("".join(f"\n{path}" for path in sorted(self._earlier_files | set(self.files))).encode())
        self._lock.flush()
        os.fsync(self._lock.fileno())
        _sync_folder(self.output)  # a reader must meet the marker before it can meet a file that was moved

    def _leave_as_found(self) -> None:
        """Undo ``__enter__`` after a build that failed before it wrote anything."""
        if self._made_marker:
            self._remove_empty_folders()
            (self.output / BUILD_MARKER).unlink()
            if self._made_folder:
                self.output.rmdir()

    @contextmanager
    def _beside(self, path: Path) -> Iterator[tuple[BinaryIO, Path]]:
        """Open a temporary file beside ``path``, and see it onto the disk."""
        temporary = path.with_name(f".{path.name}{_TEMPORARY}")
        with self._reported():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not is_below(path.parent, self.output):
                raise OutputFolderError(
                    found=f"{path.parent} is a link that leaves the output",
                    expected="folders of an artifact inside it, so that it can be moved",
                    action="remove the link, or choose another output",
                )
            self._temporaries.add(temporary)
            raw = _OutputFile(temporary, self._reported)
        with io.BufferedWriter(raw) as file:
            yield file, temporary
            file.flush()
            with self._reported():
                os.fsync(file.fileno())

    def _remove_earlier_files(self) -> None:
        """Remove what earlier builds made and this one does not list. A user's own files stay."""
        for path in self.output.glob(f".*{_TEMPORARY}"):
            path.unlink()
        for relative in list(files_below(self.output, OWNED_FOLDERS)):
            path = self.output / relative
            earlier = relative in self._earlier_files or _MADE_BY_BUILDS.fullmatch(path.name)
            if earlier and relative not in self.files:
                path.unlink()
        self._temporaries.clear()
        self._remove_empty_folders()

    def _remove_empty_folders(self) -> None:
        for folder in OWNED_FOLDERS:
            if not (self.output / folder).is_symlink():
                for parent, _, _ in os.walk(self.output / folder, topdown=False):
                    if not os.listdir(parent):
                        os.rmdir(parent)

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


class _OutputFile(io.FileIO):
    """A file whose failed writes are the output's fault, even inside a callback that also reads other files."""

    def __init__(self, path: Path, reported: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(path, "wb")
        self._reported = reported

    def write(self, data: "ReadableBuffer", /) -> int:
        with self._reported():
            return super().write(data)


class _Listing(msgspec.Struct):
    """The file list of a manifest, of any version that keeps one."""

    files: dict[str, object] = {}


def _listed_files(manifest: Path) -> set[str]:
    if not is_manifest(manifest):
        return set()
    try:
        return set(msgspec.json.decode(manifest.read_bytes(), type=_Listing).files)
    except msgspec.MsgspecError:
        return set()


def _holds(path: Path, data: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder onto the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that knows no such thing
            raise
    finally:
        os.close(descriptor)


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
    elif output.is_symlink():
        found = f"{output} is a link to nothing"
    else:
        return
    raise OutputFolderError(
        found=found, expected="a new or empty folder, or an earlier artifact", action="choose another output"
    )
