"""Files of torch.save, read and written: the same as torch's own, and nothing runs in what is damaged or hostile."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import io
import mmap
import os
import pathlib
import resource
import struct
import threading
import types
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, serialization

from megatron_sp.convert.archive.torch_files import DTYPES, MAX_PICKLE_BYTES, Object, TensorRecord, TorchFile, read_records
from megatron_sp.convert.archive.torch_writer import LazyFlat, LazyTensor, write_torch_file
from megatron_sp.utils.errors import CheckpointError

LEGACY = {"_use_new_zipfile_serialization": False}


def load(path: Path) -> Any:
    """What torch's own safe loader makes of a file."""
    with serialization.safe_globals([argparse.Namespace]):
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
    lambda x: x, lambda x: x.movedim(0, -1) if x.dim() else x, lambda x: x[1:] if x.dim() and x.shape[0] else x,
    lambda x: x[..., ::2] if x.dim() else x, lambda x: x.unsqueeze(0).expand(3, *x.shape), lambda x: x.flatten()[-1:] if x.numel() else x,
]  # fmt: skip
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
OLD = [dtype for dtype in DTYPES.values() if not str(dtype).startswith("torch.uint") or dtype == torch.uint8]
tensors = st.builds(a_tensor, st.sampled_from(OLD), shapes, st.integers(0, 99))
shared = tensors.flatmap(lambda x: st.lists(st.sampled_from(VIEWS), min_size=1, max_size=3).map(lambda views: [view(x) for view in views]))
leaves = st.none() | st.booleans() | st.integers(-(1 << 80), 1 << 80) | st.floats(allow_nan=False) | st.text(max_size=5) | shared
leaves = leaves | st.binary(max_size=5)
keys = st.text(max_size=5) | st.integers(-5, 1 << 40)
trees = st.recursive(leaves, lambda t: st.lists(t, max_size=4) | st.dictionaries(keys, t, max_size=4) | st.tuples(t, t), max_leaves=10)
drawn = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@drawn
@given(tree=trees, legacy=st.booleans())
def test_what_torch_saves_is_read(tmp_path_factory: pytest.TempPathFactory, tree: Any, legacy: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "theirs.pt"
    serialization.save(tree, path, **(LEGACY if legacy else {}))
    file = TorchFile(path)
    same(file, tree, file.tree)


@drawn
@given(tree=trees)
def test_what_is_written_torch_loads_and_we_read(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "ours.pt"
    path.unlink(missing_ok=True)
    assert write_torch_file(path, tree) == path.stat().st_size
    file = TorchFile(path)
    same(file, tree, load(path))
    same(file, tree, file.tree)
    assert zipfile.ZipFile(path).testzip() is None


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_all_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    tree = {"x": a_tensor(dtype, (3, 4), 1)[1:], "none": torch.empty(0, 2, dtype=dtype)}
    serialization.save(tree, tmp_path / "a.pt")
    write_torch_file(tmp_path / "b.pt", tree)
    for path in (tmp_path / "a.pt", tmp_path / "b.pt"):
        file = TorchFile(path)
        same(file, tree, file.tree)
        same(file, tree, load(path))


@pytest.fixture
def good(tmp_path: Path) -> Path:
    base = torch.arange(2000.0).view(50, 40)
    tree = {"w": base, "view": base[3:5, ::2], "b": torch.ones(7).bfloat16(), "args": argparse.Namespace(n=3)}
    serialization.save(tree, tmp_path / "a.pt")
    return tmp_path / "a.pt"


class Color(enum.Enum):
    RED = 3


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def torch_file(path: Path, pickled: bytes) -> Path:
    """A torch file with this pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", bytes(16))
        archive.writestr("a/version", b"3\n")
    return path


@pytest.mark.parametrize("legacy", [False, True])
def test_objects_are_records(tmp_path: Path, legacy: bool) -> None:
    args = argparse.Namespace(lr=1e-4, sizes=torch.Size([2, 3]), dtype=torch.bfloat16, where=pathlib.PurePosixPath("/data/x"))
    tree = {
        "args": args, "date": datetime.date(2020, 1, 2), "space": types.SimpleNamespace(x=1), "numbers": [np.float32(0.5), np.int64(7)],
        "array": np.arange(3), "dicts": [collections.OrderedDict(b=1, a=2), collections.defaultdict(list, {3: 4})],
        "sets": ({1, 2}, frozenset("x"), bytearray(b"ab")), "parameter": torch.nn.Parameter(torch.ones(3)),
    }  # fmt: skip
    serialization.save(tree, tmp_path / "a.pt", **(LEGACY if legacy else {}))
    file = TorchFile(tmp_path / "a.pt")
    got = file.tree
    attributes = got["args"].attributes
    assert got["args"].name == "argparse.Namespace"
    assert (attributes["lr"], attributes["sizes"], attributes["dtype"]) == (1e-4, (2, 3), torch.bfloat16)
    assert (attributes["where"].name.rsplit(".", 1)[1], attributes["where"].args) == ("PurePosixPath", ("/", "data", "x"))
    assert got["date"].name == "datetime.date" and got["space"].attributes == {"x": 1} and isinstance(got["array"], Object)
    assert got["numbers"] == [0.5, 7] and [type(number) for number in got["numbers"]] == [float, int]
    assert got["dicts"] == [{"b": 1, "a": 2}, {3: 4}] and got["sets"] == ({1, 2}, frozenset("x"), b"ab")
    assert torch.equal(file.read(got["parameter"]), torch.ones(3))


def test_objects_of_megatron_and_deepspeed_need_no_such_package(tmp_path: Path) -> None:
    member = b"cmegatron.core.enums\nModelType\nK\x01\x85R"
    by_name = b"c__builtin__\ngetattr\ncmegatron.core.enums\nModelType\n" + text("encoder_or_decoder") + b"\x86R"
    scaler = b"cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n)\x81}" + text("cur_scale") + b"G?\xf0\0\0\0\0\0\0sb"
    one, two, three = TorchFile(torch_file(tmp_path / "a.pt", b"\x80\x02(" + member + by_name + scaler + b"t.")).tree
    assert (one.name, one.args, two.name, two.args) == (one.name, (1,), "megatron.core.enums.ModelType", ("encoder_or_decoder",))
    assert (three.name, three.attributes) == ("deepspeed.runtime.fp16.loss_scaler.LossScaler", {"cur_scale": 1.0})


def test_classes_that_others_have_allowed_are_records_too(good: Path) -> None:
    """Megatron allows torch's loader its own for the whole process."""
    with serialization.safe_globals([argparse.Namespace, Color]):
        assert isinstance(TorchFile(good).tree["args"], Object)
        serialization.save(Color.RED, good)
        with pytest.raises(CheckpointError, match=r"names '[\w.]*Color'"):
            TorchFile(good)
        assert set(serialization.get_safe_globals()) >= {argparse.Namespace, Color}
    assert Color not in serialization.get_safe_globals()


def test_devices_are_those_of_the_storages(tmp_path: Path) -> None:
    pickled = TENSOR.replace(text("cpu"), text("cuda:3"))
    assert TorchFile(torch_file(tmp_path / "a.pt", b"\x80\x02" + pickled + b".")).devices == {"cuda:3"}


CALL, GETATTR = b"cposix\nsystem\n", b"cbuiltins\ngetattr\n"
STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04tQ"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE + b"K\x00K\x04\x85K\x01\x85\x89}tR"
HOSTILE = {
    "REDUCE": CALL + b"COMMAND\x85R.", "NEWOBJ": CALL + b"COMMAND\x85\x81.",
    "STACK_GLOBAL": text("posix") + text("system") + b"\x93COMMAND\x85R.",
    "INST": b"(COMMANDiposix\nsystem\n.", "OBJ": b"(" + CALL + b"COMMANDo.", "EXT1": b"\x82\x01COMMAND\x85R.",
    "eval": b"c__builtin__\neval\nCOMMAND\x85R.", "exec": b"cbuiltins\nexec\nCOMMAND\x85R.",
    "import": b"cbuiltins\n__import__\n" + text("os") + b"\x85R.",
    "attribute of a module": GETATTR + b"cbuiltins\n__import__\n" + text("os") + b"\x85R" + text("system") + b"\x86RCOMMAND\x85R.",
    "getattr called twice": GETATTR + b"cbuiltins\ngetattr\n" + text("__self__") + b"\x86RCOMMAND\x85R.",
    "attribute of a tensor": GETATTR + TENSOR + text("tofile") + b"\x86RCOMMAND\x85R.",
    "partial": b"cfunctools\npartial\n" + CALL + b"COMMAND\x86R.",
    "torch's loader": b"ctorch.serialization\nload\nCOMMAND\x85R.",
    "__setstate__": b"cargparse\nNamespace\n)\x81}" + text("__setstate__") + CALL + b"sbCOMMANDb.",
    "attributes of a class": b"cargparse\nNamespace\nN}" + text("__new__") + CALL + b"s\x86b.",
    "a list's append": b"]cbuiltins\nprint\nCOMMAND\x85Ra.",
    "persistent id": b"(" + text("storage") + CALL + b"COMMAND\x85R" + text("0") + text("cpu") + b"K\x04tQ.",
    "module": b"(" + text("module") + b"cbuiltins\nobject\n" + text("x.py") + text("COMMAND") + b"tQ.",
    "tensor subclass": b"ctorch._tensor\n_rebuild_from_type_v2\n(" + CALL + b"ctorch\nTensor\n(COMMANDt}tR.",
    "default factory": b"ccollections\ndefaultdict\n" + CALL + b"\x85R.",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["zip", "old", "records"])
@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_runs(tmp_path: Path, case: str, kind: str) -> None:
    canary, path = tmp_path / "canary", tmp_path / "a.pt"
    data = b"\x80\x02" + HOSTILE[case].replace(b"COMMAND", text(f"touch {canary}"))
    with pytest.raises(CheckpointError, match=r"a\.pt.*Nothing in it was run"):
        if kind == "records":
            read_records(data, "a.pt")
        elif kind == "zip":
            TorchFile(torch_file(path, data))
        else:
            path.write_bytes(OLD_START + data)
            TorchFile(path)
    assert not canary.exists()


@pytest.mark.parametrize("size", [1, 2, 20])
def test_an_old_file_of_a_few_bytes(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.pt").write_bytes((OLD_START + b"}.")[:size])
    with pytest.raises(CheckpointError, match=r"a\.pt: its pickle cannot be read"):
        TorchFile(tmp_path / "a.pt")


OLD_START = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}."  # magic number, version and system of an old file


