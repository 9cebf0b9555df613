"""Saving, finding, damage and pruning in one process."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_sp.checkpoint import commit, load, safetensors_file
from megatron_sp.checkpoint.checkpointer import Checkpointer
from megatron_sp.checkpoint.commit import list_steps, step_name
from megatron_sp.checkpoint.manifest import MANIFEST_NAME, read_manifest
from megatron_sp.checkpoint.pieces import GlobalTensor, Piece
from megatron_sp.utils.errors import CheckpointError, DiskError

STATE = {"consumed_samples": 640, "loss_scale": float("inf"), "config": {"model": {"num_layers": 2}}, "note": "[{,é"}


def weights(step: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(step)
    return {
        "embedding.weight": torch.randn(11, 5),
        "layer.weight": torch.randn(6, 7).t(),  # not contiguous
        "layer.bias": torch.randn(7).to(torch.bfloat16),
        "optimizer.exp_avg.layer.bias": torch.randn(7, dtype=torch.float64),
        "half": torch.randn(3, 4)[:, 1:3].half(),
        "scalar": torch.tensor(step, dtype=torch.int64),
        "one": torch.randn(1),
        "empty": torch.zeros(0, 4),
    }


def whole(tensors: dict[str, Tensor]) -> dict[str, GlobalTensor]:
    return {name: GlobalTensor.whole(tensor) for name, tensor in tensors.items()}


def save_steps(run: Path, *steps: int, **options: Any) -> Checkpointer:
    checkpointer = Checkpointer(run, keep_last=100, **options)
    for step in steps:
        assert checkpointer.save(step, whole(weights(step)), STATE).saved
    return checkpointer


def store(run: Path, *tensors: Tensor, **pieces: list[Piece]) -> Path:
    """A checkpoint of one tensor w, in these pieces or whole."""
    (full,) = tensors
    tensor = GlobalTensor(tuple(full.shape), full.dtype, pieces["pieces"]) if pieces else GlobalTensor.whole(full)
    path = Checkpointer(run).save(1, {"w": tensor}, {}).path
    assert path is not None
    return path


def in_three(full: Tensor) -> list[Piece]:
    return [Piece((0, 0), full[:4, :3]), Piece((0, 3), full[:4, 3:]), Piece((4, 0), full[4:])]


def refused(text: str) -> Any:
    return pytest.raises(CheckpointError, match=text)


def assert_loads(step_dir: Path, step: int) -> None:
    found = {name: torch.full_like(tensor, 3) for name, tensor in weights().items()}
    Checkpointer(None).load(step_dir, whole(found))
    for name, expected in weights(step).items():
        assert torch.equal(found[name], expected), name


def test_round_trip_of_every_kind_of_tensor(tmp_path: Path) -> None:
    checkpointer = save_steps(tmp_path, 100)
    found = checkpointer.find(tmp_path)
    assert found == tmp_path / "checkpoints" / "step-000100"
    assert_loads(found, 100)
    assert checkpointer.read_state(found) == {**STATE, "format_version": 1, "step": 100}
    assert checkpointer.tensor_shapes(found) == {name: (tuple(t.shape), t.dtype) for name, t in weights().items()}
    assert sorted(os.listdir(found)) == [MANIFEST_NAME, "rank00000-00000.safetensors", "state.json"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000100\n"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_whole_tensor_from_many_rectangles_by_our_reader_and_by_dcps(tmp_path: Path) -> None:
    """The trap: one chunk per name and file. Three rectangles of one name in one rank must land in three files."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    full = torch.randn(9, 8)
    step_dir = store(tmp_path, full, pieces=in_three(full))
    assert len(list(step_dir.glob("*.safetensors"))) == 3
    ours, theirs = torch.zeros(9, 8), torch.zeros(9, 8)
    Checkpointer(None).load(step_dir, {"w": GlobalTensor.whole(ours)})
    dcp.load({"w": theirs}, storage_reader=HuggingFaceStorageReader(str(step_dir)), no_dist=True)
    assert torch.equal(ours, full) and torch.equal(theirs, full)


