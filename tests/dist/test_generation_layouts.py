"""Generation over tp and sp ranks: the logits of one process at every step, and the same text, from the library and from the tool."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import stored_models, tiny
from support.ranks import run_ranks
from support.tape import Tapes
from support.training import train

from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.commands import generate
from megatron_sp.config.schema import KernelConfig
from megatron_sp.estimate.flops import count_parameters
from megatron_sp.inference.decoder import Capture, Decoder, KVCache, RowPass
from megatron_sp.inference.generation import Sampling, complete
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.parallel.parallel_context import ParallelContext

ROPE = {"position_embedding_type": "rope"}
ONE_GROUP = {"num_query_groups": 1}
OLMOE = {**ROPE, "qk_layernorm": True, "qk_layernorm_scope": "all", "normalization": "RMSNorm", "swiglu": True, "num_experts": 6}
CASES: dict[int, list[tuple[int, int, dict[str, Any]]]] = {
    2: [
        (2, 1, {}),
        (1, 2, {"window_size": 3}),
        (2, 1, {**ROPE, **ONE_GROUP, "untie_embeddings_and_output_weights": True}),  # both ranks have the key head
        (1, 2, {**ROPE, "num_query_groups": 2, "qk_layernorm": True, "normalization": "RMSNorm", "swiglu": True}),
        *((tp, 2 // tp, {"num_experts": 6, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 4}) for tp in (1, 2)),
    ],
    3: [(1, 3, {**ROPE}), (1, 3, {"num_attention_heads": 6, "kv_channels": 4, "num_query_groups": 2})],  # uneven heads
    4: [
        (2, 2, {**ROPE, "num_query_groups": 2}), (2, 2, {"vocab_size": 17}), (1, 4, {**ROPE, **ONE_GROUP}),
        (2, 2, {**OLMOE, **ONE_GROUP}), (1, 4, {**OLMOE, "num_query_groups": 2}),
    ],
}  # fmt: skip
PROMPTS = [[4, 9, 2], [7], [1, 2, 3, 4, 5, 6]]


@pytest.fixture
def byte_run(tmp_path: Path) -> tuple[Path, GPTModel]:
    return stored_models.byte_run(tmp_path)


def models(tp: int, sp: int, overrides: dict[str, Any]) -> tuple[GPTModel, GPTModel]:
    """(the whole model, this rank's part of it)."""
    config = tiny.shape(**overrides)
    groups = ParallelGroups.create(torch.device("cpu"), tp_size=tp, sp_size=sp)
    whole = GPTModel(config, KernelConfig(), seed=5, dtype=torch.float64)
    return whole, GPTModel(config, KernelConfig(), seed=5, dtype=torch.float64, layout=ParallelContext.of(groups))


def check_logits(whole: GPTModel, part: GPTModel) -> None:
    """A prompt at once, then chunks and single tokens onto the cache."""
    tokens = torch.tensor([[1, 5, 3, 0, 6, 2, 8, 7]])
    with torch.no_grad():
        want = whole.logits(whole.hidden(tokens, ForwardContext(AttentionMask())))[:, 0]
    cache, at = KVCache(tiny.LAYERS, 1, 8), 0
    for chunk in tokens.split([3, 1, 1, 2, 1], dim=1):
        got = part.next_logits(chunk, ForwardContext(AttentionMask(), cache=RowPass(cache, 0, at)))[0]
        at += chunk.shape[1]
        assert (got - want[at - 1]).abs().max() < 1e-10
    everywhere = part.all_logits(tokens, ForwardContext(AttentionMask()))[:, 0]
    assert (everywhere - want).abs().max() < 1e-10
    labels = torch.tensor([[5, 3, 0, 6, 2, 8, 7, 1]])
    losses, hits = part.score(tokens, labels, ForwardContext(AttentionMask()))
    expected = want.log_softmax(-1)
    assert (losses[0] + expected.gather(1, labels.t())[:, 0]).abs().max() < 1e-10
    assert torch.equal(hits[0], expected.argmax(1) == labels[0])


def check_batch(whole: GPTModel, part: GPTModel) -> None:
    """Sequences of different lengths in one batch, of which some go and others come while the rest continue; eager and captured."""
    eager, captured = Decoder(part, 3), Decoder(part, 3, capture=Capture(Tapes, must=True))
    for decoder in (eager,) if part.config.has_experts else (eager, captured):
        decoder.reserve(8)
        sequences = list[list[int]]()
        for change in (([4, 9, 2], [7], [1, 2, 3, 4]), (0,), ([6, 6],), (), (0,), ([2],), ()):
            for each in change:
                if isinstance(each, int):
                    decoder.drop(each)
                    sequences[each] = sequences[-1]
                    del sequences[-1]
                else:
                    decoder.read(each)
                    sequences.append(each)
            new = [(3 + 5 * len(tokens)) % 17 for tokens in sequences]
            sequences = [[*tokens, token] for tokens, token in zip(sequences, new, strict=True)]
            for logits, tokens in zip(decoder.step(new), sequences, strict=True):
                with torch.no_grad():
                    want = whole.next_logits(torch.tensor([tokens]), ForwardContext(AttentionMask()))[0]
                assert (logits - want).abs().max() < 1e-10, (change, tokens, decoder is eager)


def check_case(tp: int, sp: int, overrides: dict[str, Any]) -> None:
    whole, part = models(tp, sp, overrides)
    check_logits(whole, part)
    check_batch(whole, part)
    for prompts, samples, sampling in ((PROMPTS[1:], 1, Sampling(temperature=0)), (PROMPTS[:2], 2, Sampling(1.5, 0, 0.9, seed=3))):
        want = complete(whole, prompts, max_new_tokens=4, sampling=sampling, num_samples=samples, eod=0)
        assert complete(part, prompts, max_new_tokens=4, sampling=sampling, num_samples=samples, eod=0) == want


def check_all(cases: list[tuple[int, int, dict[str, Any]]]) -> None:
    for case in cases:
        check_case(*case)


@pytest.mark.parametrize("world_size", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 4))])
def test_logits_and_text_are_those_of_one_process(world_size: int, tmp_path: Path) -> None:
    run_ranks(check_all, world_size, tmp_path, CASES[world_size])


