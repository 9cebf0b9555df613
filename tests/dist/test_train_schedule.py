"""``megatron-sp schedule train``: plans and functions train as the model itself does; dropout is the same in a run that goes on."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.training import NO_DROPOUT, Outcome, assert_same_run, records, train
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="transformers (Python >= 3.11) is not installed")

from megatron_sp.commands import cli  # noqa: E402
from megatron_sp.schedule import Mesh, presets  # noqa: E402

FAMILY = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32, "vocab_size": 60, "bos_token_id": 0, "eos_token_id": 0}
TP = ("--tp", 2)
DROPS = ("--attention-dropout", 0.2, "--hidden-dropout", 0.2, "--attention-backend", "unfused")
FUNCTION = """
def write(s, seq):
    assert not seq
    s["transformer.h.*.mlp"].sync("fwd_pre", "copy")
    s["transformer.h.*.mlp.c_fc"].column(input="prepared")
    s["transformer.h.*.mlp.c_proj"].row()

def zero(s, seq):
    s.zero(1)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with weights, its plan for tp 2 with the sequence cut, and functions that write others."""
    torch.manual_seed(3)
    made = tmp_path_factory.mktemp("gpt2")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**FAMILY))
    model.save_pretrained(made)
    presets.auto(model, Mesh.sizes(tp=2), seq=True).save(made / "plan.yaml")
    (made / "bad.yaml").write_text((made / "plan.yaml").read_text().replace("transformer.h.*.mlp,", "transformer.h.*.mpl,"))
    return made


def command(plan: object, words: list[str]) -> None:
    raise SystemExit(cli.main(["schedule", "train", str(plan), *words]))


def run(tmp_path: Path, folder: Path, plan: object, *flags: object, ranks: int = 2, setup: Any = None) -> Outcome:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "my_lines.py").write_text(FUNCTION)
    words = ("--model", folder, "--fp64", "--adam-eps", "1e-3", "--train-iters", 2, *flags)
    return train(tmp_path, *words, ranks=ranks, setup=setup, program=partial(command, plan))


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in records(folder)]


def test_a_plan_and_a_function_train_as_the_model_does(tmp_path: Path, folder: Path) -> None:
    found = {}
    for name, ranks, plan, flags in (
        ("whole", 1, "auto", ()), ("file", 2, folder / "plan.yaml", (*TP, "--sequence-parallel")), ("function", 2, "my_lines:write", TP)
    ):  # fmt: skip
        run(tmp_path, folder, plan, *NO_DROPOUT, *flags, "--save", tmp_path / name, ranks=ranks).expect(0)
        found[name] = losses(tmp_path / name)
    assert len(found["whole"]) == 2 and found["whole"][0] != found["whole"][1]
    assert found["file"] == pytest.approx(found["whole"], rel=1e-10)
    assert found["function"] == pytest.approx(found["whole"], rel=1e-10)


BAD = {
    "a glob": ("bad.yaml", ("--sequence-parallel",), "'transformer.h.*.mpl' names no module"),
    "no file": ("no.yaml", (), "is not a file: give a plan.yaml"),
    "no module": ("no_lines:write", (), "no_lines:write: no_lines cannot be imported: ModuleNotFoundError"),
    "no function": ("my_lines:wright", (), "my_lines has no function wright"),
    "zero": ("my_lines:zero", (), "my_lines:zero says zero, which is a flag of a training"),
    "the flag": ("plan.yaml", (), "plan.yaml cuts activations along the sequence over tp, and --sequence-parallel is not given"),
}  # fmt: skip


@pytest.mark.parametrize("case", [c if c in ("a glob", "no module") else pytest.param(c, marks=pytest.mark.long) for c in BAD])
def test_a_bad_plan_is_one_message(tmp_path: Path, folder: Path, case: str) -> None:
    plan, flags, words = BAD[case]
    outcome = run(tmp_path, folder, plan if ":" in plan else folder / plan, *NO_DROPOUT, *TP, *flags).expect(2, words)
    assert outcome.text.count("error:") == 1 and "Traceback" not in outcome.text, outcome.text


def note_masks(rank: int) -> None:
    """In each process: a digest of the shape and the bits of all masks that ``F.dropout`` draws."""

    original = F.dropout

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0 or not torch.is_grad_enabled():  # apply() looks where dropout is, without gradients
            return original(x, p, training, inplace)
        mask = torch.bernoulli(torch.full_like(x.detach(), 1 - p))
        with open(f"masks-{rank}.jsonl", "a") as file:
            file.write(json.dumps([list(x.shape), hashlib.sha256(mask.numpy().tobytes()).hexdigest()]) + "\n")
        return x * mask / (1 - p)

    F.dropout = dropout


def noted(folder: Path, rank: int) -> dict[str, list[str]]:
    """Digests by kind: hidden [b, s, h] or heads [b, n, s, s]."""
    found = defaultdict(list)
    for line in (folder / f"masks-{rank}.jsonl").read_text().splitlines():
        shape, digest = json.loads(line)
        found["heads" if len(shape) == 4 else "hidden"].append(digest)
    return found


@pytest.mark.long
def test_dropout_with_tp_is_the_same_in_a_run_that_goes_on_and_recomputes(tmp_path: Path, folder: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run(tmp_path, folder, "auto", *DROPS, *TP, "--save", whole, setup=note_masks).expect(0)
    one, other = (noted(tmp_path, rank) for rank in range(2))
    assert one["hidden"] == other["hidden"] and not set(one["heads"]) & set(other["heads"])
    # two steps of two micro-batches, two layers
    assert len(set(one["hidden"])) == 4 * (1 + 2 * 2) and len(set(one["heads"])) == 4 * 2
    run(tmp_path, folder, "auto", *DROPS, *TP, "--save", halves, "--exit-interval", 1, setup=note_masks).expect(0)
    more = ("--auto-resume", "--recompute-granularity", "full")
    run(tmp_path, folder, "auto", *DROPS, *TP, "--save", halves, *more, setup=note_masks).expect(0)
    assert_same_run(halves, whole)


@pytest.mark.long
@pytest.mark.parametrize(
    "flags, alike",
    [(("--tp", 2, "--sequence-parallel"), "embedding"), (("--sp", 2), "nothing"), ((), "nothing"),
     (("--tp", 2, "--sp", 2), "hidden of tp")],
    ids=["tp_seq", "sp", "dp", "tp, sp"],
)  # fmt: skip
def test_dropout_in_other_layouts(tmp_path: Path, folder: Path, flags: tuple[object, ...], alike: str) -> None:
    ranks = 4 if len(flags) == 4 else 2
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    common = (*DROPS, *flags, "--zero-stage", 1)
    run(tmp_path, folder, "auto", *common, "--save", whole, ranks=ranks, setup=note_masks).expect(0)
    masks = [noted(tmp_path, rank) for rank in range(ranks)]
    assert not set(masks[0]["heads"]) & set(masks[1]["heads"])
    shared = set(masks[0]["hidden"]) & set(masks[1]["hidden"])
    assert len(shared) == {"nothing": 0, "embedding": 4, "hidden of tp": len(masks[0]["hidden"])}[alike]
    assert ranks == 2 or not set(masks[0]["hidden"]) & set(masks[2]["hidden"])
    run(tmp_path, folder, "auto", *common, "--save", halves, "--exit-interval", 1, ranks=ranks).expect(0)
    run(tmp_path, folder, "auto", *common, "--save", halves, "--auto-resume", ranks=ranks).expect(0)
    again = tmp_path / "again"
    run(tmp_path, folder, "auto", *common, "--save", again, ranks=ranks).expect(0)
    assert_same_run(halves, again)


@pytest.mark.long
def test_verification_leaves_dropout_out(tmp_path: Path, folder: Path) -> None:
    run(tmp_path, folder, "auto", *DROPS, *TP, "--verify-parallelism").expect(0, "hidden dropout (0.2) is off", "the layout equals one")
