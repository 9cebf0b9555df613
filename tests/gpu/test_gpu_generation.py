"""Generated tokens on a GPU: a captured step has the bits of an eager one, and the tokens are those without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.generators import VOCAB, WithoutCache, build

from megatron_sp.inference import decoder as decoder_module
from megatron_sp.inference.decoder import Capture, Decoder
from megatron_sp.inference.generation import Sampling, complete
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.cuda_graphs import CudaGraphs

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
MODELS = ["learned", "rope", "grouped", "qk_norm", "window", "one_group_no_positions"]
USED = "captured steps: used (the bits of an eager step)"


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "_LEAST_SPAN", 16)


class Eagerly(dict[Any, Any]):
    """Captured steps of a decoder that has found that none can be used."""

    def __contains__(self, _: object) -> bool:
        return True


def model_of(name: str, dtype: torch.dtype) -> GPTModel:
    return build(name, dtype, hidden_size=64, seq_length=64).to(CUDA).requires_grad_(False)


def captured(model: GPTModel, rows: int) -> tuple[Decoder, list[str]]:
    told: list[str] = []
    decoder = Decoder(model, rows, capture=Capture(lambda: CudaGraphs(CUDA), tell=told.append))
    decoder.reserve(64)
    return decoder, told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_replays_have_the_bits_of_eager_steps(name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    (replayed, told), (eager, _) = captured(model, 3), captured(model, 3)
    eager._steps = Eagerly()
    tokens = torch.Generator().manual_seed(3)
    for change in ([5], [1], [12], "drop", [2], "drop", "again", "drop"):
        for decoder in (replayed, eager):
            if change == "drop":
                decoder.drop(0)
            elif change == "again":
                decoder.again()
            else:
                decoder.read(list(range(int(change[0]))))
        for _ in range(5):
            new = torch.randint(0, VOCAB, (len(eager.lengths),), generator=tokens).tolist()
            assert torch.equal(replayed.step(new), eager.step(new))
    assert told == [USED] and len(replayed._steps) > 4 and all(replayed._steps.values())


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", [*MODELS, "experts"])
def test_tokens_are_those_without_a_cache(name: str, rows: int) -> None:
    model, prompts = model_of(name, torch.float32), [[4, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8]]
    options: dict[str, Any] = {"max_new_tokens": 30, "sampling": Sampling(temperature=0), "num_samples": 2}
    decoder = Decoder(model, rows) if name == "experts" else captured(model, rows)[0]
    assert complete(model, prompts, **options, decoder=decoder) == complete(model, prompts, **options, decoder=WithoutCache(model))
