"""--balance-rows for a run: which order its loader deals rows in (``parallel/row_dealing.py``), and what to warn of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megatron_sp.config.schema import Config
from megatron_sp.data.dataset import Dataset, RowDataset
from megatron_sp.utils.errors import ConfigError

if TYPE_CHECKING:
    from megatron_sp.parallel.row_dealing import RowDealer

_ROWS_LOOKED_AT = 8


def row_dealer(config: Config, dataset: Dataset, dp_size: int) -> RowDealer | None:
    """Return what deals the rows of ``dataset`` by their attention; None: they are dealt by index.

    Raises:
        ConfigError: the data set does not know the documents of its rows.
    """
    if not config.parallel.balance_rows:
        return None
    if not isinstance(dataset, RowDataset):
        raise ConfigError(
            "--balance-rows needs rows of packed documents whose lengths an index says, and this task's data have none: leave it out"
        )
    from megatron_sp.parallel.row_dealing import RowDealer

    model = config.model
    return RowDealer(dataset.document_lengths, config.batch.micro_batch_size, dp_size, not model.is_bert, model.window_size)


def warning_about_documents(config: Config, dataset: Dataset | None) -> str | None:
    """Return a warning if --balance-rows goes by lengths that are not those of the documents that attention sees; else None.

    Raises:
        DataError: a row cannot be read.
    """
    if not config.parallel.balance_rows or not isinstance(dataset, RowDataset):
        return None
    count = min(_ROWS_LOOKED_AT, len(dataset))
    wrong = sum(not np.array_equal(_lengths_of(dataset[i]["documents"]), dataset.document_lengths(i)) for i in range(count))
    if not wrong:
        return None
    return (
        f"--balance-rows takes documents to end where those of the data files do, and in {wrong} of {count} rows looked at the tokens that"
        " end documents are elsewhere: the ranks' work may stay uneven. megatron-sp preprocess --append-eod puts one at each end"
    )


def _lengths_of(documents: np.ndarray) -> np.ndarray:
    """Return the tokens of each document, given the number of each token's, int64 [s]."""
    starts = np.flatnonzero(np.diff(documents, prepend=documents[0] - 1))
    return np.diff(starts, append=documents.size)
