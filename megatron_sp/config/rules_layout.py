"""Rules of the layout of ranks: whole replicas, heads and widths that can be split, the exchanges of Ulysses and of
context parallelism, ZeRO.

A message says which single changes would do; they are found by trying (``_ways_out``). Context parallelism needs
nothing to divide anything: neither lengths nor heads nor documents. Megatron's words for it, by --cp-comm-type:

    p2p             cp
    all_gather      cp, the keys and values of all ranks under way at once
    a2a             all of --context-parallel-size is Ulysses': sp
    a2a+p2p         --hierarchical-context-parallel-sizes A R: sp = A and cp = R
    auto            ours: the sizes whose product is --context-parallel-size that are fastest here, measured at the
                    start (training/probe.py)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_sp.config.rules_training import all_sizes
from megatron_sp.config.schema import Config
from megatron_sp.config.schema_parallel import ParallelConfig
from megatron_sp.utils.numbers import division

# a rule is a condition and a sentence
# fmt: off
DROPOUT_IN_PIECES = ("unfused", "local", "auto")  # auto then takes the plain kernel, whose masks are hashes
_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p", "auto")
_SPELLINGS = {"allgather": "all_gather", "all-gather": "all_gather", "p2p+a2a": "a2a+p2p"}


def these_are(flags: dict[str, bool]) -> str:
    """Return the flags that are given, as the subject of a sentence: "--a and --b are"; empty if there are none."""
    given = [name for name, is_given in flags.items() if is_given]
    return f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'}" if given else ""


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
        yield (f"the number of processes ({world_size}) must be a multiple of {' * '.join(names)} ({factors} ="
            f" {product}): {division(world_size, product)}{ways}")


def split_violations(
    config: Config, world_size: int, sizes: tuple[str, ...] = ("tp", "sp", "heads", "groups", "ffn")
) -> Iterator[str]:
    """Check that heads and widths can be split over tp and sp; ``sizes``: those that the remedies may change."""
    model, tp, sp = config.model, config.parallel.tensor_model_parallel_size, config.parallel.sequence_parallel_size
    heads = model.num_attention_heads
    if not heads or (tp == 1 and sp == 1):
        return

    def ways(mend: str, *names: str) -> str:
        return _ways_out(config, world_size, {mend}, *(name for name in names if name in sizes))

    of_tp = f"must be a multiple of tensor_model_parallel_size ({tp})"
    if heads % tp:
        yield f"num_attention_heads ({heads}) {of_tp}: {division(heads, tp)}{ways('heads over tp', 'tp', 'heads')}"
    if heads < tp * sp:
        yield (f"each tensor-parallel rank's query heads ({heads} / {tp} = {heads / tp:g}) are dealt out to the"
            f" sequence-parallel ranks (sequence_parallel_size {sp}), and each needs"
            f" one{ways('heads over sp', 'sp', 'tp', 'heads')}")
    groups = model.num_query_groups
    if groups and groups % tp and tp % groups:
        yield (f"num_query_groups ({groups}) {of_tp}, or divide it (then key/value heads are held by several ranks):"
            f" {division(groups, tp)}{ways('groups over tp', 'tp', 'groups')}")
    if (model.ffn_hidden_size or model.hidden_size) and model.ffn_size % tp:
        size = model.ffn_size
        yield f"the width of the MLP ({size}) {of_tp}: {division(size, tp)}{ways('ffn', 'tp', 'ffn')}"


def exchange_violations(config: Config, world_size: int) -> Iterator[str]:
    """Check the flags of the Ulysses exchanges, which apply only with sp > 1 and must not contradict each other."""
    parallel, mode = config.parallel, config.parallel.sp_overlap_mode
    given = these_are({
        "--sp-overlap-comm": parallel.sp_overlap_comm, "--split-qkv-linear": parallel.split_qkv_linear,
        "--sp-head-chunks": parallel.sp_head_chunks is not None,
        f"--sp-overlap-mode {mode}": mode not in (None, "none"),
    })
    if given and parallel.sequence_parallel_size == 1 and not parallel.measures_split:
        yield (f"{given} about the exchanges of Ulysses, and with sequence_parallel_size 1 there are"
            f" none{_ways_out(config, world_size, set(), 'sp', more_than=1)}; or leave the flag out")
    tp, sp = parallel.tensor_model_parallel_size, parallel.sequence_parallel_size
    heads = config.model.num_attention_heads
    most = -(-heads // (tp * sp)) if heads else None
    if most and sp > 1 and (parallel.sp_head_chunks or 0) > most:
        yield (f"sp_head_chunks ({parallel.sp_head_chunks}) must be at most the query heads of a rank ({heads} / ({tp}"
            f" * {sp}), rounded up, = {most}): use --sp-head-chunks {most} or less")
    if mode is None and parallel.split_qkv_linear and parallel.sp_head_chunks is not None:
        yield "--split-qkv-linear and --sp-head-chunks are two ways to cut the exchanges: give one"
    if mode == "none" and parallel.sp_overlap_comm:
        yield "--sp-overlap-mode none and --sp-overlap-comm contradict each other: give one"
    for flag, is_given, wanted in (
        ("--split-qkv-linear", parallel.split_qkv_linear and mode not in (None, "split-qkv"), "split-qkv"),
        ("--sp-head-chunks", parallel.sp_head_chunks is not None and mode not in (None, "chunked", "auto"), "chunked"),
    ):
        if is_given:
            yield (f"--sp-overlap-mode {mode} and {flag} contradict each other: give --sp-overlap-mode {wanted}, or one"
                " of them")


def zero_violations(config: Config) -> Iterator[str]:
    """Check the flags of ZeRO."""
    parallel, stage = config.parallel, config.parallel.zero_stage
    if stage > 3:
        yield f"zero_stage ({stage}) must be 0, 1, 2 or 3"
    only_3 = {
        "--zero3-keep-units": parallel.zero3_keep_units > 0, "--zero3-gather-once": parallel.zero3_gather_once,
        "--zero3-fetch all_reduce": parallel.zero3_fetch != "all_gather",
    }
    for name, given in only_3.items():
        if given and stage != 3:
            yield f"{name} is about gathering blocks and needs --zero-stage 3 (now {stage}); give that, or leave it out"
    if parallel.zero3_gather_once and parallel.zero3_keep_units > 0:
        yield "--zero3-gather-once keeps every block: leave --zero3-keep-units out"


# ------------------------------------------------------------------------------------------------ context parallelism


def resolve_comm_type(parallel: ParallelConfig) -> Iterator[str]:
    """Turn Megatron's words into sp and cp, unless they contradict others, which ``context_violations`` reports.

    Idempotent. Yields a line for each flag that has no effect.
    """
    sizes = parallel.hierarchical_context_parallel_sizes
    if (parallel.cp_comm_type is None and sizes is None) or _contradiction(parallel):
        return
    cp, kind = parallel.context_parallel_size, _kinds(parallel)[0]
    if cp == 1:
        flags = {"--cp-comm-type": parallel.cp_comm_type, "--hierarchical-context-parallel-sizes": sizes}
        for name, given in flags.items():
            if given is not None:
                yield f"{name} (--context-parallel-size is 1: nothing is exchanged)"
    elif kind == "auto":  # the run decides
        parallel.cp_comm_type = ("auto",)
        return
    elif kind == "all_gather":
        parallel.cp_stages_ahead = "all"
    elif kind == "a2a":
        parallel.sequence_parallel_size, parallel.context_parallel_size = cp, 1
    elif kind == "a2a+p2p":
        assert sizes is not None
        parallel.sequence_parallel_size, parallel.context_parallel_size = sizes
    parallel.cp_comm_type = parallel.hierarchical_context_parallel_sizes = None


def with_split(config: Config, sp: int, cp: int) -> Config:
    """Return a copy with sizes of sp and cp, without the flags that are then about no exchange."""
    parallel = replace(config.parallel, sequence_parallel_size=sp, context_parallel_size=cp, cp_comm_type=None)
    if sp == 1:
        parallel.sp_overlap_comm, parallel.split_qkv_linear = False, False
        parallel.sp_overlap_mode = parallel.sp_head_chunks = None
    if cp == 1:
        parallel.cp_chunks = parallel.cp_stages_ahead = None
        parallel.cp_keep_kv = False
    parallel.delay_wgrad &= can_delay(parallel)
    return replace(config, parallel=parallel)


def can_delay(parallel: ParallelConfig) -> bool:
    """Return whether attention has exchanges that gradients of weights can cover."""
    if parallel.sequence_parallel_size > 1:  # the last exchanges are then those of the heads, whatever cp is
        return parallel.overlaps_exchanges
    return parallel.context_parallel_size > 1


def delay_violations(config: Config) -> Iterator[str]:
    """Check that --delay-wgrad has an exchange to be computed under."""
    parallel = config.parallel
    if not parallel.delay_wgrad or parallel.measures_split:
        return
    what = "--delay-wgrad computes gradients of weights under the exchanges of attention"
    if can_delay(parallel):
        if parallel.pipeline_model_parallel_size > 1 and parallel.pipeline_kind in ("zb1p", "zbv"):
            yield (f"--pipeline-schedule {parallel.pipeline_kind} puts off the gradients of all weights to where a rank"
                " would wait, and --delay-wgrad some of them to the exchanges of attention: give one")
    elif parallel.sequence_parallel_size > 1:
        yield (f"{what}, and without overlap these are waited for at once: add --sp-overlap-comm, or leave"
            " --delay-wgrad out")
    else:
        yield (f"{what}, and with sequence_parallel_size 1 and context_parallel_size 1 there are none: add"
            " --sequence-parallel-size N or --context-parallel-size N, or leave the flag out")


def _kinds(parallel: ParallelConfig) -> list[str]:
    # the different types given, spelled our way; Megatron takes one for all layers, or one for each
    return list(dict.fromkeys(_SPELLINGS.get(word.lower(), word.lower()) for word in parallel.cp_comm_type or ("p2p",)))


def _contradiction(parallel: ParallelConfig) -> str:
    # what is wrong with Megatron's words; empty if they have a meaning
    kinds, sizes = _kinds(parallel), parallel.hierarchical_context_parallel_sizes
    cp, sp = parallel.context_parallel_size, parallel.sequence_parallel_size
    if unknown := [kind for kind in kinds if kind not in _TYPES]:
        return f"--cp-comm-type {unknown[0][:40]} is unknown: use {', '.join(_TYPES)}"
    if len(kinds) > 1:
        return f"--cp-comm-type {' '.join(kinds)}: all layers exchange alike here: give one type"
    kind = kinds[0]
    if sizes is not None:
        given = f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))}"
        if kind != "a2a+p2p":
            return f"{given} is for --cp-comm-type a2a+p2p, and the type is {kind}: give that, or leave the sizes out"
        if len(sizes) != 2 or min(sizes) < 1 or sizes[0] * sizes[1] != cp:
            product = f", and {sizes[0]} * {sizes[1]} = {sizes[0] * sizes[1]}" if len(sizes) == 2 else ""
            return (f"{given} must be two sizes, of Ulysses and of what is around it, whose product is"
                f" context_parallel_size ({cp}){product}")
    if kind == "a2a+p2p" and sizes is None and cp > 1:
        return (f"--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes A R with A * R = {cp}: A for"
            " Ulysses, R around it")
    if (kind.startswith("a2a") or kind == "auto") and sp > 1:
        return (f"--cp-comm-type {kind} {'measures' if kind == 'auto' else 'says'} how many ranks are Ulysses', and"
            f" --sequence-parallel-size {sp} says it too: give --sequence-parallel-size and --context-parallel-size"
            " alone, or leave the former out")
    if kind == "all_gather" and parallel.cp_stages_ahead not in (None, "all"):
        return ("--cp-comm-type all_gather has all stages ahead, and --cp-stages-ahead says"
            f" {parallel.cp_stages_ahead}: give one of them")
    return ""


def context_violations(config: Config) -> Iterator[str]:
    """Check the flags of context parallelism, which must not contradict each other, and what it cannot compute."""
    parallel, model, backend = config.parallel, config.model, config.kernels.attention_backend
    if (parallel.cp_comm_type or parallel.hierarchical_context_parallel_sizes) and (why := _contradiction(parallel)):
        yield why
        return
    if parallel.context_parallel_size == 1:
        given = these_are({
            "--cp-chunks": parallel.cp_chunks is not None, "--cp-stages-ahead": parallel.cp_stages_ahead is not None,
            "--cp-keep-kv": parallel.cp_keep_kv,
        })
        if given:
            yield (f"{given} about the exchanges of context parallelism, and with context_parallel_size 1 there are"
                " none: add --context-parallel-size N, or leave the flag out")
    elif model.attention_dropout > 0 and backend not in DROPOUT_IN_PIECES:
        yield (f"attention_dropout ({model.attention_dropout}) inside --attention-backend {backend} would depend on how"
            f" context parallelism (context_parallel_size {parallel.context_parallel_size}) cuts the sequence: add"
            " --attention-dropout 0, or use --attention-backend unfused")


# -------------------------------------------------------------------------------------------------- sizes that would do


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

    @property
    def replica(self) -> int:
        return self.tp * self.sp * self.cp * self.pp

    def broken(self) -> set[str]:
        unit = self.micro_batch * max(1, self.processes // self.replica)
        rules = {
            "processes": self.processes % self.replica != 0,
            "batch": any(size % unit for size in self.batches),
            "ffn": bool(self.ffn and self.ffn % self.tp),
        }
        if self.heads:
            rotated = int((self.hidden or 0) // self.heads * self.rotary) if self.rotary else 0
            rules |= {
                "heads over tp": self.heads % self.tp != 0,
                "heads over sp": self.heads < self.tp * self.sp,
                "groups over tp": bool(self.groups and self.groups % self.tp and self.tp % self.groups),
                "heads over groups": self.heads % (self.groups or self.heads) != 0,
                "width of a head": bool(self.hidden and self.hidden % self.heads),
                "rotary": bool(self.hidden and self.rotary and (rotated < 2 or rotated % 2)),
            }
        return {name for name, is_broken in rules.items() if is_broken}


_WAYS = {
    "processes": "{} processes", "tp": "--tp-size {}", "sp": "--sp-size {}", "cp": "--cp-size {}", "pp": "--pp-size {}",
    "heads": "--num-attention-heads {}", "groups": "--num-query-groups {}", "ffn": "--ffn-hidden-size {}",
}
_MOST_TRIED = 1 << 12


def _ways_out(config: Config, world_size: int, mend: set[str], *names: str, more_than: int = 0) -> str:
    # single changes that repair the rules ``mend`` and violate no others, as text: "; use --tp-size 1 or 2, or ...";
    # names: sizes to change, keys of ``_WAYS``; the nearest valid values of each are given
    model, parallel = config.model, config.parallel
    sizes = _Sizes(
        world_size, parallel.tensor_model_parallel_size, parallel.sequence_parallel_size,
        parallel.context_parallel_size, parallel.pipeline_model_parallel_size, model.num_attention_heads or 0,
        model.num_query_groups, model.ffn_size if model.ffn_hidden_size or model.hidden_size else None,
        None if model.kv_channels else model.hidden_size,
        model.rotary_percent if model.position_embedding_type == "rope" else None, all_sizes(config.batch),
        config.batch.micro_batch_size)
    allowed, ways = sizes.broken() - mend, []
    for name in names:
        value, valid = getattr(sizes, name), list[int]()
        for distance in range(1, min(2 * max(value, sizes.processes, sizes.replica) + 2, _MOST_TRIED)):
            near = [size for size in (value - distance, value + distance) if size > more_than]
            valid += [size for size in near if replace(sizes, **{name: size}).broken() <= allowed]
            if len(valid) >= 3:
                break
        if valid:
            *first, last = map(str, sorted(valid[:3]))
            ways.append(_WAYS[name].format(f"{', '.join(first)} or {last}" if first else last))
    return f"; use {', or '.join(ways)}" if ways else ""
