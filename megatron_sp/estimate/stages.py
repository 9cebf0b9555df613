"""Layers of each pipeline stage: as given, else such that the slowest stage is as fast as it can be."""

from __future__ import annotations

from megatron_sp.config.schema import Config
from megatron_sp.estimate.flops import head_in_layers
from megatron_sp.parallel.pipeline_stages import deal_layers


def layers_of_stages(config: Config) -> tuple[int, ...]:
    """Return the number of layers of each stage, in the order of the stages; the head counts as so many layers as it has FLOPs.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    model, parallel = config.model, config.parallel
    assert model.num_layers
    stages = parallel.pipeline_model_parallel_size * parallel.stages_per_pipeline_rank
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    v = parallel.stages_per_pipeline_rank
    if first is not None or last is not None:
        return deal_layers(model.num_layers, stages, first=first and first // v, last=last and last // v)
    return deal_layers(model.num_layers, stages, head=head_in_layers(model))
