"""Checkpoints of other programs in which one thing is not as it must be: one message that names the file, and nothing written."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import deepspeed_files, mutants_of_files
from support import megatron_files as theirs
from support.convert_models import random_model, write_run
from support.megatron_files import Kind
from test_convert_megatron import config_of, random_tensors

from megatron_sp.commands.cli import main
from megatron_sp.convert.command import is_out_of_memory
from megatron_sp.convert.copies import LastRead
from megatron_sp.convert.formats.deepspeed_files import number
from megatron_sp.convert.formats.megatron_args import facts_of
from megatron_sp.convert.formats.megatron_dist import is_flattened
from megatron_sp.convert.model import build, nearest, parameter_shapes, require_sound
from megatron_sp.utils.errors import EXIT_CHECKPOINT, EXIT_CONFIG, CheckpointError

Change = Callable[[dict[str, Any]], object]
LONG = pytest.mark.long


def converted(source: Path, capsys: pytest.CaptureFixture[str], *more: object, to: str = "megatron_sp") -> tuple[int, str]:
    """The exit code, and what was said in the end; a refused source leaves nothing."""
    output = source.parent / "made" / "out"
    code = main(["convert", "--input", str(source), "--to", to, "--output", str(output), *map(str, more)])
    said = capsys.readouterr().err
    assert code == 0 or (not output.parent.exists() and said.count("error: ") == 1), said
    assert len(said) < 5000 and all(line.isprintable() for line in said.splitlines())
    return code, said


def attention(trees: dict[str, Any]) -> None:
    trees["args"].num_attention_heads, trees["args"].kv_channels = 10**6, None


def numbered(names: Callable[[int], Any]) -> Change:
    """Adam's state, whose groups name parameters so."""

    def change(tree: dict[str, Any]) -> None:
        tensors = theirs.registered(tree["model"]).values()
        state = {i: {"exp_avg": torch.zeros_like(t), "exp_avg_sq": torch.zeros_like(t)} for i, t in enumerate(tensors)}
        tree["optimizer"] = {"optimizer": {"state": state, "param_groups": [{"params": [names(i) for i in state]}]}}

    return change


MEGATRON: dict[str, tuple[Change, str]] = {
    "an array as the window": (lambda tree: setattr(tree["args"], "window_size", np.arange(3)), "window_size is"),
    "an array as the version": (lambda tree: tree.update(checkpoint_version=np.arange(3)), "checkpoint_version is"),
    "heads without columns": (attention, "num_attention_heads is 1000000, more than the 24 columns"),
    "a list as a number": (numbered(lambda i: [i]), "the optimizer has no groups of parameters"),
    "a name for the terminal": (lambda tree: tree["model"].update({"\x1b[2J" + "y" * 6000: torch.zeros(2)}), "\\x1b[2Jyyy"),
    "words without rows": (lambda tree: tree["model"].update({"embedding.word_embeddings.weight": torch.zeros(())}), "must be a table"),
}


@pytest.mark.parametrize("case", [*list(MEGATRON)[:3], *(pytest.param(case, marks=LONG) for case in list(MEGATRON)[3:])])
def test_one_thing_is_wrong_in_a_file_of_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    change, message = MEGATRON[case]
    config = config_of("gpt", num_layers=1)
    trees = theirs.rank_trees(config, random_tensors(config), Kind("core"))
    for tree in trees.values():
        change(tree)
    source = theirs.save(tmp_path / "theirs", trees)
    code, said = converted(source, capsys, "--vocab-size", config.vocab_size)
    assert code == EXIT_CHECKPOINT and message in said and str(source) in said


@pytest.mark.parametrize("shape", [(), (0,), (24,), (0, 24), (1, 2, 3)])
@pytest.mark.parametrize("name", ["embedding.word_embeddings", "mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_qkv"])
def test_weights_that_are_no_tables_tell_nothing(name: str, shape: tuple[int, ...]) -> None:
    shapes = parameter_shapes(config_of("gpt", num_layers=1))
    full = next(one for one in shapes if one.endswith(f"{name}.weight"))
    with pytest.raises(CheckpointError, match=f"{full} is .*, and must be a table"):
        facts_of(Path("here"), {**shapes, full: shape}, shapes, tp=1, num_layers=1)


def test_numbers_that_count_nothing_are_none() -> None:
    assert [number(value) for value in (3, 2.5, float("nan"), float("inf"), -float("inf"), 10**30, True, "3", None)] == [
        3,
        2.5,
        *[None] * 7,
    ]


def deepspeed_folder(path: Path) -> Path:
    model = random_model("gpt2", optimizer=True)
    tensors = {name: model.store.read(name) for name in model.weights()}
    moments = {kind: {name: model.store.read(f"optimizer.{kind}.{name}") for name in tensors} for kind in ("exp_avg", "exp_avg_sq")}
    return deepspeed_files.write_universal(path, model.config, tensors, moments, deepspeed_files.Save(zero=1))


def test_a_universal_parameter_of_one_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = deepspeed_folder(tmp_path / "theirs")
    file = next(source.glob("*/zero/*final_layernorm.weight/fp32.pt"))
    for tree, message in (({"param": torch.ones(())}, "final_layernorm.weight"), ({"param": torch.ones(()), "cat_dim": 0}, "one number")):
        deepspeed_files.save_tree(file, tree)
        code, said = converted(source, capsys, "--vocab-size", 37, "--qkv-layout", "flat")
        assert code == EXIT_CHECKPOINT and message in said


