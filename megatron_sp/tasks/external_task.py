"""Training of external models as a task of the training loop: model and schedule are external, everything else is ours.

The model is not wrapped: the adapter has the same children under the same names, so that names in checkpoints do not
change. Logits are computed for a rank's positions only; their loss is summed in fp32 or wider.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_sp.config.schema import Config, ModelConfig, raise_all
from megatron_sp.data.tokenizers import Tokenizer
from megatron_sp.estimate.flops import seen_share
from megatron_sp.models.language_model import OnUnit
from megatron_sp.optim.flat import FlatUnit
from megatron_sp.parallel.forward_context import ForwardContext, MicroBatch, Unit, UnitEvents
from megatron_sp.parallel.parallel_context import ParallelContext
from megatron_sp.schedule import Mesh, Schedule, schedule
from megatron_sp.schedule.apply.apply import Applied
from megatron_sp.schedule.apply.zero import UnitHooks, find_blocks, order_of, units_of
from megatron_sp.schedule.verify.copies import Float64Mode, one_expert_at_a_time
from megatron_sp.tasks import bert, gpt
from megatron_sp.training.parts import Task
from megatron_sp.training.setup import dtype_of
from megatron_sp.training.step import Loss
from megatron_sp.utils.errors import CheckpointError, ConfigError

BuildModel = Callable[[Config], nn.Module]
WriteSchedule = Callable[[Schedule, bool], None]

ATTENTION = {
    "auto": "sdpa", "fused": "sdpa", "cudnn": "sdpa", "unfused": "eager", "local": "eager",
    "flash": "flash_attention_2", "flash2": "flash_attention_2", "flash3": "flash_attention_3",
    "flash4": "flash_attention_4",
}  # fmt: skip
"""--attention-backend -> the name of the implementation in transformers."""
# names of configurations' entries that weigh what a model of transformers adds to the loss of the tokens
_WEIGHT_OF_A_LOSS = re.compile(r"loss_(coef|coeff|coefficient|weight)$")
_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
# in names of entries that do not change what is trained; dropout may differ from one process of a run to the next
_NOT_OF_THE_MODEL = (
    "drop", "transformers_version", "architectures", "dtype", "use_cache", "output_", "return_dict", "tokenizer_class",
    "bos_token_id", "eos_token_id", "id2label", "label2id",
)  # fmt: skip
# in names of entries that a new run may change
_OF_LENGTHS = ("rope", "rotary", "max_position_embeddings", "sliding_window", "layer_types")


def external_task(
    name: str, build: BuildModel, write: WriteSchedule, *, causal: bool = True,
    prepare: Callable[[Config], None] = lambda config: None,
) -> Task:  # fmt: skip
    """Create a task for ``training.loop.pretrain``.

    Args:
        name: first part of the run folder's name if --save is not given.
        build: builds the whole model; one in fp32 is cast to the run's dtype. Its ``prepare(config)``, if it has one,
            is called first.
        write: writes the lines of a schedule; its second argument is True with --sequence-parallel.
        causal: the model predicts the next token; else masked tokens (BERT's data).
        prepare: called before anything is built; a ConfigError on one rank is raised on all.
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

    def sums(model: nn.Module, batch: MicroBatch, context: ForwardContext, events: UnitEvents | None) -> list[Tensor]:
        loss, hits = model(batch, events)
        return [loss] if causal or torch.is_grad_enabled() else [loss, hits]

    data, metrics = (gpt, ()) if causal else (bert, ("lm accuracy",))
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
            lacks = "has no gradient_checkpointing_enable()"
            raise ConfigError(f"--recompute-granularity full: {type(model).__name__} {lacks}")
        options = {f"{kinds[0]}_checkpointing_kwargs": {"use_reentrant": False}}
        getattr(model, f"{kinds[0]}_checkpointing_enable")(**options)
    products = count_products(model)  # as long as it is whole
    s = schedule(model, Mesh(tp=layout.tp.group, sp=layout.sp.group, cp=layout.cp.group))
    write(s, layout.tp.seq)
    kinds_of_lines = {d.do for d in s.directives}  # a plan may set more of the options
    if "ulysses" not in kinds_of_lines and (layout.sp.size > 1 or "context" not in kinds_of_lines):
        s.ulysses(overlap_qkv=layout.mode == "split-qkv")
    if "context" not in kinds_of_lines and layout.cp.size > 1:
        chunks: dict[str, Any] = {} if layout.cp_chunks is None else {"chunks": layout.cp_chunks}
        s.context(stages_ahead=layout.cp.stages_ahead, keep_kv=layout.cp.keep_kv, **chunks)
    s.apply()
    assert s.applied is not None
    return ExternalModel(model, s.applied, products)


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a model as transformers' ``from_pretrained`` does: some classes keep parameters in fp32, buffers stay."""
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
        one_expert_at_a_time(model)  # their grouped product does not exist there
    return model


def _require_plain_loss(model: nn.Module) -> None:
    # refuse what a configuration adds to the loss of the tokens: of a micro-batch it is not that of one process either
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
    kernels, parallel, model = config.kernels, config.parallel, config.model
    if parallel.measures_split:
        yield (
            "--cp-comm-type auto times megatron_sp's own blocks, which an external model does not have: name the sizes,"
            " --sequence-parallel-size and --context-parallel-size"
        )
    if parallel.sequence_parallel_size > 1 and parallel.overlap_mode not in ("none", "split-qkv"):
        mode = f"--sp-overlap-mode {parallel.overlap_mode}"
        yield f"{mode} needs megatron_sp's own blocks: an external model supports none and split-qkv"
    in_part = kernels.recompute_method == "block" or (kernels.recompute_num_layers or 1) > 1
    in_part = in_part or kernels.recompute_attention != "none" or kernels.recompute_granularity == "selective"
    if in_part:
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


def _entries(config: dict[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if name.startswith("_") or any(part in name for part in _NOT_OF_THE_MODEL):
            continue
        if isinstance(value, dict):
            yield f"{place}{name}", "entries"  # where the other one may have nothing
            yield from _entries(value, f"{place}{name}.")
        else:
            yield f"{place}{name}", value


def count_products(model: nn.Module) -> float:
    """Return the multiply-adds of a model's matrices for one token: tables are looked up, and some experts chosen."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    number = next((n for name in _NUM_EXPERTS if isinstance(n := getattr(text, name, None), int) and n), 0)
    chosen = getattr(text, "num_experts_per_tok", None) or number
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    products = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and id(parameter) not in tables:
            products += parameter.numel() * (chosen / number if ".experts." in name and number else 1.0)
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None and id(head.weight) in tables:  # tied
        products += head.weight.numel()
    return products


class ExternalModel(nn.Module):
    """Adapter of a sharded external model to the training loop; ``products``: of the whole one (``count_products``)."""

    def __init__(self, model: nn.Module, applied: Applied, products: float) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self.model: nn.Module
        self.__dict__["model"] = model  # not as a child, which would put a name before all others
        self.applied, self.parameter_specs, self._products = applied, applied.specs, products
        self.blocks = find_blocks(model)
        if not self.blocks:
            blocks = "two or more blocks (modules of one class, or transformers' layers), the units of training"
            raise ConfigError(f"{type(model).__name__} has no list of {blocks}")
        self._units = units_of(model, self.blocks)
        self._hooks = UnitHooks(model, self.blocks, len(self._units))

    @property
    def description(self) -> dict[str, Any] | None:
        # for checkpoints; None if it is none of transformers' models
        config: Any = getattr(self.model, "config", None)
        if not hasattr(config, "to_dict"):
            return None
        return {"class": type(self.model).__name__, "config": json.loads(json.dumps(config.to_dict(), default=str))}

    def require_same(self, stored: dict[str, Any] | None, *, finetunes: bool) -> None:
        """Raise CheckpointError if a checkpoint's description differs; a model that ``finetunes`` may see further."""
        now = self.description
        if now is None or not isinstance(stored, dict) or not isinstance(stored.get("config"), dict):
            return
        before, after = (dict(_entries(of["config"])) for of in (stored, now))
        before, after = {"class": stored.get("class"), **before}, {"class": now["class"], **after}
        rows = []
        for name, old in before.items():
            may_differ = finetunes and any(part in name for part in _OF_LENGTHS)
            # what only one version of transformers knows is not compared
            if name in after and old != after[name] and not may_differ:
                rows.append(f"  {name}: {old} in the checkpoint, {after[name]} here")
        if rows:
            way_out = "give --model the folder that the run has begun with"
            raise CheckpointError("\n".join(["the checkpoint is of another model:", *rows, way_out]))

    def saved_buffers(self) -> dict[str, Tensor]:
        # those that belong to the model's state and are whole on every rank
        own = {id(buffer): name for name, buffer in self.model.named_buffers() if name not in self.applied.splits}
        return {own[id(t)]: t for t in self.model.state_dict(keep_vars=True).values() if id(t) in own}

    def flops_per_token(self, config: ModelConfig) -> tuple[float, float]:
        """Return (causal, full) FLOPs of forward and backward for one token, with lengths and heads of ``config``."""
        assert config.num_layers and config.num_attention_heads and config.seq_length
        text = getattr(self.model, "config", None)
        text = getattr(text, "get_text_config", lambda: text)()
        attends = text is None or hasattr(text, "num_attention_heads")  # models without attention say nothing of heads
        scores = attends * 4.0 * config.num_layers * config.seq_length * config.num_attention_heads * config.head_dim
        return 3.0 * (2.0 * self._products + scores * seen_share(config)), 3.0 * (2.0 * self._products + scores)

    def units(self) -> list[Unit]:
        return self._units  # everything outside the blocks, then the blocks

    def unit_order(self, *, backward: bool) -> list[int]:
        return order_of(len(self.blocks), backward=backward)

    def attach_units(self, units: list[FlatUnit]) -> None:
        # the hooks gather parameters at ZeRO stage 3
        sharded = units[0].zero.stage == 3 and units[0].zero.group.size() > 1
        self._hooks.sharded = units if sharded else []

    def train(self, mode: bool = True) -> ExternalModel:
        super().train(mode)
        self.model.training = mode
        return self

    def forward(self, batch: MicroBatch, events: UnitEvents | None) -> tuple[Tensor, Tensor]:
        """Return (sum of token losses, number of correct tokens) at this rank's positions."""
        self._hooks.events = events
        self._hooks.forget()
        tokens = batch["tokens"]
        given: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if "length" in batch:
            lengths = batch["length"].to(tokens.device)
            given["attention_mask"] = (torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]).long()
        if "types" in batch:
            given["token_type_ids"] = batch["types"]
        logits = self.model(**given)["logits"]
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        labels, mask = batch["labels"], batch["loss_mask"].to(logits.dtype)
        if self.applied.ulysses is not None:
            labels, mask = (self.applied.ulysses.take(t) for t in (labels, mask))
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        hits = (logits.detach().argmax(-1) == labels).to(mask.dtype)
        return (losses * mask.flatten()).sum(), (hits * mask).sum()
