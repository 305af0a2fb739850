"""Text of a growing output: no half characters, no part of a stop string, and in the end that of all tokens at once."""

from collections.abc import Sequence

from runtime.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet one


class Detokenizer:
    """Decodes one request's output token by token.

    The text is that of the output's ids alone, so that one prompt gives one text in whatever form it came. Decoders
    treat the first token of a text in their own way (SentencePiece drops its leading space) and write U+FFFD for an
    unfinished character. New tokens are therefore decoded together with those before them, and only the difference is
    taken, once it can no longer change.

    Args:
        tokenizer: of the artifact.
        stop: strings that end the output. The one that is complete first counts; of several that are complete with the
            same character, the longest. The text ends before it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # where decoding starts: the last tokens that gave text
        self._decoded = 0  # tokens whose text has been taken
        self._text = ""
        self._stop = _StopStrings(stop)
        self._finished = False

    @property
    def text(self) -> str:
        """What is certain so far, and may be shown: it only ever grows."""
        return self._text

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.found

    def push(self, token_id: int) -> str | None:
        """Take one token; returns the stop string that it completes, if any. After one, no more tokens may follow."""
        assert not self._finished
        self._ids.append(token_id)
        if not self._tokenizer.may_change_with_next(token_id):
            self._take_new_text(final=False)
        return self.stop_string

    def finish(self) -> str | None:
        """Take what was held back, as no token follows; returns the stop string that it completes, if any."""
        if not self._finished:
            self._take_new_text(final=True)
        return self.stop_string

    def _take_new_text(self, *, final: bool) -> None:
        known = self._tokenizer.decode(self._ids[self._context : self._decoded])
        text = self._tokenizer.decode(self._ids[self._context :])
        if final or (len(text) > len(known) and not text.endswith(_REPLACEMENT)):
            self._context, self._decoded = self._decoded, len(self._ids)
            self._text += self._stop.filter(text[len(known) :], final=final)
            self._finished = final or self._stop.found is not None


class _StopStrings:
    """Passes text on up to the first stop string, and holds back what may be the beginning of one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.found: str | None = None

    def filter(self, text: str, *, final: bool) -> str:
        """What of the text held so far and of the new text may be shown."""
        text = self._held + text
        ends = [(at + len(string), at, string) for string in self._strings if (at := text.find(string)) >= 0]
        if ends:
            _, start, self.found = min(ends)
            return text[:start]
        shown = len(text) if final else len(text) - self._longest_beginning(text)
        self._held = text[shown:]
        return text[:shown]

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of the text with which some stop string begins."""
        longest = max((len(string) for string in self._strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(string.startswith(text[-length:]) for string in self._strings):
                return length
        return 0