def test_names_outside_of_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    serialization.save({"color": Color.RED}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt: its pickle names '[\w.]*Color', which is not part .* Nothing in it was run"):
        TorchFile(tmp_path / "a.pt")
    for case in ("REDUCE", "STACK_GLOBAL"):
        with pytest.raises(CheckpointError, match=r"its pickle names 'posix\.system', which is not part"):
            read_records(HOSTILE[case].replace(b"COMMAND", text("true")), "a.pt")


def test_a_name_in_an_allowed_package_is_only_a_name(tmp_path: Path) -> None:
    pickled = b"cmegatron.os\nsystem\n" + text("touch x") + b"\x85R."
    for got in (read_records(pickled, "a.pt"), TorchFile(torch_file(tmp_path / "a.pt", b"\x80\x02" + pickled)).tree):
        assert isinstance(got, Object) and (got.name, got.args) == ("megatron.os.system", ("touch x",))
        assert not hasattr(got, "__dict__")


PAIRS = b"".join(b"q%c(h%ch%ct" % (n, n, n) for n in range(60))
SEVERAL = [
    (text("ha") + PAIRS + b".", "small file for very much data"),
    (b"]q\x00h\x00a.", "contains itself"),
    (b"]q\x00h\x00\x85a.", "contains itself"),
    (b"]" * 2000 + b"a" * 1999 + b".", "nested deeper than 100"),
    (b"]" + b"\x85" * 60 + b"q\x00h\x00" + b"\x85" * 60 + b"\x86.", "nested deeper than 100"),
    (b"K\x01r\xff\xff\xff\xff.", None),  # a memo of 4 billion places
    (b"X\xff\xff\xff\xffabc", "cannot be read"),
    (b"\x8e" + b"\xff" * 8 + b"abc", "cannot be read"),
    (b"K\x01", "cannot be read"),
    (b".", "cannot be read"),
    (b"t.", "cannot be read"),
    (b"h\x07.", "cannot be read"),
    (b"K\x01K\x02a.", "cannot be read"),
    (b"]K\x01K\x02s.", "cannot be read"),
    (b"X\x01\x00\x00\x00\xff.", "cannot be read"),
    (b"K\x01)R.", "cannot be read"),
    (b"cargparse\nNamespace\nK\x01R.", "cannot be read"),
    (b"\xfe.", "cannot be read"),
    (b"}]K\x01s.", "cannot be read"),
    (b"ctorch._utils\n_rebuild_tensor_v2\n)R.", "its pickle"),
    (b"K\x01Q.", "its pickle"),
]


@pytest.mark.parametrize(("data", "message"), SEVERAL, ids=lambda value: "" if isinstance(value, bytes) else value)
def test_damage_is_one_message(tmp_path: Path, data: bytes, message: str | None) -> None:
    for read in (lambda: read_records(data, "a.pt"), lambda: TorchFile(torch_file(tmp_path / "a.pt", b"\x80\x02" + data))):
        if message is None:  # torch keeps it in a dict, and reads on
            try:
                assert read().tree == 1  # type: ignore[attr-defined]
            except CheckpointError as error:
                assert "needs more memory than a checkpoint's" in str(error)
            continue
        with pytest.raises(CheckpointError, match=message) as caught:
            read()
        assert "a.pt" in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"K\x00K\x04\x85", b"J\xff\xff\xff\xffK\x04\x85", "its pickle"),  # a negative offset
        (b"K\x04\x85K\x01", b"J\xff\xff\xff\xff\x85K\x01", "its pickle"),
        (b"K\x04\x85K\x01", b"K\x05\x85K\x01", "has 16 bytes, and a storage of 20 should"),
        (b"K\x00K\x04\x85", b"K\x01K\x04\x85", "has 16 bytes, and a storage of 20 should"),
        (b"K\x04\x85K\x01\x85", b"K\x04\x85\x8a\x06\x00\x00\x00\x00\x00\x01\x85", "a storage of 13,194,139,533,316 should"),
        (b"K\x04tQ", b"J\x00\x00\x00\x40tQ", "a storage of 4,294,967,296 should be"),
        (b"K\x04tQ", b"K\x05tQ", "a/data/0' has 16 bytes, and a storage of 20"),
        (b"FloatStorage", b"QInt8Storage", "cannot be read|QInt8Storage|its pickle"),
        (text("0"), text("../data.pkl"), "its pickle"),
        (b"}tR", b"}}" + text("conj") + b"\x88stR", "its pickle"),
        (b"K\x04\x85K\x01\x85", b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85K\x00\x85", "repeats the 4 elements"),
    ],
)
def test_a_tensor_must_lie_in_its_storage(tmp_path: Path, old: bytes, new: bytes, message: str) -> None:
    assert TENSOR.count(old) == 1
    file = torch_file(tmp_path / "a.pt", b"\x80\x02" + TENSOR.replace(old, new) + b".")
    with pytest.raises(CheckpointError, match=message):
        opened = TorchFile(file)
        opened.read(opened.tree)


