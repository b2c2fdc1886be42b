"""Text to token ids and back, light enough for the router: no torch. `load_tokenizer(path)` is the way in."""
