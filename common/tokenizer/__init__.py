"""Text to token ids and back. Light enough for the router: never imports torch. Entry point: `load_tokenizer(path)`."""

from kvferry.common.tokenizer.load import load_tokenizer
from kvferry.common.tokenizer.tokenizer import IncrementalDetokenizer, SpecialTokens, Tokenizer

__all__ = ["IncrementalDetokenizer", "SpecialTokens", "Tokenizer", "load_tokenizer"]