def test_a_hostile_file_takes_little_memory(tmp_path: Path) -> None:
    """The most by far is refused by the limit for the time of reading; it would be gigabytes."""
    sets = b"cbuiltins\nset\nq\x00](" + b"".join(b"M" + struct.pack("<H", n) for n in range(2000)) + b"eq\x01("
    laughs = b"\x80\x02" + sets + b"h\x00h\x01\x85R" * 40_000 + b"t."
    zeros = b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x20\x85R."  # 128 GiB of them
    for data in (laughs, zeros):
        with pytest.raises(CheckpointError, match="needs more memory than a checkpoint's of its size"):
            TorchFile(torch_file(tmp_path / "a.pt", data))
    assert read_records(b"K\x07.", "a.pt") == 7  # the limit is gone
    assert len(bytearray(1 << 30)) == 1 << 30


def test_reservations_and_threads_do_not_refuse_a_good_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Address space is not memory: a library or an arena that appears while a file is read takes none of its limit."""
    serialization.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    load, reserved, done, threads = serialization.load, list[mmap.mmap](), threading.Event(), list[threading.Thread]()

    def busy(*args: Any, **kwargs: Any) -> Any:
        reserved.append(mmap.mmap(-1, 8 << 30, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        threads.extend(threading.Thread(target=lambda: (bytearray(100_000), done.wait())) for _ in range(32))
        for thread in threads:
            thread.start()
        return load(*args, **kwargs)

    monkeypatch.setattr(serialization, "load", busy)
    try:
        assert TorchFile(tmp_path / "a.pt").tree["w"].shape == (2,)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert len(reserved) == 1


def test_two_threads_leave_no_limit_behind(good: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with ThreadPoolExecutor(4) as pool:
        assert {len(file.tree) for file in pool.map(TorchFile, [good] * 40)} == {4}
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_pickle_of_any_bytes_is_read_or_refused(tmp_path: Path) -> None:
    random, buffer = np.random.default_rng(1), io.BytesIO()
    serialization.save({"a": [torch.zeros(2), np.arange(3), argparse.Namespace(x={1})]}, buffer)
    good = zipfile.ZipFile(buffer).read("archive/data.pkl")
    for _ in range(150):
        data = bytearray(good)
        for position in random.integers(0, len(data), 3):
            data[position] = random.integers(256)
        for read in (lambda d: TorchFile(torch_file(tmp_path / "a.pt", d)), lambda d: read_records(d, "a.pt")):
            try:
                read(bytes(data))
            except CheckpointError as error:
                assert "a.pt" in str(error)


@pytest.mark.parametrize("legacy", [False, True])
def test_newer_pickles_are_refused_by_their_protocol(tmp_path: Path, legacy: bool) -> None:
    serialization.save({"w": torch.ones(2)}, tmp_path / "a.pt", pickle_protocol=4, **(LEGACY if legacy else {}))
    with pytest.raises(CheckpointError, match=r"a\.pt has a pickle of protocol 4, and torch's restricted loader reads 2 alone"):
        TorchFile(tmp_path / "a.pt")


@pytest.mark.long
def test_a_larger_pickle_may_have_more_values() -> None:
    many = b"](" + b"(K\x01K\x02t" * 1_000_000 + b"e."
    assert len(read_records(many, "a.pt")) == 1_000_000
    with pytest.raises(CheckpointError, match=r"comes to more than .* values"):
        read_records(b"](" + b"K\x01" * 2000 + b"eq\x00](" + b"h\x00" * 5000 + b"e.", "a.pt")


def test_too_large_a_pickle_is_not_even_looked_at(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a\.pt has a pickle of 8,388,609 bytes"):
        TorchFile(torch_file(tmp_path / "a.pt", b"N" * MAX_PICKLE_BYTES + b"."))


def test_settings_and_shared_storages_are_written_as_they_are(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    tree = {"a": base, "b": base.t(), "args": argparse.Namespace(lr=0.5, sizes=torch.Size([1])), "dtype": torch.bfloat16}
    write_torch_file(tmp_path / "a.pt", {**tree, "o": collections.OrderedDict(z=1)})
    got = load(tmp_path / "a.pt")
    assert got["args"] == tree["args"] and isinstance(got["args"].sizes, torch.Size) and type(got["o"]) is collections.OrderedDict
    assert got["a"].untyped_storage().data_ptr() == got["b"].untyped_storage().data_ptr() and torch.equal(got["b"], base.t())
    assert got["dtype"] == torch.bfloat16


def test_tensors_are_made_one_by_one(tmp_path: Path) -> None:
    alive, most = 0, 0

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def make(size: int) -> Callable[[], Tensor]:
        def made() -> Tensor:
            nonlocal alive, most
            tensor = torch.full((size, 3), float(size)).t()
            alive, most = alive + 1, max(most, alive + 1)
            weakref.finalize(tensor.untyped_storage(), gone)
            return tensor

        return made

    tree = {size: LazyTensor((3, size), torch.float32, make(size)) for size in range(6)}
    write_torch_file(tmp_path / "a.pt", tree)
    assert most == 1
    assert all(torch.equal(tensor, torch.full((3, size), float(size))) for size, tensor in load(tmp_path / "a.pt").items())
    data = (tmp_path / "a.pt").read_bytes()
    headers = [info.header_offset for info in zipfile.ZipFile(tmp_path / "a.pt").infolist()]
    assert all((at + 30 + sum(struct.unpack_from("<HH", data, at + 26))) % 64 == 0 for at in headers)


PARTS = [torch.arange(7.0), torch.tensor([]), torch.arange(5.0)[::2], torch.full((3,), -1.0)]


def test_a_long_vector_is_made_in_stretches(tmp_path: Path) -> None:
    def parts() -> Iterator[Tensor]:
        yield from PARTS

    write_torch_file(tmp_path / "a.pt", {"flat": LazyFlat(13, torch.float32, parts), "after": torch.ones(2)})
    found = load(tmp_path / "a.pt")
    assert torch.equal(found["flat"], torch.cat(PARTS)) and torch.equal(found["after"], torch.ones(2))
    file = TorchFile(tmp_path / "a.pt")
    assert torch.equal(file.read(file.tree["flat"]), torch.cat(PARTS))


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        ({"a": LazyTensor((2,), torch.float32, lambda: torch.zeros(3))}, ValueError, "announced"),
        ({"a": LazyTensor((2,), torch.float32, lambda: torch.zeros(2).double())}, ValueError, "announced"),
        (LazyFlat(12, torch.float32, lambda: iter(PARTS)), ValueError, "announced 48 bytes, made 52"),
        (LazyFlat(13, torch.float64, lambda: iter(PARTS)), ValueError, r"announced torch\.float64"),
        ({"a": object()}, TypeError, "a builtins.object cannot be written"),
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


def test_files_beyond_4_gib_use_the_wide_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the limit of the narrow fields lowered, so that a small file needs the wide ones."""
    tree = {"w": torch.arange(500.0), "b": torch.ones(3)}
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
    write_torch_file(tmp_path / "a.pt", tree)
    monkeypatch.undo()
    assert zipfile.ZipFile(tmp_path / "a.pt").testzip() is None
    assert torch.equal(load(tmp_path / "a.pt")["w"], tree["w"])
    file = TorchFile(tmp_path / "a.pt")
    same(file, tree, file.tree)


