"""Files of torch.save, read and written: the same as torch's own, and nothing that is damaged or hostile gets through."""

from __future__ import annotations

import argparse
import collections
import io
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, serialization

from megatron_sp.convert.archive import zip_entries
from megatron_sp.convert.archive.pickle_tree import PickleReader, Storage, TensorRecord
from megatron_sp.convert.archive.pickle_writer import LazyTensor
from megatron_sp.convert.archive.torch_file import DTYPES, TorchFile
from megatron_sp.convert.archive.torch_writer import write_torch_file
from megatron_sp.utils.errors import CheckpointError

LEGACY = {"_use_new_zipfile_serialization": False}


@pytest.fixture(scope="module")
def reader() -> Iterator[PickleReader]:
    with PickleReader() as shared:
        yield shared


def load(path: Path) -> Any:
    """What torch's own safe loader makes of a file."""
    reconstruct = np.zeros(1).__reduce__()[0]
    known = [argparse.Namespace, np.ndarray, np.dtype, (reconstruct, "numpy.core.multiarray._reconstruct")]
    known += [type(np.dtype(kind)) for kind in ("f8", "i4")]
    with serialization.safe_globals(known):
        return serialization.load(path, weights_only=True)


def same(file: TorchFile, expected: Any, got: Any) -> None:
    """Every tensor equal in bits, dtype, shape and strides; everything else equal, in the same order."""
    if isinstance(expected, Tensor):
        tensor = file.read(got) if isinstance(got, TensorRecord) else got
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(bits(tensor), bits(expected))
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            same(file, expected[key], got[key])
    elif isinstance(expected, (list, tuple)):
        assert type(got) is type(expected) and len(got) == len(expected)
        for one, other in zip(expected, got, strict=True):
            same(file, one, other)
    else:
        assert got == expected and type(got) is type(expected)


