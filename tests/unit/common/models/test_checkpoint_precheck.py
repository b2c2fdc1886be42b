"""The precheck refuses a path that cannot be a model by reading headers only: one line of text, without torch."""

import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.models.checkpoint_precheck import check_model_files
from kvferry.common.tokenizer.gguf_header import read_gguf_header
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_llama import make_checkpoint


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        check_model_files(path)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_complete_models_pass(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path / "hf", num_hidden_layers=1)
    check_model_files(tmp_path / "hf")
    write_gguf(tmp_path / "m.gguf", reference)
    check_model_files(tmp_path / "m.gguf")


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"config.json is missing in {tmp_path}"
    config = tmp_path / "config.json"
    config.write_text("{")
    assert f"{config} cannot be read" in refusal(tmp_path)
    config.write_text("{}")
    assert refusal(tmp_path) == f"{tmp_path}: config.json: architectures must name one architecture, found None"
    config.write_text(json.dumps({"architectures": ["GrokForCausalLM"]}))
    assert f"{tmp_path}: architecture GrokForCausalLM is not supported; known are Deep" in refusal(tmp_path)
    config.write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert refusal(tmp_path) == f"model.safetensors is missing in {tmp_path}"


@pytest.mark.parametrize("content", [b"", b"root:x:0:0:root:/root:/bin/bash\n"])
def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "passwd"
    file.write_bytes(content)
    assert refusal(file) == f"{file} is not a GGUF file; expected a GGUF file or a HuggingFace directory"


def test_an_unsupported_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<I", 9))
    assert refusal(file) == f"{file} cannot be read as GGUF: version 9; known are 2, 3"
    metadata: dict[str, Any] = {"general.architecture": "grok"}
    write_gguf(file, **metadata)
    assert "GGUF architecture 'grok' is not supported; known are llama" in refusal(file)


def test_a_truncated_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, make_checkpoint(tmp_path / "hf", num_hidden_layers=1))
    whole = file.read_bytes()
    needed = max(tensor.offset + 4 * math.prod(tensor.shape) for tensor in read_gguf_header(file).tensors)
    file.write_bytes(whole[:needed])
    check_model_files(file)
    file.write_bytes(whole[: needed - 1])
    expected = f"{file} has {needed - 1} bytes but its tensors need {needed}: the copy is incomplete"
    assert refusal(file) == expected


def test_truncated_safetensors_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_hidden_layers=1)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for size in (len(whole) - 1, 1000, 4, 0):
        file.write_bytes(whole[:size])
        assert refusal(tmp_path).startswith(f"{file} cannot be read: ")


def test_torch_is_not_loaded(tmp_path: Path) -> None:
    """For every kind of checkpoint: the launcher must start without torch."""
    write_gguf(tmp_path / "m.gguf", make_checkpoint(tmp_path / "hf", num_hidden_layers=1))
    code = (
        "import sys; from pathlib import Path; "
        "from kvferry.common.models.checkpoint_precheck import check_model_files; "
        "[check_model_files(Path(path)) for path in sys.argv[1:]]; print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "m.gguf"), str(tmp_path / "hf")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"
