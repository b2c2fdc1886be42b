"""Whether a path can be a model at all, from config.json or the GGUF header alone: before any process is started.

Imports no torch and reads no weights: what only these show, a damaged tensor say, is found when the model is loaded.
"""

from pathlib import Path

from common.errors import ModelLoadError
from common.models.architectures import architecture_of, require_known
from common.models.gguf_config import read_gguf_config
from common.models.hf_files import safetensors_files
from common.models.json_file import read_json
from common.models.settings import Settings
from common.tokenizer.gguf_header import read_gguf_header


def check_model_files(path: Path) -> None:
    """Raises ModelLoadError: no config.json or weights, no GGUF file, an architecture or settings unknown here."""
    if not path.is_dir():
        read_gguf_config(read_gguf_header(path))
        return
    try:
        require_known(architecture_of(Settings(read_json(path / "config.json"), "config.json")))
    except ModelLoadError as error:
        where = "" if str(path) in str(error) else f"{path}: "
        raise ModelLoadError(f"{where}{error}") from None
    safetensors_files(path)
