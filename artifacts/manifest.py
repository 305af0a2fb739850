"""The manifest: everything that an artifact says of itself. One type each, used by compiler, runtime and tools alike."""

import hashlib
from typing import Any

import msgspec

from artifacts.errors import CorruptArtifactError, FormatVersionError
from artifacts.signature import EntrySignature, TensorSpec

FORMAT_VERSION = 1
"""Format that this package writes, and the only one that it reads. See artifacts/FORMAT.md for what changes it."""

MAX_MANIFEST_BYTES = 64 * 2**20
"""A manifest above this size is refused unread."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size and digest of one file."""

    size: int
    sha256: str


class ProgramRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry compiled for the artifact's target."""

    file: str
    requires: tuple[str, ...]
    """CPU features that the program's own instructions need, as /proc/cpuinfo spells them."""


class EntryRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry: its signature, its graph, and its program where it has been compiled."""

    signature: EntrySignature
    graph: str
    """Path of the HLO module, ``graphs/<sha256>.hlo.pb``."""
    program: ProgramRecord | None


class LayoutRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to spread the model over ranks."""

    name: str
    ranks: int
    caches: tuple[TensorSpec, ...]
    """``layers.0.k``, ``layers.0.v``, ``layers.1.k``, ...: shapes of one rank, in the order of the graphs' parameters."""
    parameters: tuple[TensorSpec, ...]
    """Weights, in checkpoint names: shapes of one rank, in the order of the graphs' parameters."""
    entries: tuple[EntryRecord, ...]


class WeightRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one tensor is stored."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the runtime must know of the model."""

    architecture: str
    """Class name in Transformers."""
    source: str
    """What the checkpoint was called in the configuration."""
    dtype: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    embedding: str
    """Name of the parameter whose rows are the model's embeddings."""
    eos_token_ids: tuple[int, ...]
    """Ids that end a generation."""


class KvCacheRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paged cache."""

    block_size: int
    """Tokens in a block."""
    blocks: int
    """Blocks in the pool, the null block 0 included."""
    dtype: str


class TargetRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the programs run on."""

    platform: str
    architecture: str
    """Machine architecture, as ``uname -m`` prints it."""
    isa: str
    """Highest instruction set that the compiler was allowed, or "native"."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole artifact."""

    format_version: int
    self_digest: str
    """SHA-256 of this manifest in canonical form with this field empty."""
    toolchain: dict[str, str]
    """Versions of the packages that made the artifact, by distribution name."""
    model: ModelRecord
    target: TargetRecord
    kv_cache: KvCacheRecord
    layouts: tuple[LayoutRecord, ...]
    weights: dict[str, WeightRecord] | None
    """By checkpoint name; None in an artifact that was built without weights."""
    files: dict[str, FileRecord]
    """Every file of the artifact but this one, by path relative to its folder."""


def encode_manifest(manifest: Manifest) -> bytes:
    """Canonical JSON of a manifest, with its ``self_digest`` filled in."""
    return _canonical(msgspec.structs.replace(manifest, self_digest=manifest_digest(manifest)))


def manifest_digest(manifest: Manifest) -> str:
    """What ``self_digest`` must be."""
    return hashlib.sha256(_canonical(msgspec.structs.replace(manifest, self_digest=""))).hexdigest()


def _canonical(manifest: Manifest) -> bytes:
    """Sorted keys, one space of indent, one trailing newline."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=1) + b"\n"


class _VersionOnly(msgspec.Struct):
    format_version: int
    self_digest: str


def read_format_version(data: bytes, origin: str) -> int:
    """Format version of a manifest, whatever else it holds.

    Raises:
        CorruptArtifactError: not a manifest of any version.
    """
    return int(_decode(data, _VersionOnly, origin).format_version)


def decode_manifest(data: bytes, origin: str) -> Manifest:
    """Parse and check a manifest: format version first, then schema, canonical form and digest.

    Args:
        data: the file's bytes.
        origin: file name, for messages.

    Raises:
        FormatVersionError: a version that this package does not read.
        CorruptArtifactError: not a manifest, or one that was changed after it was written.
    """
    version = read_format_version(data, origin)
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            found=f"{origin} has format version {version}",
            expected=f"version {FORMAT_VERSION}, which this package reads",
            action="use the release of aot-compiler that wrote it, or rebuild the artifact",
        )
    manifest = _decode(data, Manifest, origin)
    if encode_manifest(manifest) != data:
        raise CorruptArtifactError(
            found=f"{origin} is not in canonical form, or its digest disagrees with its content",
            expected="the bytes that aot-compile wrote",
            action="restore the file or rebuild the artifact",
        )
    return manifest


def _decode(data: bytes, kind: type[Any], origin: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptArtifactError(
            found=f"{origin} is not a manifest ({error})",
            expected="the JSON that artifacts/FORMAT.md describes",
            action="restore the file or rebuild the artifact",
        ) from error
