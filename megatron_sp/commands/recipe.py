"""Common part of the scripts scripts/pretrain_*.sh: builds and checks a command from a script's variables and flags.

    variables  layout, length of training, data, run folder (``recipe_variables.py``, docs/how-to/zoo.md)
    SMOKE=1    the same layout with tiny sizes on CPU processes: tp, sp, cp, pp and ep are reduced to at most 2, dp to what ZeRO needs

A script is a page of variables and flags; the user's own flags come last and take precedence. Flags are parsed by
``arguments.py`` before anything starts, so an impossible layout gives the message of the training program.
``recipe_run.py`` describes and runs the command.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_sp.commands.recipe_variables import RankCounts, Variables
from megatron_sp.config.flags.arguments import config_from_args
from megatron_sp.config.flags.config_file import canonical
from megatron_sp.config.presets import PROGRAMS
from megatron_sp.config.schema import Config
from megatron_sp.training.microbatches import BatchPlan
from megatron_sp.utils.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SMOKE_STEPS = 2
_DATA_FLAGS = ("data-path", "train-data-path", "mock-data")
# A model that every layout of up to 4 ranks can cut: 8 heads, with 4 groups where the full size shares keys and values.
_TINY = (
    "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "8", "--ffn-hidden-size", "128", "--seq-length", "128",
    "--max-position-embeddings", "128", "--vocab-size", "500", "--mock-data", "--device", "cpu", "--peak-tflops", "1",
    "--micro-batch-size", "1", "--train-iters", str(SMOKE_STEPS), "--lr-warmup-iters", "1", "--log-interval", "1", "--eval-iters", "1",
)  # fmt: skip
_TINY_EXPERTS = ("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--kv-channels", "8", "--moe-router-topk")


@dataclass(frozen=True)
class Recipe:
    """Command of a script.

    Attributes:
        name: name of the script, without path and suffix.
        program: pretrain_gpt.py or pretrain_bert.py.
        flags: all flags of the program.
        config: configuration that follows from the flags.
        save: run folder.
    """

    name: str
    program: str
    variables: Variables
    flags: tuple[str, ...]
    config: Config
    save: str

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.variables.layout.processes

    @property
    def nproc(self) -> int:
        """Number of processes that this host starts."""
        return self.world_size if self.variables.smoke else self.variables.nproc

    @property
    def batches(self) -> BatchPlan:
        """Sizes of the batches of all steps."""
        config = self.config
        return BatchPlan.from_config(config.batch, config.parallel.dp_size(self.world_size), config.model.seq_length or 0)

    def tokens_after(self, steps: int) -> int:
        """Return the number of tokens of the first ``steps`` steps."""
        return self.batches.samples_after(steps) * (self.config.model.seq_length or 0)

    @property
    def command(self) -> list[str]:
        """Command line that starts the processes of this host."""
        return ["bash", str(ROOT / "scripts" / "launch.sh"), str(self.nproc), str(ROOT / self.program), *self.flags]


def build(script: str, program: str, own: Sequence[str], users: Sequence[str], environ: Mapping[str, str], scratch: str = "") -> Recipe:
    """Build the command of a script.

    Args:
        script: path of the script.
        program: training program.
        own, users: flags of the script and of its user.
        environ: environment with the variables.
        scratch: run folder of a smoke test, unless SAVE names one.
    Raises:
        ConfigError: invalid variables or flags.
    """
    variables, name = Variables.read(environ), Path(script).stem
    if not (ROOT / program).is_file():
        raise ConfigError(f"{program} is not in {ROOT}")
    family = next((family for family, each in PROGRAMS.items() if each == program), None)
    save = variables.save or (scratch if variables.smoke else f"runs/{name.removeprefix('pretrain_')}")
    data, length = _data(variables, users), _length(variables)

    def of(layout: RankCounts, *more: str) -> tuple[list[str], Config]:
        flags = [*own, *_layout(variables, layout), *data, *length, "--save", save, "--auto-resume", *more, *users]
        return flags, config_from_args(flags, world_size=layout.processes, family=family)

    try:
        flags, config = of(variables.full_layout)  # in a smoke test too: an impossible layout cannot be tried
        if variables.smoke:
            flags, config = of(variables.smoke_layout, *_tiny(config, variables))
    except ConfigError as error:
        raise ConfigError(f"{error}\n  the variables are {variables.text()}") from None
    return Recipe(name, program, variables, tuple(flags), config, save)


def _layout(variables: Variables, layout: RankCounts) -> list[str]:
    tp, sp, cp, pp, _, ep = layout
    flags = ["--tensor-model-parallel-size", str(tp), *(["--sequence-parallel"] if tp > 1 else [])]
    flags += ["--sequence-parallel-size", str(sp), *(["--sp-overlap-mode", variables.overlap] if sp > 1 else [])]
    flags += ["--context-parallel-size", str(cp)] if cp > 1 else []
    if pp > 1:
        flags += ["--pipeline-model-parallel-size", str(pp)]
        flags += ["--pipeline-schedule", variables.pp_schedule] if variables.pp_schedule else []
    flags += ["--expert-model-parallel-size", str(ep)] if ep > 1 else []
    flags += ["--zero-stage", str(variables.zero)]
    return flags + (["--recompute-granularity", variables.recompute] if variables.recompute != "none" else [])


def _length(variables: Variables) -> list[str]:
    return [] if variables.train_iters is None else ["--train-iters", str(variables.train_iters)]


def _data(variables: Variables, users: Sequence[str]) -> list[str]:
    """Return the flags of data and tokenizer: mock data in a smoke test, none if the user's own flags name the data.

    Raises:
        ConfigError: a file is missing, or the tokenizer's file is ambiguous.
    """
    path, spm, vocab = variables.data_path, variables.tokenizer_model, variables.vocab_file
    if path == "mock" and any(canonical(word.partition("=")[0]) in _DATA_FLAGS for word in users):
        return []
    if path == "mock" or variables.smoke:
        return ["--mock-data"]
    if not os.path.isfile(f"{path}.idx"):
        raise ConfigError(f"DATA_PATH={path}: there is no {path}.idx; megatron-sp preprocess makes it (see README.md)")
    if bool(spm) == bool(vocab) or not os.path.isfile(spm or vocab):
        raise ConfigError(
            f"TOKENIZER_MODEL={spm} VOCAB_FILE={vocab}: give the one file that {path} was made with, a SentencePiece model, a"
            " tokenizer.json, or a list of word pieces"
        )
    of_model = "HuggingFaceTokenizer" if spm.endswith(".json") else "SentencePieceTokenizer"
    tokenizer = [of_model, "--tokenizer-model", spm] if spm else ["BertWordPieceLowerCase", "--vocab-file", vocab]
    return ["--data-path", path, "--split", "99,1,0", "--tokenizer-type", *tokenizer]


def _tiny(full: Config, variables: Variables) -> list[str]:
    """Return flags for tiny sizes: layers for all stages; gradient accumulation (a full pipeline) and ramp-up if the full size has them."""
    tp, sp, cp, pp, world_size, _ = variables.smoke_layout
    flags = [*_TINY, *(["--num-query-groups", "4"] if full.model.num_query_groups else [])]
    flags += [*_TINY_EXPERTS, str(min(full.model.moe_router_topk, 2))] if full.model.has_experts else []
    batch, dp = full.batch, full.parallel.dp_size(variables.full_layout.processes)
    accumulates = (batch.global_batch_size or 0) > batch.micro_batch_size * dp
    flags += ["--num-layers", str(pp * full.parallel.stages_per_pipeline_rank)] if pp > 1 else []
    tiny_dp = world_size // (tp * sp * cp * pp)
    flags += ["--rampup-batch-size", *[str(tiny_dp)] * 3] if batch.rampup_batch_size else []
    size = str(tiny_dp * (2 * pp if accumulates else 1))
    return [*flags, *(["--step-batch-size-schedule", f"0:{size}"] if batch.step_batch_size_schedule else []), "--global-batch-size", size]
