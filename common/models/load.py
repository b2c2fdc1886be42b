"""Loads a model from a path (a HuggingFace directory or a GGUF file) onto a device. The only module that opens
checkpoints.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from kvferry.common.base.errors import ModelLoadError
from kvferry.common.device.base import Device, KvTensorSpec
from kvferry.common.device.quantize import WeightScheme
from kvferry.common.models.config import TransformerConfig
from kvferry.common.models.family import CausalLM, HfSettings
from kvferry.common.models.footprint import Footprint, footprint
from kvferry.common.models.gguf_config import read_gguf_config
from kvferry.common.models.hf_files import read_json, safetensors_files
from kvferry.common.models.hf_settings import HARMLESS, HARMLESS_PREFIXES
from kvferry.common.models.identity import model_identity, weights_version
from kvferry.common.models.packed_store import SUFFIX, PackedStore, open_store
from kvferry.common.models.registry import architecture_of, family
from kvferry.common.models.settings import Settings
from kvferry.common.models.weights import TrackedWeights, WeightSource
from kvferry.common.models.weights_gguf import GgufWeights
from kvferry.common.models.weights_hf import HfWeights
from kvferry.common.parallel.collectives import ALONE, Collectives
from kvferry.common.protocol.model_info import ModelInfo
from kvferry.common.tokenizer.gguf_header import read_gguf_header

DtypeName = Literal["float32", "bfloat16"]
_DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_LEAST_STORED_BYTES = 64 << 20
"""Smaller models are not stored: packing them takes no noticeable time."""


def read_hf_config(directory: Path) -> TransformerConfig:
    """The configuration of a HuggingFace directory, read by its family's reader. Raises ModelLoadError naming the
    setting.

    A setting that the reader does not read and that is not listed as harmless is refused.
    """
    settings = Settings(read_json(directory / "config.json"), "config.json")
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    config = family(architecture_of(settings)).read_config(HfSettings(settings, generation))
    settings.refuse_rest(HARMLESS, HARMLESS_PREFIXES)
    return config


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with the facts that the rest of the node needs."""

    model: CausalLM
    config: TransformerConfig
    info: ModelInfo
    identity: str
    """Equal on every host with the same files and quantisation; does not include the compute dtype."""
    weights_version: str
    """The part of the identity that the weights' files contribute."""
    dtype: torch.dtype

    @property
    def kv_specs(self) -> tuple[KvTensorSpec, ...]:
        return self.model.kv_specs


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    config: TransformerConfig
    files: tuple[Path, ...]
    weights: GgufWeights | HfWeights
    tokenizer_path: str


def load_model(
    path: Path,
    *,
    device: Device,
    dtype: DtypeName | None = None,
    max_model_len: int | None = None,
    model_name: str | None = None,
    progress: bool = True,
    collectives: Collectives = ALONE,
    before: Callable[[Footprint], None] = lambda footprint: None,
    scheme: WeightScheme | None = None,
    packed_dir: Path | None = None,
) -> LoadedModel:
    """Load, convert and pack a checkpoint, or one rank's part of it. Raises ModelLoadError.

    `dtype`: None takes the checkpoint's own, bfloat16 for GGUF. `max_model_len`: None takes the model's own limit.
    `model_name`: None takes the name of the file or directory. `progress`: show a bar on stderr. `before` is called
    with the estimated footprint before any weight is read; it may raise to refuse the model. `scheme`: quantise
    projections, experts and head; embedding, norms and routers stay unquantised. `packed_dir`: directory in which
    packed weights are stored for other nodes on this host and later starts; not used with a scheme; None: not stored.
    """
    checkpoint = _open(path)
    config = checkpoint.config
    model_class = family(config.architecture).model
    torch_dtype = _resolve_dtype(config, dtype)
    length = _resolve_length(config, max_model_len)
    name = model_name or path.resolve().stem
    weights_digest = weights_version(checkpoint.files, scheme)
    identity = model_identity(config, weights_digest)
    with checkpoint.weights as source, _progress(source, name, progress) as tick:
        needed = footprint(config, source, device.ops, torch_dtype, collectives.shard.size, scheme)
        before(needed)
        is_stored = packed_dir is not None and scheme is None and needed.weights >= _LEAST_STORED_BYTES
        with _store(packed_dir if is_stored else None, identity, checkpoint, device, torch_dtype, collectives) as store:
            weights = TrackedWeights(source, tick, store)
            model = model_class.load(config, weights, device, torch_dtype, collectives, scheme)
            weights.refuse_rest()
    info = ModelInfo(
        name=name,
        vocab_size=config.vocab_size,
        max_model_len=length,
        max_position_embeddings=config.max_position_embeddings,
        eos_token_ids=config.eos_token_ids,
        default_top_k=config.default_top_k,
        default_do_sample=config.default_do_sample,
        tokenizer_path=checkpoint.tokenizer_path,
    )
    return LoadedModel(model, config, info, identity, weights_digest, torch_dtype)


@contextmanager
def _store(
    directory: Path | None,
    identity: str,
    checkpoint: _Checkpoint,
    device: Device,
    dtype: torch.dtype,
    collectives: Collectives,
) -> Iterator[PackedStore | None]:
    """The store for this model's packed weights, named by a hash of everything that determines the packed bytes.

    Includes the files' sizes and modification times, since the identity only samples the files.
    """
    form = device.ops.packed_form()
    if directory is None or form is None:
        yield None
        return
    stats = [file.stat() for file in checkpoint.files]
    facts = (
        identity,
        form.packing,
        str(dtype),
        collectives.shard,
        [(stat.st_size, stat.st_mtime_ns) for stat in stats],
    )
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    with open_store(directory / (name + SUFFIX)) as store:
        yield store


def _open(path: Path) -> _Checkpoint:
    if path.is_dir():
        config = read_hf_config(path)
        tokenizer = path.resolve() if (path / "tokenizer.json").exists() else ""
        return _Checkpoint(config, safetensors_files(path), HfWeights(path), str(tokenizer))
    if path.is_file():
        header = read_gguf_header(path)
        config = read_gguf_config(header)
        return _Checkpoint(config, (path,), GgufWeights(path, header, config), str(path.resolve()))
    raise ModelLoadError(f"{path} is neither a directory nor a GGUF file")


def _resolve_dtype(config: TransformerConfig, wanted: str | None) -> torch.dtype:
    name = wanted or config.checkpoint_dtype
    if name not in _DTYPES:
        raise ModelLoadError(f"dtype {name} is not supported; set float32 or bfloat16")
    return _DTYPES[name]


def _resolve_length(config: TransformerConfig, wanted: int | None) -> int:
    if wanted is None:
        return config.max_position_embeddings
    if not 1 <= wanted <= config.max_position_embeddings:
        raise ModelLoadError(
            f"max_model_len {wanted} must be from 1 to {config.max_position_embeddings}, the model's limit"
        )
    return wanted


@contextmanager
def _progress(source: WeightSource, name: str, shown: bool) -> Iterator[Callable[[], None]]:
    """Yield a callable that must be called once for each tensor taken."""
    with tqdm(
        total=len(source.names()), desc=f"loading {name}", unit="tensor", disable=not shown, file=sys.stderr
    ) as bar:

        def tick() -> None:
            bar.update(1)

        yield tick
