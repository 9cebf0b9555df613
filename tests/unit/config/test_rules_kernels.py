"""--cuda-graphs: what forbids a graph, each in a line, and what Megatron's flags about graphs mean."""

from __future__ import annotations

import pytest

from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.rules_kernels import obstacles
from megatron_sp.config.schema import Config
from megatron_sp.utils.errors import EXIT_CONFIG, ConfigError

SOUND = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 100 --train-iters 10 --lr 1e-3"
    " --attention-dropout 0"
)
FORBIDDEN = [
    ("--device cpu", 1, "--device cpu"), ("--distributed-backend gloo", 1, "--distributed-backend gloo"),
    ("--num-experts 4", 1, "--num-experts"), ("--pipeline-model-parallel-size 2", 2, "--pipeline-model-parallel-size"),
    ("--offload-optimizer", 1, "--offload-optimizer"), ("--offload-activations", 1, "--offload-activations"),
    ("--reset-attention-mask --reset-position-ids", 1, "--reset-attention-mask"), ("--check-collectives", 1, "--check-collectives"),
    ("--enable-fault-injection", 1, "--enable-fault-injection"),
    ("--attention-dropout 0.1 --recompute-granularity selective", 1, "--attention-dropout"),
]  # fmt: skip
BERT = [
    ("", "length of each of BERT's sequences"), ("--bert-pack-sequences --bert-no-binary-head", "--bert-pack-sequences"),
    ("--attention-backend unfused --context-parallel-size 2", "length of each of BERT's sequences"),
]  # fmt: skip


def parse(more: str, world_size: int = 1, family: str = "gpt") -> Config:
    return config_from_args([*SOUND.split(), *more.split()], world_size=world_size, family=family)


@pytest.mark.parametrize(("flags", "world_size", "names"), FORBIDDEN, ids=[flags for flags, _, _ in FORBIDDEN])
def test_what_forbids_a_graph_is_an_error_with_on_and_a_reason_with_auto(flags: str, world_size: int, names: str) -> None:
    found = obstacles(parse(flags, world_size))
    assert len(found) == 1 and names in found[0].reason
    with pytest.raises(ConfigError) as caught:
        parse(f"{flags} --cuda-graphs on", world_size)
    text = str(caught.value)
    assert text.startswith(f"--cuda-graphs on cannot be: {found[0].reason}; {found[0].way_out}")
    assert text.endswith("or use --cuda-graphs auto or off") and caught.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize(("flags", "names"), BERT, ids=[flags for flags, _ in BERT])
def test_of_bert(flags: str, names: str) -> None:
    found = obstacles(parse(flags, 2 if "parallel" in flags else 1, "bert"))
    assert len(found) == 1 and names in found[0].reason


def test_every_reason_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--cuda-graphs on --offload-activations --check-collectives")
    assert "2 things are wrong" in str(caught.value)
    assert "--offload-activations copies" in str(caught.value) and "--check-collectives compares" in str(caught.value)


@pytest.mark.parametrize("flags", [
    "", "--attention-dropout 0.1",
    "--attention-dropout 0.1 --recompute-granularity full --attention-backend unfused", "--recompute-granularity full", "--zero-stage 3",
    "--rampup-batch-size 1 1 10 --global-batch-size 2", "--fp16", "--report-overlap 1 --tensor-model-parallel-size 2",
    "--profile",
])  # fmt: skip
def test_what_does_not_forbid_it(flags: str) -> None:
    assert obstacles(parse(f"{flags} --cuda-graphs on", 2 if "parallel" in flags else 1)) == []


def test_bert_with_the_plain_kernel() -> None:
    assert obstacles(parse("--attention-backend unfused --cuda-graphs on", family="bert")) == []


def test_what_has_no_meaning_here_is_told_once() -> None:
    config = parse("--cuda-graph-impl local --cuda-graph-scope attn mlp --cuda-graph-warmup-steps 5 --cuda-graph-use-single-mempool")
    assert config.kernels.cuda_graph_warmup_steps == 5
    assert [line.split(" (")[0] for line in config.ignored_flags] == ["--cuda-graph-scope", "--cuda-graph-use-single-mempool"]
    assert all("share one pool" in line for line in config.ignored_flags)
