"""Write docs/reference/flags.md from the dataclasses of megatron_sp/config/schema.py and the tables of foreign flags: ``make docs``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_sp.config.fields import FieldKind, described, field_kinds
from megatron_sp.config.flags import foreign_flags as dialect
from megatron_sp.config.flags.deepspeed_keys import BLOCKS
from megatron_sp.config.flags.expert_dialects import HELD
from megatron_sp.config.flags.flag_help import flags_of, show_default
from megatron_sp.config.flags.settings import VALUE_SPELLINGS
from megatron_sp.config.schema import GROUPS
from megatron_sp.utils.entry_point import run_program

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/flags.md"

_HEAD = """# Flags

Made by `tools/dev/make_flag_docs.py` (`make docs`) from `megatron_sp/config/schema.py`; a test compares.

- Underscores may stand for hyphens; names are never completed. A mistyped name ends the program with exit code 2 and the nearest names.
- Later wins: defaults, then those of `--preset NAME` ([zoo.md](../how-to/zoo.md)), then `--config FILE`, then the command line from left to
  right; a flag given twice takes the last value.
- Every switch has a negation for the sake of files: `--bf16` / `--no-bf16`, `--no-load-optim` / `--load-optim`.
- `--config FILE` reads YAML: the names below, flat or under the name of their group; of several files the later
  ones come over the earlier ones. `--print-config` prints such a file and exits.
- `--dry-run` prints what a run would take on every rank, parameters, memory, collectives and bytes, and exits; `--dry-run json` the same
  for programs. `--world-size N` says for how many processes (default: those that the launcher has started, or `WORLD_SIZE`).
  `--device auto` then means GPUs.
