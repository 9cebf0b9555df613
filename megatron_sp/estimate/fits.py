"""The least of a host's memory that a run takes: predictions, reduced by their errors, so that no run is refused that fits."""

from __future__ import annotations

from megatron_sp.config.schema import Config
from megatron_sp.estimate.rough import rough_ranks

CERTAIN = 0.8
"""Part of a peak by the rough form that is sure to be needed."""
HOW_TO_START = "--allow-oom: start all the same"


def host_need(config: Config, world_size: int) -> float:
    """Return the bytes that a rank on a CPU certainly needs, the mean over the stages of a pipeline; a save can go without its copy."""
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