def test_only_the_bytes_of_the_tensor_are_read(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TorchFile(good)
    counts: list[int] = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: counts.append(sum(map(len, buffers))) or real(fd, buffers, at))  # type: ignore[func-returns-value]
    view = file.read(file.tree["view"])
    assert torch.equal(view, torch.arange(2000.0).view(50, 40)[3:5, ::2]) and view.stride() == (40, 2)
    assert sum(counts) < 79 * 4 + 200 and view.untyped_storage().nbytes() == 79 * 4  # from the first element to the last, and a header


@pytest.mark.parametrize("legacy", [False, True])
def test_cut_short_at_many_places(tmp_path: Path, legacy: bool) -> None:
    serialization.save({"w": torch.arange(200.0), "b": [torch.ones(7).bfloat16()]}, tmp_path / "a.pt", **(LEGACY if legacy else {}))
    data = (tmp_path / "a.pt").read_bytes()
    for length in [*np.linspace(0, len(data), 25, endpoint=False).astype(int), len(data) - 1]:
        (tmp_path / "b.pt").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"b\.pt"):
            TorchFile(tmp_path / "b.pt")


def test_damage_is_found_by_checksums(good: Path) -> None:
    data = bytearray(good.read_bytes())
    where = data.index(torch.arange(2000.0).numpy().tobytes()[400:800])
    data[where] ^= 1
    good.write_bytes(data)
    file = TorchFile(good)
    with pytest.raises(CheckpointError, match=r"a\.pt: a/data/0 is damaged: its checksum is"):
        file.read(file.tree["w"])
    data[data.index(b"argparse")] ^= 1
    good.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"a\.pt: a/data\.pkl is damaged"):
        TorchFile(good)


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    serialization.set_crc32_options(False)
    try:
        serialization.save(tree := {"w": torch.arange(20.0)}, tmp_path / "a.pt")
    finally:
        serialization.set_crc32_options(True)
    file = TorchFile(tmp_path / "a.pt")
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
        (lambda e: e.update({"b/x": b""}), "no folder with a data.pkl"),
        (lambda e: e.update({"/etc/x": b""}), "no folder with a data.pkl"),
        (lambda e: e.pop("a/data.pkl"), "no folder with a data.pkl"),
        (lambda e: e.update({"a/constants.pkl": b""}), "TorchScript"),
        (lambda e: e.update({"a/byteorder": b"big"}), "byte order 'big'"),
        (lambda e: e.update({"a/data.pkl": b"cposix\nsystem\n."}), "names 'posix.system'"),
    ],
)
def test_other_entries_are_refused(good: Path, change: Callable[[dict[str, bytes]], object], message: str) -> None:
    with pytest.raises(CheckpointError, match=f"b\\.pt.*{message}"):
        TorchFile(repacked(good, change))
    assert sorted(path.name for path in good.parent.iterdir()) == ["a.pt", "b.pt"]


