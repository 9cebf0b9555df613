"""Rules of kernels, recomputation and devices."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_sp.config.schema import Config

_FLASH_HEAD_DIM = 256


def kernel_violations(config: Config) -> Iterator[str]:
    """Yield a message for each violated rule."""
    kernels, model = config.kernels, config.model
    backend = kernels.attention_backend
    if backend in ("flash", "flash2", "flash3", "flash4", "cudnn"):
        whose = "cuDNN" if backend == "cudnn" else "flash-attn"
        if kernels.device == "cpu":
            yield f"--attention-backend {backend} needs a GPU, but --device cpu was given: use auto or fused"
        if not (config.precision.bf16 or config.precision.fp16):
            yield f"{whose} computes in bf16 and fp16 only, not {config.precision.params_dtype}: add --bf16, or drop the flash flag"
        if model.knows_head_dim and model.head_dim > _FLASH_HEAD_DIM:
            yield f"{whose} takes heads up to {_FLASH_HEAD_DIM} wide, not {model.head_dim}: use --attention-backend auto"
    if backend in ("flash3", "flash4") and model.attention_dropout > 0:
        yield (
            f"FlashAttention {backend[-1]} has no attention dropout, and attention_dropout is"
            f" {model.attention_dropout}: add --attention-dropout 0, or use --attention-backend flash2 or auto"
        )
    if backend == "cudnn" and kernels.deterministic_mode:
        yield "--attention-backend cudnn and --deterministic-mode exclude each other: torch refuses cuDNN's backward there; use auto"
    if backend == "cudnn" and (model.window_size is not None or config.data.reset_attention_mask):
        what = "--window-size" if model.window_size is not None else "--reset-attention-mask"
        yield f"--attention-backend cudnn and {what} exclude each other: torch's SDPA passes no such mask to cuDNN; use auto"
    if (fused := kernels.fused_kernels) in ("apex", "triton"):
        if kernels.device == "cpu":
            yield f"--fused-kernels {fused} needs a GPU, but --device cpu was given: use auto or torch"
        if config.precision.fp64:
            yield f"--fused-kernels {fused} computes in fp32, bf16 and fp16 only, not float64: use auto, or another precision"
        if fused == "apex" and config.parallel.offload_optimizer and config.optimizer.optimizer == "adam":
            yield "--fused-kernels apex updates on the GPU, --offload-optimizer on the host: use --fused-kernels auto, or drop the latter"
    granularity, method, layers = kernels.recompute_granularity, kernels.recompute_method, kernels.recompute_num_layers
    if kernels.recompute_activations and granularity == "full":
        yield "--recompute-activations means --recompute-granularity selective, but full was given: drop one"
    if granularity == "selective" and method:
        yield "--recompute-method chooses whole blocks and needs --recompute-granularity full (given: selective): change one of them"
    if granularity == "full" and method == "block" and layers is None:
        yield "--recompute-method block needs --recompute-num-layers N (how many blocks to recompute)"
    if kernels.recompute_attention != "none" and granularity != "full":
        yield (
            f"--recompute-attention {kernels.recompute_attention} is about recomputed blocks and needs"
            f" --recompute-granularity full (given: {granularity or 'nothing'}): change one of them"
        )
    if kernels.recompute_qkv and granularity == "selective":
        yield "--recompute-qkv keeps attention's output, and --recompute-granularity selective computes it again: drop one of them"
    parallel = config.parallel
    ulysses = parallel.sequence_parallel_size * (
        parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    )
    parts = ulysses * parallel.context_parallel_size
    positions = -(-(model.seq_length or 0) // parts)
    if model.seq_length and kernels.mlp_chunks > positions:
        yield (
            f"mlp_chunks ({kernels.mlp_chunks}) must be at most the positions of a rank ({model.seq_length} /"
            f" {parts}, rounded up, = {positions}): use --mlp-chunks {positions} or less"
        )
    if layers and model.num_layers and layers > model.num_layers:
        yield f"recompute_num_layers ({layers}) must be at most num_layers ({model.num_layers})"
