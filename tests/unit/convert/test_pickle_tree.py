"""Foreign pickles: what they mean, and that nothing in them runs, whatever they ask for."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import enum
import io
import os
import pathlib
import struct
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.paths import ROOT
from torch import serialization

from megatron_sp.convert.archive.pickle_machine import Machine, Refused, check
from megatron_sp.convert.archive.pickle_tree import MAX_PICKLE_BYTES, Name, Object, PickleReader, Storage, TensorRecord
from megatron_sp.convert.archive.torch_file import TorchFile
from megatron_sp.utils.errors import CheckpointError


@pytest.fixture(scope="module")
def reader() -> Iterator[PickleReader]:
    with PickleReader() as shared:
        yield shared


def saved(tree: Any, protocol: int = 2) -> bytes:
    """The pickle inside torch's own file of the tree."""
    buffer = io.BytesIO()
    serialization.save(tree, buffer, pickle_protocol=protocol)
    return zipfile.ZipFile(buffer).read("archive/data.pkl")


class Color(enum.Enum):
    RED = 3


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


CALL = b"cposix\nsystem\n"
STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x04t"
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"


def tensor(offset: bytes = b"K\x00", size: bytes = b"K\x04\x85", stride: bytes = b"K\x01\x85", storage: bytes = STORAGE + b"Q") -> bytes:
    return TENSOR + b"(" + storage + offset + size + stride + b"\x89}tR."


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_what_checkpoints_hold_comes_back(reader: PickleReader, protocol: int) -> None:
    settings = argparse.Namespace(lr=1e-4, sizes=torch.Size([2, 3]), dtype=torch.bfloat16, where=pathlib.PurePosixPath("/data/x"))
    tree = {
        0: [True, None, -1, 1 << 40, -(1 << 200), 2.5, float("inf"), "grün", b"\xff\x00", bytearray(b"ab")],
        (1, "a"): ({1, 2}, frozenset("x"), collections.OrderedDict(b=1, a=2), collections.defaultdict(list, {3: 4})),
        "numpy": [np.arange(6, dtype=np.int32).reshape(2, 3).T, np.float32(0.5), np.array(7), np.zeros((0, 2))],
        "args": settings,
        "date": datetime.date(2020, 1, 2),
        "space": types.SimpleNamespace(x=1),
    }
    got = reader.read(saved(tree, protocol), "a.pt")
    assert list(got) == list(tree)
    assert got[0] == tree[0] and [type(v) for v in got[0]][:2] == [bool, type(None)]
    assert got[1, "a"] == tree[1, "a"] and list(got[1, "a"][2]) == ["b", "a"] and isinstance(got[1, "a"][1], frozenset)
    number = got["numpy"].pop(1)
    assert number == 0.5 and type(number) is float
    for mine, theirs in zip(got["numpy"], tree["numpy"][::2] + tree["numpy"][3:], strict=True):
        assert np.array_equal(mine.numbers, theirs) and mine.numbers.dtype == theirs.dtype
    assert got["args"].name == "argparse.Namespace"
    attributes = got["args"].attributes
    assert (attributes["lr"], attributes["sizes"], attributes["dtype"]) == (1e-4, (2, 3), Name("torch.bfloat16"))
    assert (attributes["where"].name.rsplit(".", 1)[1], attributes["where"].args) == ("PurePosixPath", ("/", "data", "x"))
    assert got["date"].name == "datetime.date" and got["space"].attributes == {"x": 1}


def test_tensors_are_records(reader: PickleReader) -> None:
    base = torch.zeros(4, 5)
    got = reader.read(saved([base[1:, ::2], torch.nn.Parameter(torch.zeros(3)), torch.zeros(2, dtype=torch.uint16)]), "a.pt")
    assert got[0] == TensorRecord(Storage("0", "float32", 20), 5, (3, 3), (5, 2), "float32")
    assert (got[1].shape, got[1].requires_grad) == ((3,), True)
    assert (got[2].storage, got[2].dtype) == (Storage("2", "untyped", 4), "uint16")