def twice(path: Path) -> None:
    with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as target:
        warnings.simplefilter("ignore")
        target.writestr("a/data/0", b"x")


def compressed(path: Path) -> None:
    repacked(path, lambda e: e.update({"a/x": b"0" * 1000}), zipfile.ZIP_DEFLATED).rename(path)


def overlapping(path: Path) -> None:
    data = bytearray(path.read_bytes())
    directory = data.index(b"PK\x01\x02")
    second = data.index(b"PK\x01\x02", directory + 4)
    data[second + 42 : second + 46] = data[directory + 42 : directory + 46]  # where its local header is
    path.write_bytes(data)


def of_4_gib(path: Path) -> None:
    data = bytearray(path.read_bytes())
    last = data.rindex(b"PK\x01\x02")
    data[last + 20 : last + 28] = b"\xf0\xff\xff\xff" * 2
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (compressed, r"a\.pt: a/data\.pkl is compressed or encrypted, which torch never does"), (twice, "two entries of one name"),
        (overlapping, "overlaps what comes after it|not a complete torch file"), (of_4_gib, "4,294,967,280 bytes at byte .* overlaps"),
    ],
)  # fmt: skip
def test_directories_that_lie_are_refused(good: Path, change: Callable[[Path], None], message: str) -> None:
    change(good)
    with pytest.raises(CheckpointError, match=message):
        TorchFile(good)


