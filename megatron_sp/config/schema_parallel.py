"""Flags of what runs where: the layout of the ranks, and kernels, recomputation and devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_sp.config.fields import LAYERS, RANKS, When, flag


@dataclass
class ParallelConfig:
    """Layout of the ranks: processes = tp * sp * cp * dp * pp."""

    # fmt: off
    # tensor parallelism
    tensor_model_parallel_size: int = flag(1, "tp: ranks that split the weights of every layer, each with its share of"
        " the heads; for models too large for one device; keep them within one host, they talk most",
        aliases=("tp-size",), **RANKS)
    sequence_parallel: bool = flag(False, "between the split layers cut the activations along the sequence, over the"
        " same ranks; less memory, the same result (Megatron's name; --sequence-parallel-size is something else)",
        only=When.TENSOR_PARALLEL)
    # Ulysses
    sequence_parallel_size: int = flag(1, "sp: ranks that hold a piece of every sequence each, and trade it for a share"
        " of the heads around attention (Ulysses); for long sequences; at most num-attention-heads / tp",
        aliases=("ds-sequence-parallel-size", "sp-size"), **RANKS)
    sp_overlap_mode: Literal["none", "split-qkv", "chunked", "auto"] | None = flag(None,
        "how the exchanges of sp > 1 run under computation; none: they do not; split-qkv: q, k and v one after another;"
        " chunked: the heads in parts (see --sp-head-chunks); auto: time all of them at the start, take the fastest"
        " (default: none)")
    sp_overlap_comm: bool = flag(False,
        "with sp > 1: run exchanges under computation, as --sp-overlap-mode auto; with --split-qkv-linear as split-qkv")
    split_qkv_linear: bool = flag(False, "with sp > 1: project q, k and v one after another, each with its own"
        " exchange; add --sp-overlap-comm to run them under it")
    sp_head_chunks: int | None = flag(None, "--sp-overlap-mode chunked with each rank's query heads in N parts: more of"
        " them hide more, but each works less well (default: 2)", unit="chunks", low=1, high=2**16)
    # pipelines
    pipeline_model_parallel_size: int = flag(1, "pp: ranks that have consecutive layers each, through which the"
        " micro-batches of a step go one after another; for models too large for one host, and many micro-batches",
        aliases=("pp-size",), **RANKS)
    pipeline_schedule: Literal["1f1b", "interleaved", "zb1p", "zbv", "slices", "auto"] | None = flag(None,
        "with pp > 1: order of forward and backward passes; interleaved: several stages on each rank, for a shorter"
        " wait; zb1p: gradients of weights are put off to where a rank would wait; zbv: the same with two stages on a"
        " rank, the first with the last; slices: sequences go through the pipeline slice by slice, for long ones; auto:"
        " the shortest by FLOPs of those that take about as much memory as 1f1b, slices only with --pipeline-slices"
        " (default: 1f1b, with several stages on a rank interleaved)")
    pipeline_slices: int | None = flag(None, "--pipeline-schedule slices: slices of each sequence, cut so that all take"
        " the same time (default: 4)", unit="slices", low=1, high=1024)
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, "with pp > 1: stages on each rank (default: 2 with"
        " interleaved and zbv, else 1)", unit="stages", low=1, high=10_000)
    num_layers_per_virtual_pipeline_stage: int | None = flag(None, "the same, said by the layers of a stage", **LAYERS)
    decoder_first_pipeline_num_layers: int | None = flag(None, "with pp > 1: layers of the first rank (default: all are"
        " dealt so that none is slower than the others)", aliases=("num-layers-in-first-pipeline-stage",), **LAYERS)
    decoder_last_pipeline_num_layers: int | None = flag(None,
        "with pp > 1: layers of the last rank", aliases=("num-layers-in-last-pipeline-stage",), **LAYERS)
    pipeline_model_parallel_layout: str | None = flag(None, "with pp > 1: layers of every stage, in Megatron's letters:"
        " Ett|(tttt|)*2tL is an embedding and 2 layers, twice 4 layers, a layer and the head")
    # context parallelism
    context_parallel_size: int = flag(1, "cp: ranks that hold parts of every sequence each, and send keys and values to"
        " those whose queries see them; around Ulysses, for more ranks than heads; any number, for nothing has to be"
        " divisible", aliases=("cp-size",), **RANKS)
    cp_chunks: int | None = flag(None, "with cp > 1: deal each sequence to the ranks in so many chunks for each"
        " (default: the smallest of 1, 2, 4, 8, with documents also 16, with which the slowest rank takes hardly longer"
        " than the mean; causal attention takes 2)", unit="chunks", low=1, high=1024)
    cp_stages_ahead: int | Literal["all"] | None = flag(None, "with cp > 1: exchanges of keys and values under way"
        " while those before are attended to, each with a buffer; all: of all ranks at once (default: 1)",
        unit="exchanges", low=1, high=2**16)
    cp_keep_kv: bool = flag(False, "with cp > 1: keep the keys and values of other ranks for backward, instead of"
        " having them sent again; takes their memory")
    cp_comm_type: tuple[str, ...] | None = flag(None, "Megatron's word for what --context-parallel-size means; p2p: cp;"
        " all_gather: cp with --cp-stages-ahead all; a2a: that many ranks of Ulysses instead; a2a+p2p: both, see"
        " --hierarchical-context-parallel-sizes; and a word of ours, auto: time all ways to share these ranks between"
        " Ulysses and cp at the start, take the fastest (default: p2p)")
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = flag(None, "with --cp-comm-type a2a+p2p: A R, for"
        " --sequence-parallel-size A --context-parallel-size R; A * R is --context-parallel-size")
    # experts
    expert_model_parallel_size: int = flag(1, "ep: ranks that share the experts of each layer, and send each other the"
        " tokens that have chosen them; they are ranks of dp, cp and sp, with --sequence-parallel of tp, too, so that"
        " it takes none of its own", aliases=("ep-size", "moe-expert-parallel-size"), **RANKS)
    moe_chunks: int = flag(1, "send and compute a rank's tokens in N parts, so that those of one travel while those of"
        " another are computed", unit="parts", low=1, high=1024, only=When.EXPERT_PARALLEL)
    moe_worst_load: float = flag(1.0, "for estimates alone: plan memory and exchanges of a rank whose experts get X"
        " times the mean load", low=1, high=2**16, only=When.EXPERTS)
    # communication
    distributed_backend: Literal["auto", "nccl", "gloo"] = flag("auto", "collective backend: nccl on GPUs, gloo on CPU")
    distributed_timeout_minutes: float = flag(10.0,
        "a collective that takes longer ends the job with exit code 7", unit="minutes", high=525_600)
    nccl_sp_ctas: int | None = flag(None, "multiprocessors that an exchange of NCCL takes at most from the computation"
        " it runs under; few slow down the exchange (default: NCCL decides, which is what the planner assumes)",
        unit="CTAs", low=1, high=64, only=(When.NCCL, When.EXCHANGES))
    nccl_dp_ctas: int | None = flag(None, "the same for gradients and parameters between the ranks of dp x cp x sp"
        " (default: NCCL decides)", unit="CTAs", low=1, high=64, only=When.NCCL)
    nccl_cta_policy: Literal["default", "efficiency", "zero"] = flag("default", "how NCCL takes multiprocessors for sp,"
        " cp and dp; efficiency: few; zero: none where its copy engines can do the work (NCCL 2.28 or later, registered"
        " buffers)", only=When.NCCL)
    # proof of the layout
    verify_parallelism: bool = flag(False, "compare one step of this layout with one process: loss, gradient norm,"
        " every gradient; exit 0, or 5 if they differ")
    verify_dtype: Literal["fp64", "fp32"] | None = flag(None,
        "number format of the comparison (default: fp64, on GPUs fp32)", only=When.VERIFIES)
    # ZeRO and data parallelism
    overlap_grad_reduce: bool = flag(True,
        "reduce each block's gradients under the rest of the backward pass; --no-overlap-grad-reduce: after all of it")
    zero_stage: int = flag(0, "what the ranks of dp x cp x sp share instead of each having all of it; 1: optimizer"
        " state and master weights; 2: gradients too; 3: parameters too (ZeRO)", low=0)
    use_distributed_optimizer: bool = flag(False, "same as --zero-stage 1")
    overlap_param_gather: bool = flag(True, "gather parameters under computation, a block ahead;"
        " --no-overlap-param-gather: wait for each", only=When.SHARDED)
    grad_reduce_in_bf16: bool = flag(False,
        "gradients travel between ranks in bf16: half the bytes (default: as they are, in fp32)")
    zero3_keep_units: int = flag(0, "with --zero-stage 3: keep so many more blocks whole than the two that are needed,"
        " so that fewer are gathered", unit="blocks", low=0, high=10_000)
    zero3_gather_once: bool = flag(False, "with --zero-stage 3: gather each block once per step, whatever the"
        " accumulation; takes memory for all parameters")
    zero3_fetch: Literal["all_gather", "all_reduce"] = flag("all_gather",
        "with --zero-stage 3: what makes a block whole; all_reduce moves twice the bytes")
    stage3_use_all_reduce_for_fetch_params: bool = flag(False, "same as --zero3-fetch all_reduce (DeepSpeed's name)")
    offload_optimizer: bool = flag(False, "keep master weights and the optimizer's state in host memory and update"
        " there; with 16-bit parameters this moves 12 bytes for each parameter of a rank's share (--zero-stage) from"
        " the GPU to the host", aliases=("cpu-optimizer", "optimizer-cpu-offload"))
    balance_rows: bool = flag(False, "packed documents (--reset-attention-mask, --bert-pack-sequences): deal the rows"
        " of a step to data-parallel ranks by the attention that they need, not by index; losses stay the same",
        only=When.PACKED)
    delay_wgrad: bool = flag(False, "with sp or cp > 1: compute the gradients of the MLP's weights under the last"
        " exchange of attention's backward; shorter where exchanges take longer than what they overlap with (one head"
        " on a rank, slow links); takes the memory of an MLP's operands")
    check_collectives: bool = flag(False,
        "compare operation, shape and type across ranks before every collective; slow, to find bugs")
    # fmt: on

    def dp_size(self, world_size: int) -> int:
        """Return the data-parallel size, world_size / (tp * sp * cp * pp)."""
        return world_size // self.replica_size

    @property
    def replica_size(self) -> int:
        """Number of ranks that work on the same sequences: tp * sp * cp * pp."""
        of_layer = self.tensor_model_parallel_size * self.sequence_parallel_size * self.context_parallel_size
        return of_layer * self.pipeline_model_parallel_size

    @property
    def num_shards(self) -> int:
        """Number of pieces into which a sequence is cut: sp * cp, with --sequence-parallel * tp."""
        tp = self.tensor_model_parallel_size if self.sequence_parallel else 1
        return tp * self.sequence_parallel_size * self.context_parallel_size

    @property
    def stages_per_pipeline_rank(self) -> int:
        """Number of stages of each pipeline rank."""
        default = 2 if self.pipeline_schedule in ("interleaved", "zbv") else 1
        return self.num_virtual_stages_per_pipeline_rank or default

    @property
    def pipeline_kind(self) -> str:
        """Schedule of the pipeline."""
        if self.pipeline_schedule is None and self.pipeline_slices is not None:
            return "slices"
        return self.pipeline_schedule or ("1f1b" if self.stages_per_pipeline_rank == 1 else "interleaved")

    @property
    def num_pipeline_slices(self) -> int:
        """Number of slices of each sequence that go through the pipeline one after another."""
        return (self.pipeline_slices or 4) if self.pipeline_kind == "slices" else 1

    @property
    def measures_split(self) -> bool:
        """True if context_parallel_size is the product of sp and cp, and the run measures which sizes are fastest."""
        return self.cp_comm_type == ("auto",)

    @property
    def num_stages_ahead(self) -> int:
        """Number of exchanges of keys and values that are under way at once."""
        ahead = self.cp_stages_ahead
        return max(1, self.context_parallel_size - 1) if ahead == "all" else ahead or 1

    @property
    def overlap_mode(self) -> str:
        """Mode of the Ulysses exchanges that results from the four flags."""
        if self.sp_overlap_mode is not None:
            return self.sp_overlap_mode
        if self.sp_head_chunks is not None:
            return "chunked"
        if self.split_qkv_linear:
            return "split-qkv"
        return "auto" if self.sp_overlap_comm else "none"

    @property
    def overlaps_exchanges(self) -> bool:
        """True if exchanges overlap with computation: not in mode "none" and with --split-qkv-linear alone."""
        splits_alone = self.split_qkv_linear and self.sp_overlap_mode is None and not self.sp_overlap_comm
        return self.overlap_mode != "none" and not splits_alone


@dataclass
class KernelConfig:
    """Kernels, recomputation and devices."""

    # fmt: off
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "where to train; auto: cuda if there is a GPU")
    attention_backend: Literal[
        "auto", "flash", "flash2", "flash3", "flash4", "cudnn", "fused", "unfused", "local",
    ] = flag("auto", "flash2, flash3, flash4: that FlashAttention; flash: the fastest of them; fused: torch's SDPA;"
        " cudnn: its cuDNN kernel; unfused/local: plain reference, with all scores in memory; auto: the fastest found,"
        " timed at the start on a GPU")
    use_flash_attn: bool = flag(False,
        "--attention-backend flash, on a GPU and if that names no other", aliases=("use-flash-attn-v2",))
    fused_kernels: Literal["auto", "torch", "triton", "apex"] = flag("auto", "triton: Triton's kernels for norms,"
        " dropout, activation, rotary and cross entropy; apex: NVIDIA apex's for AdamW and norms; torch: neither; auto:"
        " those that are found and lose nothing")
    # recomputation
    recompute_granularity: Literal["full", "selective"] | None = flag(None,
        "full: keep only block inputs; selective: recompute the attention core")
    recompute_method: Literal["uniform", "block"] | None = flag(None,
        "uniform: all blocks; block: the first --recompute-num-layers (full only)", only=When.RECOMPUTES)
    recompute_num_layers: int | None = flag(None, "blocks per recompute chunk (uniform) or blocks to recompute (block)",
        unit="blocks", low=1, high=10_000, only=(When.RECOMPUTES, When.RECOMPUTES_BLOCKS))
    recompute_attention: Literal["none", "exchange", "full"] = flag("none", "with --recompute-granularity full: none"
        " keeps attention's output and the log of its sums, and what Ulysses has sent back, so that neither is"
        " repeated; exchange repeats the way back alone, for less memory; full repeats all", alone="full")
    recompute_qkv: bool = flag(False, "keep attention's output instead of queries, keys and values, and project and"
        " exchange these again in backward, one chunk of heads (--sp-head-chunks) after another; for long sequences."
        " Recomputed blocks do so anyway")
    recompute_activations: bool = flag(False, "same as --recompute-granularity selective")
    # memory
    lm_head_chunk_tokens: int | None = flag(None, "tokens per chunk of the LM head and its loss (default: on a CPU"
        " about 50 MiB of logits and at most 512 tokens, on a GPU 512 MiB)", unit="tokens", low=1, high=2**31)
    mlp_chunks: int = flag(1, "compute each MLP over N pieces of the positions: its wide activation exists for one"
        " piece at a time, for a product of fc1 more in backward; for long sequences", unit="pieces", low=1, high=2**25)
    offload_activations: bool = flag(False, "keep what each block saves for backward in host memory, and fetch it a"
        " block ahead; with --recompute-granularity full that is the blocks' inputs; for sequences that do not fit on a"
        " GPU otherwise")
    # host and launches
    num_threads: int | None = flag(None, "intra-op CPU threads per process (default: the host's cores divided by its"
        " processes; OMP_NUM_THREADS for one process alone)", low=1, high=1024)
    allow_oom: bool = flag(False,
        "start even if the run is predicted to need more memory than there is (else exit code 2)")
    deterministic_mode: bool = flag(False,
        "only deterministic GPU kernels: a resume repeats a run to the last bit; slower")
    cuda_graphs: Literal["auto", "on", "off"] = flag("auto", "capture steps in CUDA graphs, which launch without"
        " Python; auto: where they can be captured, give the bits of eager steps and are faster; on: error where they"
        " cannot be captured", alone="on")
    cuda_graph_warmup_steps: int = flag(3,
        "eager steps of each shape of batch before it is captured", unit="steps", low=1, high=10**6, only=When.GRAPHS)
    # fmt: on
