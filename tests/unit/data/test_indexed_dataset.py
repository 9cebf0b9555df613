"""The .idx/.bin reader and writer: exact bytes, every refusal, and files that change or die half-way."""

from __future__ import annotations

import itertools
import os
import signal
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sp.data.indexed_dataset import DTYPES, HEADER, MAGIC, IndexedDataset, token_dtype
from megatron_sp.data.writer import IndexedDatasetWriter
from megatron_sp.utils.errors import DataError, DiskError

VECTOR = bytes.fromhex(
    "4d4d494449445800000100000000000000080200000000000000030000000000000003000000020000000000000000000000"
    "0600000000000000000000000000000001000000000000000200000000000000"
)


def write(prefix: Path, documents: list[list[int]], **options: object) -> Path:
    with IndexedDatasetWriter(prefix, **(options or {"vocab_size": 1000})) as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def raw_pair(
    prefix: Path, *, lengths: list[int], pointers: list[int] | None = None, documents: list[int] | None = None, code: int = 8,
    version: int = 1, magic: bytes = MAGIC, num_sequences: int | None = None,
    num_documents: int | None = None, bin_bytes: int | None = None,
) -> Path:  # fmt: skip
    size = DTYPES.get(code, np.dtype("u2")).itemsize
    pointers = [size * sum(lengths[:i]) for i in range(len(lengths))] if pointers is None else pointers
    documents = list(range(len(lengths) + 1)) if documents is None else documents
    n = len(lengths) if num_sequences is None else num_sequences
    d = len(documents) if num_documents is None else num_documents
    body = struct.pack(f"<{len(lengths)}i{len(pointers)}q{len(documents)}q", *lengths, *pointers, *documents)
    prefix.with_suffix(".idx").write_bytes(HEADER.pack(magic, version, code, n, d) + body)
    prefix.with_suffix(".bin").write_bytes(bytes(size * max(sum(lengths), 0) if bin_bytes is None else bin_bytes))
    return prefix


def test_the_bytes_of_the_format(tmp_path: Path) -> None:
    write(tmp_path / "x", [[10, 20, 30], [40, 50]])
    assert (tmp_path / "x.idx").read_bytes() == VECTOR
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<5H", 10, 20, 30, 40, 50)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2, "u2"), (65499, "u2"), (65500, "i4"), (200_000, "i4")])
def test_dtype_follows_the_vocabulary(vocab_size: int, dtype: str, tmp_path: Path) -> None:
    assert token_dtype(vocab_size) == np.dtype(dtype)
    write(tmp_path / "x", [[vocab_size - 1]], vocab_size=vocab_size)
    data = IndexedDataset(tmp_path / "x")
    assert data.dtype == np.dtype(dtype) and data.get(0).tolist() == [vocab_size - 1]


@pytest.mark.parametrize(("dtype", "code"), [("u1", 1), ("i1", 2), ("i2", 3), ("i4", 4), ("i8", 5), ("u2", 8)])
def test_every_integer_dtype(dtype: str, code: int, tmp_path: Path) -> None:
    top = int(np.iinfo(dtype).max)
    write(tmp_path / "x", [[0, 5, top]], dtype=np.dtype(dtype))
    assert (tmp_path / "x.idx").read_bytes()[17] == code
    data = IndexedDataset(tmp_path / "x")
    assert data.get(0).tolist() == [0, 5, top] and data.get(0).dtype == np.dtype(dtype)


@given(st.lists(st.lists(st.integers(0, 999), max_size=7), max_size=12), st.sampled_from(["one", "many"]))
@settings(max_examples=60, deadline=None)
def test_round_trip(documents: list[list[int]], how: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        with IndexedDatasetWriter(folder + "/x", vocab_size=1000) as writer:
            if how == "one":
                for document in documents:
                    writer.add_document(document)
            else:
                flat = np.array([t for d in documents for t in d], np.int64)
                lengths = np.array([len(d) for d in documents], np.int64)
                writer.add_documents(flat, lengths[lengths > 0], (lengths > 0).astype(np.int64))
        data = IndexedDataset(folder + "/x")
        assert len(data) == sum(bool(d) for d in documents)  # an empty document has no sequence
        bounds = data.document_index
        got = [[t for i in range(a, b) for t in data.get(i).tolist()] for a, b in itertools.pairwise(bounds)]
        assert got == documents
        assert data.verify(1000).num_tokens == sum(map(len, documents))


def test_parts_of_a_sequence(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "x", [[1], [2, 3, 4, 5]]))
    assert data.get(1, 1).tolist() == [3, 4, 5]
    assert data.get(1, 1, 2).tolist() == [3, 4]
    assert data.get(1, 4).tolist() == []
    for offset, length in [(-1, 1), (0, 5), (5, 0), (1, -1)]:
        with pytest.raises(ValueError, match="sequence 1 has 4 tokens"):
            data.get(1, offset, length)


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", vocab_size=100) as writer:
        writer.add_document([1, 2, 3, 4], sequence_lengths=[1, 3])
        with pytest.raises(ValueError, match="do not add up to 2 tokens"):
            writer.add_document([1, 2], sequence_lengths=[1, 2])
    data = IndexedDataset(tmp_path / "x")
    assert data.sequence_lengths.tolist() == [1, 3] and data.document_index.tolist() == [0, 2]