def test_records_of_other_places_are_refused(good: Path) -> None:
    file = TorchFile(good)
    record = file.tree["w"]
    for change, message in (
        ({"storage": 1 << 50}, "should be at byte"), ({"storage": record.storage + 1}, "should be at byte"), ({"storage": -1}, "should be"),
        ({"num_bytes": 1 << 40}, "should be at byte"), ({"offset": 1}, "reaches to element 2,001"),
        ({"shape": (1 << 38,), "stride": (0,)}, "repeats"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=message):
            file.read(replace(record, **change))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_of_other_kinds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    by_name = r"is of torch\.float8_e5m2, which cannot be converted"
    kinds = ((torch.eye(3).to_sparse(), r"a\.pt: its pickle"), (quantized, r"a\.pt: its pickle"))
    for tensor, message in (*kinds, (torch.zeros(3).to(torch.float8_e5m2), by_name)):
        serialization.save(tensor, path)
        with pytest.raises(CheckpointError, match=message):
            (file := TorchFile(path)).read(file.tree)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is empty"), (b"hello", "it is something else"),
        (b"x".ljust(257, b"\0") + b"ustar".ljust(300, b"\0"), "it is a tar file"),
        (b"PK\x03\x04", "cut short or damaged"), (b"\x80\x02N.N.N.N.N.", "Invalid magic number"),
        (b"\x80\x02cposix\nsystem\n.", "names 'posix.system'"),
    ],
)  # fmt: skip
def test_other_files_are_named(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"a\\.pt.*{message}"):
        TorchFile(tmp_path / "a.pt")


