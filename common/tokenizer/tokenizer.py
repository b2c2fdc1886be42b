"""Text to token ids and back, and an incremental detokenizer. Wraps the `tokenizers` package; no torch, no IO."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer as Backend

_REPLACEMENT = "\ufffd"
_MAX_PENDING_TOKENS = 4
_MAX_INCOMPLETE_TOKENS = 3
"""A character has at most 4 bytes and a token at least one: only the last 3 tokens can be part of a character, and
bytes that are not a character after 4 tokens never will be."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens that a chat template may use, as text; None if the model has none."""

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
        """Jinja source."""

    @property
    def vocab_size(self) -> int:
        """Including added tokens."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode `text`. Special tokens written out in it become their ids.

        With `add_special_tokens` the model's bos token is prepended if the model wants one; a chat template has usually
        done so already.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's spelling; None if it is unknown."""
        return self._backend.token_to_id(token)

    def stream(self, *, skip_special_tokens: bool = True) -> "IncrementalDetokenizer":
        """A detokenizer for one stream."""
        return IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)


class IncrementalDetokenizer:
    """Decodes a stream of ids into parts of the text; retains tokens that may be part of an incomplete character."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        """Ids decoded last. A decoder may drop a leading space, so the next ids are decoded after these."""
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids; returns the text that they complete, which may be empty."""
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def flush(self) -> str:
        """End the stream; returns the text of the retained ids, with an incomplete character as U+FFFD."""
        return self._release(len(self._pending)) if self._pending else ""

    def _push_one(self, token_id: int) -> str:
        self._pending.append(token_id)
        if not self._pending_text().endswith(_REPLACEMENT):
            return self._release(len(self._pending))
        if len(self._pending) < _MAX_PENDING_TOKENS:
            return ""
        return self._release(self._num_final())

    def _num_final(self) -> int:
        """Number of pending tokens, all of them incomplete, whose text later tokens cannot change any more.

        These are the tokens before a split that does not change the decoded text: the bytes of one character decode to
        fewer U+FFFD together than split.
        """
        text = self._pending_text()
        for num_tail in range(1, _MAX_INCOMPLETE_TOKENS + 1):
            head, tail = self._pending[:-num_tail], self._pending[-num_tail:]
            if self._pending_text(head) + self._decode(tail) == text:
                return len(head)
        return len(self._pending)

    def _release(self, count: int) -> str:
        text = self._pending_text(self._pending[:count])
        self._context, self._pending = self._pending[:count], self._pending[count:]
        return text

    def _pending_text(self, token_ids: list[int] | None = None) -> str:
        """The text that the pending ids, or the given ones, add to the context's text."""
        before = self._decode(self._context)
        return self._decode(self._context + (self._pending if token_ids is None else token_ids))[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
