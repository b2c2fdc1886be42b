"""Copies a GGUF file with all matrices in one plain type, for peers that would compute with quantized weights."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, dequantize, quantize

FILE_TYPES = {
    "F16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "BF16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "F32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
}
_REPLACED_KEYS = ("general.architecture", "general.file_type")


def copy_gguf(source: Path, target: Path, kind: str) -> None:
    """`kind`: F16, BF16 or F32. Vectors become float32; metadata is kept. Takes some seconds for 10^8 weights."""
    quantization, file_type = FILE_TYPES[kind]
    reader = GGUFReader(source)
    writer = GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    writer.add_file_type(file_type)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in _REPLACED_KEYS:
            continue
        is_array = field.types[0] == GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if is_array else None)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
