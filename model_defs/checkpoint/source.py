"""From ``model.source`` of the configuration to an open checkpoint."""

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from artifacts.errors import CheckpointNotFoundError
from model_defs.checkpoint.gguf_file import open_gguf_file
from model_defs.checkpoint.hf_folder import open_hf_folder
from model_defs.checkpoint.interface import Checkpoint
from model_defs.checkpoint.listing import listing

_PACKAGE = "package:"
_HUB_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*?)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_SOURCES = "a folder, a .gguf file, package:NAME/FILE.gguf, or a hub id org/name that is in the local cache"


def open_checkpoint(source: str, *, search: Sequence[Path]) -> Checkpoint:
    """Open the checkpoint that ``source`` names; headers are read, tensors are not. Nothing is ever downloaded.

    Args:
        source: a folder or a ``.gguf`` file, absolute or relative; ``package:NAME/FILE.gguf``, a file inside an
            installed Python package, which is not imported; or a hub id ``org/name``, optionally ``org/name@revision``,
            that is in the local hub cache. A path on disk goes before a hub id.
        search: folders in which a relative path is looked for, in order.

    Raises:
        CheckpointNotFoundError: nothing readable is where the source points.
        CorruptCheckpointError: a file is damaged, or files contradict each other.
        UnsupportedModelError: an architecture, or an option of one, that is not read.
    """
    try:
        return _open(source, search)
    except OSError as error:  # a name too long for the file system, a folder that this user may not enter
        raise CheckpointNotFoundError(
            found=f"model.source {source!r} cannot be read ({error.strerror or error})",
            expected=_SOURCES,
            action="correct the path or its permissions",
        ) from None


def _open(source: str, search: Sequence[Path]) -> Checkpoint:
    if source.startswith(_PACKAGE):
        return _open_path(_inside_package(source), source)
    for path in _candidates(source, search):
        if path.exists():
            return _open_path(path, source)
    hub_id = None if source.endswith(".gguf") else _HUB_ID.fullmatch(source)
    if hub_id is None:
        raise CheckpointNotFoundError(
            found=f"model.source {source!r} is not on disk{_looked_in(source, search)}",
            expected=_SOURCES,
            action="correct the path",
        )
    repo, revision = hub_id["repo"], hub_id["revision"]
    fetch = f"hf download {repo}" + (f" --revision {revision}" if revision else "")
    folder = _in_hub_cache(repo, revision)
    if folder is None:
        raise CheckpointNotFoundError(
            found=f"model.source {source!r} is neither on disk{_looked_in(source, search)} nor in the local hub cache",
            expected=_SOURCES,
            action=f"fetch it with `{fetch}`, or correct the path",
        )
    return open_hf_folder(folder, source, fetch=fetch)


def _open_path(path: Path, source: str) -> Checkpoint:
    if path.is_dir():
        return open_hf_folder(path, source)
    if path.suffix == ".gguf":
        return open_gguf_file(path, source)
    raise CheckpointNotFoundError(
        found=f"model.source {source!r} is a file of another kind",
        expected="a .gguf file, or a folder with config.json and safetensors weights",
        action="point model.source to the folder"
        if path.suffix == ".safetensors"
        else "convert the model to safetensors",
    )


def _candidates(source: str, search: Sequence[Path]) -> list[Path]:
    path = Path(os.path.expanduser(source))
    return [path] if path.is_absolute() else [folder / path for folder in search] if source else []


def _looked_in(source: str, search: Sequence[Path]) -> str:
    folders = [str(path) for path in search]
    return f" (looked in {listing(folders)})" if folders and not os.path.isabs(os.path.expanduser(source)) else ""


def _inside_package(source: str) -> Path:
    package, _, file = source.removeprefix(_PACKAGE).partition("/")
    # A dotted name would import its parent packages.
    if not package.isidentifier() or not file or ".." in PurePosixPath(file).parts or file.startswith("/"):
        raise CheckpointNotFoundError(
            found=f"model.source {source!r} names no file of a package",
            expected="package:NAME/FILE.gguf with the name of a top-level package",
            action="correct model.source",
        )
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module made by hand, such as __main__, has no spec
        spec = None
    if spec is None:
        raise CheckpointNotFoundError(
            found=f"package {package!r} of model.source {source!r} is not installed",
            expected="a package of this Python environment",
            action=f"install {package}, or correct model.source",
        )
    roots = [Path(root) for root in spec.submodule_search_locations or ()]
    for root in roots:
        if (root / file).exists():
            return root / file
    ggufs = sorted(path.relative_to(root).as_posix() for root in roots for path in root.rglob("*.gguf"))
    raise CheckpointNotFoundError(
        found=f"package {package!r} has no file {file!r}",
        expected=f"one of {listing(ggufs)}" if ggufs else "a .gguf file inside the package; it has none",
        action="correct model.source",
    )


def _in_hub_cache(repo: str, revision: str | None) -> Path | None:
    """The snapshot's folder in the local cache, complete or not: what is absent from it is reported on opening."""
    # Imported where it is needed: no other source pays for it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # The pattern keeps the library from asking for files that are never read, such as weights in other formats.
        return Path(snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=["config.json"]))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
