"""An artifact as a folder: found, checked, and read. Nothing is opened whose path could leave the folder."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from artifacts.errors import (
    ArtifactNotFoundError,
    CorruptArtifactError,
    LayoutNotFoundError,
    UnfinishedArtifactError,
)
from artifacts.manifest import MAX_MANIFEST_BYTES, FileRecord, LayoutRecord, Manifest, decode_manifest, read_format_version

MANIFEST = "manifest.json"
BUILD_MARKER = ".unfinished"
"""Stands in a folder while it is being built."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """A folder with a manifest that has been read and checked."""

    root: Path
    manifest: Manifest

    def path(self, relative: str) -> Path:
        """Absolute path of a file that the manifest lists.

        Raises:
            CorruptArtifactError: the path leaves the folder, or the manifest does not list it.
        """
        if relative not in self.manifest.files:
            raise CorruptArtifactError(
                found=f"{self.root.name}: {relative} is used but not listed",
                expected="every file under `files` of the manifest",
                action="rebuild the artifact",
            )
        pure = PurePosixPath(relative)
        path = self.root / pure
        if pure.is_absolute() or ".." in pure.parts or not path.resolve().is_relative_to(self.root.resolve()):
            raise CorruptArtifactError(
                found=f"{self.root.name}: path {relative!r} leaves the folder",
                expected="relative paths inside the artifact",
                action="do not use this artifact",
            )
        return path

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

    def check_sizes(self) -> None:
        """Compare every file's size with the manifest.

        Raises:
            CorruptArtifactError: a file is missing or has another size.
        """
        for relative, record in self.manifest.files.items():
            path = self.path(relative)
            size = path.stat().st_size if path.is_file() else None
            if size != record.size:
                raise CorruptArtifactError(
                    found=f"{self.root.name}: {relative} " + ("is missing" if size is None else f"has {size} bytes"),
                    expected=f"{record.size} bytes",
                    action="restore the file or rebuild the artifact",
                )

    def check_digests(self) -> None:
        """Read every file and compare its digest with the manifest.

        Raises:
            CorruptArtifactError: names the first file that differs.
        """
        with ThreadPoolExecutor() as pool:
            digests = pool.map(lambda item: (item[0], item[1], file_record(self.path(item[0]))), self._files())
            for relative, expected, found in digests:
                if found != expected:
                    raise CorruptArtifactError(
                        found=f"{self.root.name}: {relative} has SHA-256 {found.sha256[:16]}...",
                        expected=f"{expected.sha256[:16]}...",
                        action="restore the file or rebuild the artifact",
                    )

    def _files(self) -> Iterator[tuple[str, FileRecord]]:
        yield from self.manifest.files.items()


def open_artifact(path: str | Path, *, verify: bool = False) -> Artifact:
    """Read the manifest of an artifact and check it and the sizes of its files.

    Args:
        path: the artifact's folder.
        verify: also read every file and compare digests.

    Raises:
        ArtifactNotFoundError: no such folder, or not an artifact.
        UnfinishedArtifactError: a build was interrupted there.
        FormatVersionError: written in another format.
        CorruptArtifactError: manifest and files disagree.
    """
    root = Path(path)
    manifest_path = root / MANIFEST
    if not manifest_path.is_file():
        if (root / BUILD_MARKER).exists():
            raise _unfinished(path)
        raise ArtifactNotFoundError(
            found=f"{path} " + ("has no manifest" if root.is_dir() else "is not a folder"),
            expected=f"an artifact: a folder with {MANIFEST}",
            action="build one with aot-compile --config FILE",
        )
    if manifest_path.stat().st_size > MAX_MANIFEST_BYTES:
        raise CorruptArtifactError(
            found=f"{path}: {MANIFEST} has {manifest_path.stat().st_size} bytes",
            expected=f"at most {MAX_MANIFEST_BYTES}",
            action="do not use this artifact",
        )
    artifact = Artifact(root=root, manifest=decode_manifest(manifest_path.read_bytes(), f"{path}/{MANIFEST}"))
    try:
        artifact.check_sizes()
        if verify:
            artifact.check_digests()
    except CorruptArtifactError as error:
        if (root / BUILD_MARKER).exists():
            raise _unfinished(path) from error
        raise
    return artifact


def is_manifest(path: Path) -> bool:
    """Whether a file is a manifest of some format version, in whatever state."""
    try:
        return path.stat().st_size <= MAX_MANIFEST_BYTES and bool(read_format_version(path.read_bytes(), path.name))
    except (OSError, CorruptArtifactError):
        return False


def _unfinished(path: str | Path) -> UnfinishedArtifactError:
    return UnfinishedArtifactError(
        found=f"{path} holds an unfinished build", expected=MANIFEST, action="run the same aot-compile again"
    )


def file_record(path: Path) -> FileRecord:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(size=file.tell(), sha256=digest.hexdigest())
