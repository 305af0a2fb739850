"""Text to ids and back, by the ``tokenizers`` library, from the artifact's ``tokenizer/`` folder."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import tokenizers

from artifacts.errors import CorruptArtifactError, PromptError
from artifacts.tokenizer_names import CONFIG_FILE, TEMPLATE_FILE, TOKENIZER_FILE

if TYPE_CHECKING:
    from runtime.chat_template import ChatTemplate


class _AddedToken(msgspec.Struct):
    content: str


class _Config(msgspec.Struct):
    """The part of ``tokenizer_config.json`` that chat templates may write; other keys are not read."""

    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None
    unk_token: str | _AddedToken | None = None
    pad_token: str | _AddedToken | None = None

    def special_tokens(self) -> dict[str, str]:
        tokens = msgspec.structs.asdict(self).items()
        return {
            name: token.content if isinstance(token, _AddedToken) else token
            for name, token in tokens
            if token is not None
        }


class Tokenizer:
    """A loaded tokenizer. It holds no state between calls and may be used from any thread.

    Args:
        tokenizer: of the ``tokenizers`` library; its truncation and padding are switched off.
        special_tokens: ``bos_token``, ``eos_token`` and so on, for chat templates.
        chat_template: source of the chat template, or None.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, special_tokens: Mapping[str, str], chat_template: str | None
    ) -> None:
        # Some checkpoints were saved with the truncation of their training: a prompt must arrive whole.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens)
        self._chat_template_source = chat_template
        self._silent_or_byte_ids = _silent_or_byte_ids(tokenizer)

    @staticmethod
    def load(folder: Path) -> "Tokenizer | None":
        """Read the artifact's tokenizer; None where it has none.

        Args:
            folder: holds ``tokenizer.json`` and, where the checkpoint had them, ``tokenizer_config.json`` and
                ``chat_template.jinja``.

        Raises:
            CorruptArtifactError: one of the files does not parse.
        """
        paths = [folder / name for name in (TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE)]
        return Tokenizer.from_files({path.name: path.read_bytes() for path in paths if path.is_file()})

    @staticmethod
    def from_files(files: Mapping[str, bytes]) -> "Tokenizer | None":
        """The tokenizer of these files, by name as in ``load``.

        Raises:
            CorruptArtifactError: one of the files does not parse.
        """
        if TOKENIZER_FILE not in files:
            return None
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(files[TOKENIZER_FILE])
        except Exception as error:  # the library raises no narrower class
            raise _corrupt(TOKENIZER_FILE, error, "a file of the tokenizers library") from error
        try:
            config = msgspec.json.decode(files.get(CONFIG_FILE, b"{}"), type=_Config)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _corrupt(CONFIG_FILE, error, "a JSON object whose special tokens are strings") from error
        try:
            template = files[TEMPLATE_FILE].decode("utf-8") if TEMPLATE_FILE in files else None
        except UnicodeDecodeError as error:
            raise _corrupt(TEMPLATE_FILE, error, "a Jinja template in UTF-8") from error
        return Tokenizer(tokenizer, config.special_tokens(), template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. Special tokens written in the text are found, as in Transformers.

        Args:
            text: any Unicode text.
            add_special_tokens: add what the model expects around a text, such as bos. Not for the text of a chat
                template, which writes them itself.

        Raises:
            PromptError: the text holds half of a surrogate pair, which is no character.
        """
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, UnicodeError) as error:
            raise PromptError(
                found="the prompt's text is not Unicode: it holds half of a surrogate pair",
                expected="text that can be written in UTF-8",
                action="decode the bytes that it came from with their own encoding",
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids that the tokenizer does not know give none, bytes that are no UTF-8 give U+FFFD."""
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def may_change_with_next(self, token_id: int) -> bool:
        """Whether the text up to this token may read otherwise once more tokens follow.

        So it is with tokens of one byte ("<0xE2>"), which their decoder reads in runs, and with those that add no text
        and so do not end a run.
        """
        return token_id in self._silent_or_byte_ids or self._tokenizer.id_to_token(token_id) is None

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Text of a conversation, to be encoded with ``add_special_tokens=False``.

        Args:
            messages: each with ``role`` and ``content``.
            add_generation_prompt: end with the opening of the assistant's turn.

        Raises:
            PromptError: there is no chat template, Jinja is not installed, or the template refuses the messages.
        """
        if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
            raise PromptError(
                found="messages that are not a list of mappings",
                expected='messages such as {"role": "user", "content": "..."}',
                action="pass a list of them",
            )
        try:
            return self._chat_template.render(
                messages, add_generation_prompt=add_generation_prompt, special_tokens=self._special_tokens
            )
        except PromptError:
            raise
        except Exception as error:  # a template is a program: it may meet anything
            raise PromptError(
                found=f"the chat template failed on these messages ({_one_line(error)})",
                expected="roles and contents that the template knows",
                action="correct the messages, or pass text that is already in the model's chat format",
            ) from error

    @cached_property
    def _chat_template(self) -> "ChatTemplate":
        if self._chat_template_source is None:
            raise PromptError(
                found="the artifact has no chat template",
                expected="a chat_template.jinja beside its tokenizer",
                action="pass text that is already in the model's chat format",
            )
        try:
            from runtime.chat_template import ChatTemplate
        except ImportError as error:
            raise PromptError(
                found="jinja2 is not installed",
                expected="the extra that runs chat templates",
                action="install the project with its extra `chat`: pip install '.[chat]' in a checkout",
            ) from error
        return ChatTemplate(self._chat_template_source)


def _silent_or_byte_ids(tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids of special tokens and, where the decoder joins them, of tokens that are one byte."""
    specials = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    decoder = tokenizer.decoder
    if decoder is None or "ByteFallback" not in _types(json.loads(decoder.__getstate__())):
        return frozenset(specials)
    tokens = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return frozenset(specials.union(token_id for token_id in tokens if token_id is not None))


def _types(decoder: Mapping[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _types(part)


def _corrupt(name: str, error: Exception, expected: str) -> CorruptArtifactError:
    return CorruptArtifactError(
        found=f"tokenizer/{name} cannot be read ({_one_line(error)})",
        expected=expected,
        action="restore the file or rebuild the artifact",
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
