"""One step of a tiny GPT under any layout, and what it must equal: the plain reference on one process.

A case names sizes of the axes and overrides of the model; ``check`` runs on every rank. The whole model is built on
every rank, the sharded one takes its parts of those weights, and each rank compares its part of every gradient.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron_sp.comm.collectives import all_reduce
from megatron_sp.comm.groups import ParallelGroups
from megatron_sp.comm.object_collectives import gather_json
from megatron_sp.comm.recorder import Direction, Recorder
from megatron_sp.config.schema import KernelConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_sp.models.attention import SelfAttention
from megatron_sp.models.bert import BertModel
from megatron_sp.models.classifier import BertClassifier
from megatron_sp.models.experts import expert_biases, routing_of
from megatron_sp.models.language_model import LanguageModel
from megatron_sp.models.transformer import delayed_weights
from megatron_sp.ops.attention import AttentionMask, KernelName, document_ends
from megatron_sp.ops.dropout import DropoutKeys
from megatron_sp.optim.flat import FlatUnit, Zero
from megatron_sp.optim.gradients import FlatGradients
from megatron_sp.optim.optimizer import FlatOptimizer
from megatron_sp.optim.weights import UnitWork, WholeWeights
from megatron_sp.parallel.forward_context import TABLE, ForwardContext
from megatron_sp.parallel.layers import attach_main_grad, shard_specs, table_names
from megatron_sp.parallel.parallel_context import NO_EP, ExpertParallel, ParallelContext
from megatron_sp.parallel.pipeline_plan import PipelineKind
from megatron_sp.parallel.pipeline_stages import deal_layers
from megatron_sp.parallel.router_pass import RouterStep
from megatron_sp.training.pipelined import Pipeline, PipelinedPasses
from megatron_sp.training.sharding import counted_by, pools_of_model, units_together
from megatron_sp.training.step import count_first, with_routers
from support import plain_experts, reference, tiny
from support.errors import FP32, FP64, assert_law
from support.ranks import run_ranks

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A layout, a model and a batch."""

    tp: int = 1
    sp: int = 1
    dp: int = 1
    cp: int = 1
    cp_chunks: int | None = None
    pp: int = 1
    schedule: PipelineKind = "1f1b"
    slices: int = 1
    layers: tuple[int, ...] = ()  # of each stage; empty: as balances them, with two stages on a rank if the schedule needs them
    tp_seq: bool = False
    mode: Any = "none"
    chunks: int = 2
    overlap: bool = True
    seq: int = tiny.S
    batch: int = 2  # of a data-parallel rank and micro-batch
    micro_batches: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    kernels: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    mask: float = 0.7
    bert: bool = False  # masked tokens and sentence order, each sequence with padding after it unless packed
    classes: int = 0  # with ``bert``: a classifier instead
    packed: bool = False  # several documents in a sequence, which do not see each other
    padding: bool = False  # bidirectional, with padding at the end of each sequence but the last
    ragged: bool = False  # the last third of each sequence, so the last sp rank, has no loss token
    zero: int = 0
    buffers: int = 2  # of the blocks, with zero 3
    fetch: Any = "all_gather"
    ep: int = 1  # of a model with experts (``model``)
    ep_chunks: int = 1
    skew: float = 0.0  # added to the bias of the first expert (``--moe-router-enable-expert-bias``): all tokens choose it
    delay: bool = False  # gradients of the MLP's weights, to attention's last exchange
    steps: int = 0  # optimizer steps after which weights are compared
    table_lr: float | None = None  # learning rate of embeddings and output layer in these
    attention: type[SelfAttention] | None = None  # what mixes positions; None: attention

    @property
    def world(self) -> int:
        return self.tp * self.sp * self.cp * self.dp * self.pp

    @property
    def stages(self) -> tuple[int, ...]:
        """Layers of each stage."""
        per_rank = 2 if self.schedule in ("interleaved", "zbv") else 1
        return self.layers or deal_layers(self.model.get("num_layers", tiny.LAYERS), self.pp * per_rank)

    @property
    def _pipeline(self) -> str:
        return (
            ""
            if self.pp == 1
            else f"-pp{self.pp} {self.schedule}{self.slices if self.slices > 1 else ''} {'+'.join(map(str, self.stages))}"
        )

    @property
    def _context(self) -> str:
        return "" if self.cp == 1 else f"-cp{self.cp}" + ("" if self.cp_chunks is None else f"x{self.cp_chunks}")

    def __str__(self) -> str:
        parts = [
            f"tp{self.tp}{'s' if self.tp_seq else ''}-sp{self.sp}{self._context}-dp{self.dp}-{self.mode}"
            f"{self.chunks if self.mode == 'chunked' else ''}{self._pipeline}"
        ]
        parts += [] if self.attention is None else [self.attention.__name__]
        parts += ["classifier" if self.classes else "bert"] if self.bert else []
        parts += [f"ep{self.ep}x{self.ep_chunks}"] if self.ep > 1 else []
        parts += [f"s{self.seq}"] if self.seq != tiny.S else []
        parts += [f"{k}={v}" for k, v in {**self.model, **self.kernels}.items()]
        parts += [word for word in ("packed", "padding") if getattr(self, word)]
        parts += [f"b{self.batch}x{self.micro_batches}"] + (["ragged"] if self.ragged else []) + ([] if self.overlap else ["waits"])
        return " ".join(parts)


