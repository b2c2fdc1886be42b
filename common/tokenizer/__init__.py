"""Text to token ids and back, light enough for the router: no torch. `load_tokenizer(path)` is the way in."""

from kvferry.common.tokenizer.load import load_tokenizer
from kvferry.common.tokenizer.tokenizer import IncrementalDetokenizer, SpecialTokens, Tokenizer

__all__ = ["IncrementalDetokenizer", "SpecialTokens", "Tokenizer", "load_tokenizer"]
