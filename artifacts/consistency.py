"""What a manifest must agree with itself about, beyond its schema: paths, names and every cross reference.

Decided from the manifest alone: no file is looked at. So a loader may index by these names without asking again.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from artifacts.errors import CorruptArtifactError
from artifacts.manifest import FileRecord, LayoutRecord, Manifest
from artifacts.signature import entry_name

ADDRESSED_FOLDERS = ("graphs", "programs", "weights")
"""In these folders a file's name begins with its SHA-256, so that a file is never replaced by another content."""


def check_consistency(manifest: Manifest, origin: str) -> None:
    """Check the paths and the cross references of a manifest.

    Args:
        manifest: one that follows the schema.
        origin: file name, for messages.

    Raises:
        CorruptArtifactError: names the first fault.
    """
    for path in manifest.files:
        if not is_relative_inside(path):
            raise CorruptArtifactError(
                found=f"{origin}: path {path!r} leaves the folder",
                expected="relative paths inside the artifact",
                action="do not use this artifact",
            )
    for fault in _faults(manifest):
        raise CorruptArtifactError(
            found=f"{origin}: {fault}",
            expected="a manifest whose parts agree (artifacts/FORMAT.md)",
            action="rebuild the artifact",
        )


def is_relative_inside(path: str) -> bool:
    """Whether a path of a manifest names a file inside the folder, in the one spelling that the format allows."""
    pure = PurePosixPath(path)
    return (
        pure.parts != ()
        and not pure.is_absolute()
        and ".." not in pure.parts
        and str(pure) == path
        and path.isprintable()
        and "\\" not in path
    )


def is_addressed(path: str, record: FileRecord) -> bool:
    """Whether a file's name begins with its digest."""
    return PurePosixPath(path).name.partition(".")[0] == record.sha256


def _faults(manifest: Manifest) -> Iterator[str]:
    for path, record in manifest.files.items():
        if PurePosixPath(path).parts[0] in ADDRESSED_FOLDERS and not is_addressed(path, record):
            yield f"{path} does not bear its SHA-256 {record.sha256[:16]}... as its name"
    for name, weight in (manifest.weights or {}).items():
        if weight.file not in manifest.files:
            yield f"weight {name} is in {weight.file}, which files does not list"
    yield from _repeated("layout", (layout.name for layout in manifest.layouts))
    if not manifest.layouts:
        yield "there is no layout"
    for layout in manifest.layouts:
        for fault in _layout_faults(manifest, layout):
            yield f"layout {layout.name}: {fault}"


def _layout_faults(manifest: Manifest, layout: LayoutRecord) -> Iterator[str]:
    yield from _repeated("entry", (entry.signature.name for entry in layout.entries))
    yield from _repeated("tensor", (spec.name for spec in (*layout.caches, *layout.parameters)))
    if not layout.entries:
        yield "there is no entry"
    for entry in layout.entries:
        signature = entry.signature
        if signature.name != (name := entry_name(signature.kind, signature.rows, signature.context)):
            yield f"entry {signature.name} is {name} by its kind, rows and context"
        yield from _repeated(f"{signature.name} input", (spec.name for spec in signature.inputs))
        for file in (entry.graph, *((entry.program.file,) if entry.program else ())):
            if file not in manifest.files:
                yield f"entry {signature.name} uses {file}, which files does not list"
    if manifest.model.embedding not in (spec.name for spec in layout.parameters):
        yield f"the embedding {manifest.model.embedding} is not a parameter"
    if manifest.weights is None:
        return
    for spec in layout.parameters:
        weight = manifest.weights.get(spec.name)
        if weight is None:
            yield f"parameter {spec.name} has no weight"
        elif layout.ranks == 1 and (weight.shape, weight.dtype) != (spec.shape, spec.dtype):
            yield f"parameter {spec} is stored as {weight.dtype}{list(weight.shape)}"


def _repeated(what: str, names: Iterable[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{what} {name} stands {count} times"