def test_objects_of_megatron_and_deepspeed_need_no_such_package(reader: PickleReader) -> None:
    member = b"cmegatron.core.enums\nModelType\nK\x01\x85R"
    by_name = b"cbuiltins\ngetattr\ncmegatron.core.enums\nModelType\n" + text("encoder_or_decoder") + b"\x86R"
    scaler = b"cdeepspeed.runtime.fp16.loss_scaler\nLossScaler\n)\x81}" + text("cur_scale") + b"G?\xf0\0\0\0\0\0\0sb"
    old = b"ccopy_reg\n_reconstructor\n(cargparse\nNamespace\nc__builtin__\nobject\nNtR}U\x01aK\x05sb"
    one, two, three, four = reader.read(b"\x80\x02(" + member + by_name + scaler + old + b"t.", "a.pt")
    assert (one.name, one.args, two.args) == ("megatron.core.enums.ModelType", (1,), ("encoder_or_decoder",))
    assert (three.name, three.attributes) == ("deepspeed.runtime.fp16.loss_scaler.LossScaler", {"cur_scale": 1.0})
    assert (four.name, four.attributes) == ("argparse.Namespace", {"a": 5})


def test_classes_of_users_are_refused_by_name(reader: PickleReader) -> None:
    with pytest.raises(CheckpointError, match=r"^a\.pt: its pickle names '[\w.]*Color', which is not part .* Nothing in it was run"):
        reader.read(saved({"color": Color.RED}), "a.pt")


HOSTILE = {
    "REDUCE": CALL + b"COMMAND\x85R.",
    "NEWOBJ": CALL + b"COMMAND\x85\x81.",
    "STACK_GLOBAL": text("posix") + text("system") + b"\x93COMMAND\x85R.",
    "INST": b"(COMMANDiposix\nsystem\n.",
    "OBJ": b"(" + CALL + b"COMMANDo.",
    "EXT1": b"\x82\x01COMMAND\x85R.",
    "eval": b"c__builtin__\neval\nCOMMAND\x85R.",
    "exec": b"cbuiltins\nexec\nCOMMAND\x85R.",
    "import": b"cbuiltins\n__import__\n" + text("os") + b"\x85R.",
    "attribute of a module": b"cbuiltins\ngetattr\ncbuiltins\n__import__\n"
    + text("os")
    + b"\x85R"
    + text("system")
    + b"\x86RCOMMAND\x85R.",
    "getattr called twice": b"cbuiltins\ngetattr\ncbuiltins\ngetattr\n" + text("__self__") + b"\x86RCOMMAND\x85R.",
    "partial": b"cfunctools\npartial\n" + CALL + b"COMMAND\x86R.",
    "torch's loader": b"ctorch.serialization\nload\nCOMMAND\x85R.",
    "__setstate__": b"cargparse\nNamespace\n)\x81}" + text("__setstate__") + CALL + b"sbCOMMANDb.",
    "a list's append": b"]cbuiltins\nprint\nCOMMAND\x85Ra.",
    "persistent id": b"(" + text("storage") + CALL + b"COMMAND\x85R" + text("0") + text("cpu") + b"K\x04tQ.",
    "module": b"(" + text("module") + b"cbuiltins\nobject\n" + text("x.py") + text("COMMAND") + b"tQ.",
    "tensor subclass": b"ctorch._tensor\n_rebuild_from_type_v2\n(" + CALL + b"ctorch\nTensor\n(COMMANDt}tR.",
    "default factory": b"ccollections\ndefaultdict\n" + CALL + b"\x85R.",
    "object array": b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n)C\x01btR(K\x01)cnumpy\ndtype\nX\x02\0\0\0O8\x85R\x89]tb.",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_runs(reader: PickleReader, tmp_path: Path, case: str) -> None:
    canary = tmp_path / "canary"
    data = b"\x80\x02" + HOSTILE[case].replace(b"COMMAND", text(f"touch {canary}"))
    with pytest.raises(CheckpointError, match=r"a\.pt.*Nothing in it was run"):
        reader.read(data, "a.pt")
    assert list(tmp_path.iterdir()) == []


def test_a_name_in_an_allowed_package_is_only_a_name(reader: PickleReader) -> None:
    got = reader.read(b"cmegatron.os\nsystem\n" + text("touch x") + b"\x85R.", "a.pt")
    assert isinstance(got, Object) and (got.name, got.args) == ("megatron.os.system", ("touch x",))


