"""The small real model from its GGUF file against transformers, which reads the same file: token for token.

The reference runs once per prompt, on the prompt plus our tokens: if each of them is its arg-max, its own greedy
generation is the same sequence.
"""

import random
from dataclasses import dataclass, field

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from kvferry.common.device.cpu import CpuDevice
from kvferry.common.device.native.build import find_compiler
from kvferry.common.models.load import LoadedModel, load_model
from kvferry.common.tokenizer import Tokenizer, load_tokenizer
from tests.support.cpu_ops import cpu_with
from tests.support.engine_driver import EngineDriver
from tests.support.real_model import real_model_path

pytestmark = [pytest.mark.model, pytest.mark.slow]

NEW_TOKENS = 12
NEAR_TIE = 0.5
SENTENCES = (
    "The harbour was quiet before the boats came in.",
    "def area(radius): return 3.14159 * radius ** 2",
    "Water boils at 100 degrees, and at 71 on the highest mountain.",
    "Ein Zug fährt um 7:45 Uhr nach Köln.",
    "She asked: what is the capital of France?",
    '{"name": "pump", "pressure": [1.5, 2.25], "on": true}',
    "1, 1, 2, 3, 5, 8, 13,",
    "東京は日本の首都です。",
    "Once upon a time a fox lived under a bridge.",
    "SELECT name FROM ships WHERE year > 1990;",
)
LENGTHS = (1, 1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 17, 24, 31, 32, 33, 40, 48, 50, 63, 64, 65, 70, 80, 90, 100, 111, 120,
           128, 129, 140, 150, 170, 190, 200, 220, 255, 256, 300, 400, 700, 2000)  # fmt: skip


@dataclass
class Oracle:
    """transformers' model, with a cache of its results."""

    model: LlamaForCausalLM
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, float]]] = field(default_factory=dict)

    def differences(self, prompt: list[int], output: list[int]) -> list[tuple[int, float]]:
        """(index, margin) of each output token that is not the arg-max; margin: best minus second-best logit."""
        key = (tuple(prompt), tuple(output))
        if key not in self.known:
            with torch.inference_mode():
                ids = torch.tensor([prompt + output[:-1]])
                logits = self.model(ids, logits_to_keep=len(output), use_cache=False).logits[0]
            best = logits.topk(2)
            margins = (best.values[:, 0] - best.values[:, 1]).tolist()
            wanted = best.indices[:, 0].tolist()
            self.known[key] = [(i, margins[i]) for i, token in enumerate(output) if token != wanted[i]]
        return self.known[key]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    path = real_model_path()
    return Oracle(AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval())


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(real_model_path())
    return [_prompt(tokenizer, index, length) for index, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(real_model_path(), device=_device(), dtype="float32", progress=False)


def _device() -> CpuDevice:
    """With the ops that a node would use here: native if there is a compiler."""
    return cpu_with("native" if find_compiler() else "torch")


def _prompt(tokenizer: Tokenizer, index: int, length: int) -> list[int]:
    """`length` ids of text, in a different order for each index; every sixth prompt has random ids."""
    chooser = random.Random(index)
    if index % 6 == 5:
        return [chooser.randrange(tokenizer.vocab_size) for _ in range(length)]
    ids: list[int] = []
    while len(ids) < length:
        ids += tokenizer.encode(chooser.choice(SENTENCES) + chooser.choice((" ", "\n", "\n\n")))
    return ids[:length]


def _serve(model: LoadedModel, prompts: list[list[int]], budget: int, in_flight: int) -> list[list[int]]:
    driver = EngineDriver(model, CpuDevice(1), blocks=700, block_size=16)
    sequences = [driver.add(prompt) for prompt in prompts]
    driver.serve(sequences, NEW_TOKENS, budget, in_flight)
    outputs = [sequence.output for sequence in sequences]
    assert all(len(output) == NEW_TOKENS for output in outputs)
    return outputs


@pytest.mark.parametrize(("in_flight", "budget", "part"), [(1, 2048, 0), (3, 64, 1), (8, 300, 2), (16, 511, 3)])
def test_greedy_float32_equals_transformers(
    oracle: Oracle, prompts: list[list[int]], loaded: LoadedModel, in_flight: int, budget: int, part: int
) -> None:
    """A quarter of the prompts per case, from one whole prompt at a time to 11 concurrent prompts in chunks."""
    assert len(prompts) >= 40
    own = prompts[part::4]
    for prompt, output in zip(own, _serve(loaded, own, budget, in_flight), strict=True):
        assert oracle.differences(prompt, output) == []


def test_sixteen_concurrent_prompts_equal_transformers(
    oracle: Oracle, prompts: list[list[int]], loaded: LoadedModel
) -> None:
    own = [prompt for prompt in prompts if len(prompt) <= 130]
    for prompt, output in zip(own, _serve(loaded, own, 256, 16), strict=True):
        assert oracle.differences(prompt, output) == []


def test_prefix_hit_equals_transformers(oracle: Oracle, prompts: list[list[int]], loaded: LoadedModel) -> None:
    """A prompt whose first blocks another sequence computed continues as if it had computed them itself."""
    prompt = next(prompt for prompt in prompts if len(prompt) == 400)
    driver = EngineDriver(loaded, CpuDevice(1), blocks=100, block_size=16)
    source = driver.add(prompt[:333])
    driver.generate([source], 1)
    target = driver.add(prompt)
    driver.share_prefix(source, target, 20)
    driver.generate([target], NEW_TOKENS)
    assert oracle.differences(prompt, target.output) == []


def test_bfloat16_differs_at_near_ties_only(oracle: Oracle, prompts: list[list[int]]) -> None:
    loaded = load_model(real_model_path(), device=_device(), progress=False)
    assert loaded.dtype == torch.bfloat16
    own = [prompt for prompt in prompts if len(prompt) <= 256][::2]
    equal = 0
    for prompt, output in zip(own, _serve(loaded, own, 200, 8), strict=True):
        different = oracle.differences(prompt, output)
        if different:
            assert different[0][1] < NEAR_TIE, (prompt[:8], different[0])
        equal += not different
    assert equal >= len(own) // 2