- Choices ignore upper and lower case.
"""

_ADAPTED = {
    "train_batch_size": "--global-batch-size",
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "gradient_accumulation_steps": "global batch = micro-batch * accumulation * data-parallel ranks; what is missing of the three follows",
    "gradient_clipping": "--clip-grad",
    "zero_optimization.stage": "--zero-stage",
    "zero_optimization.overlap_comm": "--overlap-grad-reduce and, unless that is given, --overlap-param-gather",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": "--zero3-fetch, at stage 3",
    "zero_optimization.offload_optimizer.device": '"cpu": --offload-optimizer; "nvme" is refused',
    "zero_optimization.offload_param.device": '"none"; everything else is refused',
    "bf16.enabled, fp16.enabled": "--bf16, --fp16",
    "fp16.loss_scale": "--loss-scale; 0: dynamic",
    "fp16.initial_scale_power": "--initial-loss-scale, as a power of 2; 16 where an fp16 block that is on leaves it out",
    "fp16.loss_scale_window, .hysteresis, .min_loss_scale": "--loss-scale-window, --hysteresis, --min-loss-scale",
    "data_types.grad_accum_dtype": '"fp32", as always here; everything else is refused',
    "communication_data_type": '"bf16": --grad-reduce-in-bf16; "fp32": not',
    "optimizer": "not read beside --lr; else Adam, AdamW or SGD: lr, betas, eps, weight_decay, momentum, with DeepSpeed's defaults",
    "scheduler": "WarmupLR and WarmupDecayLR where they are constant; else refused, with the flags that come nearest",
    "sequence_parallel_size": "--sequence-parallel-size",
    "curriculum_learning": "--seq-length-curriculum, if it is enabled, by fixed_linear, fixed_root or fixed_discrete",
    "data_efficiency.data_sampling.curriculum_learning": "the same, of the metric seqlen_truncate; other metrics are refused",
    "data_efficiency": "what is in it counts only where it and everything around it say `enabled: true`; random_ltd is refused then",
}  # keys of DeepSpeed's JSON with a meaning


def page() -> str:
    """The whole text of docs/reference/flags.md."""
    return "\n".join([_HEAD, *_groups(), *_rewritten(), *_values(), *_deepspeed(), *_ignored(), *_refused()])


def _groups() -> Iterator[str]:
    for group, cls in GROUPS.items():
        kinds = field_kinds(cls)
        yield f"## {group}: {(cls.__doc__ or '').strip().rstrip('.').lower()}\n"
        yield "| flag | value | default | meaning |\n|---|---|---|---|"
        for item in flags_of(cls):
            yield _row(item, kinds[item.name])
        yield ""


def _row(item: dataclasses.Field[Any], kind: FieldKind) -> str:
    name = item.name.replace("_", "-")
    shown = f"--no-{name}" if kind.base == "bool" and item.default is True else f"--{name}"
    others = "".join(f"<br>`--{alias}`" for alias in item.metadata["aliases"])
    value = "" if kind.base == "bool" else kind.metavar.replace("|", "\\|")
    unit = f" ({item.metadata['unit']})" if item.metadata["unit"] else ""
    return f"| `{shown}`{others} | {value}{unit} | {_default(item.default, kind)} | {described(item).replace('|', chr(92) + '|')} |"


def _default(value: Any, kind: FieldKind) -> str:
    if kind.base == "bool":
        return "on" if value else "off"
    return "" if value in (None, ()) else show_default(value)


def _rewritten() -> Iterator[str]:
    yield "## Other spellings of Megatron-LM and Megatron-DeepSpeed\n"
    yield "| flag | means |\n|---|---|"
    for name, meanings in dialect.REWRITTEN.items():
        meaning = " ".join(
            f"--{flag}" + ("" if value == "true" else f" {value or 'VALUE'}") for flag, value, _ in meanings
        )
        value = " VALUE" if any(meaning.value is None for meaning in meanings) else ""
        yield f"| `--{name}{value}` | `{meaning}`{' unless that is given' if any(weak for *_, weak in meanings) else ''} |"
    for name, values in dialect.REWRITTEN_VALUES.items():
        for value, meanings in values.items():
            settings = [f"`--{flag}" + ("`" if word == "true" else f" {word}`") for flag, word, _ in meanings]
            yield f"| `--{name} {value}` | {' '.join(settings)} |"
    for name, flag in dialect.GROUP_FILES.items():
        yield f"| `--{name} FILE` | `--{flag}` with what the file has in double quotes, or line by line |"
    for name, (num_words, meaning) in HELD.items():
        yield f"| `--{name}{' N' * num_words}` | {meaning} |"
    yield "| `--num-experts N N ...` | a number for each of these layers, all the same; 1 for a dense MLP |"
    yield "| `--profile pt --profile-steps A,B` | `--profile --profile-step-start A --profile-step-end B` |\n"
    yield "| `--load-tag global_stepN` | `--ckpt-step N` |\n"


def _values() -> Iterator[str]:
    yield "## Other spellings of values\n"
    yield "| value | means |\n|---|---|"
    for flag, spellings in VALUE_SPELLINGS.items():
        yield from (f"| `--{flag} {theirs}` | `--{flag} {ours}` |" for theirs, ours in spellings.items())
    yield "\nRefused, with what there is instead:\n\n| value | because |\n|---|---|"
    for flag, choices in dialect.MEGATRON_CHOICES.items():
        for why in dict.fromkeys(choices.values()):
            yield f"| {' '.join(f'`--{flag} {value}`' for value, reason in choices.items() if reason == why)} | {why} |"
    yield ""


def _deepspeed() -> Iterator[str]:
    yield "## DeepSpeed's JSON\n"
    yield (
        "`--deepspeed_config FILE` reads it. What the file and the flags (or `--config`) both say must agree; a contradiction ends the"
        " program and names both values. Only the ZeRO stage, clipping and loss scaling, which DeepSpeed reads from its file alone, are"
        ' as the file says, and a line tells of the flag that does not count. `"auto"` and `null` say nothing, and what the file does'
        " not say keeps the default above (not"
        " DeepSpeed's: `--clip-grad` is 1). Every name is given once. `--print-config` shows what comes out.\n"
    )
    yield "| key | means |\n|---|---|"
    for key, meaning in _ADAPTED.items():
        yield f"| `{key}` | {meaning} |"
    ignored = [f"`{start}{key}`" for start, keys in BLOCKS.items() for key in keys.ignored]
    yield f"\nIgnored, and listed in one line when training starts: {' '.join(ignored)}; and unknown keys, unless one looks misspelt.\n"
    yield "Refused, unless they are off:\n\n| keys | because |\n|---|---|"
    refused = {f"{start}{key}": why for start, keys in BLOCKS.items() for key, why in keys.refused.items()}
    for why in dict.fromkeys(refused.values()):
        yield f"| {' '.join(f'`{key}`' for key, reason in refused.items() if reason == why)} | {why} |"
    yield ""


def _ignored() -> Iterator[str]:
    yield "## Accepted and ignored\n\nListed once when training starts.\n\n| flags | because |\n|---|---|"
    yield from _by_reason(
        {**dialect.IGNORED_SWITCHES, **{f"{name} VALUE": why for name, why in dialect.IGNORED_VALUES.items()}}
    )
    yield ""


def _refused() -> Iterator[str]:
    yield "## Refused\n\nThey would change the result, and what they ask for is not there.\n\n| flags | today |\n|---|---|"
    prefixes = {f"{prefix}*": why for prefix, why in dialect.REFUSED_PREFIXES.items()}
    yield from _by_reason({**dialect.REFUSED, **prefixes})
    harmless = ", ".join(f"`--{name} {' or '.join(values)}`" for name, values in dialect.HARMLESS_VALUES.items())
    yield f"\nIgnored with a value that asks for what happens anyway: {harmless}.\n"
    yield "Ignored while none of the flags on the left asks for what they are about:\n\n| asks | flags |\n|---|---|"
    for asks in dict.fromkeys(dialect.COMPANIONS.values()):
        names = sorted(name for name, flags in dialect.COMPANIONS.items() if flags == asks)
        yield f"| {' '.join(f'`--{name}`' for name in asks)} | {' '.join(f'`--{name}`' for name in names)} |"
    yield ""


def _by_reason(table: dict[str, str]) -> Iterator[str]:
    for why in dict.fromkeys(table.values()):
        yield f"| {' '.join(f'`--{name}`' for name, reason in table.items() if reason == why)} | {why} |"


def main() -> int:
    """Write the page; with --check only compare."""
    if sys.argv[1:] == ["--check"]:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    run_program(main)
