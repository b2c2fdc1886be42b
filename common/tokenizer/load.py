"""Loads a model's tokenizer: from tokenizer.json of a HuggingFace directory, or from a GGUF file's metadata."""

from pathlib import Path

import orjson
from tokenizers import Tokenizer as Backend

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.tokenizer.gguf_header import read_gguf_header
from kvferry.common.tokenizer.gguf_tokenizer import gguf_tokenizer
from kvferry.common.tokenizer.tokenizer import SpecialTokens, Tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load from a HuggingFace directory or a GGUF file. Raises ModelLoadError if it has none or an unsupported one."""
    if path.is_dir():
        return _from_directory(path)
    return gguf_tokenizer(read_gguf_header(path).metadata)


def _from_directory(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ModelLoadError(f"{directory} has no tokenizer.json")
    try:
        backend = Backend.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the package raises nothing narrower
        raise ModelLoadError(f"{file} cannot be read: {error}") from error
    # A truncation or padding saved in the file would silently change the prompt.
    backend.no_truncation()
    backend.no_padding()
    config = _read_object(directory / "tokenizer_config.json")
    return Tokenizer(backend, _special(config), _chat_template(directory, config))


def _read_object(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        value = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}


def _special(config: dict[str, object]) -> SpecialTokens:
    def token(key: str) -> str | None:
        value = config.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None

    return SpecialTokens(token("bos_token"), token("eos_token"), token("pad_token"), token("unk_token"))


def _chat_template(directory: Path, config: dict[str, object]) -> str | None:
    """From chat_template.jinja, else from tokenizer_config.json: a template, or the `default` one of a named list."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