def test_either_file_names_the_pair(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1, 2]])
    for name in ("x", "x.bin", "x.idx"):
        assert IndexedDataset(str(tmp_path / name)).get(0).tolist() == [1, 2]
    write(tmp_path / "y.bin", [[3]])  # a prefix that happens to end so
    assert IndexedDataset(tmp_path / "y.bin").get(0).tolist() == [3]


def test_absent_files_of_the_current_folder_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"^x\.idx does not exist: the current folder has no complete pair of \.bin and \.idx; "):
        IndexedDataset("x")
    write(tmp_path / "y", [[1]])
    with pytest.raises(DataError, match=r"^x\.idx does not exist: the current folder has y$"):
        IndexedDataset("x")


def test_absent_files_name_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        IndexedDataset(tmp_path / "nowhere" / "x")
    with pytest.raises(DataError, match=rf"{tmp_path} has no complete pair of \.bin and \.idx; megatron-sp preprocess"):
        IndexedDataset(tmp_path / "x")
    write(tmp_path / "corpus_text_document", [[1]])
    with pytest.raises(DataError, match=r"corpus_text\.idx does not exist: .* has corpus_text_document"):
        IndexedDataset(tmp_path / "corpus_text")
    (tmp_path / "corpus_text_document.bin").unlink()
    with pytest.raises(DataError, match=r"corpus_text_document\.bin does not exist"):
        IndexedDataset(tmp_path / "corpus_text_document")