def batch_of(case: Case, config: ModelConfig, number: int) -> tiny.Batch:
    """Micro-batch ``number`` of the global batch."""
    g = torch.Generator().manual_seed(100 + number)
    assert config.vocab_size
    shape = (case.batch, case.seq)
    tokens, labels = (torch.randint(0, config.vocab_size, shape, generator=g) for _ in range(2))
    mask = torch.rand(shape, generator=g, dtype=torch.float64) * (torch.rand(shape, generator=g) < case.mask)
    if case.ragged:
        mask[:, -(-2 * case.seq // 3) :] = 0.0
    batch = {"tokens": tokens, "labels": labels, "loss_mask": mask, "sample_ids": torch.arange(case.batch) + 1000 * number}
    if case.packed:
        starts = torch.rand(shape, generator=g) < 0.3
        starts[:, 0] = False
        batch["documents"] = starts.long().cumsum(1)
        at = torch.arange(case.seq).expand(shape)
        batch["positions"] = at - torch.where(starts, at, 0).cummax(1).values
    if case.padding or (case.bert and not case.packed):
        batch["lengths"] = torch.tensor([max(1, case.seq - 3 * (case.batch - 1 - i)) for i in range(case.batch)])
        batch["loss_mask"] *= torch.arange(case.seq) < batch["lengths"][:, None]
    if case.bert:
        batch["types"] = torch.randint(0, 2, shape, generator=g)
        batch["order"] = torch.randint(0, 2, shape[:1], generator=g)
    if case.classes:
        batch["label"] = torch.randint(0, case.classes, shape[:1], generator=g)
        batch["weight"] = torch.rand(shape[:1], generator=g, dtype=torch.float64)
    return batch


def loss_of(model: LanguageModel, batch: tiny.Batch, ctx: ForwardContext, events: Any = None) -> Tensor:
    """The sum over this rank's share; BERT's second task counts more, so that a wrong factor shows."""
    if isinstance(model, BertClassifier):
        return model(batch["tokens"], batch["types"], batch["label"], batch["weight"], ctx, events).sum
    if not isinstance(model, BertModel):
        return cast("Tensor", model(batch["tokens"], batch["labels"], batch["loss_mask"], ctx, events)[0])
    made = model(batch["tokens"], batch["types"], batch["labels"], batch["loss_mask"], batch["order"], ctx, events)
    return made.masked if made.order is None else made.masked + 1.7 * made.order


def documents_of(batch: tiny.Batch) -> list[tiny.Batch]:
    """Every document of a packed batch as a batch of its own."""
    if "documents" not in batch:
        return [batch]
    alone = []
    for row, numbers in enumerate(batch["documents"]):
        for number in numbers.unique():
            alone.append({k: batch[k][row][numbers == number][None] for k in ("tokens", "labels", "loss_mask")})
    return alone


def context(config: ModelConfig, batch: tiny.Batch) -> ForwardContext:
    keys = None
    if config.hidden_dropout or config.attention_dropout:
        positions = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device)
        keys = DropoutKeys.create(7, 3, batch["sample_ids"], positions)
    kernel: KernelName = "reference" if config.attention_dropout else "sdpa"
    if "lengths" in batch:
        return ForwardContext(AttentionMask(causal=False, key_lengths=batch["lengths"]), kernel=kernel, dropout=keys)
    documents = document_ends(batch["documents"]) if "documents" in batch else None
    return ForwardContext(
        AttentionMask(causal=not config.is_bert, documents=documents), kernel=kernel, dropout=keys, positions=batch.get("positions")
    )


def want_of(case: Case, whole: LanguageModel) -> dict[str, Tensor]:
    """Loss and gradients of the whole step by the plain reference, padding rows of the vocabulary left out."""
    config = whole.config
    specs = shard_specs(whole)
    drops = bool(config.hidden_dropout or config.attention_dropout)
    # the plain reference is a causal GPT, of documents without dropout
    if case.padding or case.bert or (case.packed and drops) or case.attention is not None:
        batches = [batch_of(case, config, number) for number in range(case.dp * case.micro_batches)]
        got = _unsharded_step(_in_fp64(whole), batches)
        return {n: t if n == "loss" else t[: specs[n].shape[0]] for n, t in got.items()}
    weights = {n: specs[n].take(p.detach()[: specs[n].shape[0]].double()).clone().requires_grad_() for n, p in whole.named_parameters()}
    weights |= {n: b for n, b in whole.named_buffers() if n.endswith("expert_bias")}
    total = torch.zeros((), dtype=torch.float64)
    losses, routed = [], list[list[tuple[Tensor, list[list[int]]]]]()
    for number in range(case.dp * case.micro_batches):
        batch = batch_of(case, config, number)
        dropout = context(config, batch).dropout
        for part in documents_of(batch):
            routed.append([])
            loss, _ = reference.gpt_loss(config, weights, part["tokens"], part["labels"], part["loss_mask"], dropout, routed[-1])
            losses.append(loss)
    losses.append(router_terms(config, case, routed))
    for loss in losses:
        if loss.requires_grad:
            loss.backward(retain_graph=config.has_experts)
        total += loss.detach()
    weights = {n: w for n, w in weights.items() if not n.endswith("expert_bias")}
    return {"loss": total, **{n: w.grad if w.grad is not None else torch.zeros_like(w) for n, w in weights.items()}}


def _in_fp64(model: LanguageModel) -> LanguageModel:
    """A copy of the model that computes in fp64: what rounds as much as the layout is no reference for it."""
    model = deepcopy(model).double()
    model.params_dtype = torch.float64
    return model


def router_terms(config: ModelConfig, case: Case, routed: list[list[tuple[Tensor, list[list[int]]]]]) -> Tensor:
    """The terms that keep loads even, of the global batch: logits and choices of each micro-batch and layer."""
    total = torch.zeros((), dtype=torch.float64)
    if not config.has_experts:
        return total
    spec, number = routing_of(config), case.dp * case.micro_batches * case.batch
    for of_layer in zip(*routed, strict=True):
        logits, choices = torch.cat([logits for logits, _ in of_layer]), [c for _, choices in of_layer for c in choices]
        if config.balance_kind == "global":
            total = total + config.moe_aux_loss_coeff * plain_experts.balance(logits, choices, spec)
        elif config.balance_kind == "sequence":
            rows = [slice(i * case.seq, (i + 1) * case.seq) for i in range(number)]
            each = [plain_experts.balance(logits[row], choices[row], spec) for row in rows]
            total = total + config.moe_aux_loss_coeff * sum(each) / number
        total = total + (config.moe_z_loss_coeff or 0.0) * plain_experts.z_term(logits) / len(logits)
    return total


def _unsharded_step(whole: LanguageModel, batches: list[tiny.Batch]) -> dict[str, Tensor]:
    """Loss and gradients of our own model in one piece, whose attention the unit tests compare with a loop for every kind of mask."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        loss = loss_of(whole, batch, context(whole.config, batch))
        loss.backward()
        total += loss.detach()
    grads = {n: p.grad.clone() if p.grad is not None else torch.zeros_like(p) for n, p in whole.named_parameters()}
    whole.zero_grad()
    return {"loss": total, **grads}


@cache
def _groups(device: torch.device, tp: int, sp: int, cp: int, pp: int = 1) -> ParallelGroups:
    """Built once in a rank's process: with eight ranks on two cores they take longer than a case."""
    return ParallelGroups.create(device, tp_size=tp, sp_size=sp, cp_size=cp, pp_size=pp)


@cache
def _experts(groups: ParallelGroups, ep: int, tp_seq: bool, chunks: int) -> ExpertParallel:
    return ExpertParallel.create(groups, ep, tp_seq=tp_seq, chunks=chunks)


@cache
def _pipeline(groups: ParallelGroups, kind: PipelineKind, layers: tuple[int, ...], slices: int) -> Pipeline:
    return Pipeline(groups, kind, layers, slices)


class Sharded:
    """The model of this rank with flat buffers, its weights taken from the whole model, which is on the CPU."""

    def __init__(self, case: Case, whole: LanguageModel, recorder: Recorder | None = None, device: torch.device = CPU) -> None:
        self.case, self.recorder, config = case, recorder, whole.config
        self.groups = _groups(device, case.tp, case.sp, case.cp, case.pp)
        self.pipeline = _pipeline(self.groups, case.schedule, case.stages, case.slices) if case.pp > 1 else None
        self.layout = ParallelContext.of(
            self.groups, tp_seq=case.tp_seq, mode=case.mode, num_chunks=case.chunks, overlap=case.overlap, recorder=recorder,
            cp_chunks=case.cp_chunks, stages=() if self.pipeline is None else self.pipeline.own_stages, num_slices=case.slices,
            ep=_experts(self.groups, case.ep, case.tp_seq, case.ep_chunks) if config.has_experts else NO_EP,
        )  # fmt: skip
        self.model = tiny.build(
            config, KernelConfig(**case.kernels), case.classes, seed=5, dtype=case.dtype, layout=self.layout, attention=case.attention
        )
        self.specs = shard_specs(self.model)
        weights = dict(whole.named_parameters())
        for name, p in self.model.named_parameters():
            spec = self.specs[name]
            for offsets, view in spec.pieces(p.data):
                part = weights[name].data[tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))]
                view.copy_(part)
        buffers = dict(whole.named_buffers())
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])
        self.model.to(device)
        names = {id(p): n for n, p in self.model.named_parameters()}
        zero = Zero(case.zero, self.groups.dp_cp_sp)
        self.shapes = {n: p.shape for n, p in self.model.named_parameters()}
        zeros = {TABLE: Zero(case.zero, self.groups.ends or self.groups.dp_cp_sp).of("whole")}
        zeros |= {u.name: Zero(case.zero, self.layout.ep.replicas) for u in self.model.units() if u.alike == "experts"}
        self.units = [
            FlatUnit(u.name, [(names[id(p)], p) for p in u.module.parameters()], self.specs, zeros.get(u.name, zero))
            for u in self.model.units()
        ]
        self.tables = [i for i, u in enumerate(self.units) if u.name == TABLE]
        self.own_groups = {i: u.zero.group for i, u in enumerate(self.units) if u.name in zeros}
        self.routers: RouterStep | None = None
        self.gradients = FlatGradients(
            self.units, self.groups.dp_cp_sp, tp=self.groups.tp, own_groups=self.own_groups,
            delayed=delayed_weights(self.model, self.layout.tp) if case.delay else (),
        )  # fmt: skip
        order = [] if self.pipeline is not None else self.model.unit_order(backward=True)
        self.pools = pools_of_model(self.model, ParallelConfig(zero3_keep_units=case.buffers - 2))
        self.weights = WholeWeights(self.units, pools=self.pools, order=order, fetch=case.fetch, together=units_together(self.model))
        self.events = UnitWork(self.weights, self.gradients)
        attach_main_grad(self.model, self.gradients)

    def step(self) -> Tensor:
        """All micro-batches; the loss summed over the ranks."""
        case, total = self.case, torch.zeros((), dtype=torch.float64, device=self.groups.device)
        self.gradients.start_step()
        self.routers = start_routers(self.model, case, self.groups.device)
        if self.pipeline is not None:
            return self._pipelined(self.pipeline, total)
        if self.routers is not None and case.micro_batches > 1:
            count_first(self.routers, self.model, self.weights, range(case.micro_batches), self._count)
        self.weights.start_step(case.micro_batches)
        for i in range(case.micro_batches):
            batch = self.batch(i)
            ctx = self.context(batch)
            self._enter("forward")
            loss = loss_of(self.model, batch, ctx, self.events)
            if self.routers is not None and case.micro_batches == 1:
                self.routers.settle()
            if i == case.micro_batches - 1:
                self.gradients.last_micro_batch()
            self._enter("backward")
            loss.backward()
            self.gradients.finish_micro_batch()
            total += loss.detach()
            if ctx.routers is not None:
                ctx.routers.finish()
        self._enter("update")
        self.gradients.finish_step()
        return all_reduce(total, self.groups.dp_cp_sp).cpu() + self._router_terms()

    def context(self, batch: tiny.Batch) -> ForwardContext:
        """Of a micro-batch."""
        ctx = context(self.model.config, batch)
        return ctx if self.routers is None else with_routers(ctx, self.routers, batch)

    def _count(self, i: int) -> None:
        batch = self.batch(i)
        self.model.hidden(batch["tokens"], self.context(batch), UnitWork(self.weights, None))

    def _router_terms(self) -> Tensor:
        """Of all ranks. Collective."""
        if self.routers is None or self.routers.weights is None:
            return torch.zeros((), dtype=torch.float64)
        sums = all_reduce(all_reduce(self.routers.sums.clone(), self.layout.ep.tokens), self.groups.pp)
        weights = self.routers.weights()
        return sums[0] * weights.balance + sums[1] * weights.z

    def optimizer(self, config: OptimizerConfig) -> FlatOptimizer:
        """Of these units."""
        has_experts = self.model.config.has_experts
        whole, elsewhere = counted_by(self.groups, len(self.units), self.own_groups, self.tables, has_experts=has_experts)
        return FlatOptimizer(
            self.units, config, tp=self.groups.tp, everybody=self.groups.world, whole=whole, counted_elsewhere=elsewhere,
            decoupled=table_names(self.model),
        )  # fmt: skip

    def _pipelined(self, pipeline: Pipeline, total: Tensor) -> Tensor:
        batches = [self.batch(i) for i in range(self.case.micro_batches)]

        def loss(i: int, ctx: ForwardContext) -> Tensor:
            made = loss_of(self.model, batches[i], ctx, self.events)
            total.add_(made.detach())
            return made

        def hidden(model: torch.nn.Module, batch: tiny.Batch, ctx: ForwardContext, events: Any) -> Tensor:
            return cast("LanguageModel", model).hidden(batch["tokens"], ctx, events, batch.get("types"))

        def run(gradients: FlatGradients | None, loss: Any, events: UnitWork) -> None:
            PipelinedPasses(
                pipeline, self.model, batches, context_of=lambda i: self.context(batches[i]), hidden=hidden, loss=loss,
                events=events, weights=self.weights, gradients=gradients,
            ).run()  # fmt: skip

        if self.routers is not None and self.routers.counts_first:
            with self.routers.counting(), torch.no_grad():
                forward = UnitWork(self.weights, None)
                run(None, lambda i, ctx: hidden(self.model, batches[i], ctx, forward), forward)
        run(self.gradients, loss, self.events)
        self.gradients.finish_step()
        return all_reduce(all_reduce(total, self.groups.dp_cp_sp), self.groups.pp).cpu() + self._router_terms()

    def _enter(self, direction: Direction) -> None:
        if self.recorder is not None:
            self.recorder.enter(direction)

    def batch(self, i: int) -> tiny.Batch:
        """Micro-batch ``i`` of this rank, on its device."""
        number = self.groups.dp_rank * self.case.micro_batches + i
        return {name: t.to(self.groups.device) for name, t in batch_of(self.case, self.model.config, number).items()}

    def grads(self) -> dict[str, Tensor]:
        """Of the step that has been run, whole. Collective."""
        found: dict[str, Tensor] = {}
        for unit in self.units:
            whole = unit.gathered(unit.grad_shard).cpu()
            found |= {slot.name: slot.view(whole) for slot in unit.slots}
        return found

    def params(self) -> dict[str, Tensor]:
        """The weights, whole. Collective."""
        found: dict[str, Tensor] = {}
        for unit in self.units:
            whole = unit.gathered(unit.local_params).cpu()
            found |= {slot.name: slot.view(whole) for slot in unit.slots}
        return found

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, with zeros for padding."""
        local = torch.zeros(self.shapes[name], dtype=whole.dtype)
        for (offsets, view), _ in zip(self.specs[name].pieces(local), self.specs[name].runs, strict=True):
            view.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offsets, view.shape, strict=True))])
        return local


class OneProcess:
    """What one process makes of a case: loss and gradients of the first step, and with ``steps`` the weights after that many updates."""

    def __init__(self, case: Case) -> None:
        self.config = tiny.shape(**{"seq_length": case.seq, "model_family": "bert" if case.bert else "gpt", **case.model})
        self.whole = skewed(tiny.make_model(self.config, dtype=case.dtype, classes=case.classes, attention=case.attention), case)
        self.want = want_of(case, self.whole)
        self.weights = self._after_steps(case) if case.steps else {}

    def _after_steps(self, case: Case) -> dict[str, Tensor]:
        model = skewed(tiny.make_model(self.config, dtype=case.dtype, classes=case.classes, attention=case.attention), case)
        gradients = tiny.flatten(model)
        optimizer = FlatOptimizer(gradients.units, replace(UPDATE, decoupled_lr=case.table_lr), decoupled=table_names(model))
        batches = [batch_of(case, self.config, number) for number in range(case.dp * case.micro_batches)]
        for _ in range(case.steps):
            gradients.start_step()
            routers = start_routers(model, case, CPU)
            if routers is not None and len(batches) > 1:
                count_first(
                    routers, model, WholeWeights([]), [None],
                    lambda _, model=model, routers=routers: [
                        model.hidden(b["tokens"], with_routers(context(self.config, b), routers, b)) for b in batches
                    ],
                )  # fmt: skip
            for batch in batches:
                if batch is batches[-1]:
                    gradients.last_micro_batch()
                ctx = context(self.config, batch)
                loss = loss_of(model, batch, ctx if routers is None else with_routers(ctx, routers, batch))
                if routers is not None and len(batches) == 1:
                    routers.settle()
                loss.backward()
            gradients.finish_step()
            optimizer.step(UPDATE.lr, 0.1, float(optimizer.grad_norm()), decoupled_lr=case.table_lr)
            if routers is not None:
                model.update_expert_biases(routers.loads_in(routers.counters()))
        return {n: p.detach().clone() for n, p in model.named_parameters()} | {n: b.clone() for n, b in model.named_buffers()}


def skewed(model: LanguageModel, case: Case) -> LanguageModel:
    """The model with biases of its routers, if it has any, that are not zero."""
    for number, bias in enumerate(expert_biases(model).values()):
        bias += 0.2 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64).to(bias)
        bias[0] += case.skew
    return model


def start_routers(model: LanguageModel, case: Case, device: torch.device) -> RouterStep | None:
    """Of a step of the case."""
    routers = model.router_step(device)
    if routers is not None:
        number = torch.tensor(float(case.dp * case.micro_batches * case.batch), dtype=torch.float64)
        weights = routers.weights_from(number, number * case.seq)
        routers.weights = lambda: weights
    return routers


UPDATE = OptimizerConfig(lr=0.05, optimizer="sgd", clip_grad=0.5)
_KNOWN: dict[str, OneProcess] = {}


def alone(case: Case) -> OneProcess:
    """Of this case. Asked for before the ranks are forked, it is there in all of them; otherwise each works it out for itself.

    Layouts of the same model and batch share one.
    """
    of_the_layout = (
        "tp", "sp", "cp", "cp_chunks", "tp_seq", "mode", "chunks", "overlap", "kernels", "zero", "buffers", "fetch", "micro_batches",
        "pp", "schedule", "layers", "slices", "delay", "ep", "ep_chunks",
    )  # fmt: skip
    key = str({**vars(case), "dp": case.dp * case.micro_batches, **dict.fromkeys(of_the_layout)})
    if key not in _KNOWN:
        _KNOWN[key] = OneProcess(case)
    return _KNOWN[key]


def check(case: Case, device: torch.device = CPU) -> None:
    """Loss, every gradient, the gradient norm, and with ``steps`` the weights after that many updates."""
    known = alone(case)
    sharded = Sharded(case, known.whole, device=device)
    tolerance = FP64 if case.dtype == torch.float64 else FP32
    loss = sharded.step()
    got = {"loss": loss, **sharded.grads()}
    parts = {n: t if n == "loss" else sharded.part(n, t) for n, t in known.want.items() if n == "loss" or n in sharded.shapes}
    names = gather_json(sorted(sharded.shapes), sharded.groups.control)
    assert {name for of_rank in names for name in of_rank} == known.want.keys() - {"loss"}, "parameters that no rank has"
    assert all(p.grad is None for p in sharded.model.parameters()), "a gradient went past the main_grad"
    assert_law(got, parts, tolerance)
    optimizer = sharded.optimizer(replace(UPDATE, decoupled_lr=case.table_lr))
    norm = torch.stack([g.square().sum() for n, g in known.want.items() if n != "loss"]).sum().sqrt()
    assert_law({"grad norm": optimizer.grad_norm().cpu()}, {"grad norm": norm}, tolerance)
    for number in range(case.steps):
        if number > 0:
            sharded.step()
        norm = float(optimizer.grad_norm())
        optimizer.step(UPDATE.lr, 0.1, norm, updated=sharded.weights.refresh, decoupled_lr=case.table_lr)
        if sharded.routers is not None:
            loads = sharded.routers.loads_in(all_reduce(sharded.routers.counters(), sharded.groups.world))
            choices = case.dp * case.micro_batches * case.batch * case.seq * sharded.routers.routing.top_k
            assert loads.sum(1).eq(choices).all(), f"loads {loads.tolist()} of {choices} choices"
            sharded.model.update_expert_biases(loads)
        sharded.weights.forget()
    if case.steps:
        for name, buffer in sharded.model.named_buffers():
            assert torch.equal(buffer.cpu(), known.weights[name]), f"{name}: {buffer} is not {known.weights[name]} to the bit"
        weights = {n: sharded.part(n, t) for n, t in known.weights.items() if n in sharded.shapes}
        sharded.weights.settle()
        assert_law(sharded.params(), weights, tolerance)
        if case.zero < 3:
            assert_law({n: p.detach().cpu() for n, p in sharded.model.named_parameters()}, weights, tolerance)


def check_all(cases: list[Case]) -> None:
    """Several cases in one set of processes."""
    for case in cases:
        try:
            check(case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


def by_axes(cases: list[Case]) -> dict[str, list[Case]]:
    """The cases of the same axes together: one set of processes, with its groups, is enough for them."""
    together: dict[str, list[Case]] = {}
    for case in cases:
        context, stages = f"-cp{case.cp}" if case.cp > 1 else "", f"-pp{case.pp}" if case.pp > 1 else ""
        together.setdefault(f"tp{case.tp}-sp{case.sp}{context}-dp{case.dp}{stages}", []).append(case)
    return together


def run_cases(cases: list[Case], tmp_path: Path) -> None:
    """``check_all`` on the ranks of these cases, which have one number of them."""
    for case in cases:
        alone(case)
    run_ranks(check_all, cases[0].world, tmp_path, cases)
