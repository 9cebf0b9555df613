"""Rules of context parallelism, and Megatron's words for it.

    --cp-comm-type p2p                                                  cp --cp-comm-type all_gather
    cp, the keys and values of all ranks under way at once --cp-comm-type a2a
    all of --context-parallel-size is Ulysses': sp --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes A R
    sp = A and cp = R --cp-comm-type auto                                                 ours: the sizes whose product
    is --context-parallel-size that
                                                                        are fastest here, measured at the start
                                                                        (training/probe.py)

Nothing has to divide anything: neither lengths nor heads nor documents, only the ranks the processes (``rules.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_sp.config.schema import Config
from megatron_sp.config.schema_parallel import ParallelConfig

_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p", "auto")
_SPELLINGS = {"allgather": "all_gather", "all-gather": "all_gather", "p2p+a2a": "a2a+p2p"}
DROPOUT_IN_PIECES = ("unfused", "local", "auto")  # auto then takes the plain kernel, whose masks are hashes


def settle_comm_type(parallel: ParallelConfig) -> Iterator[str]:
    """Turn Megatron's words into sp and cp, unless they contradict others, which is left for ``context_violations``;
    idempotent.

    Returns:
        A line for each flag that has no effect.
    """
    sizes = parallel.hierarchical_context_parallel_sizes
    if (parallel.cp_comm_type is None and sizes is None) or _contradiction(parallel):
        return
    if parallel.context_parallel_size == 1:
        for name, given in (
            ("--cp-comm-type", parallel.cp_comm_type),
            ("--hierarchical-context-parallel-sizes", sizes),
        ):
            if given is not None:
                yield f"{name} (--context-parallel-size is 1: nothing is exchanged)"
    else:
        kind = _kinds(parallel)[0]
        if kind == "auto":  # the run settles it
            parallel.cp_comm_type = ("auto",)
            return
        if kind == "all_gather":
            parallel.cp_stages_ahead = "all"
        elif kind == "a2a":
            parallel.sequence_parallel_size, parallel.context_parallel_size = parallel.context_parallel_size, 1
        elif kind == "a2a+p2p":
            assert sizes is not None
            parallel.sequence_parallel_size, parallel.context_parallel_size = sizes
    parallel.cp_comm_type = parallel.hierarchical_context_parallel_sizes = None


def with_split(config: Config, sp: int, cp: int) -> Config:
    """Return a copy with sizes of sp and cp, without the flags that are then about exchanges that there are not.

    Unchanged sections are shared.
    """
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
    """Return whether attention has exchanges that gradients of weights can cover; with sp > 1 the last ones are those
    of the heads.
    """
    if parallel.sequence_parallel_size > 1:
        return parallel.overlaps_exchanges
    return parallel.context_parallel_size > 1


def delay_violations(config: Config) -> Iterator[str]:
    """Check that --delay-wgrad has an exchange to be computed under."""
    parallel = config.parallel
    if not parallel.delay_wgrad or parallel.measures_split:
        return
    if can_delay(parallel):
        if parallel.pipeline_model_parallel_size > 1 and parallel.pipeline_kind in ("zb1p", "zbv"):
            yield (
                f"--pipeline-schedule {parallel.pipeline_kind} puts off the gradients of all weights to where a rank"
                " would wait, and --delay-wgrad some of them to the exchanges of attention: give one"
            )
        return
    what = "--delay-wgrad computes gradients of weights under the exchanges of attention"
    if parallel.sequence_parallel_size > 1:
        yield f"{what}, and without overlap these are waited for at once: add --sp-overlap-comm, or leave --delay-wgrad out"
    else:
        yield (
            f"{what}, and with sequence_parallel_size 1 and context_parallel_size 1 there are none: add"
            " --sequence-parallel-size N or --context-parallel-size N, or leave the flag out"
        )


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
    kind, given = kinds[0], f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes or ()))}"
    if sizes is not None and kind != "a2a+p2p":
        return f"{given} is for --cp-comm-type a2a+p2p, and the type is {kind}: give that, or leave the sizes out"
    if sizes is not None and (len(sizes) != 2 or min(sizes) < 1 or sizes[0] * sizes[1] != cp):
        product = f", and {sizes[0]} * {sizes[1]} = {sizes[0] * sizes[1]}" if len(sizes) == 2 else ""
        return f"{given} must be two sizes, of Ulysses and of what is around it, whose product is context_parallel_size ({cp}){product}"
    if kind == "a2a+p2p" and sizes is None and cp > 1:
        return f"--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes A R with A * R = {cp}: A for Ulysses, R around it"
    if (kind.startswith("a2a") or kind == "auto") and sp > 1:
        says = "measures" if kind == "auto" else "says"
        return (
            f"--cp-comm-type {kind} {says} how many ranks are Ulysses', and --sequence-parallel-size {sp} says it"
            " too: give --sequence-parallel-size and --context-parallel-size alone, or leave the former out"
        )
    if kind == "all_gather" and parallel.cp_stages_ahead not in (None, "all"):
        return f"--cp-comm-type all_gather has all stages ahead, and --cp-stages-ahead says {parallel.cp_stages_ahead}: give one of them"
    return ""


def context_violations(config: Config) -> Iterator[str]:
    """Check the flags of context parallelism, which must not contradict each other, and what it cannot compute."""
    parallel, model, backend = config.parallel, config.model, config.kernels.attention_backend
    if (parallel.cp_comm_type or parallel.hierarchical_context_parallel_sizes) and (why := _contradiction(parallel)):
        yield why
        return
    given = [
        flag for flag, on in (
            ("--cp-chunks", parallel.cp_chunks is not None),
            ("--cp-stages-ahead", parallel.cp_stages_ahead is not None),
            ("--cp-keep-kv", parallel.cp_keep_kv),
        ) if on
    ]  # fmt: skip
    if parallel.context_parallel_size == 1:
        if given:
            yield (
                f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} about the exchanges of context"
                " parallelism, and with context_parallel_size 1 there are none: add --context-parallel-size N, or"
                " leave the flag out"
            )
        return
    if model.attention_dropout > 0 and backend not in DROPOUT_IN_PIECES:
        yield (
            f"attention_dropout ({model.attention_dropout}) inside --attention-backend {backend} would depend on how"
            f" context parallelism (context_parallel_size {parallel.context_parallel_size}) cuts the sequence: add"
            " --attention-dropout 0, or use --attention-backend unfused"
        )
