"""Flags of Megatron-LM, Megatron-DeepSpeed and their forks that are not fields of ours, and how each is handled.

There are three cases: *rewritten* (another name of one of our fields), *ignored* (nothing to choose here; listed once
when training starts, with the reason), *refused* (unsupported, and would change the result; the message names what
works). Any other flag that is not a field is unknown, an error. Sources: the argument parsers and launch scripts of
both projects. Names are written without leading dashes and with hyphens, as ``flag_names.canonical`` returns them.
A run whose flags are all fields of ours never imports this.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron_sp.config.flags.expert_dialects import HELD
from megatron_sp.config.flags.flag_names import ANY, OWN_SPECIAL, targets


@dataclass(frozen=True)
class Rewrite:
    """Translation of one flag to settings of other flags."""

    to: tuple[tuple[str, str | None], ...]  # (flag, value) pairs; the value None stands for the flag's own words
    weak: bool = False  # applies only if the other flag is not given itself

    @property
    def takes_value(self) -> bool:
        """True if the value given is passed on to one of our flags."""
        return any(value is None for _, value in self.to)


REWRITTEN: dict[str, Rewrite] = {
    "use-rotary-position-embeddings": Rewrite((("position-embedding-type", "rope"),)),
    "no-position-embedding": Rewrite((("position-embedding-type", "none"),), weak=True),
    "openai-gelu": Rewrite((("gelu-approximate", "tanh"),)),
    # Megatron's fused kernel is the tanh approximation; without the fusion it calls the exact GELU.
    "no-bias-gelu-fusion": Rewrite((("gelu-approximate", "none"),), weak=True),
    "checkpoint-activations": Rewrite((("recompute-granularity", "full"),)),
    "activations-checkpoint-method": Rewrite((("recompute-granularity", "full"), ("recompute-method", None))),
    "activations-checkpoint-num-layers": Rewrite((("recompute-num-layers", None),)),
    "checkpoint-num-layers": Rewrite((("recompute-num-layers", None),)),
    "use-flash-attn-v1": Rewrite((("use-flash-attn", "true"),)),
    "use-flash-attn-triton": Rewrite((("use-flash-attn", "true"),)),
    "use-flash-attn-builder": Rewrite((("use-flash-attn", "true"),)),
    "encoder-seq-length": Rewrite((("seq-length", None),)),
    "encoder-num-layers": Rewrite((("num-layers", None),)),
    "max-absolute-position-embeddings": Rewrite((("max-position-embeddings", None),)),
    "tokenizer-name-or-path": Rewrite((("tokenizer-model", None),)),
    "use-rms-norm": Rewrite((("normalization", "RMSNorm"),)),
    # megablocks; what else it says of experts: expert_dialects.py
    "moe-num-experts": Rewrite((("num-experts", None),)),
    "moe-top-k": Rewrite((("moe-router-topk", None),)),
    "no-tie-embed-logits": Rewrite((("untie-embeddings-and-output-weights", "true"),)),
    # Megatron-DeepSpeed's zero bubble, and that of its authors' fork of Megatron-LM, where a V takes two flags
    "enable-zbh1-pipeline": Rewrite((("pipeline-schedule", "zb1p"),), weak=True),
    "enable-zero-bubble": Rewrite((("pipeline-schedule", "zb1p"),), weak=True),
    "enable-zbv-pipeline": Rewrite((("pipeline-schedule", "zbv"),)),
    "zero-bubble-v-schedule": Rewrite((("pipeline-schedule", "zbv"),)),
    # Megatron-LM 1, of 2019 and 2020
    "model-parallel-size": Rewrite((("tensor-model-parallel-size", None),)),
    "batch-size": Rewrite((("micro-batch-size", None),)),  # per data-parallel rank; there was no gradient accumulation
    "warmup": Rewrite((("lr-warmup-fraction", None),)),
    "persistent-save-interval": Rewrite((("save-interval", None),)),
    # FSDP is ZeRO 3, and ZeRO is what each strategy of Megatron's is called here
    "use-torch-fsdp2": Rewrite((("zero-stage", "3"),), weak=True),
    # W&B's names in epfLLM's and BigCode's forks and in GPT-NeoX
    "wandb-name": Rewrite((("wandb-exp-name", None),), weak=True),
    "wandb-run-name": Rewrite((("wandb-exp-name", None),), weak=True),
    "wandb-project-name": Rewrite((("wandb-project", None),), weak=True),
    "npu-deterministic": Rewrite((("deterministic-mode", "true"),)),
    # Megatron-LM's switches ask for graphs where they can be, and so does auto
    "enable-cuda-graph": Rewrite((("cuda-graphs", "auto"),), weak=True),
    "external-cuda-graph": Rewrite((("cuda-graphs", "auto"),), weak=True),
    "override-lr-scheduler": Rewrite((("override-opt-param-scheduler", "true"),)),
    "use-checkpoint-lr-scheduler": Rewrite((("use-checkpoint-opt-param-scheduler", "true"),)),
}

REWRITTEN_VALUES: dict[str, dict[str, tuple[Rewrite, ...]]] = {
    "data-parallel-sharding-strategy": {
        strategy: (Rewrite((("zero-stage", str(stage)),), weak=True),)
        for stage, strategy in enumerate(("no_shard", "optim", "optim_grads", "optim_grads_params"))
    },
    "cuda-graph-impl": {
        "none": (Rewrite((("cuda-graphs", "off"),), weak=True),),
        "local": (Rewrite((("cuda-graphs", "auto"),), weak=True),),
        "transformer_engine": (Rewrite((("cuda-graphs", "auto"),), weak=True),),
        "full_iteration": (Rewrite((("cuda-graphs", "auto"),), weak=True),),
    },
    "attention-head-type": {"multiquery": (Rewrite((("num-query-groups", "1"),)),)},  # BigCode's fork
    "glu-activation": {  # BigScience's fork, whose GELU is exact there; arguments.py knows its width
        "swiglu": (Rewrite((("swiglu", "true"),)),),
        "geglu": (Rewrite((("geglu", "true"),)), Rewrite((("gelu-approximate", "none"),), weak=True)),
    },
}
"""Flags that are refused, apart from these values of theirs."""

VALUE_SPELLINGS: dict[str, dict[str, str]] = {
    "tokenizer-type": {
        "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
        "HFTokenizer": "HuggingFaceTokenizer", "PretrainedFromHF": "HuggingFaceTokenizer",
        "Llama3Tokenizer": "HuggingFaceTokenizer",
    },
    "position-embedding-type": {"absolute": "learned_absolute", "rotary": "rope"},
    "optimizer": {"adamw": "adam", "fusedadamw": "adam"},
    # nccl2: other code of torch's, same numbers
    "distributed-backend": {"ccl": "auto", "hccl": "auto", "mccl": "auto", "nccl2": "nccl"},
}  # fmt: skip
"""Values that other projects spell differently, by flag."""

_PARTS = ("train", "valid", "test")
GROUP_FILES = {f"{part}-weighted-split-paths-path": f"{part}-weighted-split-paths" for part in _PARTS}
"""Files with what another flag takes from the command line, by that flag."""


def _read_tables(path: Path) -> dict[str, dict[str, str]]:
    # the sections of the table of flags: by title, the reason of each name
    tables: dict[str, dict[str, str]] = {}
    names: dict[str, str] = {}
    reason, is_whole = "", True
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            names = tables[line.strip("[]")] = {}
        elif line.startswith(" "):
            names.update(dict.fromkeys(line.split(), reason))
            is_whole = True
        elif line and not line.startswith("#"):
            reason = line if is_whole else f"{reason} {line}"
            is_whole = False
    return tables


def _ending(table: dict[str, str], end: str) -> dict[str, str]:
    return {name.removesuffix(end): why for name, why in table.items() if name.endswith(end)}


_TABLES = _read_tables(Path(__file__).with_name("foreign_flags.txt"))
_IGNORED, _REFUSED = _TABLES["ignored"], _TABLES["refused"]

IGNORED_SWITCHES = {name: why for name, why in _IGNORED.items() if not name.endswith(("=", "=..", "*"))}
"""Ignored flags without a value: name -> reason."""
IGNORED_LISTS = _ending(_IGNORED, "=..")
"""Ignored flags that take several values: name -> reason."""
IGNORED_VALUES = {name.rstrip("=."): why for name, why in _IGNORED.items() if name.endswith(("=", "=.."))}
"""Ignored flags that take one value or several: name -> reason."""
IGNORED_PREFIXES = _ending(_IGNORED, "*")
"""Beginnings of families that are ignored: the flag that would make them matter, if there is one, is refused itself."""
REFUSED = {name: why for name, why in _REFUSED.items() if not name.endswith("*")}
"""Flags that would change the result and are not there: name -> what works today."""
REFUSED_PREFIXES = _ending(_REFUSED, "*")
"""Beginnings of refused families."""
SYNONYMS = _TABLES["synonyms"]
"""What other programs call our flags; with a name of these the answer is "did you mean"."""

STANDARD_SPECS = (
    "local", "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.bert.bert_layer_specs",
    "get_gpt_layer_local_spec", "get_gpt_layer_with_transformer_engine_spec", "gpt_layer_local_spec",
    "gpt_layer_with_transformer_engine_spec", "get_gpt_decoder_block_spec", "bert_layer_local_spec",
    "bert_layer_with_transformer_engine_spec",
)  # fmt: skip
"""Words of Megatron's --spec for the blocks that it has without the flag."""

