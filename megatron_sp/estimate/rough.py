"""Memory of a rank by a rough form: to choose among many configurations, of which the best are then run."""

# It knows what grows: parameters, gradients and optimizer state with ZeRO, what layers save for backward, and the
# largest temporaries. What the program really holds is told by running it without contents (``planner/fake_run.py``),
# which takes too long for thousands of layouts and for the start of a run; a test compares the two.

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

from megatron_sp.config.schema import Config
from megatron_sp.estimate.flops import mlp_parameters, norm_widths
from megatron_sp.estimate.memory_plan import Device, Line, MemoryPlan, Moment
from megatron_sp.models.unit_order import recompute_plan
from megatron_sp.utils.numbers import round_up

CERTAIN = 0.8
"""Part of a peak by the rough form that is sure to be needed: by it nothing is refused that fits."""
HOW_TO_START = "--allow-oom: start all the same"
# bytes and tokens of logits, as in parallel/lm_head.py
_CHUNK = {"cpu": (52 * 2**20, 512), "cuda": (512 * 2**20, 2**20)}


class RoughRank:
    """Sizes of one rank of a pipeline, of a validated configuration with the vocabulary size.

    Of the ranks that share its layers it is that with most heads, and with even loads of experts.
    """

    def __init__(self, config: Config, world_size: int, device: Device, rank: int = 0) -> None:
        self.config, self.cuda, self.rank = config, device == "cuda", rank
        model, parallel, kernels, batch = config.model, config.parallel, config.kernels, config.batch
        assert model.num_layers and model.hidden_size and model.num_attention_heads
        assert model.seq_length and model.vocab_size
        self.tp, self.sp = parallel.tensor_model_parallel_size, parallel.sequence_parallel_size
        self.cp, self.pp = parallel.context_parallel_size, parallel.pipeline_model_parallel_size
        self.dp, self.h, self.d = parallel.dp_size(world_size), model.hidden_size, model.head_dim
        self.parts = self.tp if parallel.sequence_parallel else 1  # that share the positions between the layers
        precision = config.precision
        self.e, self.wide = (2, 4) if precision.bf16 or precision.fp16 else (8, 8) if precision.fp64 else (4, 4)
        self.count = max(1, (batch.global_batch_size or 0) // (batch.micro_batch_size * self.dp))
        b, s = batch.micro_batch_size, -(-model.seq_length // self.cp)
        self.all_tokens = b * s  # of attention, with the heads of this rank
        self.tokens = b * round_up(s, self.sp * self.parts) // self.sp  # inside the layers
        self.stream, self.whole = self.tokens // self.parts * self.h * self.e, self.tokens * self.h * self.e
        self.rows = round_up(model.vocab_size, model.make_vocab_size_divisible_by * self.tp) // self.tp
        most_bytes, most_tokens = _CHUNK[device]
        fitting = max(128, most_bytes // (4 * self.rows) // 64 * 64)
        self.head_tokens = kernels.lm_head_chunk_tokens or min(most_tokens, fitting)
        of_ranks = self.tp * self.sp
        self.queries, self.keys = -(-model.num_attention_heads // of_ranks), -(-model.num_groups // of_ranks)
        self.replicas = self.dp * self.cp * self.sp
        which = model.expert_layers(model.num_layers)
        if self.pp == 1:
            self.layers, self.states = list(range(model.num_layers)), [(float(model.num_layers), 0.0, self.count > 1)]
            self.has_embedding = self.has_head = True
        else:
            self._deal()
        self.with_experts = sum(layer in which for layer in self.layers)

    def _deal(self) -> None:
        # sets the layers of this rank, and its states: (layers between F and B, between B and W, has gradients)
        from megatron_sp.estimate.layout import enough_micro_batches, layers_of_stages, pipeline_plan

        model, parallel = self.config.model, self.config.parallel
        plan = pipeline_plan(model, self.config.kernels, parallel, enough_micro_batches(parallel, self.count))
        of_stages, mine = layers_of_stages(model, parallel), plan.stages_of(self.rank)
        alive, waiting, begun, states = 0.0, 0.0, set[int](), set[tuple[float, float, bool]]()
        for action in plan.actions[self.rank]:
            share = of_stages[action.stage] / plan.num_slices
            alive += share if action.kind == "F" else 0
            states.add((alive, waiting, len(begun) == len(mine)))
            if action.kind == "B":
                alive, waiting = alive - share, waiting + share * plan.splits
                begun.add(action.stage)
            waiting -= share if action.kind == "W" and plan.splits else 0
        is_less = lambda one, other: other != one and all(a >= b for a, b in zip(other, one, strict=True))
        self.states = [one for one in states if not any(is_less(one, other) for other in states)]
        self.has_embedding, self.has_head = 0 in mine, plan.num_stages - 1 in mine
        starts = [sum(of_stages[:stage]) for stage in range(len(of_stages))]
        self.layers = [layer for stage in mine for layer in range(starts[stage], starts[stage] + of_stages[stage])]

    # parameters

    @cached_property
    def layer(self) -> tuple[float, float]:
        # parameters of a layer of this rank, (all but experts, its experts); of unlike layers the mean
        model, share = self.config.model, self.with_experts / max(1, len(self.layers))
        assert model.num_attention_heads
        norms = 2 if model.normalization == "LayerNorm" else 1
        heads = model.num_attention_heads // self.tp
        rows = (heads + 2 * max(1, model.num_groups // self.tp)) * self.d
        dense: float = (rows + heads * self.d + 2 * norms) * self.h + norms * sum(norm_widths(model))
        dense += rows * model.qkv_bias + self.h * model.proj_bias
        dense += (1 - share) * mlp_parameters(model, model.ffn_size) / self.tp
        if not share:
            return dense, 0.0
        shared = mlp_parameters(model, model.shared_expert_size) / self.tp if model.shared_expert_size else 0
        experts = (model.num_experts or 0) * mlp_parameters(model, model.expert_ffn_size)
        dense += share * ((model.num_experts or 0) * self.h + shared)
        return dense, share * experts / self.config.parallel.expert_model_parallel_size

    @cached_property
    def ends(self) -> tuple[float, float]:
        # parameters of the embedding and of the head
        model, norms = self.config.model, 2 if self.config.model.normalization == "LayerNorm" else 1
        table, h = self.rows * self.h, self.h
        positions = model.max_positions * h if model.position_embedding_type == "learned_absolute" else 0
        bert = (h * h + 3 * h + self.rows if model.is_bert else 0) + (h * h + 3 * h if model.has_order_head else 0)
        apart = model.untie_embeddings_and_output_weights
        head = norms * h + bert + table * (apart or not self.has_embedding)
        return (table + positions + model.token_types * h) * self.has_embedding, head * self.has_head

    @property
    def num_params(self) -> float:
        return sum(self.layer) * len(self.layers) + sum(self.ends)

    @cached_property
    def shard(self) -> float:
        # elements of this rank's shards of all parameters
        (dense, experts), ep = self.layer, self.config.parallel.expert_model_parallel_size
        of_replicas = (dense * len(self.layers) + sum(self.ends)) / self.replicas
        return of_replicas + experts * len(self.layers) / max(1.0, self.replicas * self.parts / ep)

    # activations

    @cached_property
    def mlp(self) -> tuple[float, float]:
        # bytes of an MLP or of experts before the activation function and after it, on average over the layers
        model, share = self.config.model, self.with_experts / max(1, len(self.layers))
        gate = 2 if model.is_gated else 1
        inner = (1 - share) * self.tokens * model.ffn_size / self.tp * self.e
        if share:
            choices = self.tokens / self.parts * model.moe_router_topk * self.config.parallel.moe_worst_load
            of_shared = self.tokens * model.shared_expert_size / self.tp
            inner += share * (choices * model.expert_ffn_size + of_shared) * self.e
        return inner * gate, inner

    @cached_property
    def heads(self) -> tuple[float, float]:
        # bytes of q, k and v, and of attention's output, of this rank's heads
        element = self.all_tokens * self.d * self.e
        return (self.queries + 2 * self.keys) * element, self.queries * element

    @cached_property
    def is_plain(self) -> bool:
        # true if attention writes all scores to memory
        model, backend = self.config.model, self.config.kernels.attention_backend
        drops = model.attention_dropout > 0 and (self.cp > 1 or not self.cuda)
        return backend in ("unfused", "local") or drops or (self.cuda and self.e == 8)

    @cached_property
    def scores(self) -> float:
        # bytes of one tensor of attention scores, where there is one
        length = self.config.model.seq_length or 0
        return self.is_plain * self.queries * self.all_tokens * length * self.wide / self.cp

    @cached_property
    def saved(self) -> tuple[float, float]:
        # bytes that a layer saves for backward, and that it saves if it is computed again
        model, kernels = self.config.model, self.config.kernels
        qkv, out = self.heads
        joined = self.tokens * (model.num_attention_heads or 0) / self.tp * self.d * self.e if self.sp > 1 else 0.0
        sums = 4 * self.queries * self.all_tokens
        streams = (1 if model.use_parallel_residual else 2) + 2 * (model.norm_placement == "post")
        selective = kernels.recompute_granularity == "selective"
        results = out + joined + (0 if selective else sums + 1.5 * self.scores)
        wide = 0.0 if kernels.mlp_chunks > 1 else self.mlp[0]
        share, ep = self.with_experts / max(1, len(self.layers)), self.config.parallel.expert_model_parallel_size
        if share and ep > 1:
            wide += share * self.tokens / self.parts * min(model.moe_router_topk, ep) * self.h * self.e
        kept = self.config.parallel.cp_keep_kv * (self.cp - 1) * 2 * self.keys * self.all_tokens * self.d * self.e
        whole = streams * self.stream + (0 if kernels.recompute_qkv else qkv) + results + wide + kept
        keeps = self.cp > 1 or not (self.is_plain or model.attention_dropout > 0)
        again = kernels.recompute_attention
        of_results = 0.0 if again == "full" or not keeps else out + sums + kept + (joined if again == "none" else 0)
        group = kernels.recompute_num_layers or 1 if kernels.recompute_method != "block" else 1
        return whole, self.stream / group + of_results

    @cached_property
    def again(self) -> float:
        # share of the layers that are computed again in backward
        count = max(1, len(self.layers))
        return sum(last - first for first, last, again in recompute_plan(self.config.kernels, count) if again) / count

    @cached_property
    def each(self) -> float:
        # bytes that a layer saves, on average over those that are made again and the others
        whole, remade = self.saved
        return whole * (1 - self.again) + remade * self.again

    @cached_property
    def put_off(self) -> float:
        # bytes of the operands of a layer's gradients of weights, between B and W
        share = self.with_experts / max(1, len(self.layers))
        rows = share * self.tokens / self.parts * self.config.model.moe_router_topk * 2 * self.h * self.e
        return (2 + 2 * (1 - share)) * self.whole + sum(self.heads) + sum(self.mlp) + rows

    @cached_property
    def inside(self) -> tuple[float, float, float]:
        # bytes beside what is saved: (forward in a layer, backward in one, what one saves that is made again)
        model, kernels = self.config.model, self.config.kernels
        qkv, out = self.heads
        wide, inner = self.mlp
        pieces = max(1, kernels.mlp_chunks)
        again = kernels.recompute_granularity == "full"
        by_groups = kernels.recompute_method != "block"
        group = min(kernels.recompute_num_layers or 1, max(1, len(self.layers))) if by_groups else 1
        remade = (self.saved[0] * group) if again else 0.0
        triton = self.cuda and self.e != 8 and kernels.fused_kernels != "torch"
        gated = 0.0 if triton or not model.is_gated else inner
        exchanged = qkv if self.sp > 1 or self.cp > 1 else 0.0
        forward = max(wide / pieces + inner / pieces + self.whole, qkv + out + exchanged + self.scores)
        borrowed = 2 * out * 2 / self.e if self.e == 2 or self.queries > self.keys else 0.0
        of_mlp = self.whole * (1 + (self.parts > 1)) + (wide + inner + gated + (wide if pieces > 1 else 0)) / pieces
        of_attention = 2 * self.whole + qkv + out + exchanged + borrowed + 2 * self.scores
        return forward, max(of_mlp, of_attention), remade

    @cached_property
    def head(self) -> float:
        # bytes of the head's temporaries
        if not self.has_head:
            return 0.0
        tokens = self.tokens
        if self.config.model.is_bert and not self.cuda:
            tokens = math.ceil(tokens * self.config.data.mask_prob)
        chunk = min(self.head_tokens, tokens)
        logits, gathered = chunk * self.rows * 4, self.whole if self.parts > 1 else 0
        of_logits: float = logits
        if self.e < 4:  # also in 16 bits, and what is left of the chunk before
            of_logits += chunk * self.rows * self.e + min(logits // 2, (tokens - chunk) * self.rows * 4)
        return of_logits + self.stream + chunk * self.h * self.e + gathered

    # the step

    def plan(self) -> MemoryPlan:
        config, parallel, e, wide = self.config, self.config.parallel, self.e, self.wide
        stage, total, shard = parallel.zero_stage, self.num_params, self.shard
        sharded, of_layer, (embedding, head) = stage > 0, sum(self.layer), self.ends
        updated = shard if sharded else total
        largest = max(of_layer, embedding, head)
        buffers = 0.0
        if stage == 3 and self.replicas > 1:
            units = (2 + parallel.zero3_keep_units) * of_layer + embedding + head
            buffers = total if parallel.zero3_gather_once else units
        on_device = not (self.cuda and parallel.offload_optimizer)
        states = 2 if config.optimizer.optimizer == "adam" else 1
        master = updated * wide if e == 2 else 0.0
        rows, length = self.count * config.batch.micro_batch_size, config.model.seq_length or 0
        data = rows * length * (20 + 8 * config.model.is_bert)
        places, is_rotary = (
            self.all_tokens // config.batch.micro_batch_size,
            config.model.position_embedding_type == "rope",
        )
        tables = 8 * places + (places * config.model.rotary_dim * max(4, wide) if is_rotary else 0)
        stays = [
            Line("parameters", round((shard if stage == 3 else total) * e)),
            Line("buffers for whole parameters", round(buffers * e)),
            Line("master weights", round(master * on_device)),
            Line("optimizer state", round(states * updated * wide * on_device)),
            Line("micro-batches", data), Line("tables of the forward pass", tables),
        ]  # fmt: skip
        one = largest if self.replicas > 1 else 0.0
        under_way = one * wide * (0.0 if self.cuda else 1.0) * sharded
        after = total if stage == 0 else shard
        first = embedding if not config.model.untie_embeddings_and_output_weights else head
        forward, backward, remade = self.inside
        moments, host = list[Moment](), 0.0

        def add(phase: Any, name: str, gradients: float, kept: float, inside: float, reduced: float = 0.0) -> None:
            moments.append(Moment(phase, name, (
                Line("gradients, whole", round(gradients * wide)),
                Line("gradients, beside them in reductions", round(reduced)),
                Line("activations that layers save", round(kept)), Line("activations inside a layer", round(inside)),
            )))  # fmt: skip

        for alive, waiting, accumulated in self.states:
            kept = alive * self.each
            if config.kernels.offload_activations:
                here = max(0.0, alive - 1) * self.each
                host = max(host, here)
                kept = 2 * self.each if self.cuda else kept
            kept += waiting * self.put_off
            # gradients of earlier micro-batches
            before = 0.0 if not accumulated else total if stage < 2 else shard + 2 * one
            last = max(before, first + of_layer if stage < 2 or self.replicas == 1 else 2 * one)
            add("forward", "layer", before, kept, forward)
            add("forward", "head", max(before, first), kept, self.head)
            at_head = self.stream * self.has_head
            add("backward", "last layer", last, kept + at_head, backward + remade, under_way)
        end = total if stage == 0 or self.replicas == 1 else shard + 2 * one
        others = max(alive for alive, _, _ in self.states) - len(self.layers) if self.pp > 1 else 0.0
        add("backward", "first layer", end, self.each * (1 + max(0.0, others)), backward + remade, under_way)
        add("update", "optimizer", after, 0.0, 0.0)
        moved = (updated * (wide * (2 + states) + (e if e == 2 else 0))) if not on_device else 0.0
        if not self.cuda and host:
            stays.append(Line("activations' copies in host memory", round(host)))
        return MemoryPlan(tuple(stays), tuple(moments), round(host), round(moved))


def rough_ranks(config: Config, world_size: int, device: Device) -> list[RoughRank]:
    """Return the pipeline ranks of a configuration; without a pipeline the one."""
    return [RoughRank(config, world_size, device, rank) for rank in range(config.parallel.pipeline_model_parallel_size)]


def rough_memory(config: Config, world_size: int, device: Device) -> MemoryPlan:
    """Return the memory of the rank that holds most."""
    pp = config.parallel.pipeline_model_parallel_size
    ranks = range(pp) if pp < 3 else (0, 1, pp - 1)
    return max((RoughRank(config, world_size, device, rank).plan() for rank in ranks), key=lambda plan: plan.peak)


def copy_bytes(config: Config, world_size: int) -> int:
    """Return the bytes of host memory for the copy of a background save, on the rank that writes most."""
    # A rank writes the part of a checkpoint of which it has no replica: of 16-bit weights 2 + 4 (master) + 4 + 4 (Adam)
    # bytes a parameter, of fp32 weights 12. From ZeRO stage 1 on that is its shard; at stage 0 whole tensors are
    # distributed over the replicas, so it is at least the largest tensor.
    checkpoint = config.checkpoint
    if checkpoint.save is None or not checkpoint.save_interval or not checkpoint.async_save or config.batch.skip_train:
        return 0
    rank = max(rough_ranks(config, world_size, "cpu"), key=lambda rank: rank.num_params)
    with_state, is_16_bit = not checkpoint.no_save_optim, rank.e == 2
    state = with_state * rank.wide * (2 if config.optimizer.optimizer == "adam" else 1)
    each = rank.e + state + with_state * rank.wide * is_16_bit
    vocab = config.model.vocab_size or 0
    padding = max(0, rank.rows - vocab) * rank.h * (1 + config.model.untie_embeddings_and_output_weights)
    share = math.ceil((rank.shard - padding / rank.replicas) * each)  # rows that pad the vocabulary are not saved
    if config.parallel.zero_stage > 0 or rank.replicas == 1:
        return share
    return max(share, min(rank.rows, vocab) * rank.h * max(rank.e, rank.wide if with_state else 0))


def host_need(config: Config, world_size: int) -> float:
    """Return the bytes of a host that a rank certainly needs, the mean over a pipeline's ranks; saves need no copy."""
    plans = [rank.plan() for rank in rough_ranks(config, world_size, "cpu")]
    return sum(max(plan.resident, CERTAIN * plan.peak) for plan in plans) / len(plans)


def order_bytes(config: Config, num_samples: int) -> int:
    """Return the least that the arrays with the order of so many samples take; documents come on top."""
    if config.data.mock_data:
        return 8 * num_samples if config.data.bert_pack_sequences else 0
    wide = num_samples >= 2**32 - 2
    # GPT: cuts int32 [n + 1, 2], order uint32 [n]; BERT: rows uint32 [n, 3], order int64 [n]
    return num_samples * (20 if config.model.is_bert else 16 if wide else 12)


def num_samples_of(config: Config) -> int:
    """Return about how many samples a run reads for training."""
    batch = config.batch
    return batch.train_samples or (batch.train_iters or 0) * (batch.global_batch_size or 0)
