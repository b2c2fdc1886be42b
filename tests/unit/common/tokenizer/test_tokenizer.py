"""Tokenizers of both checkpoint formats and streaming detokenisation, all without importing torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.tokenizer import Tokenizer, load_tokenizer
from kvferry.common.tokenizer.gguf_tokenizer import gguf_tokenizer, known_pre_tokenizers
from tests.support.real_model import real_model_path
from tests.support.tiny_gguf import MARKS, vocabulary, write_gguf

TEXTS = ("hello world", " hello\n\n12 34", "naïve café", "日本語 🎉", "<|im_start|>hello<|im_end|>", "", "a\tb\r\n")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer") / "m.gguf"
    write_gguf(path)
    return load_tokenizer(path)


def write_directory(path: Path, **config: Any) -> None:
    """A HuggingFace directory with a byte-level tokenizer that prepends a bos token and would truncate."""
    tokens, merges = vocabulary()
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = Backend(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(MARKS)
    backend.post_processor = processors.TemplateProcessing(single="B $A", special_tokens=[("B", 0)])
    backend.enable_truncation(3)
    backend.enable_padding()
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_bytes(orjson.dumps(config))


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_merges_and_special_tokens_are_used(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>hello world")
    assert ids == [0, tokenizer.token_id("hello"), tokenizer.token_id("Ġworld")]
    assert tokenizer.decode(ids) == "hello world"
    assert tokenizer.vocab_size == len(vocabulary()[0])


def test_special_tokens_and_template_are_read(tokenizer: Tokenizer) -> None:
    assert (tokenizer.special.bos, tokenizer.special.eos, tokenizer.special.pad) == (*MARKS, None)
    assert tokenizer.chat_template == "{{ messages }}"


def test_bos_is_added_only_if_the_model_wants_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    metadata: dict[str, Any] = {"tokenizer.ggml.add_bos_token": True}
    write_gguf(path, **metadata)
    with_bos = load_tokenizer(path)
    assert with_bos.encode("a")[0] == 0
    assert with_bos.encode("a", add_special_tokens=False) == with_bos.encode("a")[1:]


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "ab 1234", ["ab", " 1234"]),
        ("smollm", "ab 1234", ["ab", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "ab 1234 I'LL\n\nx", ["ab", " ", "123", "4", " I", "'LL", "\n\n", "x"]),
        ("qwen2", "ab 1234 I'LL\n\nx", ["ab", " ", "1", "2", "3", "4", " I", "'LL", "\n\n", "x"]),
    ],
)
def test_pre_tokenizers_split_as_their_models_do(pre: str, text: str, pieces: list[str]) -> None:
    """Every substring has a merge, so each piece becomes one token exactly if the split allows it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens, merges = list(letters), []
    # Merges across the whole text: a missing split would join the pieces on both sides of it.
    for start in range(len(text)):
        for length in range(2, len(text) - start + 1):
            encoded = level.pre_tokenize_str(text[start : start + length])[0][0]
            if encoded not in tokens:
                tokens.append(encoded)
                merges.append(f"{encoded[:-1]} {encoded[-1]}")
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * len(tokens),
    }
    built = gguf_tokenizer(metadata)
    assert [built.decode([token]) for token in built.encode(text)] == pieces


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken'.*known are"),
        ({"tokenizer.ggml.pre": None}, "'default'"),
        ({"tokenizer.ggml.model": "llama"}, "'llama'"),
        ({"tokenizer.ggml.model": None}, "None"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merges do not fit"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, "no bos token"),
    ],
)
def test_unknown_tokenizers_are_rejected_by_name(metadata: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, **metadata)
    with pytest.raises(ModelLoadError, match=named):
        load_tokenizer(path)
    assert "smollm" in known_pre_tokenizers()


def test_a_huggingface_directory(tmp_path: Path) -> None:
    write_directory(tmp_path, bos_token={"content": MARKS[0]}, eos_token=MARKS[1], chat_template="one")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.special.bos, tokenizer.special.eos, tokenizer.chat_template) == (*MARKS, "one")
    ids = tokenizer.encode("hello world hello")
    assert len(ids) == 4, "a saved truncation or padding was applied"
    assert tokenizer.decode(ids) == "hello world hello"


def test_sources_of_a_directorys_chat_template(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_directory(tmp_path, chat_template=named)
    assert load_tokenizer(tmp_path).chat_template == "d"
    (tmp_path / "chat_template.jinja").write_text("j")
    assert load_tokenizer(tmp_path).chat_template == "j"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path).chat_template is None


def test_directories_without_a_readable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_tokenizer(tmp_path)
    write_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="tokenizer_config"):
        load_tokenizer(tmp_path)


@given(text=st.text(max_size=60), cut=st.integers(1, 5))
def test_a_stream_joins_to_the_text_without_incomplete_characters(tokenizer: Tokenizer, text: str, cut: int) -> None:
    text = text.replace("\ufffd", "")
    ids = tokenizer.encode(text)
    stream = tokenizer.stream(skip_special_tokens=False)
    pieces = [stream.push(ids[start : start + cut]) for start in range(0, len(ids), cut)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == text


@given(
    raw=st.lists(st.sampled_from([0x41, 0xC3, 0xA9, 0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0x8E, 0x89, 0x80, 0xFF]), max_size=30)
)
def test_a_stream_of_any_bytes_joins_to_their_decoded_text(tokenizer: Tokenizer, raw: list[int]) -> None:
    """Bytes that are not text are neither retained for long nor lost."""
    by_byte = {tokenizer.decode([t]): t for t in range(2, 258)}
    assert by_byte["A"] > 1
    ids = [_byte_id(tokenizer, byte) for byte in raw]
    stream = tokenizer.stream()
    text = ""
    for index, token in enumerate(ids):
        text += stream.push([token])
        assert len(tokenizer.decode(ids[: index + 1])) - len(text) <= 3
    assert text + stream.flush() == bytes(raw).decode("utf-8", errors="replace")


def _byte_id(tokenizer: Tokenizer, byte: int) -> int:
    """GPT-2's mapping of bytes to printable letters: other bytes map to 256 and up, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letter = chr(byte) if byte in plain else chr(256 + sum(b not in plain for b in range(byte)))
    token = tokenizer.token_id(letter)
    assert token is not None
    return token


def test_flush_returns_the_retained_tokens(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    assert stream.push([_byte_id(tokenizer, 0xE6)]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_neither_torch_nor_gguf_is_imported() -> None:
    code = "import sys, kvferry.common.tokenizer; print(sorted({'torch', 'gguf', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.model
def test_the_real_model_splits_digits_and_keeps_its_template() -> None:
    tokenizer = load_tokenizer(real_model_path())
    assert tokenizer.special.eos == "<|im_end|>"
    assert "add_generation_prompt" in (tokenizer.chat_template or "")
    ids = tokenizer.encode("It was 1984 in Paris.")
    assert [tokenizer.decode([token]) for token in ids] == ["It", " was", " ", "1", "9", "8", "4", " in", " Paris", "."]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