HARMLESS_VALUES: dict[str, tuple[str, ...]] = {
    "attention-head-type": ("multihead",), "rope-type": ("rope",), "spec": STANDARD_SPECS,
    "mlp-type": ("standard", "mlp"), "moe-input-jitter-eps": ("0", "0.0"),
    "pre-tockens": ("65536", "2147483647"), "next-tockens": ("0",),
    "moe-jitter-eps": ("0", "0.0"), "moe-zloss-weight": ("0", "0.0"),
    "vocab-extra-ids": ("0",), "mtp-num-layers": ("0",), "label-smoothing": ("0", "0.0"),
    "fim-rate": ("0", "0.0"), "mid-level-dataset-surplus": ("0.005",),
    "softmax-type": ("vanilla",), "qk-clip-threshold": ("0",), "glu-linear-offset": ("0", "0.0"),
    "main-grads-dtype": ("fp32", "bf16"), "main-params-dtype": ("fp32",),
    "exp-avg-dtype": ("fp32",), "exp-avg-sq-dtype": ("fp32",),
    "encoder-tensor-model-parallel-size": ("0", "1"), "encoder-pipeline-model-parallel-size": ("0", "1"),
    "sample-rate": ("1.0", "1"),
}  # fmt: skip
"""Refused flags that are ignored with these values, because they then ask for what happens anyway."""

