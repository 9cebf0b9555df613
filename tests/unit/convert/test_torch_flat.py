"""A long vector in a file of torch.save, made in stretches: what torch reads is all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_sp.convert.archive.pickle_writer import LazyFlat
from megatron_sp.convert.archive.torch_file import TorchFile
from megatron_sp.convert.archive.torch_writer import write_torch_file

PARTS = [torch.arange(7.0), torch.tensor([]), torch.arange(5.0)[::2], torch.full((3,), -1.0)]


def test_torch_reads_all_stretches(tmp_path: Path) -> None:
    calls: list[int] = []

    def parts() -> Iterator[Tensor]:
        calls.append(1)
        yield from PARTS

    write_torch_file(tmp_path / "file.pt", {"flat": LazyFlat(13, torch.float32, parts), "after": torch.ones(2)})
    expected = torch.cat(PARTS)
    found = torch.serialization.load(tmp_path / "file.pt", weights_only=True)
    assert torch.equal(found["flat"], expected) and torch.equal(found["after"], torch.ones(2)) and len(calls) == 2
    with TorchFile(tmp_path / "file.pt") as file:  # which checks the checksum too
        assert torch.equal(file.read(file.tree["flat"]), expected)


@pytest.mark.parametrize(
    ("numel", "dtype", "message"), [(12, torch.float32, "announced 48 bytes, made 52"), (13, torch.float64, "announced torch.float64")]
)
def test_other_contents_than_announced(tmp_path: Path, numel: int, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_torch_file(tmp_path / "file.pt", LazyFlat(numel, dtype, lambda: iter(PARTS)))
    assert list(tmp_path.iterdir()) == []