def test_blocks_views_parameters_and_other_dtypes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wanted is filled in place, whatever it is, also where it is read in blocks; converted only where asked."""
    monkeypatch.setattr(load, "_BLOCK_BYTES", 100)
    full = torch.randn(37, 9)
    step_dir, reader = store(tmp_path, full), Checkpointer(None)
    part, flat, parameter = torch.zeros(20, 5), torch.zeros(400), torch.nn.Parameter(torch.zeros(9, 37))
    for offsets, target in (((3, 2), part), ((0, 0), flat[10:343].view(37, 9)), ((0, 0), parameter.t())):
        reader.load(step_dir, {"w": GlobalTensor((37, 9), torch.float32, [Piece(offsets, target)])})
    assert torch.equal(part, full[3:23, 2:7]) and torch.equal(parameter.detach().t(), full) and parameter.grad_fn is None
    assert torch.equal(flat[10:343].view(37, 9), full) and flat[:10].sum() == 0 and flat[343:].sum() == 0
    half = torch.zeros(37, 9, dtype=torch.bfloat16)
    with refused(r"w +F32 \[37, 9\] +BF16 \[37, 9\]"):
        reader.load(step_dir, whole({"w": half}))
    reader.load(step_dir, whole({"w": half}), cast=True)
    assert torch.equal(half, full.bfloat16())


def test_the_table_of_differences(tmp_path: Path) -> None:
    step_dir = save_steps(tmp_path, 1).find(tmp_path)
    wanted = whole(weights())
    wanted["embedding.weight"] = GlobalTensor.whole(torch.zeros(12, 5))
    wanted["layer.weights"] = wanted.pop("layer.weight")
    with pytest.raises(CheckpointError) as error:
        Checkpointer(None).load(step_dir, wanted)
    lines = [line.split() for line in str(error.value).splitlines()]
    assert "3 of its tensors differ" in str(error.value)
    assert ["embedding.weight", "F32", "[11,", "5]", "F32", "[12,", "5]"] in lines
    assert ["layer.weights", "missing;", "nearest:", "layer.weight", "F32", "[7,", "6]"] in lines
    assert ["layer.weight", "F32", "[7,", "6]", "not", "wanted"] in lines
    assert error.value.exit_code == 3


def test_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    step_dir = save_steps(tmp_path, 1).find(tmp_path)
    found = {"layer.bias": torch.zeros(7, dtype=torch.bfloat16)}
    with refused("not wanted"):
        Checkpointer(None).load(step_dir, whole(found))
    Checkpointer(None).load(step_dir, whole(found), partial=True)
    assert torch.equal(found["layer.bias"], weights(1)["layer.bias"])
    with refused("missing"):
        Checkpointer(None).load(step_dir, whole({"absent": torch.zeros(1)}), partial=True)


def test_mistakes_of_the_caller_write_nothing(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    for tensors, state in (
        ({"w": GlobalTensor((4,), torch.float32, [Piece((0,), torch.zeros(3))])}, {}),
        (whole(weights()), {"x": torch.zeros(1)}),
    ):
        with pytest.raises((ValueError, TypeError)):
            checkpointer.save(1, tensors, state)
    assert not (tmp_path / "checkpoints").exists() or os.listdir(tmp_path / "checkpoints") == []
    for options in ({"keep_last": 1}, {"keep_every": 0}, {"world_size": 2}):
        with pytest.raises(ValueError):
            Checkpointer(tmp_path, **options)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="only read"):
        Checkpointer(None).save(1, whole(weights()), {})


# What --load may name


def test_every_way_to_name_a_checkpoint(tmp_path: Path) -> None:
    checkpointer = save_steps(tmp_path / "run", 10, 20, 30)
    folder = tmp_path / "run" / "checkpoints"
    for path in (tmp_path / "run", folder, str(folder), folder / "step-000030"):
        assert checkpointer.find(path) == folder / "step-000030"
    assert checkpointer.find(tmp_path / "run", ckpt_step=20) == folder / "step-000020"
    assert checkpointer.find(folder / "step-000010") == folder / "step-000010"
    assert checkpointer.find(folder / "step-000010", ckpt_step=10) == folder / "step-000010"
    with refused(r"has no step-000025 \(--ckpt-step 25\); it has the steps 10, 20, 30"):
        checkpointer.find(folder, ckpt_step=25)
    with refused("asks for another"):
        checkpointer.find(folder / "step-000010", ckpt_step=20)
    shutil.copytree(folder / "step-000020", tmp_path / "best")
    assert_loads(checkpointer.find(tmp_path / "best"), 20)
    assert checkpointer.has_checkpoint(tmp_path / "run") and checkpointer.has_checkpoint(tmp_path / "best")
    assert not checkpointer.has_checkpoint(tmp_path) and not checkpointer.has_checkpoint(tmp_path / "absent")


def test_load_of_nothing_says_what_is_there(tmp_path: Path) -> None:
    save_steps(tmp_path / "gpt-small", 1)
    checkpointer = Checkpointer(None)
    with pytest.raises(CheckpointError, match=r"there is no .*gpt-smal: .*nearest: gpt-small") as error:
        checkpointer.find(tmp_path / "gpt-smal")
    assert error.value.exit_code == 3
    with refused("there is: gpt-small"):
        checkpointer.find(tmp_path / "zzz" / "checkpoints")
    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh" / "metrics.jsonl").touch()
    with refused(r"has no checkpoint: looked for .*step-\*/MANIFEST.json; there is: metrics.jsonl"):
        checkpointer.find(tmp_path / "fresh")
    with refused(r"has no checkpoint: .*MANIFEST.json; did you mean .*/gpt-small\?$"):
        checkpointer.find(tmp_path)  # the folder that the run is in
    with refused("is a file"):
        checkpointer.find(tmp_path / "fresh" / "metrics.jsonl")


@pytest.mark.parametrize(
    "text",
    [b"", b"garbage\n", b"step-000099\n", b"step-000020\r\n", b"step-000020", b"../../etc\n", b"\xff\xfe\x00", b"step-20\n", b"x" * 5000],
)
def test_a_damaged_latest_is_ignored_with_a_warning(text: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = save_steps(tmp_path, 10, 20)
    (tmp_path / "checkpoints" / "latest").write_bytes(text)
    with caplog.at_level(logging.WARNING):
        assert checkpointer.find(tmp_path).name == "step-000020"
    assert "ignored" in caplog.text and "latest" in caplog.text


def test_latest_absent_old_or_a_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = save_steps(tmp_path, 10, 20)
    latest = tmp_path / "checkpoints" / "latest"
    latest.write_text("step-000010\n")
    assert checkpointer.find(tmp_path).name == "step-000020"
    assert "the newest folder is step-000020" in caplog.text
    latest.unlink()
    caplog.clear()
    assert checkpointer.find(tmp_path).name == "step-000020"
    assert caplog.text == ""
    latest.symlink_to("/dev/zero")
    assert checkpointer.find(tmp_path).name == "step-000020"
    assert "symbolic link" in caplog.text


@pytest.mark.parametrize("target", ["elsewhere", "absent", "step-000004"])
def test_a_link_with_a_steps_name_is_refused_at_the_start(tmp_path: Path, target: str) -> None:
    (tmp_path / "checkpoints" / "elsewhere").mkdir(parents=True)
    link = tmp_path / "checkpoints" / "step-000004"
    link.symlink_to(target)
    with refused(rf"step-000004 is a symbolic link \(to {target}\)"):
        Checkpointer(tmp_path).prepare()
    with refused("step-000004 is a symbolic link"):
        Checkpointer(None).find(tmp_path)
    assert link.is_symlink()


def test_a_link_that_appears_while_a_run_saves_is_no_reason_to_stop(tmp_path: Path) -> None:
    """The save says why it was none, and the next step's is one."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    saver = Checkpointer(run)
    saver.prepare()
    elsewhere.mkdir()
    (run / "checkpoints" / "step-000004").symlink_to(elsewhere)
    report = saver.save(4, whole(weights()), {})
    assert not report.saved and "a symbolic link has the step folder's name" in report.reason
    assert saver.save(5, whole(weights()), {}).saved and os.listdir(elsewhere) == []
    assert sorted(os.listdir(run / "checkpoints")) == ["latest", "step-000004", "step-000005"]


