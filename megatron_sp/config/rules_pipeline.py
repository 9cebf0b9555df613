"""Rules of pipelines, and Megatron's words for their stages, such as ``Ett|(tttt|)*5,tt|tL``.

Stages are separated by ``|`` and listed in the order in which a sequence passes them: with P ranks the stages 0, P, 2
P, ... are those of rank 0. ``E`` is the embedding, ``t`` a layer, ``L`` the head with its loss, ``m`` a head for
further tokens; ``x*N`` and ``(...)*N`` repeat, commas mean nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

from megatron_sp.config.fields import flag_name
from megatron_sp.config.rules_layout import DROPOUT_IN_PIECES, these_are
from megatron_sp.config.schema import Config
from megatron_sp.utils.errors import ConfigError

# a rule is a condition and a sentence
# fmt: off
_GROUP, _LETTER = re.compile(r"\(([^()]+)\)\*(\d+)"), re.compile(r"([^()*])\*(\d+)")
_LONGEST = 1 << 16  # letters, after repetition
_OF_STAGES = (
    "pipeline_slices", "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout",
)


def resolve_stages(config: Config) -> None:
    """Turn what the flags say of a rank's stages into their number, unless they contradict each other; idempotent."""
    parallel, layers, p = config.parallel, config.model.num_layers, config.parallel.pipeline_model_parallel_size
    per_stage = parallel.num_layers_per_virtual_pipeline_stage
    if p == 1 or parallel.num_virtual_stages_per_pipeline_rank is not None:
        return
    if per_stage is not None and layers and layers % (per_stage * p) == 0:
        parallel.num_virtual_stages_per_pipeline_rank = layers // (per_stage * p)
        parallel.num_layers_per_virtual_pipeline_stage = None
    elif parallel.pipeline_model_parallel_layout:
        with suppress(ConfigError):  # the rules say what is wrong
            stages = len(layers_of_layout(parallel.pipeline_model_parallel_layout))
            if stages % p == 0 and stages > p:
                parallel.num_virtual_stages_per_pipeline_rank = stages // p


def pipeline_violations(config: Config) -> Iterator[str]:
    """Check the flags of pipelines, which must not contradict each other, and that each stage has layers."""
    parallel, layers = config.parallel, config.model.num_layers
    p, v, kind = parallel.pipeline_model_parallel_size, parallel.stages_per_pipeline_rank, parallel.pipeline_kind
    per_stage, layout = parallel.num_layers_per_virtual_pipeline_stage, parallel.pipeline_model_parallel_layout
    if p == 1:
        given = these_are({
            "--pipeline-schedule": parallel.pipeline_schedule not in (None, "auto"),
            **{flag_name(name): getattr(parallel, name) is not None for name in _OF_STAGES},
        })
        if given:
            yield (f"{given} about the stages of a pipeline, and with pipeline_model_parallel_size 1 there is none: add"
                " --pipeline-model-parallel-size N, or leave the flag out")
        return
    if per_stage is not None and layers:
        if parallel.num_virtual_stages_per_pipeline_rank is not None:
            yield ("--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank say the same:"
                " give one")
        else:
            yield (f"num_layers ({layers}) must be a multiple of pipeline_model_parallel_size ({p}) *"
                f" num_layers_per_virtual_pipeline_stage ({per_stage}) = {p * per_stage}: say"
                " --num-virtual-stages-per-pipeline-rank N instead, which deals any number of layers")
        return
    yield from _slices(config)
    schedule = f"--pipeline-schedule {kind}"
    if kind in ("1f1b", "slices") and v > 1:
        yield (f"{schedule} has one stage on each rank, and there are {v}: use interleaved or zb1p, or leave the stages"
            " out")
    if kind == "interleaved" and v == 1:
        yield (f"{schedule} needs several stages on each rank: add --num-virtual-stages-per-pipeline-rank 2 or more, or"
            " use 1f1b")
    if kind == "zbv" and v != 2:
        yield (f"{schedule} has two stages on each rank, and there are {v}: leave"
            " --num-virtual-stages-per-pipeline-rank out, or use zb1p")
    if layers:
        yield from _layers(config, layers, p, v) if layout is None else _layout(config, layout, layers, p, v)


def _slices(config: Config) -> Iterator[str]:
    parallel, model, given = config.parallel, config.model, config.parallel.pipeline_slices
    if parallel.pipeline_kind != "slices":
        if given is not None and parallel.pipeline_schedule != "auto":
            yield (f"--pipeline-slices {given} is for --pipeline-schedule slices, and --pipeline-schedule"
                f" {parallel.pipeline_schedule} has whole micro-batches: leave one of them out")
        return
    if model.is_bert:
        yield ("--pipeline-schedule slices is for causal models: with BERT's bidirectional attention a slice needs the"
            " keys of those after it; use 1f1b, zb1p or zbv")
    if model.seq_length and parallel.num_pipeline_slices > model.seq_length:
        yield (f"pipeline_slices ({parallel.num_pipeline_slices}) must be at most seq_length ({model.seq_length}): a"
            f" slice has a position at least; use --pipeline-slices {model.seq_length} or less")
    if model.attention_dropout > 0 and config.kernels.attention_backend not in DROPOUT_IN_PIECES:
        yield (f"attention_dropout ({model.attention_dropout}) inside --attention-backend"
            f" {config.kernels.attention_backend} would depend on how --pipeline-schedule slices cuts the sequence: add"
            " --attention-dropout 0, or use --attention-backend unfused")