OFF_VALUES: dict[str, tuple[str, ...]] = {"num-experts": ("1",), "moe-num-experts": ("1",)}
"""Words with which a flag of ours that asks for the feature of companions does not ask for it."""

MEGATRON_CHOICES: dict[str, dict[str, str]] = {}
"""Values that Megatron knows and this package does not: what there is instead, by flag and value."""
for _name, _why in _TABLES["values"].items():
    MEGATRON_CHOICES.setdefault(_name.partition("=")[0], {})[_name.partition("=")[2]] = _why
COMPANIONS = {name: tuple(asks.split()) for name, asks in _TABLES["companions"].items()}
"""Flags without effect unless another one enables their feature: name -> the flags of which one has to be given."""

# -------------------------------------------------------------------------------------------------------- answers

DEEPSPEED_FILE = ("deepspeed-config", "deepscale-config")
SPECIAL = (*OWN_SPECIAL, "profile-steps", "load-tag", *DEEPSPEED_FILE, *HELD, *GROUP_FILES)
_LIKENESS = 0.8  # of a name that has no effect here, where 0.6 does for one of ours


def refusal(name: str) -> str | None:
    """Return why a flag of another program is not supported; None if it is not among those."""
    return REFUSED.get(name) or _of_family(name, REFUSED_PREFIXES)


def idleness(name: str) -> str | None:
    """Return why a flag of another program is accepted without effect; None if it is not among those."""
    known = IGNORED_SWITCHES.get(name) or IGNORED_VALUES.get(name)
    return known or (None if name in REFUSED else _of_family(name, IGNORED_PREFIXES))


def _of_family(name: str, prefixes: dict[str, str]) -> str | None:
    return next((prefixes[start] for start in sorted(prefixes, key=len, reverse=True) if name.startswith(start)), None)


def foreign_arity(name: str) -> int:
    """Return how many words a flag that is none of ours takes; ``ANY``: as many as follow."""
    if name in REWRITTEN:
        return int(REWRITTEN[name].takes_value)
    if name in IGNORED_VALUES:
        return ANY if name in IGNORED_LISTS else 1
    if name in IGNORED_SWITCHES:
        return 0
    if name in HELD:
        return HELD[name][0]
    # a refused or unknown flag takes its words with it, so they are not reported as well
    return 1 if name in SPECIAL else ANY


@cache
def offered() -> tuple[str, ...]:
    tables = (targets(), SPECIAL, REWRITTEN, IGNORED_SWITCHES, IGNORED_VALUES)
    return tuple(name for table in tables for name in table)


def meant_by(name: str) -> list[str]:
    """Return up to three flags that an unknown name may be meant as; all of them are accepted."""
    if name in SYNONYMS:
        return [SYNONYMS[name]]
    return nearest(name, offered())


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return up to three of ``names`` that begin with ``name``, then similar ones; fields of ours are preferred."""
    names = list(names)
    begun = [other for other in names if len(name) >= 3 and other.startswith(name)]
    alike = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    scores = [difflib.SequenceMatcher(None, name, other).ratio() for other in alike]
    close = [
        other for other, score in zip(alike, scores, strict=True)
        if score > max(scores) - 0.12 and (score >= _LIKENESS or other in targets())
    ]  # fmt: skip
    own = [other for other in dict.fromkeys(begun + close) if other in targets()]
    return (own or list(dict.fromkeys(begun + close)))[:3]
