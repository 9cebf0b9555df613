"""Names of Megatron-LM, Megatron-DeepSpeed and DeepSpeed: each has its own answer, and what is offered for a typo can be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_sp.config.flags import foreign_flags as dialect
from megatron_sp.config.flags.arguments import config_from_args, scan
from megatron_sp.config.flags.foreign_flags import SPECIAL, idleness, meant_by, offered, refusal
from megatron_sp.config.flags.settings import targets
from megatron_sp.config.schema import Config
from megatron_sp.utils.errors import ConfigError

LINES = Path(__file__).with_name("upstream_names.txt").read_text().splitlines()
UPSTREAM = {name for line in LINES if not line.startswith("#") for name in line.split()}
SOUND = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 100 --train-iters 10 --lr 1e-3"


def parse(more: str) -> Config:
    return config_from_args([*SOUND.split(), *more.split()])


def refused(more: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(more)
    return str(caught.value)


def answered(name: str) -> str | None:
    """Return which kind of answer a name has."""
    tables = {
        "field": name in targets(), "special": name in SPECIAL, "rewritten": name in dialect.REWRITTEN,
        "family": name in dialect.COMPANIONS,
        "ignored": idleness(name) is not None, "refused": refusal(name) is not None,
    }  # fmt: skip
    return next((kind for kind, has in tables.items() if has), None)


def test_every_name_has_an_answer_with_a_reason_of_its_own() -> None:
    assert [name for name in sorted(UPSTREAM) if answered(name) is None] == []


def test_every_name_of_the_tables_is_one_of_some_program() -> None:
    tables = {*dialect.IGNORED_SWITCHES, *dialect.IGNORED_VALUES, *dialect.REFUSED}
    assert sorted(tables - UPSTREAM) == []


def test_a_known_name_takes_its_words_and_is_never_a_typo() -> None:
    words = [word for name in sorted(UPSTREAM) if answered(name) in ("ignored", "refused", "family") for word in (f"--{name}", "7")]
    switches = {f"--{name}" for name in dialect.IGNORED_SWITCHES}
    line = scan([word for i, word in enumerate(words) if word != "7" or words[i - 1] not in switches])
    assert line.problems == []
    text = refused(" ".join(f"--{setting.name} {' '.join(setting.words)}" for setting in line.settings))
    assert "did you mean" not in text and "is unknown" not in text and "unexpected" not in text


def test_nothing_is_offered_for_what_is_like_nothing() -> None:
    assert [meant_by(name) for name in ("presplit-sentences", "hidden-dim-multiplier", "max-padding-length", "qqq")] == [[]] * 4
    assert meant_by("cach-dirs") == []  # --patch-dim, which has no effect, is not near enough


def test_what_is_offered_can_be_used() -> None:
    assert [name for name in offered() if answered(name) in (None, "refused")] == []
    for name in [f"{known}x" for known in sorted(UPSTREAM)[::75]] + list(dialect.SYNONYMS):
        assert set(meant_by(name)) <= set(offered())
        assert name not in targets() or name not in dialect.SYNONYMS


@pytest.mark.parametrize(("typed", "meant"), [
    ("learning-rate", "lr"), ("max-steps", "train-iters"), ("num-heads", "num-attention-heads"), ("sequence-length", "seq-length"),
    ("micro-batchsize", "micro-batch-size"), ("global-batchsize", "global-batch-size"), ("hiden-size", "hidden-size"),
    ("num-layer", "num-layers"), ("num-attention-head", "num-attention-heads"), ("train-iter", "train-iters"),
    ("tensor-parallel-size", "tensor-model-parallel-size"), ("pipeline-parallel-size", "pipeline-model-parallel-size"),
    ("lr-decay-stlye", "lr-decay-style"), ("wieght-decay", "weight-decay"), ("savee", "save"), ("save-intervall", "save-interval"),
    ("tokenizer-mdoel", "tokenizer-model"), ("datapath", "data-path"), ("clipgrad", "clip-grad"), ("bf-16", "bf16"),
    ("beta2", "adam-beta2"), ("cache-dir", "data-cache-path"), ("save-steps", "save-interval"),
    ("expert-parallel-size", "expert-model-parallel-size"), ("wandb-projct", "wandb-project"),
    ("eval-interva", "eval-interval"),
])  # fmt: skip
def test_near_misses_of_common_names(typed: str, meant: str) -> None:
    assert meant_by(typed)[0] == meant


@pytest.mark.parametrize(("more", "reasons"), [
    ("--img-h 224 --patch-dim 16 --vision-backbone-type vit --dino-norm-last-layer", ["it is for models of images"] * 4),
    ("--inference-max-requests 8 --inference-dynamic-batching --flash-decode", ["for inference only"] * 3),
    ("--grpo-group-size 4 --rl-partial-rollouts", ["without --perform-rl-step it has no effect"] * 2),
    ("--inprocess-restart --inprocess-hard-timeout 90", ["--auto-resume goes on"] * 2), ("--retro-encoder-layers 2", ["without --retro-"]),
    ("--reset-iteration --no-load-lr-state", ["without --load it has no effect"] * 2), ("--mamba-head-dim 4", ["without --is-hybrid"]),
    ("--verify-integrity --replication --replication-jump 2", ["always hashed", "one format", "one format"]),
    ("--save x --async-save --async-strategy nvrx --async-ckpt-use-cpu-shm --ckpt-fully-parallel-load-exchange-algo broadcast", [
        "writes in a thread", "writes in a thread", "one format"]),
    ("--check-for-spiky-loss --check-for-large-grads --test-mode --enable-experimental", ["is checked", "is checked", "tests", "nothing"]),
    ("--wandb-group a --wandb-team b --wandb-entity c", ["its own environment variables"] * 3),
    ("--otel-endpoint x", ["--tensorboard-dir"]),
    ("--use-megatron-fsdp --fsdp-double-buffer --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim", [
        "ZeRO is one implementation"] * 4),
    ("--mtp-num-layers 0 --mtp-loss-scaling-factor 0.1", ["what happens anyway", "without --mtp-num-layers"]),
    ("--num-experts 4 --expert-tensor-parallel-size 2", ["an expert is whole on a rank"]),
    ("--recompute-num-layers 1 --recompute-method uniform", ["without --recompute-granularity it has no effect"] * 2),
    ("--recompute-activations --recompute-num-layers 1", ["without --recompute-granularity full it has no effect"]),
    ("--context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2 --moe-tp-extend-ep", ["changes no number"] * 3),
    ("--reuse-fp32-param --swap-attention --use-fused-rotary-pos-emb --use-fused-swiglu --use-cp-send-recv-overlap", ["memory is",
        "memory is", "which kernels run", "which kernels run", "communication has"]),
    ("--pre-tockens 65536 --next-tockens 0 --no-shared-storage --moe-capacity-bins-num 10 --verify-checkpoint", ["what happens anyway",
        "what happens anyway", "data is read", "every token is computed", "always hashed"]),
    ("--null-tokenizer-pad-id 0 --varlen-mock-dataset-config-json x", ["no sample of GPT", "without --use-varlen-dataset"]),
    ("--tokenizer-special-tokens a b --trust-remote-code", ["no code of theirs is run"] * 2),
])  # fmt: skip
def test_ignored_by_the_true_reason(more: str, reasons: list[str]) -> None:
    notes = parse(more).ignored_flags
    assert len(notes) == len(reasons) and all(reason in note for reason, note in zip(reasons, notes, strict=True)), notes


def test_names_for_wandb() -> None:
    logging = parse("--wandb-project-name p --wandb-name n").logging
    assert (logging.wandb_project, logging.wandb_exp_name) == ("p", "n")
    assert parse("--wandb-project p --wandb-name n --wandb-exp-name m").logging.wandb_exp_name == "m"