REFUSED = {
    "magic": (dict(lengths=[3], magic=b"MMIDIDY\0\0"), r"byte offset 0: expected the magic"),
    "old": (dict(lengths=[3], magic=b"TNTIDX\0\0\0"), r"byte offset 0: this is a TNTIDX file"),
    "version": (dict(lengths=[3], version=2), r"byte offset 9: expected version 1, found 2"),
    "no dtype": (dict(lengths=[3], code=0), r"byte offset 17: expected a dtype code from 1 to 8, found 0"),
    "high dtype": (dict(lengths=[3], code=9), r"byte offset 17: .* found 9"),
    "float64": (dict(lengths=[3], code=6), r"byte offset 17: dtype code 6 is float64: tokens must be integers"),
    "float32": (dict(lengths=[3], code=7), r"byte offset 17: dtype code 7 is float32"),
    "sequences": (dict(lengths=[3], num_sequences=2**60 + 1), r"byte offset 18: 1152921504606846977 sequences cannot be"),
    "sequences fit": (dict(lengths=[3], num_sequences=2**60), r"expected \d+ bytes for 1152921504606846976 sequences .* found 62"),
    "entries": (dict(lengths=[3], num_documents=2**63), r"byte offset 26: a document index of 9223372036854775808 entries cannot be"),
    "no entries": (dict(lengths=[], documents=[]), r"byte offset 26: a document index of 0 entries"),
    "one too many": (dict(lengths=[3], num_sequences=2), r"expected 74 bytes for 2 sequences and 2 document entries, found 62"),
    "length": (dict(lengths=[3, -1], pointers=[0, 6]), r"byte offset 38: sequence 1 has length -1: expected 0 or more"),
    "first pointer": (dict(lengths=[3, 1], pointers=[2, 6]), r"byte offset 42: sequence 0 starts at byte 2: expected 0"),
    "pointer": (dict(lengths=[3, 1, 1], pointers=[0, 6, 6]), r"byte offset 62: sequence 2 starts at byte 6: expected 8"),
    "huge lengths": (dict(lengths=[2**31 - 1] * 3, pointers=[0, 2**32 - 2, 5], bin_bytes=0), r"sequence 2 starts at byte 5: expected 8589"),
    "first document": (dict(lengths=[3, 1], documents=[1, 2]), r"byte offset 58: the first document starts at sequence 1: expected 0"),
    "last document": (dict(lengths=[3, 1], documents=[0, 1]), r"byte offset 66: the document index ends at 1: expected 2"),
    "falling": (dict(lengths=[3, 1, 1], documents=[0, 2, 1, 3]), r"byte offset 86: document 2 starts at sequence 1: expected at least 2"),
    "bin short": (dict(lengths=[3, 1], bin_bytes=7), r"\.bin: byte offset 7: expected a file of 8 bytes, found 7"),
    "bin long": (dict(lengths=[3, 1], bin_bytes=9), r"\.bin: byte offset 8: expected a file of 8 bytes, found 9"),
    "bin empty": (dict(lengths=[3, 1], bin_bytes=0), r"\.bin: byte offset 0: expected a file of 8 bytes, found 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    raw_pair(tmp_path / "x", **changes)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=message) as info:
        IndexedDataset(tmp_path / "x")
    assert str(tmp_path / "x") in str(info.value) and info.value.exit_code == 4


def test_a_cut_off_index(tmp_path: Path) -> None:
    for size in range(len(VECTOR)):
        (tmp_path / "x.idx").write_bytes(VECTOR[:size])
        (tmp_path / "x.bin").write_bytes(bytes(10))
        with pytest.raises(DataError, match=r"x\.idx: byte offset"):
            IndexedDataset(tmp_path / "x")


def test_mode_bytes_of_images_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.idx").write_bytes(VECTOR + b"\0\0")
    (tmp_path / "x.bin").write_bytes(bytes(10))
    with pytest.raises(DataError, match="images and text, which is not supported"):
        IndexedDataset(tmp_path / "x")


@given(st.integers(0, len(VECTOR) - 1), st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_any_flipped_byte_of_the_index(position: int, change: int) -> None:
    """A flip is refused, or can only have moved a document bound inside its limits: tokens and sequences are never garbage."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        damaged = bytearray(VECTOR)
        damaged[position] ^= change
        Path(folder, "x.idx").write_bytes(damaged)
        Path(folder, "x.bin").write_bytes(struct.pack("<5H", 10, 20, 30, 40, 50))
        try:
            data = IndexedDataset(folder + "/x")
        except DataError:
            return
        if position == 17:
            assert data.dtype == np.dtype("i2")  # the other 2-byte dtype
        else:
            assert position >= 66, "only the document index has no redundancy"
        assert [data.get(i).tolist() for i in range(len(data))] == [[10, 20, 30], [40, 50]]


def test_the_bin_shrinks_while_it_is_read(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "x", [[1, 2, 3], list(range(100))]))
    os.truncate(tmp_path / "x.bin", 50)
    assert data.get(0).tolist() == [1, 2, 3]
    for read in (lambda: data.get(1), data.verify):
        with pytest.raises(DataError, match=r"x\.bin: byte offset \d+: expected \d+ bytes, found \d+: the file has become shorter"):
            read()


def test_tokens_outside_the_vocabulary(tmp_path: Path) -> None:
    raw_pair(tmp_path / "x", lengths=[2, 0, 3], code=4)
    for position, value, message in [
        (3, 500, r"x\.bin: byte offset 12: sequence 2, token 1 is 500: expected 0 to 499, the vocabulary has 500 entries"),
        (0, -1, r"x\.bin: byte offset 0: sequence 0, token 0 is -1"),
        (4, -(2**31), r"byte offset 16: sequence 2, token 2 is -2147483648"),
    ]:
        tokens = np.zeros(5, "<i4")
        tokens[position] = value
        (tmp_path / "x.bin").write_bytes(tokens.tobytes())
        data = IndexedDataset(tmp_path / "x")
        with pytest.raises(DataError, match=message):
            data.verify(500)
        sequence, offset = (0, 0) if position < 2 else (2, 0)
        with pytest.raises(DataError, match=message):
            data.check_tokens(data.get(sequence), sequence, offset, 500)
    data.check_tokens(np.array([499, 0]), 0, 0, 500)


def test_verify_without_a_vocabulary_still_refuses_negative_ids(tmp_path: Path) -> None:
    raw_pair(tmp_path / "x", lengths=[2], code=2)
    (tmp_path / "x.bin").write_bytes(b"\x01\xff")
    with pytest.raises(DataError, match="token 1 is -1"):
        IndexedDataset(tmp_path / "x").verify()


def test_verify_reports_what_it_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_sp.data.indexed_dataset._SCAN_BYTES", 8)  # several pieces, one ending inside a sequence
    data = IndexedDataset(write(tmp_path / "x", [[7, 3, 900], [], [5, 6, 4, 8, 9]]))
    assert data.verify(901) == (3, 2, 8, 3, 900)
    with pytest.raises(DataError, match="byte offset 4: sequence 0, token 2 is 900"):
        data.verify(900)


def test_an_empty_data_set(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "x", [[], []]))
    assert len(data) == 0 and data.document_index.tolist() == [0, 0, 0] and data.verify(5) == (2, 0, 0, None, None)
    assert len(data.digest()) == 64


def test_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_sp.data.writer._COPY_BYTES", 4)
    one, two = [[1, 2, 3], []], [[4], [5, 6], []]
    write(tmp_path / "a", one)
    write(tmp_path / "b", two)
    with IndexedDatasetWriter(tmp_path / "ab", vocab_size=1000) as writer:
        writer.merge(tmp_path / "a")
        writer.merge(IndexedDataset(tmp_path / "b"))
    write(tmp_path / "direct", one + two)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ab{suffix}").read_bytes() == (tmp_path / f"direct{suffix}").read_bytes()
    with pytest.raises(DataError, match="only data sets of one dtype"), IndexedDatasetWriter(tmp_path / "z", vocab_size=70_000) as writer:
        writer.merge(tmp_path / "a")


@pytest.mark.parametrize(("ids", "bad"), [([1, 1000], 1000), ([-1], -1), ([2**40], 2**40)])
def test_the_writer_refuses_ids_that_do_not_fit(ids: list[int], bad: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"token id {bad}: expected 0 to 999"):
        write(tmp_path / "x", [[1], ids])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="expected 0 to 127"):
        write(tmp_path / "x", [[128]], dtype=np.int8)
    with pytest.raises(DataError, match="expected 0 to 255"):
        write(tmp_path / "x", [[256]], dtype=np.uint8, vocab_size=1000)


def test_the_writer_needs_a_dtype(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab_size or dtype"):
        IndexedDatasetWriter(tmp_path / "x")
    for dtype in (np.float32, np.uint32, np.bool_):
        with pytest.raises(ValueError, match="tokens cannot be"):
            IndexedDatasetWriter(tmp_path / "x", dtype=dtype)


def test_an_error_leaves_the_older_pair(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1, 2]])
    with pytest.raises(RuntimeError, match="stop"), IndexedDatasetWriter(tmp_path / "x", vocab_size=1000) as writer:
        writer.add_document([3])
        raise RuntimeError("stop")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx", "x.sha256"]
    assert IndexedDataset(tmp_path / "x").get(0).tolist() == [1, 2]


@pytest.mark.parametrize("kill_at", [0, 1, 2, 3, 4, 5])
def test_killed_while_writing(kill_at: int, tmp_path: Path) -> None:
    """Killed at any rename: the old pair, the new pair, or nothing that could be opened; never a mixture."""
    write(tmp_path / "x", [[1, 2]])  # of the same size as the new one, so sizes alone could not tell
    child = os.fork()
    if child == 0:
        calls = iter(range(10))

        def fatal(real):  # type: ignore[no-untyped-def]
            def call(*args: object) -> object:
                if next(calls) == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args)

            return call

        os.unlink, os.replace = fatal(os.unlink), fatal(os.replace)
        write(tmp_path / "x", [[3], [4]])
        os._exit(0)
    os.waitpid(child, 0)
    expected = {0: [[1, 2]], 1: [[1, 2]], 2: None, 3: None}.get(kill_at, [[3], [4]])
    assert Path(f"{tmp_path}/x.sha256").exists() == (kill_at in (0, 5)), "digests of files that are being replaced would be wrong"
    if expected is None:
        with pytest.raises(DataError, match=r"x\.idx does not exist"):
            IndexedDataset(tmp_path / "x")
    else:
        data = IndexedDataset(tmp_path / "x")
        assert [data.get(i).tolist() for i in range(len(data))] == expected


def test_no_room_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"x\.bin: cannot be written: No such file"):
        IndexedDatasetWriter(tmp_path / "none" / "x", vocab_size=10)
    if os.path.exists("/dev/full"):
        writer = IndexedDatasetWriter(tmp_path / "x", vocab_size=10)
        writer._bin.close()
        writer._bin = open("/dev/full", "wb")  # noqa: SIM115
        writer.add_document([1])
        with pytest.raises(DiskError, match="No space left"):
            writer.close()
        assert list(tmp_path.iterdir()) == []


def test_digest_tells_data_sets_apart(tmp_path: Path) -> None:
    base = [[1, 2, 3], [4, 5]]
    same = IndexedDataset(write(tmp_path / "a", base)).digest()
    assert IndexedDataset(write(tmp_path / "b", base)).digest() == same
    others = [[[1, 2, 9], [4, 5]], [[1, 2], [3, 4, 5]], [[1, 2, 3], [], [4, 5]], [[1, 2, 3], [4, 5, 6]]]
    assert len({same, *(IndexedDataset(write(tmp_path / f"o{i}", o)).digest() for i, o in enumerate(others))}) == 5


def test_reading_after_close_and_opening_many(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1]])
    data = IndexedDataset(tmp_path / "x")
    data.close()
    data.close()
    with pytest.raises(DataError, match="cannot read"):
        data.get(0)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for _ in range(50):
        IndexedDataset(tmp_path / "x")
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 1
