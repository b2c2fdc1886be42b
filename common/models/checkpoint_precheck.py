"""Checks a checkpoint before any process is started: config.json or the GGUF header, and the sizes of weight files.

Imports no torch and reads no weights; a fault inside them, such as a damaged tensor, is found when the model is loaded.
"""

import math
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.models.gguf_config import read_gguf_config
from kvferry.common.models.hf_files import read_json, safetensors_files
from kvferry.common.models.registry import architecture_of, require_known
from kvferry.common.models.settings import Settings
from kvferry.common.tokenizer.gguf_header import GgufHeader, read_gguf_header


def check_model_files(path: Path) -> None:
    """Raise ModelLoadError if the path holds no config.json and weights and is no GGUF file, if its architecture or
    settings are not supported, or if a weight file is shorter than its own table states."""
    if not path.is_dir():
        header = read_gguf_header(path)
        read_gguf_config(header)
        _check_gguf_size(path, header)
        return
    try:
        require_known(architecture_of(Settings(read_json(path / "config.json"), "config.json")))
    except ModelLoadError as error:
        where = "" if str(path) in str(error) else f"{path}: "
        raise ModelLoadError(f"{where}{error}") from None
    for file in safetensors_files(path):
        _check_safetensors_size(file)


def _check_gguf_size(path: Path, header: GgufHeader) -> None:
    """Detect an incomplete copy: it is shorter than its table of tensors states."""
    from gguf.constants import GGML_QUANT_SIZES

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    needed = 0
    for tensor in header.tensors:
        per_block, block_bytes = sizes.get(tensor.ggml_type, (1, 0))  # loading reports an unknown type
        needed = max(needed, tensor.offset + math.prod(tensor.shape) // per_block * block_bytes)
    size = path.stat().st_size
    if needed > size:
        raise ModelLoadError(f"{path} has {size} bytes but its tensors need {needed}: the copy is incomplete")


def _check_safetensors_size(file: Path) -> None:
    try:
        with safe_open(file, framework="np"):
            pass
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ModelLoadError(f"{file} cannot be read: {error}; the copy may be incomplete") from None
