"""Digests of samples: what they depend on, and how they travel."""

from __future__ import annotations

import json
import types

import numpy as np
import pytest

from megatron_sp.checkpoint.manifest import encode_state
from megatron_sp.data.dataset import from_bytes, sample_digest, step_digest, to_bytes
from megatron_sp.data.gpt_dataset import GPTOptions, MockGPTDataset
from megatron_sp.data.loader import BatchLoader
from megatron_sp.data.tokenizers import ByteTokenizer
from megatron_sp.training import train_state
from megatron_sp.training.train_state import KEPT_STEPS, SampleHistory
from megatron_sp.utils.errors import CheckpointError


def sample(**changes: int) -> dict[str, np.ndarray]:
    made = {"tokens": np.arange(9), "labels": np.arange(1, 10), "loss_mask": np.ones(9, np.float32)}
    for name, value in changes.items():
        made[name] = made[name].copy()
        made[name][4] = value
    return made


def test_one_other_token_or_label_is_another_digest() -> None:
    known = sample_digest(sample())
    assert known == sample_digest(sample()) == sample_digest({name: value.astype(np.int32) for name, value in sample().items()})
    assert len({known, sample_digest(sample(tokens=7)), sample_digest(sample(labels=7))}) == 3
    assert sample_digest(sample(loss_mask=0)) == known, "what is masked follows from tokens and flags"
    assert 0 <= known < 2**48 and int(float(known)) == known


def test_rows_of_a_wider_table_count_by_their_contents() -> None:
    spread = {name: np.stack([value, value], 1)[:, 0] for name, value in sample().items()}
    assert not spread["tokens"].flags.c_contiguous and sample_digest(spread) == sample_digest(sample())
    narrow = {name: np.stack([value, value], 1).astype("<i4")[:, 0] for name, value in sample().items()}
    assert not narrow["tokens"].flags.c_contiguous and sample_digest(narrow) == sample_digest(sample())


def test_the_digest_is_this_one() -> None:
    """It is kept in checkpoints: another way to work it out would refuse all of them."""
    assert sample_digest(sample()) == 179736698933358 and step_digest([1, 2**48 - 1]) == "1bdf28aa179f7a00"


def test_they_are_six_bytes_each() -> None:
    digests = [0, 1, 2**48 - 1, sample_digest(sample())]
    assert from_bytes(to_bytes(digests)) == digests and len(to_bytes(digests)) == 24 and from_bytes(b"") == []
    with pytest.raises(ValueError, match="reshape"):
        from_bytes(b"abc")


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_tells_them(workers: int) -> None:
    data = MockGPTDataset(GPTOptions(8, 1), num_samples=12, tokenizer=ByteTokenizer())
    with BatchLoader(data, micro_batch_size=3, dp_rank=1, dp_size=2, num_workers=workers, digests=True) as loader:
        (batch,) = loader.step(0, 1)
    assert batch["digests"].tolist() == [sample_digest(data[i]) for i in (3, 4, 5)]
    with BatchLoader(data, micro_batch_size=3) as loader:
        assert "digests" not in loader.step(0, 1)[0]


# What a checkpoint keeps of them


def history(data: MockGPTDataset, steps: int = 3, size: int = 4, start: int = 0) -> SampleHistory:
    made = SampleHistory()
    for step in range(steps):
        made.add(step + 1, start + step * size, [sample_digest(data[start + step * size + k]) for k in range(size)])
    return made


def mock(seed: int = 1, num: int = 40) -> MockGPTDataset:
    return MockGPTDataset(GPTOptions(8, seed), num_samples=num, tokenizer=ByteTokenizer())


def test_a_history_comes_back_and_names_the_first_difference() -> None:
    kept = SampleHistory.from_json(json.loads(json.dumps(history(mock()).to_json())))
    assert len(kept) == 12 and kept.words() == "12 samples of steps 1 to 3"
    assert kept.first_difference(mock(), "single", 1, None) is None

    class Changed(MockGPTDataset):
        def __getitem__(self, i: int) -> dict[str, np.ndarray]:
            return mock(2)[i] if i in (6, 9) else super().__getitem__(i)

    found = kept.first_difference(Changed(GPTOptions(8, 1), num_samples=40, tokenizer=ByteTokenizer()), "single", 1, None)
    assert found is not None and found.startswith("sample 6 (number 2 of step 2): its tokens were others then") and "--mock-data" in found
    found = kept.first_difference(mock(num=7), "single", 1, None)
    assert found is not None and found.startswith("sample 7 (number 3 of step 2): the data set has only 7 samples now")


def test_ranks_share_the_reading_and_give_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 meets its difference, sample 9, earlier in its share than rank 0 its own, and sample 6 is the first all the same."""
    kept, found, read = history(mock()), {}, {}

    class Changed(MockGPTDataset):
        def __getitem__(self, i: int) -> dict[str, np.ndarray]:
            seen.append(i)
            return mock(2)[i] if i in (6, 9) else super().__getitem__(i)

    for told in (None, [(6, "of rank 0"), (9, "of rank 1")]):
        for rank in range(2):
            seen: list[int] = []
            found[rank] = None

            def gather(value: object, group: object, rank: int = rank, told: object = told) -> object:
                found[rank] = value
                return told or [value]

            group = types.SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2)
            monkeypatch.setattr(train_state, "gather_json", gather)
            data = Changed(GPTOptions(8, 1), num_samples=40, tokenizer=ByteTokenizer())
            answer = kept.first_difference(data, "single", 1, group)  # type: ignore[arg-type]
            read[rank] = seen
            assert told is None or answer == "of rank 0"
    assert read == {0: [0, 2, 4, 6], 1: [1, 3, 5, 7, 9]}, "and none after the first difference of its own"
    assert [value[0] for value in found.values()] == [6, 9]  # type: ignore[index]


def test_only_the_last_steps_are_kept_and_no_more_than_state_json_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    many = SampleHistory()
    for step in range(150):
        many.add(step, 8 * step, [step] * 8)
    assert len(many) == 8 * KEPT_STEPS and many.words().endswith("of steps 50 to 149")
    huge = SampleHistory()
    for step in range(5):
        huge.add(step, step << 16, [2**48 - 1] * 60_000)
    assert huge.words() == "120,000 samples of steps 3 to 4"
    encode_state(4, {"samples": huge.to_json()})
    monkeypatch.setattr(train_state, "MAX_SAMPLES", 5)
    huge.add(9, 0, list(range(8)))
    assert huge.words() == "5 samples of steps 9 to 9", "the first of them, whose numbers are known"


@pytest.mark.parametrize(
    "value",
    [None, {}, 7, [1], [{}], [{"step": 1}], [{"step": 1, "consumed_samples": -1, "digests": ""}], [[]] * 101,
     *([{"step": 1, "consumed_samples": 0, "digests": text}] for text in (None, 5, "?", "AAAA", "AAAAAA", "\u20ac"))],
)  # fmt: skip
def test_what_is_no_history_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"state\.json: samples"):
        SampleHistory.from_json(value)
