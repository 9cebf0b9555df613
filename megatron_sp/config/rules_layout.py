"""Rules of the layout of ranks: whole replicas, heads and widths that can be split, the exchanges of Ulysses.

A message says which single changes would do; they are found by trying (``_ways_out``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_sp.config.rules_batch import all_sizes
from megatron_sp.config.schema import Config
from megatron_sp.utils.numbers import division


def whole_replica_violations(config: Config, world_size: int) -> Iterator[str]:
    """Check that the processes are a multiple of the ranks that work on the same sequences."""
    parallel = config.parallel
    more = {"context_parallel_size": "cp", "pipeline_model_parallel_size": "pp"}
    also = {name: key for name, key in more.items() if getattr(parallel, name) > 1}
    names = ["tensor_model_parallel_size", "sequence_parallel_size", *also]
    product = parallel.replica_size
    if world_size > 0 and world_size % product:
        ways = _ways_out(config, world_size, {"processes"}, "processes", "tp", "sp", *also.values())
        factors = " * ".join(str(getattr(parallel, name)) for name in names)
        yield (
            f"the number of processes ({world_size}) must be a multiple of {' * '.join(names)} ({factors} = {product}):"
            f" {division(world_size, product)}{ways}"
        )


def split_violations(
    config: Config, world_size: int, sizes: tuple[str, ...] = ("tp", "sp", "heads", "groups", "ffn")
) -> Iterator[str]:
    """Check that heads and widths can be split over tp and sp; ``sizes``: those that the remedies may change."""
    model, tp, sp = config.model, config.parallel.tensor_model_parallel_size, config.parallel.sequence_parallel_size
    heads = model.num_attention_heads
    if not heads or (tp == 1 and sp == 1):
        return

    def ways(mend: set[str], *names: str) -> str:
        return _ways_out(config, world_size, mend, *(name for name in names if name in sizes))

    if heads % tp:
        yield (
            f"num_attention_heads ({heads}) must be a multiple of tensor_model_parallel_size ({tp}):"
            f" {division(heads, tp)}{ways({'heads over tp'}, 'tp', 'heads')}"
        )
    if heads < tp * sp:
        yield (
            f"each tensor-parallel rank's query heads ({heads} / {tp} = {heads / tp:g}) are dealt out to the"
            f" sequence-parallel ranks (sequence_parallel_size {sp}), and each needs"
            f" one{ways({'heads over sp'}, 'sp', 'tp', 'heads')}"
        )
    groups = model.num_query_groups
    if groups and groups % tp and tp % groups:
        yield (
            f"num_query_groups ({groups}) must be a multiple of tensor_model_parallel_size ({tp}), or divide it (then"
            " key/value heads are held by several ranks):"
            f" {division(groups, tp)}{ways({'groups over tp'}, 'tp', 'groups')}"
        )
    if (model.ffn_hidden_size or model.hidden_size) and model.ffn_size % tp:
        yield (
            f"the width of the MLP ({model.ffn_size}) must be a multiple of tensor_model_parallel_size ({tp}):"
            f" {division(model.ffn_size, tp)}{ways({'ffn'}, 'tp', 'ffn')}"
        )


def exchange_violations(config: Config, world_size: int) -> Iterator[str]:
    """Check the flags of the Ulysses exchanges, which apply only with sp > 1 and must not contradict each other."""
    parallel = config.parallel
    given = [
        flag for flag, on in (
            ("--sp-overlap-comm", parallel.sp_overlap_comm), ("--split-qkv-linear", parallel.split_qkv_linear),
            ("--sp-head-chunks", parallel.sp_head_chunks is not None),
            (f"--sp-overlap-mode {parallel.sp_overlap_mode}", parallel.sp_overlap_mode not in (None, "none")),
        ) if on
    ]  # fmt: skip
    if given and parallel.sequence_parallel_size == 1 and not parallel.measures_split:
        yield (
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} about the exchanges of Ulysses, and with"
            f" sequence_parallel_size 1 there are none{_ways_out(config, world_size, set(), 'sp', more_than=1)}; or"
            " leave the flag out"
        )
    heads, tp, sp = (
        config.model.num_attention_heads,
        parallel.tensor_model_parallel_size,
        parallel.sequence_parallel_size,
    )
    most = -(-heads // (tp * sp)) if heads else None
    if most and sp > 1 and (parallel.sp_head_chunks or 0) > most:
        yield (
            f"sp_head_chunks ({parallel.sp_head_chunks}) must be at most the query heads of a rank ({heads} / ({tp} *"
            f" {sp}), rounded up, = {most}): use --sp-head-chunks {most} or less"
        )
    mode = parallel.sp_overlap_mode
    if mode is None:
        if parallel.split_qkv_linear and parallel.sp_head_chunks is not None:
            yield "--split-qkv-linear and --sp-head-chunks are two ways to cut the exchanges: give one"
        return
    if mode == "none" and parallel.sp_overlap_comm:
        yield "--sp-overlap-mode none and --sp-overlap-comm contradict each other: give one"
    if mode not in ("split-qkv",) and parallel.split_qkv_linear:
        yield f"--sp-overlap-mode {mode} and --split-qkv-linear contradict each other: give --sp-overlap-mode split-qkv, or one of them"
    if mode not in ("chunked", "auto") and parallel.sp_head_chunks is not None:
        yield f"--sp-overlap-mode {mode} and --sp-head-chunks contradict each other: give --sp-overlap-mode chunked, or one of them"


def zero_violations(config: Config) -> Iterator[str]:
    """Check the flags of ZeRO."""
    parallel = config.parallel
    stage = parallel.zero_stage
    if stage > 3:
        yield f"zero_stage ({stage}) must be 0, 1, 2 or 3"
    only_3 = {
        "--zero3-keep-units": parallel.zero3_keep_units > 0, "--zero3-gather-once": parallel.zero3_gather_once,
        "--zero3-fetch all_reduce": parallel.zero3_fetch != "all_gather",
    }  # fmt: skip
    for name, given in only_3.items():
        if given and stage != 3:
            yield f"{name} is about gathering blocks and needs --zero-stage 3 (now {stage}); give that, or leave it out"
    if parallel.zero3_gather_once and parallel.zero3_keep_units > 0:
        yield "--zero3-gather-once keeps every block: leave --zero3-keep-units out"


@dataclass(frozen=True)
class _Sizes:
    """Sizes that must fit together in a layout; used to try out a value before it is recommended."""

    processes: int
    tp: int
    sp: int
    cp: int
    pp: int
    heads: int
    groups: int | None
    ffn: int | None
    hidden: int | None  # None: a head's width does not depend on it
    rotary: float | None
    batches: tuple[int, ...]  # every global batch size of the run, or the numbers that determine them
    micro_batch: int

    @classmethod
    def of(cls, config: Config, world_size: int) -> _Sizes:
        model, parallel, batch = config.model, config.parallel, config.batch
        return cls(
            world_size, parallel.tensor_model_parallel_size, parallel.sequence_parallel_size,
            parallel.context_parallel_size,
            parallel.pipeline_model_parallel_size, model.num_attention_heads or 0, model.num_query_groups,
            model.ffn_size if model.ffn_hidden_size or model.hidden_size else None,
            None if model.kv_channels else model.hidden_size,
            model.rotary_percent if model.position_embedding_type == "rope" else None,
            all_sizes(batch), batch.micro_batch_size,
        )  # fmt: skip

    @property
    def replica(self) -> int:
        return self.tp * self.sp * self.cp * self.pp

    def broken(self) -> set[str]:
        groups, width = self.groups or self.heads, (self.hidden or 0) // self.heads if self.heads else 0
        unit = self.micro_batch * max(1, self.processes // self.replica)
        rules = {
            "processes": self.processes % self.replica != 0,
            "batch": any(size % unit for size in self.batches),
            "ffn": bool(self.ffn and self.ffn % self.tp),
        }
        if self.heads:
            rules |= {
                "heads over tp": self.heads % self.tp != 0,
                "heads over sp": self.heads < self.tp * self.sp,
                "groups over tp": bool(self.groups and self.groups % self.tp and self.tp % self.groups),
                "heads over groups": self.heads % groups != 0,
                "width of a head": bool(self.hidden and self.hidden % self.heads),
                "rotary": bool(
                    self.hidden and self.rotary and (int(width * self.rotary) < 2 or int(width * self.rotary) % 2)
                ),
            }
        return {name for name, is_broken in rules.items() if is_broken}


_WAYS = {
    "processes": ("{} processes", "processes"), "tp": ("--tp-size {}", "tp"), "sp": ("--sp-size {}", "sp"),
    "cp": ("--cp-size {}", "cp"),
    "pp": ("--pp-size {}", "pp"),
    "heads": ("--num-attention-heads {}", "heads"), "groups": ("--num-query-groups {}", "groups"),
    "ffn": ("--ffn-hidden-size {}", "ffn"),
}  # fmt: skip  # fmt: skip
_MOST_TRIED = 1 << 12


def _ways_out(config: Config, world_size: int, mend: set[str], *names: str, more_than: int = 0) -> str:
    """Return single changes that repair the rules ``mend`` and violate no others, as text: "; use --tp-size 1 or 2, or
    ...".

    Args:
        names: sizes to change, keys of ``_WAYS``; the nearest valid values of each are given.
    """
    sizes = _Sizes.of(config, world_size)
    before, said = sizes.broken(), []
    for name in names:
        text, key = _WAYS[name]
        value = getattr(sizes, key)
        found = []
        for distance in range(1, min(2 * max(value, sizes.processes, sizes.replica) + 2, _MOST_TRIED)):
            found += [
                near for near in (value - distance, value + distance)
                if near > more_than and replace(sizes, **{key: near}).broken() <= before - mend
            ]  # fmt: skip
            if len(found) >= 3:
                break
        if found:
            *first, last = [str(near) for near in sorted(found[:3])]
            said.append(text.format(f"{', '.join(first)} or {last}" if first else last))
    return f"; use {', or '.join(said)}" if said else ""