@pytest.mark.parametrize("more", [{}, {"window_size": 3}, {"window_size": 1}], ids=str)
def test_one_rank_is_no_special_case(more: dict[str, Any]) -> None:
    whole = GPTModel(tiny.shape(**ROPE, num_query_groups=2, **more), KernelConfig(), seed=5, dtype=torch.float64)
    check_logits(whole, whole)
    check_batch(whole, whole)


def tool(run: Path, *words: str) -> Any:
    return lambda _: sys.exit(generate.main(["--load", str(run), "--device", "cpu", *words]))


@pytest.mark.parametrize("layout", [("--tp-size", "2"), ("--sequence-parallel-size", "2")], ids=["tp", "sp"])
def test_the_tool_prints_the_text_of_one_process_once(
    byte_run: tuple[Path, GPTModel], tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: tuple[str, ...]
) -> None:
    (tmp_path / "prompts.txt").write_text("ab\nh\nabcdefg\n")
    words = ("--prompt-file", str(tmp_path / "prompts.txt"), "--max-new-tokens", "9", "--num-samples", "2", "--top-k", "40")
    assert generate.main(["--load", str(byte_run[0]), "--device", "cpu", *words]) == 0
    want, said = capsys.readouterr()
    size = f"({count_parameters(byte_run[1].config):,}) parameters in float32 on cpu"  # of the whole, without rows that pad the vocabulary
    assert size in said
    ended = train(tmp_path, ranks=2, program=tool(byte_run[0], *words, *layout)).expect(0, f"{size} over 2 processes", "tokens/s")
    assert want in ended.texts[0]
    assert ended.texts[1] == ""


@pytest.mark.parametrize(
    ("ranks", "words", "message"),
    [
        (2, (), "the number of processes (2) must be tensor_model_parallel_size * sequence_parallel_size (1 * 1 = 1)"),
        (2, ("--tp-size", "3"), "num_attention_heads (4) must be a multiple of tensor_model_parallel_size (3)"),
        (2, ("--sp-size", "5"), "each needs one"),
        (1, ("--sp-size", "0"), "--sequence-parallel-size (0) must be at least 1"),
        (2, ("--tp-size", "2", "--prompt-file", "/nowhere/prompts.txt"), "/nowhere/prompts.txt cannot be read"),
    ],
)
def test_impossible_layouts_are_one_message(byte_run: tuple[Path, GPTModel], tmp_path: Path, ranks: int, words: Any, message: str) -> None:
    words = words if "--prompt-file" in words else (*words, "--prompt", "ab")
    ended = train(tmp_path, ranks=ranks, program=tool(byte_run[0], *words))
    ended.expect(4 if "--prompt-file" in words else 2, message)
    assert "num_attention_heads 3" not in ended.text  # the model is there: its shape cannot be chosen
    assert ended.texts[0].count("error:") == 1 and "".join(ended.texts[1:]) == ""