def bits(tensor: Tensor) -> Tensor:
    """Its bytes, so that a NaN equals itself."""
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def a_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    count = int(np.prod(shape)) * dtype.itemsize
    data = torch.tensor(np.random.default_rng(seed).integers(0, 2 if dtype == torch.bool else 256, count), dtype=torch.uint8)
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x.movedim(0, -1) if x.dim() else x,
    lambda x: x[1:] if x.dim() and x.shape[0] else x,
    lambda x: x[..., ::2] if x.dim() else x,
    lambda x: x.unsqueeze(0).expand(3, *x.shape),
    lambda x: x.flatten()[-1:] if x.numel() else x,
]
tensors = st.builds(
    a_tensor, st.sampled_from(list(DTYPES.values())), st.lists(st.integers(0, 4), max_size=3).map(tuple), st.integers(0, 99)
)
shared = tensors.flatmap(lambda x: st.lists(st.sampled_from(VIEWS), min_size=1, max_size=3).map(lambda views: [view(x) for view in views]))
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 80), 1 << 80)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | shared
)
keys = st.text(max_size=5) | st.integers(-5, 1 << 40)
trees = st.recursive(
    leaves,
    lambda t: st.lists(t, max_size=4) | st.dictionaries(keys, t, max_size=4) | st.tuples(t, t) | st.sets(st.integers()),
    max_leaves=10,
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(tree=trees, legacy=st.booleans(), protocol=st.sampled_from([2, 4]))
def test_what_torch_saves_is_read(
    tmp_path_factory: pytest.TempPathFactory, reader: PickleReader, tree: Any, legacy: bool, protocol: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "theirs.pt"
    serialization.save(tree, path, pickle_protocol=protocol, **(LEGACY if legacy else {}))
    with TorchFile(path, reader) as file:
        same(file, tree, file.tree)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(tree=trees)
def test_what_is_written_torch_loads_and_we_read(tmp_path_factory: pytest.TempPathFactory, reader: PickleReader, tree: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "ours.pt"
    path.unlink(missing_ok=True)
    assert write_torch_file(path, tree) == path.stat().st_size
    with TorchFile(path, reader) as file:
        same(file, tree, load(path))
        same(file, tree, file.tree)
    assert zipfile.ZipFile(path).testzip() is None


@pytest.fixture
def good(tmp_path: Path) -> Path:
    base = torch.arange(2000.0).view(50, 40)
    serialization.save(
        {"w": base, "view": base[3:5, ::2], "b": torch.ones(7).bfloat16(), "args": argparse.Namespace(n=3)}, tmp_path / "a.pt"
    )
    return tmp_path / "a.pt"


def test_settings_and_shared_storages_are_written_as_they_are(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    tree = {
        "a": base,
        "b": base.t(),
        "args": argparse.Namespace(lr=0.5, sizes=torch.Size([1])),
        "x": np.arange(4.0),
        "y": np.array([[1, 2]], np.int32),
    }
    tree |= {"o": collections.OrderedDict(z=1), "dtype": torch.bfloat16, "device": torch.device("cpu")}
    write_torch_file(tmp_path / "a.pt", tree)
    got = load(tmp_path / "a.pt")
    assert got["args"] == tree["args"] and isinstance(got["args"].sizes, torch.Size) and type(got["o"]) is collections.OrderedDict
    assert got["a"].untyped_storage().data_ptr() == got["b"].untyped_storage().data_ptr() and torch.equal(got["b"], base.t())
    assert np.array_equal(got["x"], tree["x"]) and np.array_equal(got["y"], tree["y"]) and got["y"].dtype == np.int32
    assert (got["dtype"], got["device"]) == (torch.bfloat16, torch.device("cpu"))


def test_tensors_are_made_one_by_one(tmp_path: Path) -> None:
    alive, most = 0, 0

    def make(size: int) -> Callable[[], Tensor]:
        def made() -> Tensor:
            nonlocal alive, most
            tensor = torch.full((size, 3), float(size)).t()
            alive, most = alive + 1, max(most, alive + 1)
            import weakref

            def gone() -> None:
                nonlocal alive
                alive -= 1

            weakref.finalize(tensor.untyped_storage(), gone)
            return tensor

        return made

    tree = {size: LazyTensor((3, size), torch.float32, make(size)) for size in range(6)}
    write_torch_file(tmp_path / "a.pt", tree)
    assert all(torch.equal(tensor, torch.full((3, size), float(size))) for size, tensor in load(tmp_path / "a.pt").items())
    infos = [info for info in zipfile.ZipFile(tmp_path / "a.pt").infolist() if "/data/" in info.filename]
    data = (tmp_path / "a.pt").read_bytes()
    starts = [
        i.header_offset
        + 30
        + int.from_bytes(data[i.header_offset + 26 :][:2], "little")
        + int.from_bytes(data[i.header_offset + 28 :][:2], "little")
        for i in infos
    ]
    assert len(starts) == 6 and all(start % 64 == 0 for start in starts)


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        ({"a": LazyTensor((2,), torch.float32, lambda: torch.zeros(3))}, ValueError, "announced"),
        ({"a": LazyTensor((2,), torch.float32, lambda: torch.zeros(2).double())}, ValueError, "announced"),
        ({"a": object()}, TypeError, "a builtins.object cannot be written"),
        ({"a": np.array(["x"])}, TypeError, "a numpy array of"),
        (1 << 3000, ValueError, "an integer of 376 bytes"),
    ],
)
def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, tree: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        write_torch_file(tmp_path / "a.pt", tree)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over(good: Path) -> None:
    before = good.read_bytes()
    with pytest.raises(FileExistsError):
        write_torch_file(good, {})
    assert good.read_bytes() == before


def test_files_beyond_4_gib_use_the_wide_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: PickleReader) -> None:
    """With the limits of the narrow fields lowered, so that a small file needs the wide ones."""
    tree = {"w": torch.arange(500.0), "b": torch.ones(3)}
    monkeypatch.setattr(zip_entries, "_narrow_limits", [1000, 3])
    write_torch_file(tmp_path / "a.pt", tree)
    monkeypatch.undo()
    assert zipfile.ZipFile(tmp_path / "a.pt").testzip() is None
    assert torch.equal(load(tmp_path / "a.pt")["w"], tree["w"])
    with TorchFile(tmp_path / "a.pt", reader) as file:
        same(file, tree, file.tree)


def test_only_the_bytes_of_the_tensor_are_read(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with TorchFile(good) as file:
        counts: list[int] = []
        real = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: counts.append(sum(map(len, buffers))) or real(fd, buffers, at))  # type: ignore[func-returns-value]
        view = file.read(file.tree["view"])
    assert torch.equal(view, torch.arange(2000.0).view(50, 40)[3:5, ::2]) and view.stride() == (40, 2)
    assert sum(counts) < 79 * 4 + 200 and view.untyped_storage().nbytes() == 79 * 4  # from the first element to the last, and a header


@pytest.mark.parametrize("legacy", [False, True])
def test_cut_short_at_many_places(tmp_path: Path, reader: PickleReader, legacy: bool) -> None:
    serialization.save({"w": torch.arange(200.0), "b": [torch.ones(7).bfloat16()]}, tmp_path / "a.pt", **(LEGACY if legacy else {}))
    data = (tmp_path / "a.pt").read_bytes()
    for length in [*np.linspace(0, len(data), 25, endpoint=False).astype(int), len(data) - 1]:
        (tmp_path / "b.pt").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"b\.pt"):
            TorchFile(tmp_path / "b.pt", reader)


