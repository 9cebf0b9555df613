"""Rules of a mixture of experts, and other projects' words for it."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_sp.config.schema import Config
from megatron_sp.config.schema_model import layer_pattern
from megatron_sp.utils.errors import ConfigError


# a rule is a condition and a sentence
# fmt: off
def resolve_experts(config: Config) -> list[str]:
    """Turn what other projects say into what it means here; idempotent.

    Returns a line for each flag that has no effect or another name.
    """
    model, lines = config.model, list[str]()
    if model.num_experts in (0, 1):
        model.num_experts = None  # Megatron-DeepSpeed's word for a dense model is 1
    if not model.moe_shared_expert_intermediate_size:
        model.moe_shared_expert_intermediate_size = None
    if not config.knows_model or not model.has_experts:
        return lines
    if model.moe_router_load_balancing_type == "aux_loss":
        model.moe_router_load_balancing_type = "seq_aux_loss"
        if model.moe_aux_loss_coeff:
            config.understood += ("--moe-router-load-balancing-type aux_loss (over a rank's micro-batch it would depend"
                " on the layout: it is seq_aux_loss, the same where a micro-batch is one sequence)",)
    if model.moe_router_pre_softmax and model.moe_router_score_function == "sigmoid":
        model.moe_router_pre_softmax = False
        lines.append("--moe-router-pre-softmax (scores that are sigmoids have no softmax, in Megatron-LM either)")
    return lines


def expert_violations(config: Config, world_size: int) -> Iterator[str]:
    """Yield a message for each violated rule."""
    model, parallel, ep = config.model, config.parallel, config.parallel.expert_model_parallel_size
    if not model.has_experts:
        if ep > 1:
            yield (f"expert_model_parallel_size ({ep}) is about the experts of a model without any: add --num-experts"
                " N, or leave it out")
        return
    assert model.num_experts
    if model.num_layers:
        try:
            if not any(layer_pattern(model.moe_layer_freq, model.num_layers)):
                yield f"--moe-layer-freq {model.moe_layer_freq} has no layer with experts: leave --num-experts out"
        except ConfigError as error:
            yield str(error)
    yield from _router(config)
    if model.is_bert:
        yield "--num-experts is for GPT: BERT's blocks have dense MLPs; leave it out"
    if model.use_parallel_residual and model.norm_placement == "post":
        yield "--use-parallel-residual is for blocks with their norms in front"
    yield from share_violations(config)
    tp = parallel.tensor_model_parallel_size
    if world_size > 0 and world_size % parallel.replica_size == 0:
        ranks = world_size // (tp * parallel.pipeline_model_parallel_size) * (tp if parallel.sequence_parallel else 1)
        if ranks % ep:
            axes = "tp * sp * cp * dp" if parallel.sequence_parallel else "sp * cp * dp"
            legal = [str(n) for n in range(1, min(ranks, 4096) + 1) if ranks % n == 0 and model.num_experts % n == 0]
            more = "; with --sequence-parallel the ranks of tp are among them"
            yield (f"expert_model_parallel_size ({ep}) must divide the ranks that have different tokens, {axes} ="
                f" {ranks}: use --ep-size {', '.join(legal)}{'' if parallel.sequence_parallel or tp == 1 else more}")


def lifeless_router(config: Config) -> Iterator[str]:
    """Check that a loss reaches the router.

    Only training needs that: a model that has been trained so is still used and converted.
    """
    model = config.model
    without = model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
    if model.has_experts and model.moe_router_topk == 1 and without and not config.batch.skip_train:
        yield ("moe_router_topk (1) with a softmax over the chosen experts never trains the router: the weight of one"
            " expert alone is 1, whatever its score; add --moe-router-pre-softmax, or --moe-router-score-function"
            " sigmoid")


def share_violations(config: Config) -> Iterator[str]:
    """Check that each ep rank has as many experts, whatever the number of ranks."""
    experts, ep = config.model.num_experts or 0, config.parallel.expert_model_parallel_size
    if ep > 0 and experts % ep:
        yield (f"num_experts ({experts}) must be a multiple of expert_model_parallel_size ({ep}): each rank has as"
            f" many; use --ep-size {_divisors(experts)}")


def shared_expert_violations(config: Config) -> Iterator[str]:
    """Check that the shared expert can be split over tp, also where a stored model is used."""
    size, tp = config.model.shared_expert_size, config.parallel.tensor_model_parallel_size
    if size % tp:
        yield (f"moe_shared_expert_intermediate_size ({size}) must be a multiple of tensor_model_parallel_size ({tp}):"
            f" the shared expert is split as an MLP is; use --tp-size {_divisors(size)}")


def _divisors(size: int) -> str:
    return ", ".join(str(n) for n in range(1, min(size, 256) + 1) if size % n == 0)


def _router(config: Config) -> Iterator[str]:
    model = config.model
    assert model.num_experts
    experts, k = model.num_experts, model.moe_router_topk
    groups, of_groups = model.moe_router_num_groups, model.moe_router_group_topk
    if k > experts:
        yield f"moe_router_topk ({k}) must be at most num_experts ({experts}): a token takes an expert once"
    if (groups is None) != (of_groups is None):
        yield "--moe-router-num-groups and --moe-router-group-topk belong together: give both, or leave both out"
    elif groups is not None and of_groups is not None:
        in_group = experts // groups
        if experts % groups:
            rule = f"num_experts ({experts}) must be a multiple of moe_router_num_groups ({groups})"
            yield f"{rule}: groups have as many experts each"
        elif of_groups > groups:
            yield f"moe_router_group_topk ({of_groups}) must be at most moe_router_num_groups ({groups})"
        elif k > of_groups * in_group:
            yield (f"moe_router_topk ({k}) must be at most the experts of {of_groups} groups ({of_groups} * {in_group}"
                f" = {of_groups * in_group}): raise --moe-router-group-topk")
        elif k // of_groups > in_group:
            share = f"moe_router_topk ({k}) / moe_router_group_topk ({of_groups})"
            yield f"{share} must be at most the experts of a group ({in_group})"
    if model.moe_router_enable_expert_bias and model.moe_router_score_function != "sigmoid":
        yield ("--moe-router-enable-expert-bias is added to scores that do not depend on each other: add"
            " --moe-router-score-function sigmoid, or use --moe-aux-loss-coeff")
    if model.moe_router_topk_scaling_factor == 0:
        yield ("moe_router_topk_scaling_factor (0) must be above 0: it multiplies the weights of the chosen experts;"
            " leave it out for 1")
    if model.moe_aux_loss_coeff and model.moe_router_load_balancing_type == "none":
        yield (f"moe_aux_loss_coeff ({model.moe_aux_loss_coeff:g}) and --moe-router-load-balancing-type none contradict"
            " each other: leave one of them out")
