"""Training of external models as a task of the training loop: model and schedule are external, everything else is ours.

Data, optimizer, ZeRO, checkpoints, logs and flags are those of every run. Flags that only apply to our own blocks are
rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron_sp.config.schema import Config, raise_all
from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.models.language_model import OnUnit
from megatron_sp.parallel.forward_context import ForwardContext, MicroBatch, UnitEvents
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.schedule.verify.copies import Float64Mode, one_expert_at_a_time
from megatron_sp.tasks import bert, gpt
from megatron_sp.tasks.external_model import ExternalModel, count_products
from megatron_sp.training.run import Task
from megatron_sp.training.setup import dtype_of
from megatron_sp.training.step import Loss
from megatron_sp.utils.errors import ConfigError

BuildModel = Callable[[Config], nn.Module]
WriteSchedule = Callable[[Schedule, bool], None]

ATTENTION = {
    "auto": "sdpa", "fused": "sdpa", "cudnn": "sdpa", "unfused": "eager", "local": "eager",
    "flash": "flash_attention_2",
    "flash2": "flash_attention_2", "flash3": "flash_attention_3", "flash4": "flash_attention_4",
}  # fmt: skip
"""--attention-backend -> the name of the implementation in transformers."""

_WEIGHT_OF_A_LOSS = re.compile(r"loss_(coef|coeff|coefficient|weight)$")
"""Names of configurations' entries that weigh what a model of transformers adds to the loss of the tokens."""


def external_task(
    name: str, build: BuildModel, write: WriteSchedule, *, causal: bool = True,
    prepare: Callable[[Config], None] = lambda config: None,
) -> Task:  # fmt: skip
    """Create a task for ``training.loop.pretrain``.

    Args:
        name: name of the task; first part of the run folder's name if --save is not given.
        build: builds the whole model from the configuration, with random or loaded weights; a model in fp32 is cast
            to the run's dtype as transformers' ``from_pretrained(dtype=...)`` would. Its ``prepare(config)``, if it has
            one, is called first.
        write: writes directives into a schedule, those for tensor parallelism among them; its second argument is
            True with --sequence-parallel.
        causal: True if the model predicts the next token; else masked tokens (BERT's data).
        prepare: called with the configuration before anything is built; a ConfigError on one rank is raised on all.
    """

    def tokenizer_of(config: Config) -> Tokenizer:
        raise_all(list(problems(config)))
        prepare(config)
        getattr(build, "prepare", lambda config: None)(config)
        return gpt.tokenizer_provider(config)

    def build_model(config: Config, layout: ParallelContext, on_unit: OnUnit | None = None) -> nn.Module:
        model = _scheduled(config, layout, build, write)
        for unit in model.units():
            if on_unit is not None:
                on_unit(model, unit)  # type: ignore[arg-type]
        return model

    data, sums, metrics = (gpt, _sums, ()) if causal else (bert, _sums_and_hits, ("lm accuracy",))
    return Task(
        name=name, build_tokenizer=tokenizer_of, build_datasets=data.dataset_provider, build_model=build_model,
        loss=Loss(names=("lm loss",), counts=data.loss_counts, sums=sums, causal=causal, metrics=metrics),
        torch_dropout=True, exactly=Float64Mode,
    )  # fmt: skip