def test_links_pipes_and_folders_are_refused(good: Path) -> None:
    good.with_name("link").symlink_to(good)
    os.mkfifo(good.with_name("pipe"))
    for name, message in (("link", "symbolic link"), ("pipe", "not a plain file"), (".", "not a plain file"), ("gone", "cannot be read")):
        with pytest.raises(CheckpointError, match=message):
            TorchFile(good.parent / name)


def test_a_damaged_legacy_file_is_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    serialization.save({"w": torch.arange(200.0)}, buffer, **LEGACY)
    data = buffer.getvalue()
    at = len(data) - 800 - 8
    for changed, message in (
        (data[:at] + (1 << 40).to_bytes(8, "little") + data[at + 8 :], "cut short or damaged"),
        (data.replace(b"K\xc8", b"J\x00\x00\x00\x7f"), "its pickle"),
        (data + b"x", "its storages end at byte"),
    ):
        assert changed != data
        (tmp_path / "a.pt").write_bytes(changed)
        with pytest.raises(CheckpointError, match=message):
            TorchFile(tmp_path / "a.pt")


def test_any_byte_may_be_wrong(good: Path) -> None:
    """Whatever is flipped, the tensors are right or there is one clear error."""
    data, random = good.read_bytes(), np.random.default_rng(5)
    outside = [n for n in range(len(data)) if not 3000 < n < len(data) - 2000]
    for position in random.choice(outside, 150):
        changed = bytearray(data)
        changed[position] ^= 1 << random.integers(8)
        good.write_bytes(changed)
        try:
            file = TorchFile(good)
            assert torch.equal(file.read(file.tree["w"]), torch.arange(2000.0).view(50, 40))
        except (CheckpointError, KeyError):  # a KeyError of the name in the pickle, whose checksum may be 0
            pass


def test_files_are_open_only_while_something_is_read(tmp_path: Path) -> None:
    """A universal folder has more of them than a process may have open."""
    for number in range(5):
        serialization.save({"w": torch.arange(20.0) + number}, tmp_path / f"{number}.pt")
    before = len(os.listdir("/proc/self/fd"))
    files = [TorchFile(tmp_path / f"{number}.pt") for number in range(5)]
    assert [int(file.read(file.tree["w"])[0]) for file in files] == [0, 1, 2, 3, 4]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_exchanged_between_two_reads_is_refused(tmp_path: Path) -> None:
    serialization.save({"w": torch.zeros(20)}, tmp_path / "a.pt")
    file = TorchFile(tmp_path / "a.pt")
    serialization.save({"w": torch.ones(20)}, tmp_path / "b.pt")
    os.replace(tmp_path / "b.pt", tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="is not the file that it was"):
        file.read(file.tree["w"])
