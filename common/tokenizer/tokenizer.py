"""Text to token ids and back, and a detokenizer for streams. Wraps the `tokenizers` package; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer as Backend

_REPLACEMENT = "\ufffd"
_MOST_HELD_TOKENS = 4
_MOST_TOKENS_OF_A_HALF = 3
"""A character is at most 4 bytes and a token at least one: only the last 3 tokens can be half a character, and what
was not whole after 4 never will be."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The marks a chat template may use, as text; None where the model has none."""

    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    unk: str | None = None


class Tokenizer:
    """One model's tokenizer. Immutable; threads may share it."""

    def __init__(self, backend: Backend, special: SpecialTokens, chat_template: str | None = None) -> None:
        self._backend = backend
        self.special = special
        self.chat_template = chat_template
        """Jinja source, or None."""

    @property
    def vocab_size(self) -> int:
        """With added tokens."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Special tokens written out in it are taken as such; `add_special_tokens` puts a model's own
        begin mark in front where the model wants one (a chat template has usually done that already)."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """The id of one token written as the vocabulary has it."""
        return self._backend.token_to_id(token)

    def stream(self, *, skip_special_tokens: bool = True) -> "IncrementalDetokenizer":
        """A detokenizer for one stream."""
        return IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)


class IncrementalDetokenizer:
    """Turns a stream of ids into pieces of text that join to the whole; holds back what may be half a character."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        """Ids given out last: a decoder may drop a space at the start, so the next ones are decoded behind them."""
        self._held: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these ids complete; may be empty."""
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def flush(self) -> str:
        """What is still held, at the end of the stream: half a character comes out as U+FFFD."""
        return self._release(len(self._held)) if self._held else ""

    def _push_one(self, token_id: int) -> str:
        self._held.append(token_id)
        if not self._pending().endswith(_REPLACEMENT):
            return self._release(len(self._held))
        if len(self._held) < _MOST_HELD_TOKENS:
            return ""
        return self._release(self._settled())

    def _settled(self) -> int:
        """How many of the held tokens, all of them broken, cannot become whole any more.

        Those behind a point where cutting changes nothing: bytes that belong together decode to fewer marks than the
        same bytes apart.
        """
        whole = self._pending()
        for kept in range(1, _MOST_TOKENS_OF_A_HALF + 1):
            head, tail = self._held[:-kept], self._held[-kept:]
            if self._pending(head) + self._decode(tail) == whole:
                return len(head)
        return len(self._held)

    def _release(self, count: int) -> str:
        text = self._pending(self._held[:count])
        self._context, self._held = self._held[:count], self._held[count:]
        return text

    def _pending(self, held: list[int] | None = None) -> str:
        """The text that the held ids (or the first of them) add to the context's."""
        before = self._decode(self._context)
        return self._decode(self._context + (self._held if held is None else held))[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
