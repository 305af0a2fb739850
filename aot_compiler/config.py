"""The schema of a build's configuration: which keys there are, what each accepts, and how they have to agree.

Each key is documented where it is declared; :func:`describe_keys` renders the table of all of them, and the faults of a
file (``config_file``) quote the same words. A rule about one key stands in that key's type; a rule between keys stands
in :func:`disagreements`.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from aot_compiler.yaml_source import show_path

LARGEST_BUCKET = 2**20
"""Largest bucket and cache block, in tokens or rows: nothing sensible is above, and a slip of the keyboard is."""

LARGEST_CACHE = 2**30
"""Most tokens of a cache: slots are numbered in int32."""

DType = Literal["float32", "bfloat16"]
Platform = Literal["cpu"]
Isa = Literal["native", "x86-64-v3", "x86-64-v4"]


@dataclass(frozen=True, slots=True)
class Phrase:
    """What a type accepts, in the words of the documentation and of the faults: "an integer from 1 to 9"."""

    text: str
    choices: tuple[str, ...] = ()


def _refuse(
    *, found: str = "", expected: str = "", action: str = "", absent: Sequence[tuple[str, ...]] = ()
) -> NoReturn:
    """Ends a validator of one key; a part left empty is filled in from the value and the key's documentation.

    Args:
        absent: paths of keys, where any of them is all that is wanting.
    """
    raise PydanticCustomError(
        "rule", "{found}", {"found": found, "expected": expected, "action": action, "absent": absent}
    )


def _check_path(value: str) -> str:
    if value.startswith("~"):
        # A shell would put a home folder here, and a build should not depend on who runs it.
        _refuse(expected="a path without a leading ~, which is not expanded here", action="write the folder in full")
    if re.search(r"[\x00-\x1f\x7f-\x9f]", value):
        _refuse(expected="a path without control characters", action="remove them")
    if not value.strip():
        _refuse()
    return value


def _check_source(value: str) -> str:
    package = value.removeprefix("package:")
    name, _, file = package.partition("/")
    if package != value and not (
        re.fullmatch(r"\w+(\.\w+)*", name)
        and file.endswith(".gguf")
        and all(part not in ("", ".", "..") for part in file.split("/"))
    ):
        _refuse(
            expected="package:NAME/FILE.gguf, NAME an importable package and FILE below its folder",
            action="correct the name and the path",
        )
    return value


def _check_layout(value: str) -> str:
    if not re.fullmatch(r"tp[1-9][0-9]{0,3}(-sp)?", value):
        _refuse()
    return value


def _check_list(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values:
        _refuse()
    repeated = sorted(value for value, count in Counter(values).items() if count > 1)
    if repeated:
        _refuse(
            found=f"holds {', '.join(str(value) for value in repeated)} more than once",
            action="write each once",
        )
    return values


def _sort(values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(values))


PathText = Annotated[str, AfterValidator(_check_path), Phrase("a path")]
Source = Annotated[
    str,
    AfterValidator(_check_path),
    AfterValidator(_check_source),
    Phrase("a folder, a .gguf file, package:NAME/FILE.gguf or a hub id"),
]
Bucket = Annotated[int, Field(ge=1, le=LARGEST_BUCKET), Phrase(f"an integer from 1 to {LARGEST_BUCKET}")]
Buckets = Annotated[
    tuple[Bucket, ...],
    Strict(False),  # of the list alone: YAML has no tuples
    AfterValidator(_check_list),
    AfterValidator(_sort),
    Phrase(f"a list of one or more distinct integers from 1 to {LARGEST_BUCKET}"),
]
LayoutName = Annotated[str, AfterValidator(_check_layout), Phrase("tp{N} or tp{N}-sp, N from 1 to 9999")]
LayoutNames = Annotated[
    tuple[LayoutName, ...],
    Strict(False),
    AfterValidator(_check_list),
    Phrase("a list of one or more distinct names tp{N} or tp{N}-sp, N from 1 to 9999"),
]


def _one_of(choices: tuple[str, ...]) -> Phrase:
    *others, last = choices
    if not others:
        return Phrase(f"{last}, the only choice of this version")  # not "did you mean": nothing else could be meant
    return Phrase(f"{', '.join(others)} or {last}", choices)


class Section(BaseModel):
    """A mapping of the YAML: its keys are the fields, and no others."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    shorthand: ClassVar[str | None] = None
    """The key that a string in place of the whole section stands for."""

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, data: object) -> object:
        return {cls.shorthand: data} if cls.shorthand is not None and isinstance(data, str) else data