# Damage


def damage_cases() -> dict[str, Callable[[Path], Any]]:
    shard = "rank00000-00000.safetensors"

    def cut(amount: int | None) -> Callable[[Path], Any]:
        def apply(step_dir: Path) -> None:
            size = (step_dir / shard).stat().st_size
            os.truncate(step_dir / shard, 0 if amount is None else size - amount)

        return apply

    def link_out(step_dir: Path) -> None:
        shutil.move(step_dir / shard, step_dir.parent.parent / "elsewhere")
        (step_dir / shard).symlink_to(step_dir.parent.parent / "elsewhere")

    return {
        "has .* bytes, its manifest says": cut(1),
        "has 0 bytes, its manifest says": cut(None),
        "has .* bytes, its manifest says .*": cut(300),
        f"{shard} is missing": lambda d: (d / shard).unlink(),
        "state.json is missing": lambda d: (d / "state.json").unlink(),
        "has no MANIFEST.json": lambda d: (d / MANIFEST_NAME).unlink(),
        "MANIFEST.json is not valid JSON": lambda d: (d / MANIFEST_NAME).write_text(""),
        "is a symbolic link": link_out,
    }


@pytest.mark.parametrize("text", damage_cases())
def test_damage_is_named_with_the_way_out(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, 10, 20, 30)
    damage_cases()[text](tmp_path / "checkpoints" / "step-000030")
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(CheckpointError, match=text) as error:
        checkpointer.find(tmp_path)
    assert "--resume-fallback" in str(error.value) and "--ckpt-step N to choose one of 10, 20" in str(error.value)
    assert "step-000030" in str(error.value)
    assert checkpointer.find(tmp_path, fallback=True).name == "step-000020"
    assert "trying the one before it" in caplog.text
    assert checkpointer.find(tmp_path, ckpt_step=10).name == "step-000010"
    with pytest.raises(CheckpointError):
        Checkpointer(None).load(tmp_path / "checkpoints" / "step-000030", whole(weights()))


