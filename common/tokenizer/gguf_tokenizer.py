"""Builds a tokenizer from GGUF metadata: byte-level BPE with a known pre-tokenizer. Others are rejected by name."""

from collections.abc import Callable, Mapping

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.tokenizer.gguf_header import GgufValue
from kvferry.common.tokenizer.tokenizer import SpecialTokens, Tokenizer

_CONTROL, _USER_DEFINED = 3, 4
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = (
    _CONTRACTIONS + r"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = _WORDS.format(digits=r"\p{N}{1,3}")
_QWEN2_WORDS = _WORDS.format(digits=r"\p{N}")


def known_pre_tokenizers() -> tuple[str, ...]:
    """Supported values of tokenizer.ggml.pre."""
    return tuple(sorted(_PRE_TOKENIZERS))


def gguf_tokenizer(metadata: Mapping[str, GgufValue]) -> Tokenizer:
    """Raises ModelLoadError when the metadata has no tokenizer or an unsupported one."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelLoadError(f"GGUF tokenizer model {kind!r} is not supported; only byte-level BPE ('gpt2') is")
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        raise ModelLoadError(
            f"GGUF pre-tokenizer {name!r} is not supported; known are {', '.join(known_pre_tokenizers())}"
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    backend = Backend(_bpe(tokens, _strings(metadata, "tokenizer.ggml.merges"), ignore_merges=name == "llama-bpe"))
    backend.pre_tokenizer = _PRE_TOKENIZERS[str(name)]()
    backend.decoder = decoders.ByteLevel()
    if name == "qwen2":
        backend.normalizer = normalizers.NFC()
    _add_special_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type"))
    special = _special(tokens, metadata)
    if metadata.get("tokenizer.ggml.add_bos_token") is True:
        backend.post_processor = _bos_processor(backend, special.bos)
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(backend, special, template if isinstance(template, str) else None)


def _bpe(tokens: list[str], merges: list[str], *, ignore_merges: bool) -> BPE:
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    try:
        return BPE(
            vocab={token: index for index, token in enumerate(tokens)}, merges=pairs, ignore_merges=ignore_merges
        )
    except Exception as error:  # the package raises nothing narrower
        raise ModelLoadError(f"the GGUF tokenizer's merges do not fit its vocabulary: {error}") from error


def _add_special_tokens(backend: Backend, tokens: list[str], types: GgufValue | None) -> None:
    """Add control tokens as special and user-defined ones as indivisible tokens, both with their existing ids."""
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelLoadError("tokenizer.ggml.token_type is missing, or its length differs from tokenizer.ggml.tokens")
    for token_type, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        selected = [token for token, kind in zip(tokens, types, strict=True) if kind == token_type]
        added = [AddedToken(token, special=special, normalized=False) for token in selected]
        if special:
            backend.add_special_tokens(added)
        else:
            backend.add_tokens(added)


def _special(tokens: list[str], metadata: Mapping[str, GgufValue]) -> SpecialTokens:
    def token(key: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None

    return SpecialTokens(token("bos"), token("eos"), token("padding"), token("unknown"))


def _bos_processor(backend: Backend, bos: str | None) -> processors.TemplateProcessing:
    index = backend.token_to_id(bos) if bos is not None else None
    if bos is None or index is None:
        raise ModelLoadError("tokenizer.ggml.add_bos_token is set, but the metadata has no bos token")
    return processors.TemplateProcessing(single="BEGIN $A", special_tokens=[("BEGIN", index)])


def _strings(metadata: Mapping[str, GgufValue], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelLoadError(f"{key} is missing or not a list of strings")
    return [str(item) for item in value]


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _by_words(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _by_words(_LLAMA3_WORDS),
    "qwen2": lambda: _by_words(_QWEN2_WORDS),
}