def _scheduled(config: Config, layout: ParallelContext, build: BuildModel, write: WriteSchedule) -> ExternalModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.batch.seed)  # the same weights on every rank, in every layout
        # from_pretrained leaves it in evaluation mode, without dropout
        model = in_dtype(build(config), dtype_of(config)).train()
    _require_plain_loss(model)
    if config.kernels.recompute_granularity == "full":
        # the newer name, the older
        kinds = [kind for kind in ("activation", "gradient") if hasattr(model, f"{kind}_checkpointing_enable")]
        if not kinds:
            raise ConfigError(
                f"--recompute-granularity full: {type(model).__name__} has no gradient_checkpointing_enable()"
            )
        getattr(model, f"{kinds[0]}_checkpointing_enable")(
            **{f"{kinds[0]}_checkpointing_kwargs": {"use_reentrant": False}}
        )
    products = count_products(model)  # as long as it is whole
    s = schedule(model, Mesh(tp=layout.tp.group, sp=layout.sp.group, cp=layout.cp.group))
    write(s, layout.tp.seq)
    said = {d.do for d in s.directives}  # a plan may set more of the options
    if "ulysses" not in said and (layout.sp.size > 1 or "context" not in said):
        s.ulysses(overlap_qkv=layout.mode == "split-qkv")
    if "context" not in said and layout.cp.size > 1:
        chunks: dict[str, Any] = {} if layout.cp_chunks is None else {"chunks": layout.cp_chunks}
        s.context(stages_ahead=layout.cp.stages_ahead, keep_kv=layout.cp.keep_kv, **chunks)
    s.apply()
    assert s.applied is not None
    return ExternalModel(model, s.applied, products)


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the parameters of a model to ``dtype``, as transformers' ``from_pretrained(dtype=...)`` does.

    Buffers stay as they are (rotary frequencies lose their meaning in 16 bits), and so do the parameters that a class
    of transformers keeps in fp32 (``_keep_in_fp32_modules_strict``; in fp16 also ``_keep_in_fp32_modules``). In fp64
    the experts of transformers' mixtures are computed one by one: their grouped product does not exist there.
    """
    kept: list[str] = []
    if dtype in (torch.bfloat16, torch.float16):
        kept += getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if dtype == torch.float16:
        kept += getattr(model, "_keep_in_fp32_modules", None) or ()
    patterns = [re.compile(name.replace("*", ".*")) for name in kept]
    if all(parameter.dtype != dtype for parameter in model.parameters()):
        for name, parameter in model.named_parameters():
            wide = any(pattern.search(name) for pattern in patterns)
            parameter.data = parameter.data.to(torch.float32 if wide else dtype)
    if dtype == torch.float64:
        one_expert_at_a_time(model)
    return model


def _require_plain_loss(model: nn.Module) -> None:
    """Raise ConfigError if a model's configuration adds something to the loss of the tokens.

    A mixture's loss over all tokens of a micro-batch would not be that of one process either.
    """
    config = getattr(model, "config", None)
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())
    holders = [holder for holder in (config, *parts) if hasattr(holder, "__dict__")]
    balances = any(getattr(holder, "output_router_logits", False) for holder in holders)
    for name, value in (entry for holder in holders for entry in vars(holder).items()):
        if not _WEIGHT_OF_A_LOSS.search(name) or not isinstance(value, (int, float)) or not value:
            continue
        if "z_loss" in name:
            raise ConfigError(
                f"the model's configuration adds a loss on the size of its logits ({name} {value:g}), which is not"
                f" computed for an external model: set {name} to 0 in config.json"
            )
        if balances:
            raise ConfigError(
                f"the model's configuration asks for a loss that balances its experts (output_router_logits, {name}"
                f" {value:g}), which depends on the cut of the batch: set output_router_logits to false in config.json,"
                " or convert the model and train it with --moe-aux-loss-coeff"
            )


def problems(config: Config) -> Iterator[str]:
    """Yield the problems of flags that an external model does not support."""
    kernels, parallel, model = config.kernels, config.parallel, config.model
    if parallel.measures_split:
        yield (
            "--cp-comm-type auto times megatron_sp's own blocks, which an external model does not have: name the sizes,"
            " --sequence-parallel-size and --context-parallel-size"
        )
    if parallel.sequence_parallel_size > 1 and parallel.overlap_mode not in ("none", "split-qkv"):
        mode = f"--sp-overlap-mode {parallel.overlap_mode}"
        yield f"{mode} needs megatron_sp's own blocks: an external model supports none and split-qkv"
    partly = (
        kernels.recompute_method == "block"
        or (kernels.recompute_num_layers or 1) > 1
        or kernels.recompute_attention != "none"
    )
    if kernels.recompute_granularity == "selective" or partly:
        way_out = "use --recompute-granularity full without further options"
        yield f"an external model recomputes all of its blocks or none: {way_out}"
    for given, flag in (
        (kernels.mlp_chunks > 1, "--mlp-chunks"), (kernels.offload_activations, "--offload-activations"),
        (kernels.recompute_qkv, "--recompute-qkv"), (parallel.delay_wgrad, "--delay-wgrad"),
    ):  # fmt: skip
        if given:
            yield f"{flag} changes megatron_sp's own blocks, which an external model does not have: leave it out"
    if config.optimizer.decoupled_lr is not None:
        yield "--decoupled-lr is for the embedding and output layer of megatron_sp's own models: leave it out"
    data = config.data
    for given, flag in (
        (data.reset_position_ids, "--reset-position-ids"), (data.reset_attention_mask, "--reset-attention-mask"),
        (data.bert_pack_sequences, "--bert-pack-sequences"),
    ):  # fmt: skip
        if given:
            yield f"{flag}: an external model is trained on whole rows: leave it out"
    if model.has_order_head:
        yield "an external model is trained on masked tokens alone: add --bert-no-binary-head"


def _sums(model: nn.Module, batch: MicroBatch, context: ForwardContext, events: UnitEvents | None) -> list[Tensor]:
    return [model(batch, events)[0]]


def _sums_and_hits(
    model: nn.Module, batch: MicroBatch, context: ForwardContext, events: UnitEvents | None
) -> list[Tensor]:
    loss, hits = model(batch, events)
    return [loss] if torch.is_grad_enabled() else [loss, hits]
