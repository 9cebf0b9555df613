"""Folders of torch.distributed.checkpoint, read and written; and what is damaged or hostile in them."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, serialization
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron_sp.convert.archive.dist_folder import METADATA, STORAGE_INFO, DistFolder, DistFolderWriter, NewChunk
from megatron_sp.convert.archive.torch_files import DTYPES, Object, read_records
from megatron_sp.convert.archive.torch_writer import TreeWriter
from megatron_sp.utils.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def theirs(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    """A folder that torch writes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, sync_files=False, **options), no_dist=True)
    return folder


def a_state() -> dict[str, Any]:
    state: dict[str, Any] = {"model": {"w": torch.arange(20.0).view(4, 5), "b": torch.tensor(3.0).bfloat16()}}
    state["model"] |= {str(dtype): torch.ones(3).to(dtype) for dtype in DTYPES.values()}
    state |= {"empty": torch.zeros(0, 3), "args": {"lr": 1e-4, "layers": [1, "x"]}, "t": torch.arange(6).view(2, 3).t()}
    return state


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    state = a_state()
    folder = DistFolder(theirs(tmp_path / "a", state))
    flat = {f"model.{name}": tensor for name, tensor in state["model"].items()} | {"empty": state["empty"], "t": state["t"]}
    assert set(folder.tensors) == set(flat) and set(folder.objects) == {"args.lr", "args.layers"}
    for name, tensor in flat.items():
        got = folder.read(name)
        assert got.dtype == tensor.dtype and torch.equal(got, tensor), name
        assert (folder.tensors[name].shape, folder.tensors[name].dtype) == (tensor.shape, tensor.dtype)
    assert (folder.read_object("args.lr"), folder.read_object("args.layers")) == (1e-4, [1, "x"])


def written(path: Path, w: Tensor) -> Path:
    """A folder of ours in three files, w cut into a large rectangle and two small ones."""
    with DistFolderWriter(path) as writer:
        cuts = [((0, 0), (4, 2), 0), ((0, 2), (1, 3), 1), ((1, 2), (3, 3), 2)]
        chunks = [NewChunk(o, s, lambda o=o, s=s: w[o[0] : o[0] + s[0], o[1] : o[1] + s[1]], rank) for o, s, rank in cuts]  # type: ignore[misc]
        writer.add_tensor("model.w", (4, 5), w.dtype, chunks)
        writer.add_tensor("step", (), torch.int64, [NewChunk((), (), lambda: torch.tensor(7))])
        writer.add_tensor("empty", (0, 3), torch.float32, [NewChunk((0, 0), (0, 3), lambda: torch.zeros(0, 3))])
        writer.add_object("args", [1, {"a": torch.ones(2), "b": None}], rank=1)
        writer.finish()
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16])
def test_what_is_written_torch_loads_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    w = torch.arange(20).view(4, 5).to(dtype)
    folder = written(tmp_path / "a", w)
    assert sorted(p.name for p in folder.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    state = {"model": {"w": torch.zeros(4, 5, dtype=dtype)}, "step": torch.tensor(0), "empty": torch.zeros(0, 3), "args": None}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["model"]["w"], w) and int(state["step"]) == 7
    assert state["args"][0] == 1 and torch.equal(state["args"][1]["a"], torch.ones(2))
    dcp_to_torch_save(folder, tmp_path / "a.pt")
    got = serialization.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(got["model.w"], w) and got["step"].dtype == torch.int64 and got["empty"].shape == (0, 3)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    w = torch.randn(4, 5)
    folder = DistFolder(written(tmp_path / "a", w))
    assert torch.equal(folder.read("model.w"), w) and len(folder.tensors["model.w"].chunks) == 3
    assert int(folder.read("step")) == 7 and folder.read("empty").shape == (0, 3)
    got = folder.read_object("args")
    assert got[0] == 1 and torch.equal(got[1]["a"].read(), torch.ones(2))
    with pytest.raises(CheckpointError, match="no tensor 'x'"):
        folder.read("x")
    with pytest.raises(CheckpointError, match=r"no object 'model\.w'"):
        folder.read_object("model.w")


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([((0, 0), (4, 4))], "16 elements in total, the tensor has 20"),
        ([((0, 0), (4, 4)), ((0, 1), (4, 1))], "overlaps another"), ([((0, 1), (4, 5))], "outside the tensor"), ([], "0 elements in total"),
        ([((0, 0), (4, 5)), ((0, 0), (0, 5))], "an empty one"),
    ],
)  # fmt: skip
def test_chunks_must_cover_the_tensor(tmp_path: Path, chunks: list[Any], message: str) -> None:
    with DistFolderWriter(tmp_path / "a") as writer, pytest.raises(ValueError, match=f"w \\[4, 5\\]: .*{message}"):
        writer.add_tensor("w", (4, 5), torch.float32, [NewChunk(o, s, lambda s=s: torch.zeros(s)) for o, s in chunks])  # type: ignore[misc]
    assert not (tmp_path / "a" / ".metadata").exists()
    with pytest.raises(CheckpointError, match="cannot be read"):
        DistFolder(tmp_path / "a")