def test_everything_damaged_and_the_only_one_damaged(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    os.truncate(tmp_path / "checkpoints" / "step-000010" / "state.json", 3)
    with refused("There is no other checkpoint beside it"):
        Checkpointer(None).find(tmp_path)
    with refused(r"no sound checkpoint under .*: 1 tried, all damaged"):
        Checkpointer(None).find(tmp_path, fallback=True)


def test_one_flipped_bit_in_any_file_is_always_caught(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, max_file_bytes=200)
    step_dir = tmp_path / "checkpoints" / "step-000010"
    rng = random.Random(7)
    names = sorted(os.listdir(step_dir))
    assert len(names) > 3
    for name in names:
        data = (step_dir / name).read_bytes()
        for _ in range(20):
            position = rng.randrange(len(data))
            (step_dir / name).write_bytes(data[:position] + bytes([data[position] ^ 1 << rng.randrange(8)]) + data[position + 1 :])
            with refused(name):
                Checkpointer(None).find(tmp_path)
        (step_dir / name).write_bytes(data)
    assert_loads(Checkpointer(None).find(tmp_path), 10)


def test_a_pickle_is_never_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beside the files it is a warning, in place of one an error."""
    save_steps(tmp_path, 10)
    step_dir, canary = tmp_path / "checkpoints" / "step-000010", tmp_path / "canary"
    listed = sorted(os.listdir(step_dir))
    pickled = b"cposix\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
    for name in (".metadata", "__0_0.distcp", "model.pt", "extra.safetensors"):
        (step_dir / name).write_bytes(pickled)
    assert_loads(Checkpointer(None).find(tmp_path), 10)
    assert "does not list, ignored: .metadata, __0_0.distcp, extra.safetensors, model.pt" in caplog.text
    for name in listed:
        (step_dir / name).write_bytes(pickled)
        for read in (lambda: Checkpointer(None).find(tmp_path), lambda: Checkpointer(None).read_state(step_dir)):
            with pytest.raises(CheckpointError):
                read()
    assert not canary.exists()


def forge(step_dir: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite a manifest with a right hash of its own, as an attacker or a wrong tool would."""
    import hashlib

    document = json.loads((step_dir / MANIFEST_NAME).read_bytes())
    for name in document["files"]:
        data = (step_dir / name).read_bytes()
        document["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(document)
    document["manifest_sha256"] = "0" * 64
    text = json.dumps(document).encode()
    (step_dir / MANIFEST_NAME).write_bytes(text.replace(b"0" * 64, hashlib.sha256(text).hexdigest().encode(), 1))


def test_a_shard_missing_from_the_manifest_too_does_not_load_silently(tmp_path: Path) -> None:
    """The trap: a reader that infers shapes from the chunks it finds would load a smaller tensor, or leave parts unset."""
    full = torch.randn(8, 4)
    step_dir = store(tmp_path, full, pieces=[Piece((0, 0), full[:5]), Piece((5, 0), full[5:])])
    (step_dir / "rank00000-00001.safetensors").rename(tmp_path / "gone")
    document = json.loads((step_dir / MANIFEST_NAME).read_bytes())
    document["files"].pop("rank00000-00001.safetensors")
    (step_dir / MANIFEST_NAME).write_text(json.dumps(document))
    forge(step_dir, lambda d: None)
    with refused(r"w \[8, 4\] is not stored completely and once: its pieces hold 20 elements"):
        Checkpointer(None).load(step_dir, {"w": GlobalTensor.whole(torch.zeros(8, 4))})


def test_files_that_contradict_the_manifest_are_refused(tmp_path: Path) -> None:
    step_dir = save_steps(tmp_path, 1).find(tmp_path)
    half = whole({"half": weights()["half"]})
    for change, text in (
        (lambda d: d["tensors"]["one"].update(dtype="I32"), "holds one as F32, the manifest lists it as I32"),
        (lambda d: d["tensors"].pop("one"), "holds one as F32, the manifest lists it not at all"),
    ):
        forge(step_dir, change)
        with refused(text):
            Checkpointer(None).load(step_dir, half, partial=True)
    step_dir = save_steps(tmp_path / "twice", 1).find(tmp_path / "twice")
    first, second = "rank00000-00000.safetensors", "rank00001-00000.safetensors"
    shutil.copy(step_dir / first, step_dir / second)
    forge(step_dir, lambda d: d["files"].update({second: d["files"][first]}))
    with refused("not stored completely and once"):
        Checkpointer(None).load(step_dir, whole(weights()))


def test_folders_that_are_links_or_badly_named_are_no_steps(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step-000010", tmp_path / "outside")
    (folder / "step-000099").symlink_to(tmp_path / "outside")
    for name in ("step-99", "step-0000098", "step-000097.part-abc", "step-+00096", "step-00009٣", "step-000095.replaced-00ff"):
        shutil.copytree(folder / "step-000010", folder / name)
    (folder / "step-000094").touch()
    assert list(list_steps(folder)) == [10]


def test_a_state_that_was_changed_or_is_of_a_newer_format_is_not_read_even_without_a_verification(tmp_path: Path) -> None:
    step_dir = save_steps(tmp_path, 10).find(tmp_path)
    text = (step_dir / "state.json").read_text()
    (step_dir / "state.json").write_text(text.replace("640", "641"))
    with refused(r"state.json is damaged: its contents do not match the manifest"):
        Checkpointer(None).read_state(step_dir)
    (step_dir / "state.json").write_text(json.dumps({**json.loads(text), "format_version": 2}))
    forge(step_dir, lambda d: None)
    with refused(r"state.json has format version 2, this program reads up to 1: a newer megatron_sp wrote it"):
        Checkpointer(None).read_state(step_dir)


# Saving over, pruning, sweeping


def test_the_same_step_saved_twice_by_one_process_is_written_once(tmp_path: Path) -> None:
    checkpointer = save_steps(tmp_path, 10)
    before = (tmp_path / "checkpoints" / "step-000010" / MANIFEST_NAME).stat().st_ino
    report = checkpointer.save(10, whole(weights(10)), STATE)
    assert report.saved and report.num_bytes == 0 and "already" in report.reason
    assert (tmp_path / "checkpoints" / "step-000010" / MANIFEST_NAME).stat().st_ino == before
    (tmp_path / "checkpoints" / "step-000010" / "state.json").unlink()
    assert checkpointer.save(10, whole(weights(10)), STATE).num_bytes > 0  # it is damaged: not taken for saved
    assert_loads(checkpointer.find(tmp_path), 10)


def test_what_is_in_the_way_is_set_aside_not_overwritten(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another continuation and a folder without a manifest are kept; equal tensors, after a resume, leave no copy."""
    save_steps(tmp_path, 10, 20, 30)
    folder = tmp_path / "checkpoints"
    assert Checkpointer(tmp_path).save(20, whole(weights(77)), STATE).saved
    assert Checkpointer(None).find(tmp_path) == folder / "step-000020"  # not step 30 of the old line
    assert_loads(folder / "step-000020", 77)
    assert_loads(next(folder.glob("step-000020.replaced-*")), 20)
    assert_loads(next(folder.glob("step-000030.abandoned-*")), 30)
    assert "step-000030 was left from another continuation" in caplog.text
    for run, whole_folder, copies in ((tmp_path / "same", True, 0), (tmp_path / "cut", False, 1)):
        step_dir = save_steps(run, 10).find(run)
        if not whole_folder:
            (step_dir / MANIFEST_NAME).unlink()
        assert Checkpointer(run).save(10, whole(weights(10)), {"other": 1}).saved
        assert Checkpointer(None).read_state(step_dir)["other"] == 1
        assert len(list(step_dir.parent.glob("step-000010.replaced-*"))) == copies and len(os.listdir(step_dir.parent)) == 2 + copies
        assert_loads(step_dir, 10)


def test_a_replaced_folder_comes_back_when_the_save_did_not_finish(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    folder = tmp_path / "checkpoints"
    (folder / "step-000020").rename(folder / "step-000020.replaced-0a")
    shutil.copytree(folder / "step-000010", folder / "step-000005.replaced-0b")  # long done with: newer steps exist
    notes = Checkpointer(tmp_path).prepare()
    assert notes == ["put step-000020.replaced-0a back as step-000020: the save that replaced it did not finish"]
    assert Checkpointer(None).find(tmp_path).name == "step-000020"
    assert (folder / "step-000005.replaced-0b").is_dir()


def test_left_overs_are_removed_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, 10)
    folder = tmp_path / "checkpoints"
    (folder / "step-000020.part-0123abcd").mkdir()
    (folder / "step-000020.part-0123abcd" / "x").touch()
    (folder / "mine.part-1").mkdir()
    (folder / ".latest.0a1b2c3d.tmp").touch()
    (folder / "step-000030.part-ff").symlink_to(tmp_path)
    notes = Checkpointer(tmp_path).prepare()
    assert notes == [f"removed {folder / 'step-000020.part-0123abcd'}, left over from a save that did not finish"]
    assert notes[0] in caplog.text
    assert sorted(os.listdir(folder)) == ["latest", "mine.part-1", "step-000010", "step-000030.part-ff"]


def test_prepare_where_nothing_can_be_written_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(DiskError, match="give another --save") as error:
        Checkpointer(tmp_path / "run").prepare()
    assert error.value.exit_code == 6


def test_pruning_keeps_the_newest_and_the_multiples(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep_last=2, keep_every=40)
    removed = []
    for step in range(10, 101, 10):
        removed += checkpointer.save(step, whole(weights(step)), STATE).removed
    assert list(list_steps(tmp_path / "checkpoints")) == [40, 80, 90, 100]
    assert removed == [step_name(step) for step in (10, 20, 30, 50, 60, 70)]


def test_pruning_counts_complete_ones_only(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)
    folder = tmp_path / "checkpoints"
    os.truncate(folder / "step-000030" / "state.json", 1)
    checkpointer = Checkpointer(tmp_path, keep_last=2)
    checkpointer.save(40, whole(weights(40)), STATE)
    assert list(list_steps(folder)) == [20, 30, 40]  # 20 and 40 are the two sound ones; the damaged one between them stays
    checkpointer.save(50, whole(weights(50)), STATE)
    assert list(list_steps(folder)) == [40, 50]


# Disks that refuse


def test_too_little_space_prunes_first_and_then_skips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 10, 20, 30)
    monkeypatch.setattr(commit, "free_bytes", lambda path: 1000)
    checkpointer = Checkpointer(tmp_path, keep_last=2)
    report = checkpointer.save(40, {"w": GlobalTensor.whole(torch.zeros(250))}, {})
    assert not report.saved and "1.2 times" in report.reason and report.path is None
    assert list(list_steps(tmp_path / "checkpoints")) == [20, 30]
    assert checkpointer.save(40, {"w": GlobalTensor.whole(torch.zeros(208))}, {}).saved  # 998.4 bytes are needed


def refuse(*args: Any) -> None:
    raise OSError(30, "Read-only file system")


@pytest.mark.parametrize("name", ["write_synced", "free_bytes", "_publish"])
def test_an_error_of_the_disk_at_any_step_is_a_report(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = save_steps(tmp_path, 10)
    with monkeypatch.context() as patch:
        patch.setattr(commit, name, refuse)
        report = checkpointer.save(20, whole(weights(20)), STATE)
    assert not report.saved and "Read-only" in report.reason
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-000010"]
    assert checkpointer.save(20, whole(weights(20)), STATE).saved


def test_failing_to_prune_or_to_update_latest_does_not_unsave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = save_steps(tmp_path, 10)
    for name in ("atomic_write_text", "outdated"):
        monkeypatch.setattr(commit, name, refuse)
    assert checkpointer.save(20, whole(weights(20)), STATE).saved
    assert "after step-000020 was saved" in caplog.text and "could not be deleted" in caplog.text
    assert checkpointer.find(tmp_path).name == "step-000020"


def test_a_rank_with_nothing_to_write_has_its_kill_point_too(tmp_path: Path) -> None:
    called: list[str] = []
    assert safetensors_file.write_own_files(tmp_path, 3, [], 1 << 30, called.append) == {"files": {}}
    assert called == ["hash", "write", "shard"]


# Every cut of a save


def test_everything_is_on_the_disk_before_the_one_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def name(path: str | Path) -> str:
        return "staging" if ".part-" in Path(path).name else Path(path).name

    def watch_fsync(fd: int) -> None:
        events.append(f"fsync {name(os.readlink(f'/proc/self/fd/{fd}'))}")
        fsync(fd)

    def watch_rename(path: Path, target: Path) -> Path:
        events.append(f"rename {name(path)} to {name(target)}, {len(os.listdir(path))} files")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(Path, "rename", watch_rename)
    save_steps(tmp_path, 10)
    assert events[:-2] == [
        "fsync rank00000-00000.safetensors",
        "fsync staging",
        "fsync state.json",
        "fsync MANIFEST.json",
        "fsync staging",
        "rename staging to step-000010, 3 files",
        "fsync checkpoints",
    ]
    assert events[-2].startswith("fsync .latest.") and events[-1] == "fsync checkpoints"


def test_every_cut_of_the_commit_leaves_the_old_or_the_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop before the n-th change of the folder, for every n: what is found is always one of the two, whole."""

    class Cut(BaseException):
        pass

    def run(run_dir: Path, allowed: int) -> bool:
        save_steps(run_dir, 10)
        left = allowed

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                if left == 0:
                    raise Cut
                left -= 1
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for owner, name in ((os, "fsync"), (os, "mkdir"), (os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir")):
                patch.setattr(owner, name, counted(getattr(owner, name)))
            try:
                Checkpointer(run_dir, keep_last=2).save(20, whole(weights(20)), STATE)
            except Cut:
                return False
        return True

    found = []
    for allowed in range(100):
        run_dir = tmp_path / str(allowed)
        finished = run(run_dir, allowed)
        step_dir = Checkpointer(None).find(run_dir)
        assert_loads(step_dir, int(step_dir.name[-6:]))
        found.append(step_dir.name)
        Checkpointer(run_dir).prepare()
        assert Checkpointer(None).find(run_dir) == step_dir
        if finished:
            break
    assert found[0] == "step-000010" and found[-1] == "step-000020"
    assert found == sorted(found) and len(found) > 6
    assert read_manifest(tmp_path / str(len(found) - 1) / "checkpoints" / "step-000020").step == 20