def _layers(config: Config, layers: int, p: int, v: int) -> Iterator[str]:
    parallel = config.parallel
    if layers < p * v:
        fewer = ", or fewer stages on a rank" if v > 1 else ""
        yield (f"each stage needs a layer, and num_layers ({layers}) is less than pipeline_model_parallel_size ({p}) *"
            f" {v} stages on each rank = {p * v}: use --pipeline-model-parallel-size {max(1, layers // v)} or"
            f" less{fewer}")
        return
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    given = {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": last}
    for name, count in given.items():
        if count is not None and v > 1 and parallel.pipeline_kind == "zbv":
            yield (f"{name} ({count}) is about the first or last rank, and with zbv one rank has both ends: leave it"
                " out, or use zb1p")
        elif count is not None and count % v:
            near = f"{count // v * v or v} or {(count // v + 1) * v}"
            yield f"{name} ({count}) must be a multiple of the stages on a rank ({v}): {near}"
    between, left = (p - sum(count is not None for count in given.values())) * v, layers - (first or 0) - (last or 0)
    if between and left < between:
        yield (f"the stages that are not given need a layer each, and of {layers} layers {left} are left for {between}"
            " stages: lower --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers")
    if not between and left:
        both = f"decoder_first_pipeline_num_layers ({first}) + decoder_last_pipeline_num_layers ({last})"
        yield f"{both} must be num_layers ({layers})"


def _layout(config: Config, layout: str, layers: int, p: int, v: int) -> Iterator[str]:
    parallel, flag = config.parallel, "--pipeline-model-parallel-layout"
    try:
        counts = layers_of_layout(layout)
    except ConfigError as error:
        yield str(error)
        return
    if len(counts) != p * v:
        needed = f"pipeline_model_parallel_size ({p}){f' with {v} stages on each' if v > 1 else ''} takes {p * v}"
        yield f"{flag} has {len(counts)} stages, and {needed}: make them agree"
    if sum(counts) != layers:
        yield f"{flag} has {sum(counts)} layers, and num_layers is {layers}: make them agree"
    if parallel.decoder_first_pipeline_num_layers is not None or parallel.decoder_last_pipeline_num_layers is not None:
        yield f"{flag} has the layers of every stage: leave --decoder-first- and --decoder-last-pipeline-num-layers out"


@cache
def layers_of_layout(text: str) -> tuple[int, ...]:
    """Return the number of layers of each stage of --pipeline-model-parallel-layout.

    Raises:
        ConfigError: it is no such text, or has stages that cannot be here; the message says which.
    """
    flag = f"--pipeline-model-parallel-layout {text[:80]}"
    word = re.sub(r"[\s,'\"]", "", text)
    for pattern in (_GROUP, _LETTER):
        length = len(word) + sum(len(match[1]) * min(int(match[2][:9]), _LONGEST) for match in pattern.finditer(word))
        if length > _LONGEST:  # before it is written out: (t)*999999999 would take a gigabyte
            raise ConfigError(f"{flag}: that is more than {_LONGEST} letters")
        word = pattern.sub(lambda match: match[1] * int(match[2]), word)
    stages = word.split("|")
    letters = "".join(stages)
    if wrong := sorted(set(letters) - set("EtLm")):
        legend = "E is the embedding, t a layer, L the head, | ends a stage, t*3 and (tt|)*2 repeat"
        raise ConfigError(f"{flag}: {wrong[0]!r} means nothing there: {legend}")
    if "m" in letters:
        raise ConfigError(f"{flag}: m is a head for further tokens (--mtp-num-layers), which is not there")
    if not re.fullmatch("Et*L", letters):
        raise ConfigError(f"{flag}: the embedding (E) comes once, first, and the head (L) once, last")
    counts = tuple(stage.count("t") for stage in stages)
    if 0 in counts:
        number = counts.index(0)
        what = {"E": "only the embedding", "L": "only the head"}.get(stages[number], "no layer")
        raise ConfigError(f"{flag}: stage {number + 1} of {len(stages)} has {what}, and each stage needs a layer here:"
            " put the embedding with the first layers (Et|...) and the head with the last ones (...|tL), or leave the"
            " flag out, and layers are dealt so that the head counts")
    return counts