@pytest.mark.parametrize("folder", ["iter_0000010", "iter_0000010/mp_rank_00", "checkpoints"])
def test_folders_elsewhere_are_not_read_through_links(tmp_path: Path, capsys: pytest.CaptureFixture[str], folder: str) -> None:
    config = config_of("gpt", num_layers=1)
    if folder == "checkpoints":
        source = write_run(random_model("gpt2"), tmp_path / "source")
    else:
        source = theirs.save(tmp_path / "source", theirs.rank_trees(config, random_tensors(config), Kind("core")))
    shutil.move(source / folder, tmp_path / "elsewhere")
    (source / folder).symlink_to(tmp_path / "elsewhere")
    code, said = converted(source, capsys, *(["--vocab-size", config.vocab_size] if folder != "checkpoints" else []), to="megatron_sp")
    assert code == EXIT_CHECKPOINT and f"{source / folder} is a symbolic link" in said
    named = tmp_path / "named"
    named.symlink_to(tmp_path / "elsewhere")  # by the user, and not in the checkpoint
    if folder == "iter_0000010":
        assert converted(named, capsys, "--vocab-size", config.vocab_size)[0] == 0


def test_a_configuration_that_is_stored_wrongly_is_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_run(random_model("gpt2"), tmp_path / "source")
    (step,) = source.glob("checkpoints/step-*")
    state = json.loads((step / "state.json").read_text())
    state["config"]["model"]["swiglu"] = 3
    (step / "state.json").write_text(json.dumps(state))
    mutants_of_files.reseal(step)
    code, said = converted(source, capsys, to="hf")
    assert code == EXIT_CHECKPOINT and f"{step / 'state.json'}: 'model.swiglu'" in said


def test_near_names_are_looked_for_in_few() -> None:
    asked = iter(["decoder.layers.0.norm.weigh", *(f"{i}.w" for i in range(10**4))])
    assert nearest("decoder.layers.0.norm.weight", asked) == " (nearest: decoder.layers.0.norm.weigh)"
    assert len(list(asked)) > 9000


def test_shapes_are_those_of_the_model_with_all_its_blocks() -> None:
    for name in ("gpt2", "llama", "neox", "bert", "megatron-bert", "bert-classifier"):
        model = random_model(name)
        whole = build(model.config, model.num_classes)
        expected = {name: tuple(p.shape) for name, p in whole.named_parameters()}
        assert list(parameter_shapes(model.config, model.num_classes)) == list(expected)
    config = config_of("gpt", num_layers=1025)
    with pytest.raises(CheckpointError, match=r"num_layers \(1,025\) must not exceed 1,024"):
        require_sound(config, 10**6, "here")


def test_shares_of_more_ranks_than_there_are() -> None:
    assert is_flattened((4, 2, 32), (16, 16)) and not is_flattened((1 << 10, 1 << 10, 1), (1 << 10, 1 << 10))


def test_what_says_that_memory_is_short() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value) and is_out_of_memory(MemoryError()) and not is_out_of_memory(RuntimeError("of ours"))


def test_stores_that_read_from_one_keep_one_tensor() -> None:
    model = random_model("gpt2")
    kept = LastRead(model.store)
    first, second = list(kept.tensors())[:2]
    assert kept.read(first) is kept.read(first)
    before = kept.read(first)
    assert kept.read(second) is not before and kept.read(first) is not before


SEEDS = {"hf": 6, "megatron": 2, "megatron_sp": 5}
FORMATS = ("hf", "megatron", "megatron-dist", "megatron-deepspeed", "megatron_sp")


@pytest.mark.parametrize(("target", "count"), [*SEEDS.items(), *(pytest.param(name, 250, marks=LONG) for name in FORMATS)])
def test_mutants(tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, count: int) -> None:
    """Whatever is wrong in a folder: it is converted, or refused by one message about it, and nothing is left."""
    sound = write_run(random_model("gpt2", optimizer=True), tmp_path / "sound")
    if target != "megatron_sp":
        assert main(["convert", "--input", str(sound), "--to", target, "--output", str(tmp_path / "other")]) == 0
        sound = tmp_path / "other"
    more = ["--vocab-size", 37] if target.startswith("megatron-") or target == "megatron" else []
    capsys.readouterr()
    codes = []
    for seed in range(count):
        draw, source = random.Random(seed), tmp_path / f"mutant-{seed}"
        shutil.copytree(sound, source)
        mutants_of_files.folder_of(source, draw)
        if target == "megatron_sp" and draw.random() < 0.8:
            for step in source.glob("checkpoints/step-*"):
                if (step / "MANIFEST.json").is_file():
                    mutants_of_files.reseal(step)
        code, said = converted(source, capsys, *more, to="hf" if target == "megatron_sp" else "megatron_sp")
        assert code in (0, EXIT_CHECKPOINT, EXIT_CONFIG) and source.name in said, (seed, said)
        codes.append(code)
        shutil.rmtree(source)
        shutil.rmtree(tmp_path / "made", ignore_errors=True)
    assert count < 5 or EXIT_CHECKPOINT in codes
