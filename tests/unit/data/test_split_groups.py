"""Groups of parts of data sets: the samples of their shares, blended; several sets to evaluate; files of groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.training import write_data

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.rules_data import SplitGroup, read_groups
from megatron_sp.config.schema import DataConfig
from megatron_sp.data.build import Datasets, build_datasets
from megatron_sp.data.dataset import Dataset
from megatron_sp.data.indexed_dataset import IndexedDataset
from megatron_sp.data.tokenizers import NullTokenizer
from megatron_sp.utils.errors import ConfigError, DataError

S = 16


def built(num_samples: tuple[int, int, int] = (40, 6, 4), seed: int = 5, **fields: Any) -> Datasets:
    return build_datasets(DataConfig(**fields), seq_length=S, seed=seed, tokenizer=NullTokenizer(60), num_samples=num_samples)


def rows(dataset: Dataset | None, count: int) -> list[list[int]]:
    assert dataset is not None
    return [dataset[i]["tokens"].tolist() for i in range(count)]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    return str(write_data(tmp_path / "a" / "a")), str(write_data(tmp_path / "b" / "b", num_documents=31, seed=1))


def test_what_a_group_says() -> None:
    text = "TRAIN set: 1 0:0.95 /x/a_text_document, 0.3 0.5:1 b"
    (group,) = read_groups((text,))
    assert group == SplitGroup("TRAIN set", (1.0, 0.3), ((0.0, 0.95), (0.5, 1.0)), ("/x/a_text_document", "b"))
    assert read_groups((f'"{text}"',)) == (group,)


def test_shares_of_one_data_set_are_those_of_a_split(pair: tuple[str, str]) -> None:
    """The same documents in the same order: 60 documents are cut after 54 and 57."""
    a, _ = pair
    groups = built(
        train_weighted_split_paths=(f"T: 1 0:0.9 {a}",), valid_weighted_split_paths=(f"V: 1 0.9:0.95 {a}",),
        test_weighted_split_paths=(f"X: 1 0.95:1 {a}",),
    )  # fmt: skip
    split = built(data_path=(a,), split="90,5,5")
    for one, other, count in ((groups.train, split.train, 40), (groups.valid, split.valid, 6), (groups.test, split.test, 4)):
        assert rows(one, count) == rows(other, count)
    assert groups.fingerprint == split.fingerprint and not groups.named


def test_whole_data_sets_are_blended_as_by_their_weights(pair: tuple[str, str]) -> None:
    a, b = pair
    groups = built(train_weighted_split_paths=(f"T: 3 0:1 {a}, 1.5 0:1 {b}",))
    blend = built(train_data_path=("3", a, "1.5", b))
    assert rows(groups.train, 40) == rows(blend.train, 40) and groups.fingerprint == blend.fingerprint
    parts = built(train_weighted_split_paths=(f"T: 3 0:0.5 {a}, 1.5 0.5:1 {b}",))
    assert parts.fingerprint != groups.fingerprint
    first, second = parts.train.datasets  # type: ignore[union-attr]
    assert set(np.unique(first.index.document)) == set(range(30)) and set(np.unique(second.index.document)) == set(range(16, 31))


def test_each_of_several_sets_is_there(pair: tuple[str, str]) -> None:
    a, b = pair
    sets = built(
        train_weighted_split_paths=(f"T: 1 0:0.5 {a}",),
        valid_weighted_split_paths=(f"V1: 1 0.5:0.9 {a}, 1 0:1 {b}", f"V2: 1 0.9:1 {a}"),
    )  # fmt: skip
    assert [name for name, _ in sets.evaluated("valid")] == ["V1", "V2"] and sets.evaluated("test") == ()
    assert sets.evaluated("valid")[0].dataset is sets.valid and list(sets.evaluation_fingerprints) == ["valid V1", "valid V2"]
    apart = built(train_data_path=(a,), valid_data_path=(a, b), multiple_validation_sets=True)
    assert [name for name, _ in apart.evaluated("valid")] == ["a", "b"]
    for (_, dataset), prefix in zip(apart.evaluated("valid"), pair, strict=True):
        assert rows(dataset, 6) == rows(built(train_data_path=(a,), valid_data_path=(prefix,)).valid, 6)


def test_a_validation_set_that_is_read_once(pair: tuple[str, str]) -> None:
    """Each of its samples, whatever number is asked for, of one data set, of several and of a share; training is not concerned."""
    a, b = pair
    per_epoch = [(IndexedDataset(prefix).sequence_lengths.sum() - 1) // S for prefix in pair]
    for fields, wanted in (
        ({"train_data_path": (a,), "valid_data_path": (a,)}, per_epoch[:1]),
        ({"train_data_path": (a,), "valid_data_path": (a, b, b)}, [per_epoch[0] + 2 * per_epoch[1]]),
        ({"train_data_path": (a,), "valid_data_path": (a, b), "multiple_validation_sets": True}, per_epoch),
        ({"train_weighted_split_paths": (f"T: 1 0:1 {a}",), "valid_weighted_split_paths": (f"V: 1 0:1 {b}",)}, per_epoch[1:]),
    ):
        for asked in (1, 5000):
            sets = built((5000, asked, 5000), full_validation=True, **fields)
            assert [len(dataset) for _, dataset in sets.evaluated("valid")] == wanted
            assert sets.train is not None and len(sets.train) >= 5000


def test_a_share_without_a_document(pair: tuple[str, str]) -> None:
    with pytest.raises(DataError, match=r"/a: 0.5:0.505 of its 60 documents is none: give it a larger share"):
        built(train_weighted_split_paths=(f"T: 1 0.5:0.505 {pair[0]}",))


@pytest.mark.parametrize("text", ['"V1: 1 0:0.5 x, 2 0:1 y" "V2: 1 0.5:1 x"\n', "V1: 1 0:0.5 x, 2 0:1 y\n\nV2: 1 0.5:1 x"])
def test_a_file_of_groups(tmp_path: Path, text: str) -> None:
    file = tmp_path / "valid.txt"
    file.write_text(text)
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --vocab-size 60 --train-iters 1 --lr 1"
    words = shape.split()
    words += ["--train-weighted-split-paths", "T: 1 0:1 x", "--valid-weighted-split-paths-path", str(file)]
    assert config_from_args(words).data.valid_weighted_split_paths == ("V1: 1 0:0.5 x, 2 0:1 y", "V2: 1 0.5:1 x")
    file.unlink()
    with pytest.raises(ConfigError, match=r"^--valid-weighted-split-paths-path: /.*: cannot be read: No such file"):
        config_from_args(words)
