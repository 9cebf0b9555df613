"""--balance-rows: what the loader is told for a run, and where it is refused, dropped or warned of."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.schema import Config
from megatron_sp.data.dataset import Sample
from megatron_sp.training.microbatches import row_dealer, warning_about_documents
from megatron_sp.utils.errors import ConfigError

FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --vocab-size 100 --train-iters 10 --lr 1e-3 --mock-data"
    " --micro-batch-size 2 --global-batch-size 4 --reset-attention-mask"
)
ROWS = [[4, 4], [8], [1] * 8, [6, 2]]


class Rows:
    """Rows of given documents; what the index says of them may be something else."""

    def __init__(self, indexed: list[list[int]] = ROWS) -> None:
        self.indexed = indexed

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, i: int) -> Sample:
        return {"documents": np.repeat(np.arange(3, 3 + len(ROWS[i])), ROWS[i])}

    def document_lengths(self, i: int) -> np.ndarray:
        return np.array(self.indexed[i])

    def fingerprint(self) -> str:
        return ""

    def where(self, i: int) -> str:
        return ""


def parse(more: str = "", family: str = "gpt") -> Config:
    flags = FLAGS.replace("--reset-attention-mask", "") if family == "bert" else FLAGS
    return config_from_args([*flags.split(), *more.split()], family=family)


def test_what_a_run_deals_by() -> None:
    dealer = row_dealer(parse("--balance-rows --window-size 5"), Rows(), 2)
    assert dealer is not None
    assert (dealer.micro_batch_size, dealer.dp_size, dealer.causal, dealer.window) == (2, 2, True, 5)
    assert dealer.document_lengths(3).tolist() == [6, 2]
    bert = row_dealer(parse("--balance-rows --bert-pack-sequences --bert-no-binary-head", "bert"), Rows(), 2)
    assert bert is not None and not bert.causal and bert.window is None
    assert row_dealer(parse(), Rows(), 2) is None


def test_without_packed_documents_it_has_no_effect() -> None:
    line = "--balance-rows (without --reset-attention-mask or --bert-pack-sequences it has no effect)"
    plain = config_from_args([*FLAGS.split()[:-1], "--balance-rows"])
    assert not plain.parallel.balance_rows and line in plain.ignored_flags
    packed = parse("--balance-rows")
    assert packed.parallel.balance_rows and line not in packed.ignored_flags
    assert parse("--balance-rows --bert-pack-sequences --bert-no-binary-head", "bert").parallel.balance_rows


def test_a_task_whose_data_know_no_documents() -> None:
    class Texts:
        __len__, __getitem__, fingerprint, where = Rows.__len__, Rows.__getitem__, Rows.fingerprint, Rows.where

    with pytest.raises(ConfigError, match="--balance-rows needs rows of packed documents whose lengths an index says"):
        row_dealer(parse("--balance-rows"), Texts(), 2)  # type: ignore[arg-type]
    assert row_dealer(parse(), Texts(), 2) is None  # type: ignore[arg-type]
    assert warning_about_documents(parse("--balance-rows"), Texts()) is None  # type: ignore[arg-type]


def test_an_index_that_knows_other_documents() -> None:
    other = Rows([[4, 4], [7, 1], [1] * 8, [8]])
    warning = warning_about_documents(parse("--balance-rows"), other)
    assert warning is not None and "in 2 of 4 rows looked at" in warning and "--append-eod" in warning
    assert warning_about_documents(parse("--balance-rows"), Rows()) is None
    assert warning_about_documents(parse(), other) is None and warning_about_documents(parse("--balance-rows"), None) is None