LAUGHS = text("ha") + b"".join(b"2\x86" for _ in range(60)) + b"."
COPIES = b"cbuiltins\nlist\nq\x00]q\x01(" + b"N" * 1000 + b"e(" + b"h\x00h\x01\x85R" * 20_000 + b"t."  # 8 kB for every 6 bytes
WIDE = b"]" + b"q\x00" + b"]" + b"".join(b"(" + b"h%c" % n * 200 + b"tq%c" % (n + 1) for n in range(5)) + b"."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (LAUGHS, "small file for very much data"),
        (WIDE, "small file for very much data"),
        (text("x" * 100_000) + b"q\x00(" + b"h\x00" * 1000 + b"t.", "small file for very much data"),
        (COPIES, "needs more memory than a checkpoint's pickle of its size"),
        (b"]q\x00h\x00a.", "contains itself"),
        (b"]q\x00h\x00\x85a.", "contains itself"),
        (b"]" * 2000 + b"a" * 1999 + b".", "nested deeper than 100"),
        (b"]" + b"\x85" * 101 + b".", "nested deeper than 100"),
        (b"]" + b"\x85" * 60 + b"q\x00h\x00" + b"\x85" * 60 + b"\x86.", "nested deeper than 100"),
        (b"X\xff\xff\xff\xffabc", "cut short"),
        (b"\x8e" + b"\xff" * 8 + b"abc", "cut short"),
        (b"\x8b\xff\xff\xff\x7f" + b"1" * 100, "integer of 2,147,483,647 bytes"),
        (b"K\x01", "cut short"),
        (b"", "cut short"),
        (b".", "empty stack"),
        (b"t.", "did not begin"),
        (b"h\x07.", "does not have"),
        (b"K\x01K\x02a.", "not a list"),
        (b"}(K\x01u.", "key without a value"),
        (b"]K\x01K\x02s.", "not a dict"),
        (b"X\x01\x00\x00\x00\xff.", "not UTF-8"),
        (b"K\x01)R.", "not a name"),
        (b"cargparse\nNamespace\nK\x01R.", "not a tuple"),
        (b"\xfe.", "should be"),
        (b"K\x01.K\x02.", "3 bytes after the end"),
        (b"}]K\x01s.", "cannot be one"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n)R.", "arguments that it does not take"),
        (tensor(offset=b"J\xff\xff\xff\xff"), "arguments that it does not take"),
        (tensor(size=b"J\xff\xff\xff\xff\x85"), "arguments that it does not take"),
        (tensor(stride=b"J\xff\xff\xff\xff\x85"), "arguments that it does not take"),
        (tensor(size=b"\x88\x85"), "arguments that it does not take"),
        (tensor(stride=b")"), "arguments that it does not take"),
        (tensor()[:-3] + b"}" + text("conj") + b"\x88stR.", "arguments that it does not take"),
        (tensor(storage=b"N"), "arguments that it does not take"),
        (tensor(storage=STORAGE.replace(b"FloatStorage", b"QInt8Storage") + b"Q"), "QInt8Storage"),
        (tensor(storage=STORAGE.replace(b"K\x04t", b"J\xff\xff\xff\xfft") + b"Q"), "without a known class, a key and a size"),
        (b"(" + STORAGE + b"Q" + STORAGE.replace(b"K\x04t", b"K\x05t") + b"Qt.", "in two ways"),
        (b"K\x01Q.", "not a storage"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_damage_is_named(reader: PickleReader, data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        reader.read(data, "a.pt")
    assert str(error.value).startswith("a.pt")


def test_a_tensor_that_is_written_by_hand_is_one(reader: PickleReader) -> None:
    assert reader.read(tensor(), "a.pt") == TensorRecord(Storage("0", "float32", 4), 0, (4,), (1,), "float32")


def test_a_pickle_of_any_bytes_is_read_or_refused() -> None:
    random = np.random.default_rng(1)
    good = saved({"a": [torch.zeros(2), np.arange(3), argparse.Namespace(x={1})]})
    for _ in range(1000):
        data = bytearray(good)
        for position in random.integers(0, len(data), 3):
            data[position] = random.integers(256)
        try:
            machine = Machine(bytes(data))
            check(machine.run(), 1 << 20)
        except Refused:
            pass


def test_cut_short_anywhere(reader: PickleReader) -> None:
    data = saved({"a": [torch.zeros(2), np.arange(3), argparse.Namespace(x={1})]})
    for length in range(len(data)):
        with pytest.raises(CheckpointError, match=r"a\.pt"):
            reader.read(data[:length], "a.pt")


def test_time_is_bounded_and_the_next_file_is_read() -> None:
    with PickleReader(timeout_seconds=-1) as impatient:  # at once, whatever the machine
        with pytest.raises(CheckpointError, match=r"a\.pt: its pickle could not be read within"):
            impatient.read(b"N0" * 10_000 + b"N.", "a.pt")
        impatient.timeout_seconds = 60
        assert impatient.read(b"K\x07.", "b.pt") == 7


def test_a_larger_pickle_gets_more_memory() -> None:
    text_of_7_mb = "x" * 7_000_000
    with PickleReader() as reader:
        assert reader.read(b"K\x07.", "a.pt") == 7
        assert reader.read(text(text_of_7_mb) + b"q\x00h\x00\x86.", "a.pt") == (text_of_7_mb, text_of_7_mb)


def test_too_large_a_pickle_is_not_even_looked_at(reader: PickleReader) -> None:
    class Large(bytes):
        def __len__(self) -> int:
            return MAX_PICKLE_BYTES + 1

    with pytest.raises(CheckpointError, match=r"a\.pt has a pickle of 8,388,609 bytes"):
        reader.read(Large(b"N."), "a.pt")


def memory_kib(pid: int | str, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def in_child(fn: Any) -> int:
    """What ``fn()`` returns in a forked child, where the highest memory use begins anew."""
    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(theirs, struct.pack("<q", fn()))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return int(struct.unpack("<q", os.read(ours, 8))[0])


def test_hostile_pickles_cost_at_most_64_mib() -> None:
    cases = [LAUGHS, WIDE, b"\x8e" + struct.pack("<Q", 1 << 40), b"](" * 50_000, COPIES]
    cases.append(b"(" + b"N\x85" * 40_000 + b"t.")  # the most values that are let through
    cases.append(text("x" * 60_000) + b"q\x00(" + b"h\x00" * 60 + b"t.")

    def work() -> int:
        before = memory_kib("self", "VmRSS")
        with PickleReader() as reader:
            reader.read(b"N.", "warm")
            process = reader._process
            assert process is not None
            start = memory_kib(process.pid, "VmHWM")
            for data in cases:
                with contextlib.suppress(CheckpointError):
                    reader.read(data, "a.pt")
            assert reader._process is process, "it was lost"
            theirs = memory_kib(process.pid, "VmHWM") - start
        return max(theirs, memory_kib("self", "VmHWM") - before)

    assert 0 < in_child(work) < 64 << 10


def test_many_values_are_bounded_however_large_the_file() -> None:
    """What comes back is as many values, each of which takes memory here."""
    with PickleReader() as reader:
        assert len(reader.read(b"](" + b"K\x01" * 30_000 + b"e.", "a.pt", max_cost=1 << 20)) == 30_000
        with pytest.raises(CheckpointError, match="comes to more than 1 MiB of values: it has very many"):
            reader.read(b"](" + b"K\x01" * 33_000 + b"e.", "a.pt", max_cost=1 << 20)


def test_the_process_can_open_nothing(tmp_path: Path) -> None:
    """The second fence: even a fault of the interpreter finds no file, no process, no module."""
    import subprocess
    import sys

    root = ROOT
    for attempt in (f"open({str(tmp_path / 'canary')!r}, 'w')", "__import__('socket')", "os.fork()", f"os.mkdir({str(tmp_path / 'd')!r})"):
        script = f"import sys, os; sys.path.append({str(root)!r}); sys.argv = ['', '100000000', '60']\n"
        script += "from megatron_sp.convert.archive import pickle_worker\npickle_worker._give_up_everything(1 << 26, 60)\n"
        done = subprocess.run([sys.executable, "-I", "-S", "-c", script + attempt + "\nos.write(1, b'still here')"], capture_output=True)
        assert (done.returncode, done.stdout) == (9, b""), attempt
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_torch_goes_through_it(tmp_path: Path) -> None:
    serialization.save({"x": Color.RED}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt: its pickle names '[\w.]*Color'"):
        TorchFile(tmp_path / "a.pt")