def test_damage_is_found_by_checksums(good: Path, reader: PickleReader) -> None:
    data = bytearray(good.read_bytes())
    where = data.index(torch.arange(2000.0).numpy().tobytes()[400:800])
    data[where] ^= 1
    good.write_bytes(data)
    with TorchFile(good, reader) as file, pytest.raises(CheckpointError, match=r"a\.pt: a/data/0 is damaged: its checksum is"):
        file.read(file.tree["w"])
    data[data.index(b"argparse")] ^= 1
    good.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"a\.pt: a/data\.pkl is damaged"):
        TorchFile(good, reader)


def test_a_file_without_checksums_is_read(tmp_path: Path, reader: PickleReader) -> None:
    serialization.set_crc32_options(False)
    try:
        serialization.save(tree := {"w": torch.arange(20.0)}, tmp_path / "a.pt")
    finally:
        serialization.set_crc32_options(True)
    with TorchFile(tmp_path / "a.pt", reader) as file:
        same(file, tree, file.tree)


def repacked(good: Path, change: Callable[[dict[str, bytes]], object], compression: int = zipfile.ZIP_STORED) -> Path:
    """The file's entries, changed, in a new zip file."""
    entries = {name: zipfile.ZipFile(good).read(name) for name in zipfile.ZipFile(good).namelist()}
    change(entries)
    with zipfile.ZipFile(good.with_name("b.pt"), "w", compression) as target:
        for name, data in entries.items():
            target.writestr(zipfile.ZipInfo(name), data, compression)
    return good.with_name("b.pt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.update({"a/../../x": b""}), "leads out of the file"),
        (lambda e: e.update({"/etc/x": b""}), "leads out of the file"),
        (lambda e: e.update({"b/x": b""}), "no folder with a data.pkl"),
        (lambda e: e.pop("a/data.pkl"), "no folder with a data.pkl"),
        (lambda e: e.update({"a/constants.pkl": b""}), "TorchScript"),
        (lambda e: e.update({"a/byteorder": b"big"}), "byte order 'big'"),
        (lambda e: e.update({"a/data.pkl": b"cposix\nsystem\n."}), "names 'posix.system'"),
    ],
)
def test_other_entries_are_refused(good: Path, reader: PickleReader, change: Callable[[dict[str, bytes]], object], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"b\\.pt.*{message}"):
        TorchFile(repacked(good, change), reader)
    assert sorted(path.name for path in good.parent.iterdir()) == ["a.pt", "b.pt"]