class ModelSection(Section):
    """Which model is compiled, and in which dtype."""

    source: Source | None = Field(
        default=None,
        description="Weights, tokenizer and architecture: a folder with config.json and safetensors, a .gguf file, "
        "package:NAME/FILE.gguf for a file inside an installed Python package, or a hub id that is already in the "
        "local cache. Optional where `config` is given. Relative paths are looked for from the YAML's folder, then the "
        "working directory. A leading ~ is refused, not expanded.",
        examples=["meta-llama/Llama-3.1-8B-Instruct"],
    )
    config: PathText | None = Field(
        default=None,
        validate_default=True,
        description="The config.json of a Hugging Face model: architecture alone, enough to plan and compile "
        "without weights. Looked for as `source` is.",
        examples=["configs/hf/llama-3.1-8b.json"],
    )
    dtype: Annotated[DType, _one_of(get_args(DType))] = Field(
        default="float32",
        description="Dtype of weights and activations in the compiled graphs; logits are float32 in any case.",
        examples=["bfloat16"],
    )

    @field_validator("config")
    @classmethod
    def _require_a_model(cls, config: str | None, info: ValidationInfo) -> str | None:
        if config is None and "source" in info.data and info.data["source"] is None:
            _refuse(
                found="is missing, and so is model.source",
                expected="one of the two",
                action="add source, or config to compile without weights",
                absent=[("model", "source"), ("model", "config")],
            )
        return config


class TargetSection(Section):
    """What the programs are compiled for."""

    shorthand: ClassVar[str | None] = "platform"

    platform: Annotated[Platform, _one_of(get_args(Platform))] = Field(
        default="cpu",
        description="Platform of the programs. `target: cpu` is short for `target: {platform: cpu}`.",
        examples=["cpu"],
    )
    isa: Annotated[Isa, _one_of(get_args(Isa))] = Field(
        default="native",
        description="Highest instruction set that the programs may use. native: all that the build machine has; the "
        "others are the levels of the x86-64 psABI, for programs that run on other machines too.",
        examples=["x86-64-v3"],
    )


class BucketSection(Section):
    """The fixed sizes that graphs are compiled for. A step takes the smallest bucket that holds it; order is free."""

    prefill: Buckets = Field(
        description="Tokens of a prefill step. None may exceed the largest context bucket.",
        examples=[[32, 128, 512]],
    )
    decode: Buckets = Field(
        description="Rows of a decode step: requests that advance by one token each.",
        examples=[[1, 4, 16]],
    )
    context: Buckets = Field(
        description="Cache tokens that a step may read, each a multiple of kv_cache.block_size. The largest is the "
        "longest sequence, prompt and answer together.",
        examples=[[512, 2048]],
    )


class KvCacheSection(Section):
    """The paged key/value cache, whose size is fixed in the programs."""

    block_size: Bucket = Field(default=32, description="Tokens of a cache block.", examples=[32])
    tokens: Annotated[int, Field(ge=1, le=LARGEST_CACHE), Phrase(f"an integer from 1 to {LARGEST_CACHE}")] = Field(
        description="Tokens that the cache holds for all requests together: a multiple of block_size, at least the "
        "largest context bucket.",
        examples=[8192],
    )
    dtype: Annotated[DType | None, _one_of(get_args(DType))] = Field(
        default=None,
        description="Dtype of the cache; where it is not stated, model.dtype.",
        examples=["bfloat16"],
    )


