"""The artifact's ``tokenizer/`` folder: what the slim runtime needs to turn text into ids and back.

A Hugging Face folder already holds a ``tokenizer.json``, which is taken as it is. A GGUF file holds the vocabulary,
the merges and a *name* for the way its text is cut into words; from these the ``tokenizer.json`` that the model was
trained with is built again. A wrong tokenizer is worse than none, because the model then answers in slightly broken
text: what is not known for sure gives no tokenizer and a warning, and requests carry ids or embeddings instead.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf import TokenType
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from artifacts.errors import CheckpointNotFoundError, CorruptCheckpointError
from artifacts.tokenizer_names import CONFIG_FILE, TEMPLATE_FILE, TOKENIZER_FILE
from model_defs.checkpoint import GgufTokenizer, HfTokenizerFiles, TokenizerSource
from model_defs.checkpoint.gguf_header import read_gguf_header


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """Content of the ``tokenizer/`` folder: the same bytes for the same checkpoint."""

    files: Mapping[str, bytes]
    """By file name; empty where the checkpoint has no tokenizer that can be carried over.

    - ``tokenizer.json``: for the ``tokenizers`` library.
    - ``chat_template.jinja``: only where the checkpoint has one.
    - ``tokenizer_config.json``: an object with ``bos_token``, ``eos_token``, ``unk_token``, ``pad_token`` (strings) and
      ``add_bos_token`` (bool), each only where the checkpoint states it. What is put in front of a text is up to the
      post-processor in ``tokenizer.json``; from GGUF, ``add_bos_token`` is always there and agrees with it.
    """
    warnings: tuple[str, ...]
    """One line each, worded as errors are: ``<what was found>; expected <rule or list>; <what to do>``."""


def tokenizer_files(source: TokenizerSource) -> TokenizerFiles:
    """Takes or builds the tokenizer of a checkpoint; raises as the function for its kind."""
    match source:
        case HfTokenizerFiles(folder=folder):
            return from_hf_folder(folder)
        case GgufTokenizer(path=path):
            return from_gguf(path)
        case None:
            return _no_tokenizer("a checkpoint without a tokenizer", "one with it")


def from_hf_folder(folder: Path) -> TokenizerFiles:
    """Takes the tokenizer that lies beside a Hugging Face checkpoint.

    Args:
        folder: holds ``tokenizer.json`` and, where the model has them, ``tokenizer_config.json`` and
            ``chat_template.jinja``, which wins over the template inside ``tokenizer_config.json`` as in Transformers.

    Raises:
        CheckpointNotFoundError: the folder does not exist.
        CorruptCheckpointError: one of the files cannot be read.
    """
    if not folder.is_dir():
        raise CheckpointNotFoundError(
            found=f"no folder {folder}",
            expected="the folder of a Hugging Face checkpoint",
            action="correct model.source",
        )
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return _no_tokenizer(f"no {TOKENIZER_FILE} in {folder}", "the file of a fast tokenizer")
    content = path.read_bytes()
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises no narrower class
        raise CorruptCheckpointError(
            found=f"{path} cannot be parsed ({error})",
            expected="a file of the tokenizers library",
            action="download it again (it may be a git-lfs pointer)",
        ) from error

    config_path = folder / CONFIG_FILE
    config = _read_hf_config(config_path) if config_path.is_file() else _HfConfig()
    specials = config.special_tokens()
    warnings = [
        _line(f"{config_path}: {name} is {token!r}", f"a token of {TOKENIZER_FILE}", "correct one of the two files")
        for name, token in specials.items()
        if tokenizer.token_to_id(token) is None
    ]

    if (folder / TEMPLATE_FILE).is_file():
        template = (folder / TEMPLATE_FILE).read_bytes()
    else:
        templates = config.chat_templates()
        template = templates.get("default", "").encode()
        if templates and not template:
            found = f"{config_path}: chat templates named {', '.join(sorted(templates))}"
            warnings.append(_line(found, "one named default", f"save the wanted one as {TEMPLATE_FILE}"))
    return TokenizerFiles(
        files=_files(content, template, specials, config.add_bos_token),
        warnings=tuple(warnings),
    )


def from_gguf(path: Path) -> TokenizerFiles:
    """Builds the tokenizer that a GGUF file describes.

    Two kinds are known: ``gpt2`` (byte-level BPE, in one of the styles of ``BYTE_LEVEL_STYLES``) and ``llama``
    (SentencePiece BPE with byte fallback). The aim is the model's *original* tokenizer, which llama.cpp, the format's
    reference reader, rebuilds too. Transformers converts alike, with gaps (in 5.24) that are not repeated here: its
    ``smollm`` does not cut at digits first, so that "\\n\\n1" differs; its tiktoken families look up no whole words;
    its ``qwen2`` does not normalise; ``add_space_prefix`` is not read.

    Where the file does not say whether text starts with bos, the original tokenizer's habit decides.

    Raises:
        CheckpointNotFoundError: the file does not exist.
        CorruptCheckpointError: not a whole GGUF file, or tokens, types, scores and merges that do not fit together.
    """
    vocabulary = _read_gguf(path)
    match vocabulary.kind:
        case "gpt2":
            style = BYTE_LEVEL_STYLES.get(vocabulary.pre)
            if style is None:
                known = f"one of {', '.join(sorted(BYTE_LEVEL_STYLES))}"
                return _no_tokenizer(f"{path}: {_stated('tokenizer.ggml.pre', vocabulary.pre)}", known)
            tokenizer = _byte_level_bpe(path, vocabulary, style)
            add_bos = style.add_bos
        case "llama":
            tokenizer = _sentencepiece_bpe(path, vocabulary)
            add_bos = True
        case kind:
            return _no_tokenizer(f"{path}: {_stated('tokenizer.ggml.model', kind)}", "gpt2 or llama")

    size = len(vocabulary.tokens)
    ids = vocabulary.special_ids()
    specials = {name: vocabulary.tokens[token_id] for name, token_id in ids.items() if 0 <= token_id < size}
    warnings = [
        _line(f"{path}: the id of {name} is {token_id}", f"an id below {size}", f"no {name} is recorded")
        for name, token_id in ids.items()
        if name not in specials
    ]
    repeated = [token for token, count in Counter(vocabulary.tokens).items() if count > 1]
    if repeated:
        found = f"{path}: {len(repeated)} repeated tokens, {repeated[0]!r} first"
        warnings.append(_line(found, "each token once", "text gives the last id of each, the other ids give no text"))

    _add_tokens(tokenizer, vocabulary, specials)
    if vocabulary.add_bos is not None:
        add_bos = vocabulary.add_bos
    add_bos = add_bos and "bos_token" in specials
    add_eos = vocabulary.add_eos and "eos_token" in specials
    if add_bos or add_eos:
        before = [specials["bos_token"]] if add_bos else []
        after = [specials["eos_token"]] if add_eos else []
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(before + after)],
        )
    return TokenizerFiles(
        files=_files(tokenizer.to_str().encode(), vocabulary.chat_template.encode(), specials, add_bos),
        warnings=tuple(warnings),
    )


def _add_tokens(tokenizer: Tokenizer, vocabulary: "_GgufVocabulary", specials: Mapping[str, str]) -> None:
    """Has control and user-defined tokens matched in the raw text first: no merge leads to "<|im_start|>"."""
    control = dict.fromkeys([*vocabulary.tokens_of_type(TokenType.CONTROL), *specials.values()])
    user_defined = [token for token in vocabulary.tokens_of_type(TokenType.USER_DEFINED) if token not in control]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in user_defined])


def _files(tokenizer: bytes, template: bytes, specials: Mapping[str, str], add_bos: bool | None) -> dict[str, bytes]:
    config: dict[str, str | bool] = dict(specials)
    if add_bos is not None:
        config["add_bos_token"] = add_bos
    files = {
        TOKENIZER_FILE: tokenizer,
        CONFIG_FILE: (json.dumps(config, ensure_ascii=False, indent=2, sort_keys=True) + "\n").encode(),
    }
    if template:
        files[TEMPLATE_FILE] = template
    return files


def _no_tokenizer(found: str, expected: str) -> TokenizerFiles:
    action = "pass token ids or embeddings, or compile from a folder with a tokenizer.json to have text"
    return TokenizerFiles(files={}, warnings=(_line(found, expected, action),))


def _stated(key: str, value: str) -> str:
    return f"{key} is {value!r}" if value else f"no {key}"


def _line(found: str, expected: str, action: str) -> str:
    return f"{found}; expected {expected}; {action}"


# What the files state.


class _AddedTokenObject(BaseModel):
    content: str


class _NamedTemplate(BaseModel):
    name: str
    template: str


class _HfConfig(BaseModel):
    """``tokenizer_config.json``: a token is a string or a dumped ``AddedToken``, templates are one or several."""

    model_config = ConfigDict(strict=True)

    bos_token: str | _AddedTokenObject | None = None
    eos_token: str | _AddedTokenObject | None = None
    unk_token: str | _AddedTokenObject | None = None
    pad_token: str | _AddedTokenObject | None = None
    add_bos_token: bool | None = None
    chat_template: str | list[_NamedTemplate] | None = None

    def special_tokens(self) -> dict[str, str]:
        tokens = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "unk_token": self.unk_token,
            "pad_token": self.pad_token,
        }
        return {
            name: token.content if isinstance(token, _AddedTokenObject) else token
            for name, token in tokens.items()
            if token is not None
        }

    def chat_templates(self) -> dict[str, str]:
        if isinstance(self.chat_template, list):
            return {named.name: named.template for named in self.chat_template}
        return {"default": self.chat_template} if self.chat_template else {}


def _read_hf_config(path: Path) -> _HfConfig:
    try:
        return _HfConfig.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise CorruptCheckpointError(
            found=f"{path}: {_first_fault(error)}",
            expected="a tokenizer configuration of Transformers",
            action="download it again",
        ) from error


class _GgufVocabulary(BaseModel):
    """The ``tokenizer.*`` metadata of a GGUF file (ggml-org/ggml, docs/gguf.md, section "Tokenizer")."""

    model_config = ConfigDict(strict=True)

    kind: str = Field("", alias="tokenizer.ggml.model")
    pre: str = Field("", alias="tokenizer.ggml.pre")
    tokens: list[str] = Field([], alias="tokenizer.ggml.tokens")
    token_types: list[int] | None = Field(None, alias="tokenizer.ggml.token_type")
    scores: list[float] | None = Field(None, alias="tokenizer.ggml.scores")
    merges: list[str] | None = Field(None, alias="tokenizer.ggml.merges")
    bos_id: int | None = Field(None, alias="tokenizer.ggml.bos_token_id")
    eos_id: int | None = Field(None, alias="tokenizer.ggml.eos_token_id")
    unk_id: int | None = Field(None, alias="tokenizer.ggml.unknown_token_id")
    pad_id: int | None = Field(None, alias="tokenizer.ggml.padding_token_id")
    add_bos: bool | None = Field(None, alias="tokenizer.ggml.add_bos_token")
    add_eos: bool = Field(False, alias="tokenizer.ggml.add_eos_token")
    add_space_prefix: bool = Field(True, alias="tokenizer.ggml.add_space_prefix")
    chat_template: str = Field("", alias="tokenizer.chat_template")

    def ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    def special_ids(self) -> dict[str, int]:
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_id, "unk_token": self.unk_id, "pad_token": self.pad_id}
        return {name: token_id for name, token_id in ids.items() if token_id is not None}

    def tokens_of_type(self, wanted: TokenType) -> Iterator[str]:
        types = [] if self.token_types is None else self.token_types
        return (token for token, token_type in zip(self.tokens, types, strict=False) if token_type == wanted)


def _read_gguf(path: Path) -> _GgufVocabulary:
    if not path.is_file():
        raise CheckpointNotFoundError(
            found=f"no file {path}", expected="the path of a GGUF file", action="correct model.source"
        )
    header = read_gguf_header(path, str(path))
    try:
        vocabulary = _GgufVocabulary.model_validate(header.metadata)
    except ValidationError as error:
        raise _misfit(path, _first_fault(error)) from error
    try:
        "".join([*vocabulary.tokens, vocabulary.chat_template]).encode()
    except UnicodeEncodeError:  # bytes that the header's reader could not decode
        raise _misfit(path, "tokens or a chat template that are not UTF-8") from None
    for key, values in (("token_type", vocabulary.token_types), ("scores", vocabulary.scores)):
        if values is not None and len(values) != len(vocabulary.tokens):
            raise _misfit(path, f"tokenizer.ggml.{key} has {len(values)} entries for {len(vocabulary.tokens)} tokens")
    return vocabulary


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in fault["loc"])
    return f"{place}: {fault['msg']}" if place else fault["msg"]


def _misfit(path: Path, found: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        found=f"{path}: {found}",
        expected="tokens, types, scores and merges that fit together",
        action="convert the model to GGUF again",
    )


# Byte-level BPE.


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteLevelStyle:
    """What the tokenizers that share a ``tokenizer.ggml.pre`` do around their merges."""

    pre_tokenizer: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    """A word that is a token stays whole even where no chain of merges leads to it, as in tiktoken."""
    add_bos: bool = False
    """Whether text starts with bos where the file is silent: converters wrote nothing for Llama 3 until 2025."""


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_LLAMA_3 = ByteLevelStyle(
    pre_tokenizer=_split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    ignore_merges=True,
    add_bos=True,
)

# By tokenizer.ggml.pre, each as in the tokenizer.json of the family's first model. The names are llama.cpp's.
BYTE_LEVEL_STYLES: Mapping[str, ByteLevelStyle] = {
    "gpt-2": ByteLevelStyle(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": ByteLevelStyle(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "qwen2": ByteLevelStyle(
        normalizer=normalizers.NFC(),
        pre_tokenizer=_split(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    ),
    # o200k: GPT-4o, GPT-OSS.
    "gpt-4o": ByteLevelStyle(
        pre_tokenizer=_split(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        ignore_merges=True,
    ),
    # Mistral Nemo.
    "tekken": ByteLevelStyle(
        pre_tokenizer=_split(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        ignore_merges=True,
        add_bos=True,
    ),
}


def _byte_level_bpe(path: Path, vocabulary: _GgufVocabulary, style: ByteLevelStyle) -> Tokenizer:
    # No unk_token: bytes that the vocabulary lacks are dropped, as the original tokenizers do. (SmolLM2 lacks 21: six
    # control characters, and bytes that occur in no UTF-8 text or only in planes without characters.)
    merges = _stated_merges(path, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary.ids(), merges, ignore_merges=style.ignore_merges))
    if style.normalizer is not None:
        tokenizer.normalizer = style.normalizer
    tokenizer.pre_tokenizer = style.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _stated_merges(path: Path, vocabulary: _GgufVocabulary) -> list[tuple[str, str]]:
    if vocabulary.merges is None:
        raise _misfit(path, "no tokenizer.ggml.merges")
    known = frozenset(vocabulary.tokens)
    merges = []
    for index, merge in enumerate(vocabulary.merges):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= known:
            raise _misfit(path, f"merge {index} is {merge!r}, of which a part or the union is no token")
        merges.append((left, right))
    return merges


# SentencePiece BPE.

_SPACE = "\u2581"  # how SentencePiece writes a blank


def _sentencepiece_bpe(path: Path, vocabulary: _GgufVocabulary) -> Tokenizer:
    if vocabulary.merges is None:
        merges = _merges_from_scores(path, vocabulary)
    else:
        merges = _stated_merges(path, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary.ids(), merges, byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE, prepend_scheme="first" if vocabulary.add_space_prefix else "never", split=False
    )
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(path: Path, vocabulary: _GgufVocabulary) -> list[tuple[str, str]]:
    """Recovers the merges, best first: SentencePiece joins the adjacent pair whose union has the highest score.

    Equal scores are ordered as in Transformers: longer left part first, then longer right part, then smaller id.
    """
    if vocabulary.scores is None:
        raise _misfit(path, "neither tokenizer.ggml.scores nor tokenizer.ggml.merges")
    known = frozenset(vocabulary.tokens)
    merges = [
        (score, token[:cut], token[cut:])
        for token, score in zip(vocabulary.tokens, vocabulary.scores, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]