def test_tensors_inside_settings_are_read(tmp_path: Path) -> None:
    with DistFolderWriter(tmp_path / "a") as writer:
        writer.add_object("args", argparse.Namespace(x=torch.ones(2)))
        writer.finish()
    folder = DistFolder(tmp_path / "a")
    assert torch.equal(folder.read_object("args").attributes["x"].read(), torch.ones(2))


def test_nothing_is_written_twice(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", torch.randn(4, 5))
    with pytest.raises(FileExistsError):
        DistFolderWriter(folder)
    with DistFolderWriter(tmp_path / "b") as writer:
        writer.add_object("x", 1)
        with pytest.raises(ValueError, match="x is written twice"):
            writer.add_object("x", 1)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The folder with another .metadata: ``change`` gets its attributes, of plain data and Object."""
    metadata = read_records((folder / ".metadata").read_bytes(), "metadata")
    change(metadata.state)
    (folder / ".metadata").write_bytes(TreeWriter().dumps(metadata))
    return folder


def info_of(state: dict[str, Any], name: str) -> dict[str, Any]:
    return next(info.state for index, info in state["storage_data"].items() if index.state["fqn"] == name)


def described(state: dict[str, Any]) -> dict[str, Any]:
    return state["state_dict_metadata"]["model.w"].state  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: info_of(s, "step").update(relative_path="../x"), "'../x' is not a file of this folder"),
        (lambda s: info_of(s, "step").update(relative_path="/etc/passwd"), "is not a file of this folder"),
        (lambda s: info_of(s, "step").update(relative_path=".."), "is not a file of this folder"),
        (lambda s: info_of(s, "step").update(offset=-1), "is not a file of this folder with a place"),
        (lambda s: info_of(s, "step").update(transform_descriptors=["zstd"]), "went through zstd"),
        (lambda s: s["storage_data"].popitem(), "does not say where 'args' is stored"),
        (lambda s: s["storage_data"].pop(next(iter(s["storage_data"]))), r"does not say where 'model.w' at \[0, 0\] is stored"),
        (lambda s: s.update(storage_data=None), "what is stored where"),
        (lambda s: s.update(storage_data={"x": 1}), "it stores by int, which is not known"),
        (lambda s: s["state_dict_metadata"].update(x=1), "'x' is described by something unknown"),
        (lambda s: s["state_dict_metadata"].update(x=Object(f"{METADATA}Other", state={})), "is a .*Other, which is not known"),
        (lambda s: described(s)["chunks"].pop(), "not covered by its chunks: its pieces hold 11 elements"),
        (lambda s: described(s)["chunks"].append(described(s)["chunks"][0]), "not covered by its chunks"),
        (lambda s: described(s).update(size=(1 << 40, 5)), "not covered by its chunks"),
        (lambda s: described(s).update(size=(-4, 5)), "without shape, dtype or chunks"),
        (lambda s: described(s).update(properties=None), "without shape, dtype or chunks"),
        (lambda s: described(s).update(chunks=[1]), "a chunk without offsets and sizes"),
    ],
)
def test_metadata_that_cannot_be_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    folder = rewrite(written(tmp_path / "a", torch.randn(4, 5)), change)
    with pytest.raises(CheckpointError, match=f"a/.metadata cannot be used: .*{message}"):
        DistFolder(folder)


def lie_about_the_shape(state: dict[str, Any]) -> None:
    """A tensor of a tebibyte in two chunks, which the files do not have."""
    described(state)["size"] = (1 << 38, 5)
    chunks = described(state)["chunks"]
    chunks[1].state.update(offsets=(0, 2), sizes=(1 << 38, 3))
    chunks[0].state.update(offsets=(0, 0), sizes=(1 << 38, 2))
    del chunks[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: info_of(s, "step").update(offset=1 << 50), "a/__0_0.distcp has .* bytes, but should have"),
        (lambda s: info_of(s, "step").update(relative_path="__7_0.distcp"), "a/__7_0.distcp cannot be read"),
        (
            lambda s: info_of(s, "step").update(offset=info_of(s, "model.w")["offset"], length=info_of(s, "model.w")["length"]),
            "damaged, or of two saves",
        ),
        (lambda s: info_of(s, "step").update(offset=5), "is not a file of torch.save|not a complete torch file"),
    ],
)
def test_chunks_that_are_not_there_are_named(tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    folder = DistFolder(rewrite(written(tmp_path / "a", torch.randn(4, 5)), change))
    with pytest.raises(CheckpointError, match=message):
        folder.read("step")


def test_no_memory_is_taken_for_a_shape_alone(tmp_path: Path) -> None:
    folder = DistFolder(rewrite(written(tmp_path / "a", torch.randn(4, 5)), lie_about_the_shape))
    needs = r"model\.w \[274877906944, 5\] needs 5,497,558,138,880 bytes, its chunks have"
    with pytest.raises(CheckpointError, match=needs):
        folder.read("model.w")


def test_a_hostile_folder_runs_nothing(tmp_path: Path) -> None:
    call = b"cposix\nsystem\nX" + len(command := f"touch {tmp_path}/canary".encode()).to_bytes(4, "little") + command + b"\x85R."
    folder = written(tmp_path / "a", torch.randn(4, 5))
    good = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(b"\x80\x02" + call)
    with pytest.raises(CheckpointError, match=r"a/\.metadata: its pickle names 'posix\.system'"):
        DistFolder(folder)
    (folder / ".metadata").write_bytes(good)
    data = (folder / "__1_0.distcp").read_bytes()
    opened = DistFolder(folder)
    place = opened.objects["args"]
    (folder / "__1_0.distcp").write_bytes(data[: place.offset] + b"\x80\x02" + call.ljust(place.length, b"."))
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp.*(cut short|names 'posix\.system')"):
        opened.read_object("args")
    (folder / "__1_0.distcp").unlink()
    (folder / "__1_0.distcp").symlink_to(folder / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="symbolic link"):
        opened.read_object("args")
    assert not (tmp_path / "canary").exists()


def test_other_kinds_of_folders_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "__0.metadata").write_bytes(b"")
    with pytest.raises(CheckpointError, match="use_collectives=False"):
        DistFolder(tmp_path / "b")
    (tmp_path / "b" / ".metadata").write_bytes(b"\x80\x02N.")
    with pytest.raises(CheckpointError, match="not a description of a checkpoint"):
        DistFolder(tmp_path / "b")
    folder = theirs(tmp_path / "c", {"w": torch.ones(3)}, serialization_format=SerializationFormat.SAFETENSORS)
    opened = DistFolder(folder)
    with pytest.raises(CheckpointError, match="safetensors"):
        opened.read("w")


def test_a_storage_class_of_another_program_is_named(tmp_path: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        for info in state["storage_data"].values():
            info.name = STORAGE_INFO.replace("_StorageInfo", "_Other")

    with pytest.raises(CheckpointError, match=r"stores by .*_Other"):
        DistFolder(rewrite(written(tmp_path / "a", torch.randn(4, 5)), change))
