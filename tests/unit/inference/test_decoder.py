"""Steps of several sequences at once: rows that come and go, captured steps (tapes in place of graphs), and batches of prompts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.generators import MODELS, VOCAB, WithoutCache, build
from support.tape import Tape, Tapes
from torch import Tensor

from megatron_sp.inference import decoder as decoder_module
from megatron_sp.inference.decoder import Capture, Decoder
from megatron_sp.inference.generation import NewToken, Sampling, complete, generate, one_after_another
from megatron_sp.models.gpt import GPTModel
from megatron_sp.ops.attention import AttentionMask
from megatron_sp.parallel.forward_context import ForwardContext
from megatron_sp.utils.errors import ConfigError

CAPTURABLE = [name for name in MODELS if name != "experts"]
GREEDY, SAMPLED = Sampling(temperature=0), Sampling(temperature=1.3, top_k=20, top_p=0.9)


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny sequences, too, go through several spans."""
    monkeypatch.setattr(decoder_module, "_LEAST_SPAN", 8)


class Eagerly(dict[Any, Any]):
    """Captured steps of a decoder that has found that none can be used."""

    def __contains__(self, _: object) -> bool:
        return True


def in_spans(model: GPTModel, rows: int) -> tuple[Decoder, Decoder]:
    """Return a decoder whose steps are replays, and one whose steps are the same, eagerly."""
    made = Decoder(model, rows, capture=Capture(Tapes, must=True)), Decoder(model, rows, capture=Capture(Tapes, must=True))
    for each in made:
        each.reserve(model.config.max_positions)
    made[1]._steps = Eagerly()
    return made


def whole(model: GPTModel, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model.next_logits(torch.tensor([tokens]), ForwardContext(AttentionMask()))[0]


@pytest.mark.often("window")
@pytest.mark.parametrize("name", CAPTURABLE)
def test_replays_have_the_bits_of_eager_steps_while_rows_come_and_go(name: str) -> None:
    """By chance prompts are read, samples begin, rows go and steps are taken; a decoder without graphs gives the same in fp64."""
    model, draw = build(name), random.Random(name)
    plain = Decoder(model, 4)
    plain.reserve(20)
    captured, eager = in_spans(model, 4)
    sequences, prompt, replays = list[list[int]](), list[int](), 0
    for _ in range(90):
        full = [row for row, tokens in enumerate(sequences) if len(tokens) == 20]
        if full or (sequences and draw.random() < 0.2):
            row = full[0] if full else draw.randrange(len(sequences))
            for each in (captured, eager, plain):
                each.drop(row)
            sequences[row] = sequences[-1]
            del sequences[-1]
        elif len(sequences) < 4 and prompt and draw.random() < 0.6:
            for each in (captured, eager, plain):
                each.again()
            sequences.append(list(prompt))
        elif len(sequences) < 4 and draw.random() < 0.3:
            prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 12))]
            for each in (captured, eager, plain):
                assert (each.read(prompt)[0] - whole(model, prompt)).abs().max() < 1e-10
            sequences.append(list(prompt))
        elif sequences:
            new = [draw.randrange(VOCAB) for _ in sequences]
            sequences = [[*tokens, token] for tokens, token in zip(sequences, new, strict=True)]
            got = captured.step(new)
            assert torch.equal(got, eager.step(new))
            replays += 1
            for one, other, tokens in zip(got, plain.step(new), sequences, strict=True):
                want = whole(model, tokens)
                assert (one - want).abs().max() < 1e-10 and (other - want).abs().max() < 1e-10
        assert captured.lengths == plain.lengths == [len(tokens) for tokens in sequences]
    assert replays > 25 and len(captured._steps) > 5, "numbers of rows and spans"


@pytest.mark.often("sampled-learned-3", "sampled-window-3", "sampled-experts-3", "sampled-qk_norm-3", "greedy-grouped-1")
@pytest.mark.parametrize(("name", "rows"), [*((name, 3) for name in MODELS), ("learned", 1), ("grouped", 1)])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_those_without_a_cache(name: str, rows: int, sampling: Sampling) -> None:
    """One after another or together, eagerly and captured, with samples that wait for a row, and ends at different times."""
    model, prompts = build(name), [[4, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8]]
    options: dict[str, Any] = {"max_new_tokens": 10, "sampling": sampling, "num_samples": 2}
    free = complete(model, prompts, **options, decoder=WithoutCache(model))
    options |= {"eod": free[0][0][3], "stop": [free[1][1][5:7]]}
    want = complete(model, prompts, **options, decoder=WithoutCache(model))
    lengths = {len(tokens) for samples in want for tokens in samples}
    assert min(lengths) < 7 and len(lengths) > 1
    captures = [None] if name == "experts" else [None, Capture(Tapes, must=True)]
    for decoder in [Decoder(model, rows, capture=capture) for capture in captures]:
        for _ in range(2 if sampling is GREEDY else 1):  # a second time with what is left of the first
            assert complete(model, prompts, **options, decoder=decoder) == want