class CompileConfig(Section):
    """A checked configuration. Made from YAML by ``config_file.load_config``, or from a dict by ``model_validate``.

    Raises:
        pydantic.ValidationError: made in Python from values that break a rule; ``load_config`` turns it into faults.
    """

    model: ModelSection = Field(
        description="Which model is compiled.",
        examples=[{"source": "meta-llama/Llama-3.1-8B-Instruct"}],
    )
    target: TargetSection = Field(
        default=TargetSection(),
        description="What the programs are compiled for; the platform's name alone will do.",
        examples=["cpu"],
    )
    layouts: LayoutNames = Field(
        default=("tp1",),
        description="How the model is split over ranks: tp{N} for tensor parallel over N ranks, tp{N}-sp with hidden "
        "states split by token in prefill (sequence parallel). All are built into the one artifact. This version "
        "builds tp1 alone.",
        examples=[["tp1", "tp4-sp"]],
    )
    buckets: BucketSection = Field(
        description="The fixed sizes that graphs are compiled for.",
        examples=[{"prefill": [32, 128, 512], "decode": [1, 4, 16], "context": [512, 2048]}],
    )
    kv_cache: KvCacheSection = Field(
        description="The paged key/value cache.",
        examples=[{"block_size": 32, "tokens": 8192}],
    )
    output: PathText = Field(
        description="Folder of the artifact; a relative path counts from the working directory. A leading ~ is "
        "refused, not expanded.",
        examples=["compiled/llama8b"],
    )

    @property
    def cache_dtype(self) -> DType:
        """Dtype of the key/value cache."""
        return self.kv_cache.dtype or self.model.dtype

    @field_validator("kv_cache")
    @classmethod
    def _resolve_cache_dtype(cls, kv_cache: KvCacheSection, info: ValidationInfo) -> KvCacheSection:
        model = info.data.get("model")
        if kv_cache.dtype is None and isinstance(model, ModelSection):
            return kv_cache.model_copy(update={"dtype": model.dtype})
        return kv_cache

    @model_validator(mode="after")
    def _check_agreement(self) -> Self:
        sizes = Sizes(
            prefill=self.buckets.prefill,
            context=self.buckets.context,
            block_size=self.kv_cache.block_size,
            tokens=self.kv_cache.tokens,
        )
        found = [f"{d.found}; expected {d.expected}; {d.action}" for d in disagreements(sizes)]
        if found:
            raise ValueError("\n".join(found))
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What the rules between keys read; None where the key itself is at fault. Lists are in the order of the file."""

    prefill: Sequence[int] | None
    context: Sequence[int] | None
    block_size: int | None
    tokens: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Disagreement:
    """A rule between keys that is broken: ``path`` is of the value to change, the rest is the text of its fault."""

    path: tuple[str | int, ...]
    found: str
    expected: str
    action: str


def disagreements(sizes: Sizes) -> Iterator[Disagreement]:
    """The rules between keys, which need the values of more than one."""
    block_size, tokens = sizes.block_size, sizes.tokens
    longest = None if sizes.context is None else max(sizes.context)
    if longest is not None:
        for i, bucket in enumerate(sizes.prefill or ()):
            if bucket > longest:
                yield Disagreement(
                    path=("buckets", "prefill", i),
                    found=f"buckets.prefill[{i}] is {bucket}, a bucket that no context can hold",
                    expected=f"at most the largest of buckets.context, {longest}",
                    action="remove it, or add a context bucket that holds it",
                )
    if block_size is not None:
        for i, bucket in enumerate(sizes.context or ()):
            if bucket % block_size:
                yield Disagreement(
                    path=("buckets", "context", i),
                    found=f"buckets.context[{i}] is {bucket}, not a whole number of cache blocks",
                    expected=f"a multiple of kv_cache.block_size, {block_size}",
                    action=f"write {_nearest_multiples(bucket, block_size)}",
                )
    if tokens is not None and longest is not None and tokens < longest:
        block = block_size or 1
        yield Disagreement(
            path=("kv_cache", "tokens"),
            found=f"kv_cache.tokens is {tokens}, too few for one sequence of the largest context",
            expected=f"at least the largest of buckets.context, {longest}",
            action=f"write at least {math.ceil(longest / block) * block}",
        )
    elif tokens is not None and block_size is not None and tokens % block_size:
        yield Disagreement(
            path=("kv_cache", "tokens"),
            found=f"kv_cache.tokens is {tokens}, not a whole number of cache blocks",
            expected=f"a multiple of kv_cache.block_size, {block_size}",
            action=f"write {_nearest_multiples(tokens, block_size)}",
        )


def _nearest_multiples(value: int, step: int) -> str:
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyDoc:
    """One row of the table of keys; ``default`` is in YAML, or "required"."""

    path: str
    type: str
    default: str
    text: str


def describe_keys() -> list[KeyDoc]:
    """Every key of the configuration, a section before its own keys."""
    return [
        KeyDoc(
            path=show_path(path),
            type=phrase_of(path).text,
            default="required" if field.is_required() else _show_default(field.default),
            text=field.description or "",
        )
        for path, field in KEYS.items()
    ]


def _walk(section: type[Section], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    for name, field in section.model_fields.items():
        yield (*above, name), field
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _walk(field.annotation, (*above, name))


KEYS: dict[tuple[str, ...], FieldInfo] = dict(_walk(CompileConfig))
"""Every key by its path, a section before its own keys."""

SECTIONS: dict[tuple[str, ...], type[Section]] = {(): CompileConfig} | {
    path: field.annotation
    for path, field in KEYS.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}
"""Every section by its path, the whole configuration by ``()``."""


def key_of(path: Sequence[str | int]) -> tuple[str, ...]:
    """The path without the index of a list item."""
    return tuple(step for step in path if isinstance(step, str))


def phrase_of(path: Sequence[str | int]) -> Phrase:
    """What the key, the section or the list item at ``path`` accepts."""
    key = key_of(path)
    if key in SECTIONS:
        section = SECTIONS[key]
        keys = f"a mapping with the keys {', '.join(section.model_fields)}"
        return Phrase(keys if section.shorthand is None else f"{keys}, or the {section.shorthand} alone")
    field = KEYS[key]
    # The outer type's own phrase, then those of its items or of its choices but None.
    inner = [mark for argument in get_args(field.annotation) for mark in getattr(argument, "__metadata__", ())]
    marks = inner if isinstance(path[-1], int) else [*field.metadata, *inner]
    return next(mark for mark in marks if isinstance(mark, Phrase))


@functools.cache
def example_of(key: tuple[str, ...]) -> str:
    """The example of a key as one line of YAML, ``decode: [1, 4, 16]``."""
    examples = KEYS[key].examples
    assert examples, f"key {key} is declared without an example"
    return yaml.safe_dump({key[-1]: examples[0]}, default_flow_style=True, sort_keys=False, width=math.inf)[1:-2]


def _show_default(default: object) -> str:
    match default:
        case None:
            return "none"
        case Section():
            default = default.model_dump(mode="json")
        case tuple():
            default = list(default)
    return yaml.safe_dump(default, default_flow_style=True, sort_keys=False).removesuffix("...\n").strip()
