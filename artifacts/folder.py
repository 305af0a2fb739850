"""An artifact as a folder: found, checked, and read. Nothing is opened whose path could leave the folder."""

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from artifacts.consistency import check_consistency, is_addressed, is_relative_inside
from artifacts.errors import (
    ArtifactNotFoundError,
    CorruptArtifactError,
    LayoutNotFoundError,
    UnfinishedArtifactError,
)
from artifacts.manifest import (
    MAX_MANIFEST_BYTES,
    FileRecord,
    LayoutRecord,
    Manifest,
    decode_manifest,
    read_format_version,
)

MANIFEST = "manifest.json"
BUILD_MARKER = ".unfinished"
"""Stands in a folder while it is being built."""

OWNED_FOLDERS = ("graphs", "programs", "weights", "tokenizer")
"""Folders that hold nothing but what the manifest lists. Beside them a user may keep what he likes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """A folder with a manifest that has been read and checked."""

    root: Path
    """Absolute and free of links: a later change of working directory, or of a link to the folder, changes nothing."""
    manifest: Manifest

    def path(self, relative: str) -> Path:
        """Absolute path of a file that the manifest lists.

        Raises:
            CorruptArtifactError: the path leaves the folder, or the manifest does not list it.
        """
        if relative not in self.manifest.files:
            raise CorruptArtifactError(
                found=f"{self.root}: {relative} is used but not listed",
                expected="every file under `files` of the manifest",
                action="rebuild the artifact",
            )
        path = self.root / relative
        if not is_relative_inside(relative) or not is_below(path, self.root):
            raise CorruptArtifactError(
                found=f"{self.root}: path {relative!r} leaves the folder",
                expected="relative paths inside the artifact",
                action="do not use this artifact",
            )
        return path

    def read(self, relative: str) -> bytes:
        """Content of a file that the manifest lists, compared with its digest: for files small enough to hold.

        Raises:
            CorruptArtifactError: it has gone since the artifact was opened, or differs.
        """
        path, expected = self.path(relative), self.manifest.files[relative].sha256
        with _readable(self.root, relative):
            data = path.read_bytes()
        found = hashlib.sha256(data).hexdigest()
        if found != expected:
            raise CorruptArtifactError(
                found=f"{self.root}: {relative} has SHA-256 {found[:16]}...",
                expected=f"{expected[:16]}...",
                action="restore the file or rebuild the artifact",
            )
        return data

    def read_folder(self, folder: str) -> dict[str, bytes]:
        """Content of the files that the manifest lists directly below ``folder``, by name."""
        listed = (PurePosixPath(relative) for relative in self.manifest.files)
        return {path.name: self.read(str(path)) for path in listed if path.parent == PurePosixPath(folder)}

    def layout(self, name: str | None) -> LayoutRecord:
        """The layout called ``name``; None takes the only one.

        Raises:
            LayoutNotFoundError: no such layout, or None where there are several.
        """
        layouts = {layout.name: layout for layout in self.manifest.layouts}
        if name is None and len(layouts) == 1:
            return next(iter(layouts.values()))
        if name not in layouts:
            raise LayoutNotFoundError(
                found=f"layout {name}" if name else f"no layout named, and {self.root.name} holds {len(layouts)}",
                expected=f"one of {', '.join(layouts)}",
                action="name one of these, or build the layout",
            )
        return layouts[name]

    def check_paths(self) -> None:
        """Resolve the links of every path; no file is opened.

        Raises:
            CorruptArtifactError: a path leaves the folder.
        """
        for relative in self.manifest.files:
            self.path(relative)

    def check_sizes(self) -> None:
        """Compare every file's size with the manifest.

        Raises:
            CorruptArtifactError: a file is missing or has another size.
        """
        for relative, record in self.manifest.files.items():
            with _readable(self.root, relative):
                path = self.path(relative)
                size = path.stat().st_size if path.is_file() else None
            if size != record.size:
                raise CorruptArtifactError(
                    found=f"{self.root}: {relative} " + ("is missing" if size is None else f"has {size} bytes"),
                    expected=f"{record.size} bytes",
                    action="restore the file or rebuild the artifact",
                )

    def check_digests(self, *, where: Callable[[str, FileRecord], bool] = lambda relative, record: True) -> None:
        """Read files and compare their digests with the manifest.

        Args:
            where: chooses files by path and record; all by default.

        Raises:
            CorruptArtifactError: names the first file that differs or cannot be read.
        """
        chosen = [relative for relative, record in self.manifest.files.items() if where(relative, record)]
        with ThreadPoolExecutor() as pool:
            for _ in pool.map(self._check_digest, chosen):
                pass

    def _check_digest(self, relative: str) -> None:
        expected = self.manifest.files[relative]
        with _readable(self.root, relative):
            found = file_record(self.path(relative))
        if found != expected:
            raise CorruptArtifactError(
                found=f"{self.root}: {relative} has SHA-256 {found.sha256[:16]}...",
                expected=f"{expected.sha256[:16]}...",
                action="restore the file or rebuild the artifact",
            )

    def check_no_extra_files(self) -> None:
        """Compare the artifact's own folders with the manifest.

        Raises:
            CorruptArtifactError: a file stands there that the manifest does not list.
        """
        for relative in files_below(self.root, OWNED_FOLDERS):
            if relative not in self.manifest.files:
                raise CorruptArtifactError(
                    found=f"{self.root}: {relative} is not in the manifest",
                    expected=f"in {', '.join(OWNED_FOLDERS)} only the files that it lists",
                    action="move the file out of the artifact",
                )


def open_artifact(path: str | Path, *, verify: bool = False) -> Artifact:
    """Read the manifest of an artifact and check it, the paths that it names and the sizes of its files.

    Args:
        path: the artifact's folder.
        verify: also read every file and compare digests, and look for files that the manifest does not list.

    Raises:
        ArtifactNotFoundError: no such folder, or not an artifact.
        UnfinishedArtifactError: a build was interrupted there.
        FormatVersionError: written in another format.
        CorruptArtifactError: manifest and files disagree.
    """
    data = _read_manifest(path)
    origin = f"{path}/{MANIFEST}"
    artifact = Artifact(root=Path(os.path.realpath(path)), manifest=decode_manifest(data, origin))
    check_consistency(artifact.manifest, origin)
    artifact.check_paths()
    being_built = (artifact.root / BUILD_MARKER).exists()
    try:
        artifact.check_sizes()
        if being_built:
            # A build may have been killed between these files and their manifest: then sizes alone could agree.
            artifact.check_digests(where=lambda relative, record: not is_addressed(relative, record))
        if verify:
            artifact.check_digests()
            if not being_built:  # else there are files of the unfinished build, which nothing reads
                artifact.check_no_extra_files()
    except CorruptArtifactError as error:
        if being_built:
            raise _unfinished(path) from error
        raise
    return artifact


def _read_manifest(path: str | Path) -> bytes:
    root = Path(path)
    manifest = root / MANIFEST
    try:
        if not manifest.is_file():
            if (root / BUILD_MARKER).exists():
                raise _unfinished(path)
            state = "has no manifest" if root.is_dir() else "is not a folder" if root.exists() else "does not exist"
            raise ArtifactNotFoundError(
                found=f"{path} {state}",
                expected=f"an artifact: a folder with {MANIFEST}",
                action="build one with aot-compile --config FILE",
            )
        if not is_below(manifest, root):
            raise CorruptArtifactError(
                found=f"{path}: {MANIFEST} is a link that leaves the folder",
                expected="a manifest inside the artifact",
                action="do not use this artifact",
            )
        if manifest.stat().st_size > MAX_MANIFEST_BYTES:
            raise CorruptArtifactError(
                found=f"{path}: {MANIFEST} has {manifest.stat().st_size} bytes",
                expected=f"at most {MAX_MANIFEST_BYTES}",
                action="do not use this artifact",
            )
        return manifest.read_bytes()
    except OSError as error:
        raise ArtifactNotFoundError(
            found=f"{path} cannot be read ({error.strerror or error})",
            expected=f"an artifact: a folder with {MANIFEST}",
            action="check the path and its permissions",
        ) from error


def is_manifest(path: Path) -> bool:
    """Whether a file is a manifest of some format version, in whatever state."""
    try:
        return path.stat().st_size <= MAX_MANIFEST_BYTES and bool(read_format_version(path.read_bytes(), path.name))
    except (OSError, CorruptArtifactError):
        return False


def is_below(path: Path, root: Path) -> bool:
    """Whether a path is inside ``root`` once every link in it is followed."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def files_below(root: Path, folders: tuple[str, ...]) -> Iterator[str]:
    """Relative paths of all that stands in some folders of ``root`` and is no folder. Links are not followed."""
    for folder in folders:
        if (root / folder).is_symlink():
            yield folder
            continue
        for parent, subfolders, files in os.walk(root / folder):
            links = [name for name in subfolders if os.path.islink(os.path.join(parent, name))]
            for name in (*files, *links):
                yield (Path(parent) / name).relative_to(root).as_posix()


def file_record(path: Path) -> FileRecord:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(size=file.tell(), sha256=digest.hexdigest())


def _unfinished(path: str | Path) -> UnfinishedArtifactError:
    return UnfinishedArtifactError(
        found=f"{path} holds an unfinished build", expected=MANIFEST, action="run the same aot-compile again"
    )


@contextmanager
def _readable(root: Path, relative: str) -> Iterator[None]:
    """Turn what the file system refuses into an error that names the file."""
    try:
        yield
    except OSError as error:
        raise CorruptArtifactError(
            found=f"{root}: {relative} cannot be read ({error.strerror or error})",
            expected="a file that this user may read",
            action="check its permissions and its disk, or restore the file",
        ) from error