def test_compressed_entries_are_refused(good: Path, reader: PickleReader) -> None:
    with pytest.raises(CheckpointError, match=r"b\.pt: a/data\.pkl is compressed, which torch never does"):
        TorchFile(repacked(good, lambda e: e.update({"a/x": b"0" * 1000}), zipfile.ZIP_DEFLATED), reader)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_given_twice_is_refused(good: Path, reader: PickleReader) -> None:
    with zipfile.ZipFile(good, "a") as target:
        target.writestr("a/data/0", b"x")
    with pytest.raises(CheckpointError, match="two entries of one name"):
        TorchFile(good, reader)


def test_overlapping_entries_are_refused(good: Path, reader: PickleReader) -> None:
    data = bytearray(good.read_bytes())
    directory = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", directory + 4)
    data[second + 42 : second + 46] = data[directory + 42 : directory + 46]  # where its local header is
    good.write_bytes(data)
    with pytest.raises(CheckpointError, match="overlaps what comes after it"):
        TorchFile(good, reader)


def test_an_entry_of_a_tebibyte_is_refused(good: Path, reader: PickleReader) -> None:
    data = bytearray(good.read_bytes())
    last = data.rindex(b"PK\x01\x02")
    data[last + 20 : last + 28] = b"\xf0\xff\xff\xff" * 2
    good.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"4,294,967,280 bytes at byte .* overlaps"):
        TorchFile(good, reader)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (TensorRecord(Storage("0", "float32", 2000), 1, (50, 40), (40, 1), "float32"), "reaches to element 2,001 of a storage of 2,000"),
        (TensorRecord(Storage("0", "float32", 2000), 0, (50, 40), (1 << 40, 1), "float32"), "reaches to element"),
        (TensorRecord(Storage("0", "float32", 1 << 40), 0, (1 << 40,), (1,), "float32"), "has 8,000 bytes; 1,099,511,627,776 elements"),
        (TensorRecord(Storage("0", "float32", 2000), 0, (1 << 38,), (0,), "float32"), "repeats the 2,000 elements"),
        (TensorRecord(Storage("0", "float32", 2000), 0, (1 << 40, 1 << 40), (0, 0), "float32"), "larger than any memory"),
        (TensorRecord(Storage("0", "float32", 2000), 0, (0, 1 << 61, 1 << 61), (1, 1, 1), "float32"), "larger than any memory"),
        (TensorRecord(Storage("0", "untyped", 8000), 0, (8000,), (1,), "float8_e4m3fn"), "float8_e4m3fn cannot be read"),
        (TensorRecord(Storage("9", "float32", 1), 0, (1,), (1,), "float32"), "has no storage '9'"),
        (TensorRecord(Storage("../data.pkl", "float32", 1), 0, (1,), (1,), "float32"), "has no storage"),
        (TensorRecord(Storage("0", "float32", 2000), 0, (1000,), (1,), "float64"), "is damaged"),
    ],
)
def test_a_tensor_must_lie_in_its_storage(good: Path, reader: PickleReader, record: TensorRecord, message: str) -> None:
    with TorchFile(good, reader) as file, pytest.raises(CheckpointError, match=f"a\\.pt.*{message}"):
        file.read(record)


