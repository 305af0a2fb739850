"""The manifest: all that an artifact says of itself. One type each, used by compiler, runtime and tools alike."""

import hashlib
from typing import Annotated, TypeVar

import msgspec

from artifacts.errors import CorruptArtifactError, FormatVersionError
from artifacts.signature import EntrySignature, Positive, TensorSpec, check_dtype, check_shape

FORMAT_VERSION = 1
"""Format that this package writes, and the only one that it reads. See artifacts/FORMAT.md for what changes it."""

MAX_MANIFEST_BYTES = 64 * 2**20
"""A manifest above this size is refused unread."""

Natural = Annotated[int, msgspec.Meta(ge=0)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size and digest of one file."""

    size: Natural
    sha256: Sha256


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
    ranks: Positive
    caches: tuple[TensorSpec, ...]
    """``layers.0.k``, ``layers.0.v``, ``layers.1.k``, ...: shapes of one rank, in the graphs' order."""
    parameters: tuple[TensorSpec, ...]
    """Weights, in checkpoint names: shapes of one rank, in the graphs' order, after the caches."""
    entries: tuple[EntryRecord, ...]


class WeightRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where one tensor is stored."""

    file: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        check_shape(self.shape)


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the runtime must know of the model."""

    architecture: str
    """Class name in Transformers."""
    source: str
    """What the checkpoint was called in the configuration."""
    dtype: str
    vocab_size: Positive
    hidden_size: Positive
    num_layers: Positive
    max_position_embeddings: Positive
    embedding: str
    """Name of the parameter whose rows are the model's embeddings."""
    eos_token_ids: tuple[Natural, ...]
    """Ids that end a generation."""

    def __post_init__(self) -> None:
        check_dtype(self.dtype)


class KvCacheRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The paged cache."""

    block_size: Positive
    """Tokens in a block."""
    blocks: Positive
    """Blocks in the pool, the null block 0 included."""
    dtype: str

    def __post_init__(self) -> None:
        check_dtype(self.dtype)


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
    """What every format version keeps: a newer manifest is told by its version, whatever fields it has come to hold."""

    format_version: int
    self_digest: str


_Kind = TypeVar("_Kind", _VersionOnly, Manifest)


def read_format_version(data: bytes, origin: str) -> int:
    """Format version of a manifest, whatever else it holds.

    Raises:
        CorruptArtifactError: not a manifest of any version.
    """
    return _decode(data, _VersionOnly, origin).format_version


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


def _decode(data: bytes, kind: type[_Kind], origin: str) -> _Kind:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CorruptArtifactError(
            found=f"{origin} is not a manifest ({error})",
            expected="the JSON that artifacts/FORMAT.md describes",
            action="restore the file or rebuild the artifact",
        ) from error
