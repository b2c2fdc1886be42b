"""Whether a path can be a model at all, from config.json or the GGUF header alone: before any process is started.

Imports no torch and reads no weights: what only these show, a damaged tensor say, is found when the model is loaded.
"""

import math
from pathlib import Path

from safetensors import SafetensorError, safe_open

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.models.architectures import architecture_of, require_known
from kvferry.common.models.gguf_config import read_gguf_config
from kvferry.common.models.hf_files import read_json, safetensors_files
from kvferry.common.models.settings import Settings
from kvferry.common.tokenizer.gguf_header import GgufHeader, read_gguf_header


def check_model_files(path: Path) -> None:
    """Raises ModelLoadError: no config.json or weights, no GGUF file, an architecture or settings unknown here, a file
    of weights that is shorter than its own table says."""
    if not path.is_dir():
        header = read_gguf_header(path)
        read_gguf_config(header)
        _demand_whole_gguf(path, header)
        return
    try:
        require_known(architecture_of(Settings(read_json(path / "config.json"), "config.json")))
    except ModelLoadError as error:
        where = "" if str(path) in str(error) else f"{path}: "
        raise ModelLoadError(f"{where}{error}") from None
    for file in safetensors_files(path):
        _demand_whole_safetensors(file)


def _demand_whole_gguf(path: Path, header: GgufHeader) -> None:
    """A file that was not copied whole is shorter than its table of tensors says."""
    from gguf.constants import GGML_QUANT_SIZES

    sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    needed = 0
    for tensor in header.tensors:
        per_block, block_bytes = sizes.get(tensor.ggml_type, (1, 0))  # an unknown type is told when it is loaded
        needed = max(needed, tensor.offset + math.prod(tensor.shape) // per_block * block_bytes)
    size = path.stat().st_size
    if needed > size:
        raise ModelLoadError(f"{path} ends at {size} bytes where its tensors need {needed}: is it a whole copy?")


def _demand_whole_safetensors(file: Path) -> None:
    try:
        with safe_open(file, framework="np"):
            pass
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ModelLoadError(f"{file} cannot be read: {error}: is it a whole copy?") from None
