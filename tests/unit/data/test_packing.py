"""Samples that know where their documents end."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_sp.data.dataset import Sample, make_sample
from megatron_sp.data.gpt_dataset import PackedDataset, document_numbers
from megatron_sp.ops.attention import document_ends

EOD = 9


class Stretches:
    """Samples from given stretches of tokens."""

    def __init__(self, *stretches: list[int]) -> None:
        self.stretches = [np.array(s, np.int64) for s in stretches]

    def __len__(self) -> int:
        return len(self.stretches)

    def __getitem__(self, i: int) -> Sample:
        return make_sample(self.stretches[i], None)

    def fingerprint(self) -> str:
        return "x"


@pytest.mark.parametrize(
    "tokens, numbers, positions",
    [
        ([1, 2, 3], [0, 0, 0], [0, 1, 2]),
        ([1, EOD, 2, 3], [0, 0, 1, 1], [0, 1, 0, 1]),
        ([EOD, 1, 2], [0, 1, 1], [0, 0, 1]),
        ([1, 2, EOD], [0, 0, 0], [0, 1, 2]),
        ([1, EOD, EOD, 4, EOD, 5], [0, 0, 1, 2, 2, 3], [0, 1, 0, 0, 1, 0]),
        ([EOD], [0], [0]),
    ],
)
def test_the_end_of_document_token_belongs_to_the_document_it_ends(tokens: list[int], numbers: list[int], positions: list[int]) -> None:
    data = PackedDataset(Stretches([*tokens, 0]), EOD, positions=True, documents=True)
    sample = data[0]
    assert sample["tokens"].tolist() == tokens and sample["documents"].tolist() == numbers and sample["positions"].tolist() == positions
    assert len(data) == 1 and data.fingerprint() == "x" and sample["positions"].dtype == np.int64


def test_only_what_is_asked_for_is_added() -> None:
    plain = {"tokens", "labels", "loss_mask"}
    assert set(PackedDataset(Stretches([1, 2]), EOD, positions=True, documents=False)[0]) == plain | {"positions"}
    assert set(PackedDataset(Stretches([1, 2]), EOD, positions=False, documents=True)[0]) == plain | {"documents"}


def test_ends_of_documents() -> None:
    rows = [[1, EOD, 2, 3], [EOD, 1, 2, EOD], [1, 2, 3, 4]]
    numbers = torch.from_numpy(np.stack([document_numbers(np.array(row), EOD) for row in rows]))
    assert document_ends(numbers) == ((2, 4), (1, 4), (4,))
    assert document_ends(numbers[2:]) is None, "one document in each sequence is nothing special"
    assert document_ends(torch.tensor([[5, 5, 0, 0, 5]])) == ((2, 4, 5),), "numbers may come again"