def test_eight_bit_floats_are_refused_by_name(tmp_path: Path, reader: PickleReader) -> None:
    serialization.save(torch.zeros(3).to(torch.float8_e5m2), tmp_path / "a.pt")
    with TorchFile(tmp_path / "a.pt", reader) as file, pytest.raises(CheckpointError, match="float8_e5m2 cannot be read"):
        file.read(file.tree)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is empty"),
        (b"hello", "it is something else"),
        (b"x".ljust(257, b"\0") + b"ustar".ljust(300, b"\0"), "it is a tar file"),
        (b"PK\x03\x04", "cut short or damaged"),
        (b"\x80\x02N.N.N.N.N.", "a pickle of another program"),
        (b"\x80\x02cposix\nsystem\n.", "names 'posix.system'"),
    ],
)
def test_other_files_are_named(tmp_path: Path, reader: PickleReader, data: bytes, message: str) -> None:
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"a\\.pt.*{message}"):
        TorchFile(tmp_path / "a.pt", reader)


def test_links_pipes_and_folders_are_refused(good: Path, reader: PickleReader) -> None:
    good.with_name("link").symlink_to(good)
    os.mkfifo(good.with_name("pipe"))
    for name, message in (("link", "symbolic link"), ("pipe", "not a plain file"), (".", "not a plain file"), ("gone", "cannot be read")):
        with pytest.raises(CheckpointError, match=message):
            TorchFile(good.parent / name, reader)


def test_a_damaged_legacy_file_is_refused(tmp_path: Path, reader: PickleReader) -> None:
    buffer = io.BytesIO()
    serialization.save({"w": torch.arange(200.0)}, buffer, **LEGACY)
    data = buffer.getvalue()
    at = len(data) - 800 - 8
    for changed, message in (
        (data[:at] + (1 << 40).to_bytes(8, "little") + data[at + 8 :], "has 1,099,511,627,776 elements, not 200"),
        (data + b"x", "its storages end at byte"),
        (data.replace(b"little_endian", b"little_endiaN"), "another byte order"),
    ):
        (tmp_path / "a.pt").write_bytes(changed)
        with pytest.raises(CheckpointError, match=message):
            TorchFile(tmp_path / "a.pt", reader)


def test_any_byte_may_be_wrong(good: Path, reader: PickleReader) -> None:
    """Whatever is flipped, the tensors are right or there is one clear error."""
    data, random = good.read_bytes(), np.random.default_rng(5)
    outside = [n for n in range(len(data)) if not 3000 < n < len(data) - 2000]
    for position in random.choice(outside, 150):
        changed = bytearray(data)
        changed[position] ^= 1 << random.integers(8)
        good.write_bytes(changed)
        try:
            with TorchFile(good, reader) as file:
                assert torch.equal(file.read(file.tree["w"]), torch.arange(2000.0).view(50, 40))
        except CheckpointError:
            pass


def test_files_are_open_only_while_something_is_read(tmp_path: Path) -> None:
    """A universal folder has more of them than a process may have open."""
    for number in range(5):
        serialization.save({"w": torch.arange(20.0) + number}, tmp_path / f"{number}.pt")
    reader = PickleReader()
    before = len(os.listdir("/proc/self/fd"))
    files = [TorchFile(tmp_path / f"{number}.pt", reader) for number in range(5)]
    records = [file.tree["w"] for file in files]
    after = len(os.listdir("/proc/self/fd"))
    assert [int(file.read(record)[0]) for file, record in zip(files, records, strict=True)] == [0, 1, 2, 3, 4]
    assert len(os.listdir("/proc/self/fd")) == after and after - before < 5  # the pipes of the one reader
    reader.close()


def test_a_file_that_is_exchanged_between_two_reads_is_refused(tmp_path: Path) -> None:
    serialization.save({"w": torch.zeros(20)}, tmp_path / "a.pt")
    file = TorchFile(tmp_path / "a.pt")
    serialization.save({"w": torch.ones(20)}, tmp_path / "b.pt")
    os.replace(tmp_path / "b.pt", tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="is not the file that it was"):
        file.read(file.tree["w"])
    file.close()
    with pytest.raises(RuntimeError, match="was closed"):
        file.read(file.tree["w"])