def test_a_prompt_is_read_once_for_all_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where none of them has a row any more when the next one gets its own."""
    read, seen = Decoder.read, list[list[int]]()
    model, prompts = build("rope"), [[4, 9, 2], [7, 7]]
    want = complete(model, prompts, max_new_tokens=4, num_samples=5, decoder=WithoutCache(model))
    monkeypatch.setattr(Decoder, "read", lambda self, tokens, *rest: seen.append(tokens) or read(self, tokens, *rest))
    together = complete(model, prompts, max_new_tokens=4, num_samples=5, decoder=Decoder(model, 2))
    assert seen == prompts and together == want


def test_sequences_are_told_one_after_another() -> None:
    model = build()
    tokens = list(generate(model, [[4, 9], [7], [1]], max_new_tokens=4, num_samples=2, decoder=Decoder(model, 4)))
    assert [(t.prompt, t.sample) for t in tokens[4:8]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    ordered = list(one_after_another(tokens, 2))
    assert [(t.prompt, t.sample, t.position) for t in ordered] == sorted((t.prompt, t.sample, t.position) for t in tokens)
    waited = list[NewToken]()
    stream = one_after_another(iter(tokens[:4]), 2)
    assert [next(stream), *stream, *waited] == tokens[:1], "the others' turn has not come"


def test_what_has_been_reserved_stays_and_what_is_too_little_is_made_anew() -> None:
    model = build("rope")
    decoder = Decoder(model, 1, capture=Capture(Tapes, must=True))
    complete(model, [[1]], max_new_tokens=3, decoder=decoder)
    first, steps = decoder._cache, dict(decoder._steps)
    complete(model, [[1, 2]], max_new_tokens=3, decoder=decoder)
    assert decoder._cache is first and decoder._steps == steps
    want = complete(model, [[1]], max_new_tokens=12)
    assert complete(model, [[1]], max_new_tokens=12, decoder=decoder) == want and decoder._cache is not first


# whether replays are used


class Wrong(Tape):
    """A graph that computes something else."""

    def replay(self) -> None:
        super().replay()
        self._calls[-1][3][0].add_(1e-12)


class WrongTapes(Tapes):
    def capture(self, record: Callable[[], None]) -> Tape:
        tape = super().capture(record)
        tape.__class__ = Wrong
        return tape


class NoTapes(Tapes):
    def capture(self, record: Callable[[], None]) -> Tape:
        raise RuntimeError("CUDA error: operation not permitted\nmore")


@pytest.mark.parametrize(
    ("maker", "others", "why"),
    [
        (Tapes, ["", ""], ""), (WrongTapes, ["", ""], "a replay has other bits than an eager step"),
        (NoTapes, [""], "the capture failed: RuntimeError: CUDA error: operation not permitted"),
        (Tapes, ["another rank's capture"], "another rank's capture"), (Tapes, ["", "another rank's bits"], "another rank's bits"),
    ],
)  # fmt: skip
def test_a_replay_is_used_if_all_ranks_find_it_right(maker: Any, others: list[str], why: str) -> None:
    """After a capture that fails on some rank, none of them replays, which would hang."""
    model, told, rounds = build("grouped"), list[str](), iter(others)
    decoder = Decoder(model, capture=Capture(maker, of_all=lambda mine: [mine, next(rounds, "")], tell=told.append))
    decoder.reserve(8)
    assert next(rounds, None) is None
    assert complete(model, [[4, 9, 2]], max_new_tokens=9, decoder=decoder) == complete(model, [[4, 9, 2]], max_new_tokens=9)
    assert told == [f"captured steps: not used, {why}" if why else "captured steps: used (the bits of an eager step)"]
    assert (decoder._maker is None) == bool(why)


def test_a_capture_that_must_be_is_an_error() -> None:
    decoder = Decoder(build(), capture=Capture(NoTapes, must=True))
    with pytest.raises(ConfigError, match=r"--cuda-graphs on cannot be: the capture failed: .*; use --cuda-graphs auto or off"):
        decoder.reserve(9)


def test_a_later_shape_that_cannot_be_captured_is_eager() -> None:
    model, told = build("grouped"), list[str]()
    decoder = Decoder(model, capture=Capture(Tapes, tell=told.append))
    decoder.reserve(20)
    decoder._maker = NoTapes()
    assert complete(model, [[4, 9, 2]], max_new_tokens=15, decoder=decoder) == complete(model, [[4, 9, 2]], max_new_tokens=15)
    assert [captured is None for captured in decoder._steps.values()] == [False, True, True] and len(told) == 3


def test_a_failure_leaves_nothing_behind() -> None:
    """NaN of a hidden position would be in every sum."""
    model = build("learned")
    decoder = Decoder(model, 2)
    decoder.reserve(20)
    decoder.read([1, 2, 3, 4, 5, 6])
    for pair in decoder._cache._layers:
        assert pair is not None
        pair[0].fill_(float("nan")), pair[1].fill_(float("nan"))
    decoder.clear()
    for prompt in ([3], [4, 9, 2]):
        decoder.read(prompt)
    assert torch.isfinite(decoder.step([1, 1])).all() and decoder.lengths == [2, 4]


VIEWS = ("_unsafe_view", "alias", "detach", "empty", "expand", "permute", "select", "slice", "split_with_sizes", "t", "unsqueeze", "view")


def num_launches(layers: int, name: str) -> int:
    """Operations of a captured step, but for views."""
    decoder = Decoder(build(name, num_layers=layers), capture=Capture(Tapes, must=True))
    decoder.reserve(16)
    (captured,) = decoder._steps.values()
    assert captured is not None and isinstance(captured._graph, Tape)
    return sum(func._schema.name.removeprefix("aten::") not in VIEWS for func, *_ in captured._graph._calls)


@pytest.mark.parametrize(("name", "budget"), [("learned", 12), ("grouped", 19)])
def test_launches_of_a_layer(name: str, budget: int) -> None:
    """Two norms, four products, attention, an activation, two sums, keys and values; rotary positions. The mask is made for all layers."""
    assert (num_launches(4, name) - num_launches(2, name)) / 2 <= budget
