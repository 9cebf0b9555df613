"""Generation: the cache changes nothing, candidates are those of the definition, samples are reproducible, limits are errors."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from support import stored_models
from support.generators import MODELS, VOCAB, WithoutCache, build

from megatron_sp.inference.decoder import Decoder, KVCache, RowPass
from megatron_sp.inference.generation import Sampling, TextStream, candidates, choose, complete, generate, uniform
from megatron_sp.inference.team import find_stored
from megatron_sp.models.experts import expert_biases
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.utils.errors import ConfigError, NumericsError


@pytest.mark.parametrize("name", MODELS)
def test_cached_steps_have_the_logits_of_a_full_forward(name: str) -> None:
    model = build(name)
    tokens = torch.randint(0, VOCAB, (1, 17), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        full = model.logits(model.hidden(tokens, ForwardContext(AttentionMask())))
        cache, at, parts = KVCache(2, 3, 17), 0, []
        for chunk in tokens.split([5, 1, 1, 6, 3, 1], dim=1):  # a prompt, single steps and chunks onto a filled row
            parts.append(model.logits(model.hidden(chunk, ForwardContext(AttentionMask(), cache=RowPass(cache, 1, at)))))
            at += chunk.shape[1]
    assert (torch.cat(parts) - full).abs().max() < 1e-10


def test_a_sample_is_the_same_alone_in_company_and_whatever_the_random_state() -> None:
    model, prompts = build("rope"), [[4, 9, 2], [7], [30, 30]]
    before = torch.get_rng_state()
    together = complete(model, prompts, max_new_tokens=6, num_samples=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert together == [complete(model, [prompt], max_new_tokens=6, num_samples=3)[0] for prompt in prompts]
    assert complete(model, prompts, max_new_tokens=6, num_samples=3, sampling=Sampling(seed=2)) != together
    assert len({tuple(sample) for sample in together[0]}) > 1  # samples of one prompt differ


def literal_candidates(probs: list[float], top_k: int, top_p: float) -> set[int]:
    """The definition, word for word: k most probable; then the smallest leading set that reaches p of what is left."""
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    order = order[:top_k] if top_k else order
    total = sum(probs[i] for i in order)
    for number in range(1, len(order) + 1):
        if sum(probs[i] for i in order[:number]) / total >= top_p:
            return set(order[:number])
    return set(order)


@pytest.mark.parametrize("top_k", [0, 1, 3, 7, 40, 100])
@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.77, 0.999, 1.0])
def test_candidates_are_those_of_the_definition(top_k: int, top_p: float) -> None:
    for seed, temperature in itertools.product(range(4), (0.5, 1.0, 2.0)):
        logits = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2
        full = torch.softmax(logits / temperature, dim=0)
        ids, probs = candidates(logits, Sampling(temperature, top_k, top_p))
        assert set(ids.tolist()) == literal_candidates(full.tolist(), top_k, top_p)
        torch.testing.assert_close(probs, full[ids] / full[ids].sum(), rtol=1e-12, atol=0)


def test_the_nucleus_stops_at_the_token_that_reaches_p() -> None:
    logits = torch.tensor([0.125, 0.5, 0.25, 0.125], dtype=torch.float64).log()
    assert candidates(logits, Sampling(top_p=0.5))[0].tolist() == [1]
    assert candidates(logits, Sampling(top_p=0.51))[0].tolist() == [1, 2]
    assert candidates(logits, Sampling(top_p=1e-9))[0].tolist() == [1]  # never none
    assert candidates(logits, Sampling())[0].tolist() == [1, 2, 0, 3]  # lower ids first among equals
    assert candidates(logits, Sampling(top_k=3))[0].tolist() == [1, 2, 0]


def test_draws_follow_the_distribution() -> None:
    target = torch.tensor([0.05, 0.6, 0.2, 0.15], dtype=torch.float64)
    draws = 4000
    counts = torch.zeros(4)
    for position in range(draws):
        counts[choose(target.log(), Sampling(), sample=0, position=position)] += 1
    # five standard deviations of a binomial share
    assert ((counts / draws - target).abs() < 5 * (target * (1 - target) / draws).sqrt()).all()


def test_uniform_numbers_are_uniform_and_differ_in_every_argument() -> None:
    values = [uniform(1, 0, position) for position in range(2000)]
    assert all(0 <= v < 1 for v in values) and abs(sum(values) / 2000 - 0.5) < 0.03
    assert len({uniform(a, b, c) for a, b, c in itertools.product(range(9), repeat=3)}) == 729


def test_temperature_extremes() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0])
    assert choose(logits, Sampling(temperature=0), 0, 0) == 1  # the lower id of equals
    tiny = [choose(torch.tensor([1.0, 3.0, 2.9]), Sampling(temperature=1e-308), 0, position) for position in range(50)]
    assert set(tiny) == {1}
    huge = candidates(logits * 1e30, Sampling(temperature=1e300))[1]
    torch.testing.assert_close(huge, torch.full((4,), 0.25, dtype=torch.float64))


@pytest.mark.parametrize(
    "changes", [{"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_impossible_sampling_is_an_error(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        Sampling(**changes)  # type: ignore[arg-type]


def test_ends_at_eod_at_a_stop_sequence_and_at_the_limit() -> None:
    model = build()
    greedy = Sampling(temperature=0)
    free = complete(model, [[4, 9]], max_new_tokens=8, sampling=greedy)[0][0]
    eod = free[3]
    first = free.index(eod)
    ended = list(generate(model, [[4, 9]], max_new_tokens=8, sampling=greedy, eod=eod))
    assert [t.token for t in ended] == free[: first + 1]
    assert [t.finish for t in ended] == [""] * first + ["eod"]
    stopped = list(generate(model, [[4, 9]], max_new_tokens=8, sampling=greedy, stop=[free[1:3], []]))
    assert [t.token for t in stopped] == free[:3] and stopped[-1].finish == "stop"
    assert list(generate(model, [[4, 9]], max_new_tokens=8, sampling=greedy))[-1].finish == "max_new_tokens"
    # a stop sequence does not reach into the prompt
    assert complete(model, [[4, 9]], max_new_tokens=8, sampling=greedy, stop=[[9, free[0]]])[0][0] == free


@pytest.mark.parametrize("kind", [Decoder, WithoutCache])
@pytest.mark.parametrize("name", ["learned", "rope"])
def test_ends_at_the_last_position(name: str, kind: type[Decoder]) -> None:
    model = build(name)  # 20 positions
    tokens = list(generate(model, [[1] * 15], max_new_tokens=100, decoder=kind(model)))
    # positions 15 to 19 can be read again; one more token is predicted after the last one
    assert [t.position for t in tokens] == [15, 16, 17, 18, 19, 20]
    assert tokens[-1].finish == "context"
    full = list(generate(model, [[1] * 20], max_new_tokens=100, decoder=kind(model)))
    assert [(t.position, t.finish) for t in full] == [(20, "context")]
    longer = build(name, max_position_embeddings=26)  # than the sequences of the training
    assert list(generate(longer, [[1] * 24], max_new_tokens=9, decoder=kind(longer)))[-1].position == 26


def test_prompts_that_cannot_work_are_errors_before_any_token() -> None:
    model = build()
    for prompt, message in [
        ([1] * 21, r"prompt 1 has 21 tokens, .* is 20: shorten it by at least 1"),
        ([], "prompt 1 is empty"),
        ([3, VOCAB], f"prompt 1 has the token id {VOCAB}, the model's vocabulary is 0 to {VOCAB - 1}"),
        ([-1], "token id -1"),
    ]:
        with pytest.raises(ConfigError, match=message):
            generate(model, [[1], prompt], max_new_tokens=1)
    with pytest.raises(ConfigError, match="max_new_tokens"):
        generate(model, [[1]], max_new_tokens=0)


def test_an_empty_prompt_starts_from_eod_and_only_ids_of_the_tokenizer_are_generated() -> None:
    model = build()
    started, given = ([*generate(model, [prompt], max_new_tokens=5, eod=7)] for prompt in ([], [7]))
    assert started[0].position == 1 and [t.token for t in started] == [t.token for t in given]
    tokens = complete(model, [[1]], max_new_tokens=19, num_samples=4, vocab_size=5, sampling=Sampling(temperature=5.0))[0]
    assert {t for sample in tokens for t in sample} == set(range(5))


def test_damaged_weights_are_reported() -> None:
    model = build()
    with torch.no_grad():
        model.decoder.final_layernorm.weight[0] = float("nan")
    with pytest.raises(NumericsError, match="logits at position 1 are not finite"):
        complete(model, [[1]], max_new_tokens=2)


def test_text_comes_out_whole() -> None:
    text = "naïve — 日本語 🙂!"

    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    stream = TextStream(decode)
    parts = [stream.add(b) for b in text.encode()]
    assert "".join(parts) == text and stream.flush() == ""
    assert all("\ufffd" not in part for part in parts) and "語" in parts
    stream = TextStream(decode, context="日".encode()[:2])  # the prompt itself may end within a character
    assert stream.add("日".encode()[2]) == "日"
    stream = TextStream(decode)
    assert [stream.add(b) for b in "日".encode()[:2]] == ["", ""]
    assert stream.flush() == "\ufffd"


def test_text_of_pieces_keeps_the_space_between_words() -> None:
    pieces = {1: "▁the", 2: "▁cat", 3: "s"}

    def decode(ids: list[int]) -> str:
        return "".join(pieces[i] for i in ids).replace("▁", " ").removeprefix(" ")

    stream = TextStream(decode, context=[1])
    assert [stream.add(2), stream.add(3), stream.add(1)] == [" cat", "s", " the"]
    assert TextStream(decode).add(2) == "cat"


def test_a_stored_model_has_its_routers_biases(tmp_path: Path) -> None:
    """They are no parameters, and without them tokens would go to other experts."""
    config = stored_models.byte_config()
    for name, value in {"num_experts": 4, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}.items():
        setattr(config.model, name, value)
    model = GPTModel(config.model, config.kernels, seed=2, dtype=torch.float32)
    for bias in expert_biases(model).values():
        bias += torch.tensor([0.0, 3.0, -3.0, 0.5])
    stored_models.save(tmp_path / "run", config, {1: model})
    stored = find_stored(tmp_path / "run", None, "GPT", {}, print)
    loaded = stored.load(GPTModel, torch.device("cpu"), torch.float32)
    assert all(torch.equal(bias, expert_biases(loaded)[name]) for name, bias in expert_biases(model).items())
    tokens = torch.tensor([[1, 5, 3, 0, 6]])
    with torch.no_grad():
        got, want = (each.all_logits(tokens, ForwardContext(AttentionMask())) for each in (loaded, model))
    assert torch.equal(got, want)
