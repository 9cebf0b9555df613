"""Flags of Megatron-LM and Megatron-DeepSpeed that are not fields of our configuration, and how each is handled.

There are three cases: *rewritten* (another name of one of our fields), *ignored* (nothing to choose here; listed once
when training starts, with the reason), *refused* (unsupported, and would change the result; the message names what
works). Any other flag that is not a field is unknown, an error. Sources: the argument parsers and launch scripts of
both projects. Names are written without leading dashes and with hyphens, as ``config_file.canonical`` returns them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Rewrite:
    """Translation of one flag to settings of other flags.

    Attributes:
        to: (flag, value) pairs; the value None stands for the flag's own words.
        weak: applies only if the other flag is not given itself.
    """

    to: tuple[tuple[str, str | None], ...]
    weak: bool = False

    @property
    def takes_value(self) -> bool:
        """True if the value given is passed on to one of our flags."""
        return any(value is None for _, value in self.to)


REWRITTEN: dict[str, Rewrite] = {
    "use-rotary-position-embeddings": Rewrite((("position-embedding-type", "rope"),)),
    "no-position-embedding": Rewrite((("position-embedding-type", "none"),), weak=True),
    "openai-gelu": Rewrite((("gelu-approximate", "tanh"),)),
    # Megatron's fused kernel is the tanh approximation; without the fusion it calls the exact GELU.
    "no-bias-gelu-fusion": Rewrite((("gelu-approximate", "none"),), weak=True),
    "checkpoint-activations": Rewrite((("recompute-granularity", "full"),)),
    "activations-checkpoint-method": Rewrite((("recompute-granularity", "full"), ("recompute-method", None))),
    "activations-checkpoint-num-layers": Rewrite((("recompute-num-layers", None),)),
    "checkpoint-num-layers": Rewrite((("recompute-num-layers", None),)),
    "use-flash-attn-v1": Rewrite((("use-flash-attn", "true"),)),
    "use-flash-attn-triton": Rewrite((("use-flash-attn", "true"),)),
    "use-flash-attn-builder": Rewrite((("use-flash-attn", "true"),)),
    "encoder-seq-length": Rewrite((("seq-length", None),)),
    "encoder-num-layers": Rewrite((("num-layers", None),)),
    "max-absolute-position-embeddings": Rewrite((("max-position-embeddings", None),)),
    "tokenizer-name-or-path": Rewrite((("tokenizer-model", None),)),
    "use-rms-norm": Rewrite((("normalization", "RMSNorm"),)),
    "moe-num-experts": Rewrite((("num-experts", None),)),  # megablocks; what else it says of experts: expert_dialects.py
    "moe-top-k": Rewrite((("moe-router-topk", None),)),
    "no-tie-embed-logits": Rewrite((("untie-embeddings-and-output-weights", "true"),)),
    # Megatron-DeepSpeed's zero bubble, and that of its authors' fork of Megatron-LM, where a V takes two flags
    "enable-zbh1-pipeline": Rewrite((("pipeline-schedule", "zb1p"),), weak=True),
    "enable-zero-bubble": Rewrite((("pipeline-schedule", "zb1p"),), weak=True),
    "enable-zbv-pipeline": Rewrite((("pipeline-schedule", "zbv"),)),
    "zero-bubble-v-schedule": Rewrite((("pipeline-schedule", "zbv"),)),
    # Megatron-LM 1, of 2019 and 2020
    "model-parallel-size": Rewrite((("tensor-model-parallel-size", None),)),
    "batch-size": Rewrite((("micro-batch-size", None),)),  # per data-parallel rank; there was no gradient accumulation
    "warmup": Rewrite((("lr-warmup-fraction", None),)),
    "persistent-save-interval": Rewrite((("save-interval", None),)),
    # FSDP is ZeRO 3, and ZeRO is what each strategy of Megatron's is called here
    "use-torch-fsdp2": Rewrite((("zero-stage", "3"),), weak=True),
    # W&B's names in epfLLM's and BigCode's forks and in GPT-NeoX
    "wandb-name": Rewrite((("wandb-exp-name", None),), weak=True),
    "wandb-run-name": Rewrite((("wandb-exp-name", None),), weak=True),
    "wandb-project-name": Rewrite((("wandb-project", None),), weak=True),
    "npu-deterministic": Rewrite((("deterministic-mode", "true"),)),
    # Megatron-LM's switches ask for graphs where they can be, and so does auto
    "enable-cuda-graph": Rewrite((("cuda-graphs", "auto"),), weak=True),
    "external-cuda-graph": Rewrite((("cuda-graphs", "auto"),), weak=True),
    "override-lr-scheduler": Rewrite((("override-opt-param-scheduler", "true"),)),
    "use-checkpoint-lr-scheduler": Rewrite((("use-checkpoint-opt-param-scheduler", "true"),)),
}

REWRITTEN_VALUES: dict[str, dict[str, tuple[Rewrite, ...]]] = {
    "data-parallel-sharding-strategy": {
        strategy: (Rewrite((("zero-stage", str(stage)),), weak=True),)
        for stage, strategy in enumerate(("no_shard", "optim", "optim_grads", "optim_grads_params"))
    },
    "cuda-graph-impl": {
        "none": (Rewrite((("cuda-graphs", "off"),), weak=True),),
        **dict.fromkeys(("local", "transformer_engine", "full_iteration"), (Rewrite((("cuda-graphs", "auto"),), weak=True),)),
    },
    "attention-head-type": {"multiquery": (Rewrite((("num-query-groups", "1"),)),)},  # BigCode's fork
    "glu-activation": {  # BigScience's fork, whose GELU is exact there; arguments.py knows its width
        "swiglu": (Rewrite((("swiglu", "true"),)),),
        "geglu": (Rewrite((("geglu", "true"),)), Rewrite((("gelu-approximate", "none"),), weak=True)),
    },
}
"""Flags that are refused, apart from these values of theirs."""

VALUE_SPELLINGS: dict[str, dict[str, str]] = {
    "tokenizer-type": {
        "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
        "HFTokenizer": "HuggingFaceTokenizer", "PretrainedFromHF": "HuggingFaceTokenizer", "Llama3Tokenizer": "HuggingFaceTokenizer",
    },
    "position-embedding-type": {"absolute": "learned_absolute", "rotary": "rope"},
    "optimizer": {"adamw": "adam", "fusedadamw": "adam"},
    "distributed-backend": {"ccl": "auto", "hccl": "auto", "mccl": "auto", "nccl2": "nccl"},  # nccl2: other code of torch's, same numbers
}  # fmt: skip
"""Values that other projects spell differently, by flag."""

MEGATRON_CHOICES: dict[str, dict[str, str]] = {
    "tokenizer-type": {
        "TikTokenizer": "have its vocabulary as a tokenizer.json, and give --tokenizer-type HuggingFaceTokenizer",
        **dict.fromkeys(
            ("MultimodalTokenizer", "NullMultimodalTokenizer", "SFTTokenizer"), "models here read text alone, as it stands in the data"
        ),
    },
    "position-embedding-type": dict.fromkeys(("yarn", "relative", "mrope", "alibi"), "positions are learned_absolute, rope or none"),
    "moe-router-load-balancing-type": {
        "sinkhorn": "its choice of experts depends on which tokens a rank has; a loss or biases keep the balance"
    },
    "optimizer": dict.fromkeys(("muon", "dist_muon", "lion", "onebitadam", "soap"), "the optimizers are adam (AdamW) and sgd"),
    "dataloader-type": {"external": "samples come from .bin/.idx files, in the order single or cyclic"},
}  # fmt: skip
"""Values that Megatron knows and this package does not: what there is instead."""

GROUP_FILES = {f"{name}-weighted-split-paths-path": f"{name}-weighted-split-paths" for name in ("train", "valid", "test")}
"""Files with what another flag takes from the command line, by that flag."""

TOKEN_FLAGS = ("train-tokens", "lr-decay-tokens", "lr-warmup-tokens")
"""Megatron-DeepSpeed's lengths in tokens, fields that ``arguments`` turns into samples or steps wherever it can."""

_FUSED = "which kernels run is decided by what the machine has, and by --fused-kernels and --attention-backend"
_GRAPHS = "--cuda-graphs captures whole micro-batches, forward and backward, and all graphs share one pool of memory"
_LOGGED = "always written to metrics.jsonl, and to TensorBoard when that is on"
_FORMAT = "checkpoints have one format here: sharded, verified, independent of the layout"
_ENGINE = "there is one engine here"
_COMMUNICATION = "communication has its own flags here"
_MEMORY = "memory is managed differently here"
_DATA = "data is read with checked reads, and masks are never stored"
_EXPERTS = "experts are computed, sent and recomputed in one way here, without capacities"
_TABLE = "the head makes the gradient of its table together with the loss"
_STAGES = "layers are dealt so that no stage is slower than the others, which counts the head"
_CAPACITY = "every token is computed: none is dropped, and none padded"
_GARBAGE = "Python's garbage collector is kept out of the steps without a flag"
_WHOLE_EXPERTS = "an expert is whole on a rank, which changes no number; --expert-model-parallel-size spreads experts over more ranks"
_LAYOUT = "how the ranks of a sequence or an expert share the work changes no number; it has its own flags here"
_FSDP = "ZeRO is one implementation here; --zero-stage or --data-parallel-sharding-strategy says what it shards"
_PROFILER = "the profiler is torch's"
_INFERENCE = "for inference only"
_FAULTS = "a run looks for hanging, slow and failing ranks by itself, and --auto-resume goes on"
_TOKENIZERS = "the tokenizer's own files say how it works, and no code of theirs is run"
_DUMPS = "a run's tensors are in its checkpoints alone"
_IMAGES = "GPT and BERT do not read it: it is for models of images"
_RETRIEVAL = "GPT and BERT do not read it: it is for models of retrieval"
_EVERY_STEP = "every loss and gradient is checked, and a bad step is skipped"
_ACTIVATIONS = "--offload-activations sends what blocks save to the host"

_IGNORED_LISTS = (
    "recompute-modules",
    "offload-modules",
    "cuda-graph-modules",
    "tiktoken-special-tokens",
    "high-priority-stream-groups",
    "cuda-graph-scope",
    "memory-keys",
    "modules-to-filter",
    "retriever-report-topk-accuracies",
    "tokenizer-special-tokens",
)

_IGNORED_SWITCHES = {
    "DeepSpeed's JSON says which curriculum there is, if any": """
        curriculum-learning curriculum-learning-legacy data-efficiency-curriculum-learning""",
    _FUSED: """
        no-gradient-accumulation-fusion no-masked-softmax-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion
        cross-entropy-loss-fusion no-persist-layer-norm use-mcore-models use-legacy-models
        te-rng-tracker inference-rng-tracker disable-mem-efficient-ln disable-jit-fuser synchronize-each-layer delay-wgrad-compute
        ds-fused-adam cpu-torch-adam use-torch-optimizer-for-cpu-offload use-te-activation-func use-transformer-engine-op-fuser
        abort-on-unmet-fused-kernel-constraints disable-te-fused-rope
        no-weight-gradient-accumulation-fusion
        masked-softmax-fusion scaled-masked-softmax-fusion no-scaled-masked-softmax-fusion bias-dropout-fusion persist-layer-norm
        use-te-rng-tracker
        activation-func-fp8-input-store use-fused-weighted-squared-relu fused-residual-rmsnorm apply-rope-fusion
        tp-comm-overlap disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs
        tp-comm-overlap-rs-dgrad disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad disable-tp-comm-split-ag
        disable-tp-comm-split-rs use-fused-swiglu use-fused-rotary-pos-emb use-fused-moe-token-permute-and-unpermute
        use-fused-ring-attention-update use-fusion-attn-v2 gemm-gradient-accumulation-fusion use-ascend-mc2 use-ascend-coc jit-compile""",
    _GRAPHS: "cuda-graph-retain-backward-graph cuda-graph-use-single-mempool cuda-graph-share-io-buffers",
    "the router is computed in fp32": "router-gating-in-fp32",
    _LAYOUT: "megatron-cp-in-bnsd kv-head-repeat-before-uly-alltoall use-ulysses-allgather-kv moe-tp-extend-ep",
    "the softmax and the loss are always computed in fp32": """
        attention-softmax-in-fp32 fp16-lm-cross-entropy disable-attention-softmax-in-fp32""",
    "products are rounded as torch rounds them": "disable-bf16-reduced-precision-matmul",
    "--deterministic-mode repeats a run to the bit": "batch-invariant-mode",
    _WHOLE_EXPERTS: "enable-expert-tensor-parallelism",
    _FSDP: """
        use-megatron-fsdp use-custom-fsdp fsdp-double-buffer fsdp-manual-registration torch-fsdp2-no-reshard-after-forward
        enable-full-sharding-in-hsdp""",
    "scores are scaled once; scaling by layer and back changes nothing": "apply-query-key-layer-scaling no-query-key-layer-scaling",
    "gradients are always accumulated and summed in fp32 (or wider)": """
        accumulate-allreduce-grads-in-fp32 ddp-reduce-scatter-with-fp32-accumulation""",
    "the loss is always divided by the step's global number of tokens": "calculate-per-token-loss",
    "initial weights never depend on device or layout": "use-cpu-initialization no-initialization",
    "no random state exists, so none is stored or loaded": "no-load-rng no-save-rng",
    "--async-save writes in a thread of the process itself": """
        use-persistent-ckpt-worker async-ckpt-use-cpu-shm""",
    "files are always hashed, and checked when they are read": "verify-integrity verify-checkpoint",
    "any checkpoint loads into any layout; the layout is what the flags say": "use-mp-args-from-checkpoint-args",
    "weights are loaded in fp32": "load-main-params-from-ckpt",
    "a tokenizer that is given counts": "no-use-tokenizer-model-from-checkpoint-args",
    _TOKENIZERS: """
        legacy-tokenizer trust-remote-code tokenizer-not-use-fast tokenizer-hf-no-use-fast tokenizer-sentencepiece-legacy
        no-save-tokenizer-assets""",
    "no token is left out of the loss for being padding": "allow-ambiguous-pad-tokens",
    "rows of padding are never in a checkpoint": "no-pad-vocab-size",
    _INFERENCE: """
        flash-decode decode-only-cuda-graphs disable-chunked-prefill enable-chunked-prefill nccl-all-reduce-for-prefill
        output-bert-embeddings return-log-probs skip-prompt-log-probs use-flashinfer-fused-rope use-inference-optimized-layers
        use-legacy-static-engine""",
    _FAULTS: "enable-ft-package calc-ft-timeouts run-workload-inspector-server",
    "a signal stops a run and its readers together": "exit-signal-handler-for-dataloader exit-signal-handler-for-training",
    "there is nothing experimental to enable": "enable-experimental",
    "biases are added as torch adds them, and transposes are torch's": "fused-single-qkv-rope disable-parameter-transpose-cache",
    "files are on disks that this machine mounts": "disable-msc",
    "lengths of sequences are the same on all ranks": "variable-seq-lengths",
    "the tests of Megatron itself read it": "test-mode",
    _ACTIVATIONS: "cpu-offloading-weights cpu-offloading-double-buffering disable-cpu-offloading-activations",
    _IMAGES: "vision-pretraining",
    _RETRIEVAL: "use-one-sent-docs biencoder-shared-query-context-model retriever-score-scaling",
    "a router's choices are traced by no flag; the load of the experts is in metrics.jsonl": """
        moe-routing-trace-capture-logits moe-routing-trace-capture-hidden-states moe-routing-trace-dump-weights""",
    "replicas start equal, and initial weights never depend on the layout": "data-parallel-random-init",
    _FORMAT: """
        use-dist-ckpt ckpt-fully-parallel-save ckpt-fully-parallel-load no-ckpt-fully-parallel-save auto-detect-ckpt-format
        ckpt-assume-constant-structure dist-ckpt-save-pre-mcore-014 no-strict-fsdp-dtensor-load dist-ckpt-optim-fully-reshardable
        distrib-optim-fully-reshardable-mem-efficient""",
    _LOGGED: """
        log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard log-memory-to-tensorboard
        log-batch-size-to-tensorboard log-world-size-to-tensorboard log-learning-rate-to-tensorboard log-loss-scale-to-tensorboard
        log-optimizer-states-to-tensorboard no-log-learning-rate-to-tensorboard no-log-learnig-rate-to-tensorboard
        log-l2-norm-grad-to-tensorboard log-runtime-to-tensorboard log-throughput-to-tensorboard no-one-logger no-filter-warnings
        set-level-for-all-loggers no-log-loss-scale-to-tensorboard log-progress log-energy log-straggler
        disable-straggler-on-startup enable-one-logger no-barrier-with-level-1-timing log-max-attention-logit log-device-memory-used
        log-optimizer-states""",
    _PROFILER: """
        use-pytorch-profiler record-memory-history profile-backward use-nsys-profiler nvtx-ranges record-shapes
        pytorch-profiler-collect-shapes pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra""",
    _GARBAGE: "manual-gc no-manual-gc-eval",
    _EXPERTS: """
        moe-grouped-gemm moe-use-legacy-grouped-gemm moe-permute-fusion moe-router-fusion
        moe-router-aux-loss-fusion no-moe-router-aux-loss-fusion moe-shared-expert-overlap
        moe-router-padding-for-fp8 moe-router-padding-for-quantization moe-enable-deepep moe-layer-recompute
        overlap-moe-expert-parallel-comm create-moe-param-group moe-extended-tp ep-overlap-early-attn-memory-release
        moe-pad-experts-for-cuda-graph-inference moe-weight-parallelism""",
    _TABLE: "defer-embedding-wgrad-compute",
    "pairs (2 i, 2 i + 1) are pairs (i, i + n/2) with a head's channels in another order, which fresh weights do not have; those of"
    " checkpoints are put in order by megatron-sp convert": "rotary-interleaved",
    _STAGES: "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split",
    _CAPACITY: "moe-pad-expert-input-to-capacity moe-token-dropping disable-moe-token-dropping moe-paged-stash",
    "the second expert of a token is the next best, never drawn": "disable-moe-top2-2nd-expert-sampling",
    "the load of the experts is in the log line and in metrics.jsonl": "moe-per-layer-logging",
    _ENGINE: """
        deepspeed deepscale no-pipeline-parallel deepspeed-activation-checkpointing use-tutel sync-tp-duplicated-parameters
        repeated-dataloader skip-warmup use-dataset-only custom-token-counting force-ds-sequence-parallel""",
    _COMMUNICATION: """
        use-cp-send-recv-overlap moe-permutation-async-comm moe-alltoall-overlap-comm moe-allgather-overlap-comm disable-gloo-group
        overlap-p2p-communication no-overlap-p2p-communication overlap-param-gather-with-optimizer-step
        no-async-tensor-model-parallel-allreduce disable-async-tensor-model-parallel-allreduce disable-batch-p2p-comm
        disable-batch-p2p-sync no-gradient-reduce-div-fusion no-delay-grad-reduce delay-grad-reduce no-align-grad-reduce
        delay-param-gather no-align-param-gather no-scatter-gather-tensors-in-pipeline no-contiguous-buffers-in-local-ddp
        use-contiguous-buffers-in-ddp use-contiguous-parameters-in-local-ddp disable-gloo-process-groups enable-gloo-process-groups
        nccl-ub disable-symmetric-registration batch-p2p-communication no-batch-p2p-communication
        overlap-p2p-communication-warmup-flush defer-grad-reduce use-ring-exchange-p2p ddp-average-in-collective use-nccl-ub
        use-sharp ddp-pad-buckets-for-high-nccl-busbw use-tp-pp-dp-mapping""",
    _MEMORY: """
        reuse-fp32-param recompute-activation-function recompute-norm recompute-in-advance enable-recompute-layers-per-pp-rank
        swap-attention swap-optimizer
        distribute-saved-activations distribute-checkpointed-activations no-clone-scatter-output-in-embedding
        disable-clone-scatter-output-in-embedding recompute-non-linear-layer-in-mlp partition-activations contigious-checkpointing
        checkpoint-in-cpu scattered-embeddings split-transformers memory-centric-tiled-linear use-pin-memory
        overlap-cpu-optimizer-d2h-h2d no-pin-cpu-grads no-pin-cpu-params init-model-with-meta-device use-precision-aware-optimizer
        zero-reduce-scatter zero-contigious-gradients reuse-grad-buf-for-mxfp8-param-ag fine-grained-activation-offloading
       """,
    _DATA: """
        no-mmap-bin-files mmap-warmup no-create-attention-mask-in-dataloader create-attention-mask-in-dataloader no-data-sharding
        no-shared-storage""",
    "all schedules have the bits of 1F1B": "enable-zbh1-exact-semantics enable-exactly-numeric-match enable-optimizer-post-validation",
    _EVERY_STEP: """
        no-check-for-nan-in-loss-and-grad check-for-nan-in-loss-and-grad check-for-spiky-loss check-for-large-grads""",
    "--auto-resume does that on any cluster": "adlr-autoresume",
    "a checkpoint loads into any layout; one of DeepSpeed's own is converted first, and --load says how": "universal-checkpoint",
    "ranks are those of whatever has started this: mpirun, srun, torchrun, or nothing, for a single process": """
        use-mpi deepspeed-mpi""",
}

_IGNORED_VALUES = {
    _GRAPHS: "cuda-graph-impl cuda-graph-scope cuda-graph-modules",
    _FUSED: """
        transformer-impl cross-entropy-fusion-impl
        tp-comm-overlap-cfg te-precision-config-file use-torch-compile use-fused-sdpa use-fused-sdpa-with-recompute
        use-fused-rmsnorm use-fast-softmax""",
    "a validation takes micro-batches of --micro-batch-size, on which its loss does not depend": "eval-micro-batch-size",
    _WHOLE_EXPERTS: "expert-tensor-parallel-size",
    _LAYOUT: "context-parallel-algo ulysses-degree-in-cp cp-window-size shape-order",
    _FSDP: "num-distributed-optimizer-instances outer-dp-sharding-strategy suggested-communication-unit-size megatron-fsdp-version",
    "--async-save writes in a thread of the process itself": "async-strategy async-ckpt-cpu-priority async-ckpt-io-priority",
    _TOKENIZERS: "tokenizer-library tokenizer-metadata tokenizer-special-tokens",
    _INFERENCE: "mlp-chunks-for-prefill num-speculative-tokens symmetric-ar-type bert-embedder-type max-tokens-to-oom",
    _FAULTS: "result-rejected-tracker-filename gpu-sniff-test-interval",
    _DUMPS: """
        save-params-interval save-activations-interval save-tokens-per-expert-interval save-wgrads-interval save-dgrads-interval""",
    _PROFILER: "memory-snapshot-path",
    _ACTIVATIONS: "cpu-offloading-num-layers min-offloaded-tensor-size",
    "a router's choices are traced by no flag; the load of the experts is in metrics.jsonl": """
        moe-routing-trace-path moe-routing-trace-max-training-iters""",
    "validations begin with the first --eval-interval": "start-eval-at-iter",
    "validation sets are called as their data": "validation-set-names",
    "--keep-last says how many of the newest checkpoints are kept": "most-recent-k",
    "files are on disks that this machine mounts": "object-storage-cache-path",
    "--config and --print-config read and write a run's flags": "save-config-filepath",
    "recomputation has its own flags here": "num-microbatches-with-partial-activation-checkpoints",
    "--optimizer-cpu-offload sends all of the optimizer's state to the host": "optimizer-offload-fraction",
    "nothing is exported to ONNX": "onnx-safe",
    _IMAGES: """
        img-h img-w patch-dim num-channels num-classes vision-model-type swin-backbone-type classes-fraction data-per-class-fraction
        head-lr-mult mask-type mask-factor iter-per-epoch""",
    _RETRIEVAL: """
        ict-head-size ict-load bert-load query-in-block-prob evidence-data-path titles-data-path retriever-seq-length
        retriever-report-topk-accuracies block-data-path embedding-path indexer-batch-size indexer-log-interval
        biencoder-projection-dim""",
    "it is for TikTokenizer": "tiktoken-pattern tiktoken-num-special-tokens tiktoken-special-tokens",
    "rows of padding are never in a checkpoint; --make-vocab-size-divisible-by says how many there are": """
        pad-vocab-size-to padded-vocab-size""",
    _TABLE: "wgrad-deferral-limit",
    _STAGES: "pp-partition-method",
    "micro-batches go through the stages of a rank in groups of the pipeline's size": "microbatch-group-size-per-virtual-pipeline-stage",
    "a schedule holds as many micro-batches as 1F1B": "zero-bubble-max-pending-backward zero-bubble-pipeline-timers-start-iter"
    " zero-bubble-pipeline-timers-end-iter zero-bubble-adaptive-memory-limit-percentile",
    "GPT and BERT have no decoder beside": "decoder-seq-length",
    "there is one data-parallel implementation": "DDP-impl",
    "files are always hashed, and checked when they are read": "verify-checkpoint-model-type",
    _DATA: "data-impl num-dataset-builder-threads attention-mask-type",
    _FORMAT: """
        ckpt-format dist-ckpt-format dist-ckpt-strictness dist-ckpt-workers non-persistent-save-interval non-persistent-ckpt-type
        non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir""",
    _LOGGED: """
        timing-log-level timing-log-option runtime-time-unit throughput-window-size memory-keys modules-to-filter structured-logs
        dump-param-to-param-group-map tensorboard-log-interval log-memory-interval logging-level straggler-minmax-count
        straggler-ctrlr-port one-logger-project one-logger-run-name one-logger-entity one-logger-async log-path log-level
        log-level-replica config-logger-dir codecarbon-dir profile-dir app-tag-run-name app-tag-run-version""",
    _EXPERTS: "moe-token-dispatcher-type moe-flex-dispatcher-backend moe-deepep-num-sms moe-hybridep-num-sms mlp-impl",
    _CAPACITY: """
        moe-expert-capacity-factor moe-token-drop-policy moe-train-capacity-factor moe-eval-capacity-factor
        moe-min-capacity moe-capacity-factor moe-expert-rank-capacity-factor""",
    "the router and its losses are computed in fp32": "moe-lbl-in-fp32 moe-zloss-in-fp32",
    "W&B reads its own environment variables": """
        wandb-save-dir wandb-entity wandb-entity-name wandb-team wandb-group wandb-host wandb-id wandb-api-key wandb-resume
        wandb-mode wandb-tags""",
    _GARBAGE: "manual-gc-interval",
    _ENGINE: "remote-device ai-framework optimization-level",
    "the launcher tells the rank": "local-rank",
    "exit code 75 means saved, whatever the signal": "exit-signal",
    _COMMUNICATION: """
        ddp-bucket-size ddp-num-buckets nccl-communicator-config-path lazy-mpu-init high-priority-stream-groups
        tp-comm-bootstrap-backend pipeline-model-parallel-comm-backend sharp-enabled-group distributed-timeout-seconds-after-init""",
    _MEMORY: """
        param-and-grad-buffer-pad recompute-activation-function-num-layers recompute-norm-num-layers
        moe-zero-memory moe-zero-memory-num-layers
        empty-unused-memory-level tile-factor recompute-modules offload-modules multiprocessing-context zero-reduce-bucket-size
        zero-allgather-bucket-size""",
    _EVERY_STEP: "rerun-mode error-injection-rate error-injection-type",
    "replicas are checked by the tests, not while training, for now": "check-weight-hash-across-dp-replicas-interval",
    "ranks agree on stopping in every step without it": "train-sync-interval",
    "--auto-resume does that on any cluster": "adlr-autoresume-interval",
}


def _by_name(table: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in table.items() for name in names.split()}


IGNORED_SWITCHES: dict[str, str] = _by_name(_IGNORED_SWITCHES)
"""Ignored flags without a value: name -> reason."""
IGNORED_VALUES: dict[str, str] = _by_name(_IGNORED_VALUES)
"""Ignored flags that take a value: name -> reason."""
IGNORED_LISTS = frozenset(_IGNORED_LISTS)
"""Those of them that take several values."""

_REFUSED = {
    "--reset-attention-mask keeps documents apart": "dataloader-inter-document-masking",
    "the formats today are fp32, --bf16, --fp16 and --fp64": """
        fp8-format fp8-hybrid fp8-e4m3 fp8-margin fp8-recipe fp8-interval fp8-param-gather fp8-amax-history-len
        fp8-amax-compute-algo fp8-amax-reduce fp8-coverage fp8-quantizer-factory no-fp8-wgrad disable-fp8-wgrad
        keep-fp8-transpose-cache tp-only-amax-red fp4-format fp4-recipe fp4-param-gather keep-fp8-weight-transpose-cache
        first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16""",
    "residuals, master weights, gradients and Adam's moments have fixed formats": """
        fp32-residual-connection main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype embedding-weights-in-fp32
        use-pure-low-precision""",
    "an MLP beside the experts, weighed against them by a router of its own, is not there; one that is added as it is takes"
    " --moe-shared-expert-intermediate-size": "mlp-type",
    "programs around megablocks add this loss up over the layers, or take the mean: say --moe-z-loss-coeff, which is of each layer": """
        moe-zloss-weight""",
    "weights of the chosen experts sum to 1 without --moe-router-pre-softmax; other norms are not there": "moe-normalize-expert-weights",
    "tokens choose by their router's scores alone: the balance is kept by --moe-router-load-balancing-type or"
    " --moe-router-enable-expert-bias": """
        moe-input-jitter-eps moe-jitter-eps moe-router-force-load-balancing moe-router-force-biased fix-router""",
    "a shared expert is added as it is, without a gate": "moe-shared-expert-gate moe-use-shared-expert-gate",
    "an expert's weight is a factor of its result, not of its input": "moe-apply-probs-on-input",
    "latent, upcycled and other mixtures are not there; experts are MLPs": """
        moe-use-upcycling moe-upcycling-granularity moe-latent-size num-experts-switch moe-mlp-glu-interleave-size""",
    "text is generated by megatron-sp generate and megatron-sp serve": "ds-inference inference text-generate-input-file out-seq-length",
    "the strategies are no_shard, optim, optim_grads and optim_grads_params: ZeRO 0 to 3": "data-parallel-sharding-strategy",
    "the embedding is on the first stage with layers; --pipeline-model-parallel-layout says with how many": "standalone-embedding-stage",
    "GPT and BERT are one stack of blocks, without an encoder beside it; leave it out": """
        pipeline-model-parallel-split-rank encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size""",
    "--pipeline-schedule says 1f1b, interleaved, zb1p or zbv": "schedule-method",
    "a classifier is trained by megatron-sp finetune, which has this flag; pretraining has no use for it": """
        pretrained-checkpoint task epochs train-data valid-data""",
    "a model predicts the next token alone; heads for further ones are not there": """
        mtp-num-layers mtp-loss-scaling-factor mtp-detach-heads mtp-use-repeated-layer""",
    "queries, keys and values are projected as a whole; latent attention is not there": """
        multi-latent-attention multi-head-latent-attention qk-rope-head-dim qk-nope-head-dim q-lora-rank kv-lora-rank qk-head-dim
        qk-pos-emb-head-dim v-head-dim rotary-scaling-factor mscale mscale-all-dim
        cache-mla-latents beta-fast beta-slow original-max-position-embeddings""",
    "experts are told in Megatron's words: --moe-layer-freq, --moe-ffn-hidden-size, --moe-shared-expert-intermediate-size,"
    " --moe-router-group-topk, --moe-router-topk-scaling-factor": """
        first-k-dense-replace moe-intermediate-size n-shared-experts topk-group routed-scaling-factor norm-topk-prob seq-aux""",
    "every layer of --num-layers computes; --pipeline-model-parallel-layout says how many a stage has": "noop-layers",
    "scores are kept small by --qk-layernorm; they are not clipped": """
        qk-l2-norm qk-clip qk-clip-alpha qk-clip-threshold attn-logit-softcapping""",
    "a softmax is over the keys alone, of scores divided by the root of a head's width": "softmax-type softmax-scale",
    "attention's result has no gate": "attention-output-gate",
    "the loss is the cross entropy of the token itself, without smoothing": "label-smoothing",
    "attention is softmax attention in every layer; linear and sparse kinds are not there": """
        linear-attention-type linear-attention-freq experimental-attention-variant""",
    "layers are attention with an MLP or experts; state spaces are not there": """
        is-hybrid-model hybrid-override-pattern hybrid-attention-ratio hybrid-mlp-ratio hybrid-layer-pattern""",
    "packed documents are dealt to data-parallel ranks by --balance-rows; the context-parallel size is the same for all": """
        hybrid-context-parallel dynamic-context-parallel sequence-packing-scheduler""",
    "a token sees itself and what is before it, or the last N tokens with --window-size N": "pre-tockens next-tockens",
    "contexts are made longer by --use-rope-scaling, Llama 3's, or --rotary-seq-len-interpolation-factor; YaRN is not there": """
        rope-scaling-type rope-scaling-mscale rope-scaling-mscale-all-dim rope-scaling-beta-fast rope-scaling-beta-slow
        yarn-scaling-factor""",
    "samples have --seq-length tokens each, or those of --seq-length-curriculum": "use-varlen-dataset",
    "embeddings go into the first block as they are": "embed-layernorm",
    "initial weights and learning rates do not follow the width; muP is not there": "use-mup",
    "--init-method-std is the deviation of embeddings, too": "embedding-init-method-std",
    "the loss is over all tokens, each with the same weight, but for --eod-mask-loss and BERT's masks": """
        loss-on-targets-only reweight-loss-based-on-position-frequency""",
    "which samples are drawn is said by --split and by the weights of --data-path": "sample-rate mid-level-dataset-surplus",
    "documents are trained as they stand; pieces of them do not change places, for filling in the middle": "fim-data fim-rate",
    "several validation sets are groups of --valid-weighted-split-paths": "extra-eval-data-path",
    "no step is left out by its number; one with a bad loss or gradient is by itself": "skip-train-iteration-range iterations-to-skip",
    "which experts a token chooses among is limited by --moe-router-num-groups and --moe-router-group-topk": """
        moe-router-topk-limited-devices""",
    "models of retrieval are not there": "retro-add-retriever retro-project-dir retro-workdir",
    "positions are learned_absolute or rope: they have no biases of their own, and are those of a text": """
        use-alibi-position-embeddings relative-attention-num-buckets relative-attention-max-distance mrope-section""",
    "GPT and BERT are the models today; T5 and prefix models are not there yet": """
        decoder-num-layers prefixlm noise-density mean-noise-span-length""",
    "a vocabulary is the tokenizer's own; nothing is added to it, such as T5's sentinels": "vocab-extra-ids vocab-extra-ids-list",
    "rotary positions today turn pairs (i, i + n/2) of every layer alike, stretched by --use-rope-scaling or"
    " --rotary-seq-len-interpolation-factor": "no-rope-freq",
    "attention today is causal, over the whole sequence or a window (--window-size) that is the same in every layer and head": """
        window-attn-skip-freq""",
    "heads are multihead or multiquery here": "attention-head-type",
    "gates are swiglu or geglu here": "glu-activation",
    "positions are learned_absolute, rope or none": "rope-type",
    "a sequence is cut over the ranks (--sequence-parallel-size N), its MLPs run in pieces (--mlp-chunks N) and what blocks save to the"
    " host (--offload-activations); attention itself is not cut into chunks in host memory": """
        ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-fpdt-offloading""",
    "blocks today are pre-norm (BERT's also post-norm: --norm-placement post), all of one shape, with GELU, ReLU, squared ReLU (--relu,"
    " --squared-relu), or gated by SiLU or GELU (--swiglu, --geglu)": """
        apply-residual-connection-post-layernorm quick-geglu spec heterogeneous-layers-config-path
        heterogeneous-layers-config-encoded-json activation-func-clamp-value glu-linear-offset xielu""",
    "initial weights today are normal (--init-method-std)": "init-method-xavier-uniform",
    "the optimizers today are AdamW and SGD": """
        no-decoupled-weight-decay no-weight-decay-cond-type apply-wd-to-qk-layernorm use-bnb-optimizer""",
    "every batch has the size that --global-batch-size, --rampup-batch-size or --step-batch-size-schedule says": """
        decrease-batch-size-if-needed""",
    "compression and distillation are not there, and of data-efficiency methods only --seq-length-curriculum is": """
        kd teacher-model-config export-kd-teacher-load export-kd-cfg export-kd-finalize compression-training
        train-data-exact-num-epochs return-data-index train-doc-idx-path train-idx-path train-desc-path train-sample-idx-path
        train-shuffle-idx-path mos kd-alpha-ce kd-beta-ce kd-temp load-teacher num-layers-teacher num-experts-teacher
        hidden-size-teacher num-attention-heads-teacher""",
    "random layer token dropping leaves tokens out of the middle layers, and here every layer computes all": "random-ltd",
    "--data-path with --split, or --train-data-path, --valid-data-path and --test-data-path name the data": """
        data-args-path per-split-data-args-path aml-data-download-path""",
    "a model is trained on tokenized text as it stands; for instructions and rewards there are other programs": """
        sft sft-tokenizer-prompt-format finetune-hf-dataset finetune-data-split perform-rl-step is-instruction-dataset prompt-type stage""",
    "checkpoints of other programs are converted by megatron-sp convert (docs/how-to/convert.md); --load takes ours": """
        ckpt-convert-format ckpt-convert-update-legacy-dist-opt-format ckpt-convert-save""",
    "--finetune starts at step 0 with the weights alone, --override-opt-param-scheduler changes the schedule on resume": """
        reset-iteration no-load-lr-state""",
    "write the flags, without dashes, into a file for --config FILE": "yaml-cfg",
    "it is the launcher's: it goes between torchrun and the program's name": """
        nnodes nproc-per-node node-rank master-addr master-port rdzv-backend rdzv-endpoint rdzv-id max-restarts standalone num-gpus
        num-nodes hostfile""",
}
REFUSED: dict[str, str] = _by_name(_REFUSED)
"""Flags that would change the result and are not there: name -> what works today."""
REFUSED_PREFIXES: dict[str, str] = {
    "ds-sequence-parallel-fpdt": REFUSED["ds-sequence-parallel-fpdt"],
    "kd-": REFUSED["kd"],
    "export-": REFUSED["kd"],
    "sft-": REFUSED["sft"],
    "hybrid-": REFUSED["is-hybrid-model"],
    "fp4-": REFUSED["fp8-format"],
    "fp8-": REFUSED["fp8-format"],
    "kitchen-": REFUSED["fp8-format"],
    "use-kitchen": REFUSED["fp8-format"],
    "curriculum-": REFUSED["compression-training"],
    "random-ltd-": REFUSED["random-ltd"],
    "heterogeneous-": REFUSED["heterogeneous-layers-config-path"],
}
"""Beginnings of refused families."""

IGNORED_PREFIXES: dict[str, str] = {
    "inference-": _INFERENCE,
    "mamba-inference-": _INFERENCE,
    **dict.fromkeys(
        ("rl-", "no-rl-", "grpo-", "langrl-", "no-langrl-", "moe-enable-routing-replay"), "without --perform-rl-step it has no effect"
    ),
    **dict.fromkeys(("inprocess-", "fault-injector-"), _FAULTS),
    "otel-": "where measurements go is said by --tensorboard-dir and --wandb-project",
    "retro-": "without --retro-add-retriever it has no effect",
    "fim-": "without --fim-data it has no effect",
    "mtp-": "without --mtp-num-layers it has no effect",
    "muon-": "without --optimizer muon it has no effect",
    "mup-": "without --use-mup it has no effect",
    **dict.fromkeys(("mamba-", "disable-mamba-"), "without --is-hybrid-model it has no effect"),
    **dict.fromkeys(("linear-", "dsa-"), "without --experimental-attention-variant it has no effect"),
    "max-seqlen-per-dp-cp-rank": "without --hybrid-context-parallel it has no effect",
    "min-dynamic-context-parallel-size": "without --dynamic-context-parallel it has no effect",
    "moe-capacity-bins": _CAPACITY,
    "varlen-": "without --use-varlen-dataset it has no effect",
    "null-tokenizer-pad-": "no sample of GPT is padded",
    **dict.fromkeys(("vision-", "dino-"), _IMAGES),
    "biencoder-": _RETRIEVAL,
    **dict.fromkeys(("fsdp-", "torch-fsdp2-"), _FSDP),
    "tp-comm-": _FUSED,
    **dict.fromkeys(("replication", "ckpt-fully-parallel-", "non-persistent-", "async-ckpt-"), _FORMAT),
}
"""Beginnings of families that are ignored: the flag that would make them matter, if there is one, is refused itself."""

SYNONYMS = {
    **dict.fromkeys(("learning-rate", "max-lr", "peak-lr"), "lr"),
    **dict.fromkeys(("min-learning-rate", "lr-min"), "min-lr"),
    **dict.fromkeys(("warmup-steps", "warmup-iters", "num-warmup-steps", "lr-warmup-steps"), "lr-warmup-iters"),
    **dict.fromkeys(("warmup-ratio", "warmup-fraction"), "lr-warmup-fraction"),
    **dict.fromkeys(("lr-scheduler", "lr-scheduler-type", "lr-schedule"), "lr-decay-style"),
    **dict.fromkeys(("steps", "iters", "max-steps", "train-steps", "num-train-steps", "max-iters", "iterations"), "train-iters"),
    **dict.fromkeys(("layers", "n-layer", "n-layers", "num-hidden-layers", "depth"), "num-layers"),
    **dict.fromkeys(("hidden-dim", "d-model", "n-embd", "embed-dim", "width"), "hidden-size"),
    **dict.fromkeys(("heads", "n-head", "n-heads", "num-heads"), "num-attention-heads"),
    **dict.fromkeys(("num-kv-heads", "n-kv-heads", "kv-heads"), "num-query-groups"),
    **dict.fromkeys(("ffn-dim", "intermediate-size", "ffn-size", "d-ff"), "ffn-hidden-size"),
    **dict.fromkeys(("sequence-length", "seq-len", "max-seq-len", "max-seq-length", "context-length", "block-size"), "seq-length"),
    **dict.fromkeys(("train-batch-size", "global-batch", "gbs", "gradient-accumulation-steps", "grad-accum-steps"), "global-batch-size"),
    **dict.fromkeys(("per-device-train-batch-size", "micro-batch", "mbs"), "micro-batch-size"),
    **dict.fromkeys(("max-grad-norm", "grad-clip", "gradient-clipping", "clip-grad-norm"), "clip-grad"),
    "beta1": "adam-beta1", "beta2": "adam-beta2", "wd": "weight-decay", "dropout": "hidden-dropout", "optim": "optimizer",
    **dict.fromkeys(("dtype", "precision", "params-dtype"), "bf16"), **dict.fromkeys(("flash-attn", "flash-attention"), "use-flash-attn"),
    **dict.fromkeys(("save-steps", "checkpoint-interval", "save-every"), "save-interval"),
    **dict.fromkeys(("eval-steps", "eval-every"), "eval-interval"), **dict.fromkeys(("log-steps", "logging-steps"), "log-interval"),
    "cache-dir": "data-cache-path", "run-name": "wandb-exp-name", "rope": "position-embedding-type",
    **dict.fromkeys(("output-dir", "save-dir", "checkpoint-dir"), "save"), **dict.fromkeys(("resume", "resume-from", "load-dir"), "load"),
    **dict.fromkeys(("data", "dataset", "train-data-dir", "data-dir"), "data-path"), "tokenizer": "tokenizer-model",
    **dict.fromkeys(("tp", "tensor-parallel-size", "tensor-parallel"), "tensor-model-parallel-size"),
    **dict.fromkeys(("pp", "pipeline-parallel-size", "pipeline-parallel"), "pipeline-model-parallel-size"),
    **dict.fromkeys(("cp", "context-parallel"), "context-parallel-size"), **dict.fromkeys(("sp", "ulysses"), "sequence-parallel-size"),
    **dict.fromkeys(("ep", "expert-parallel", "expert-parallel-size"), "expert-model-parallel-size"),
}  # fmt: skip
"""What other programs call our flags; with a name of these the answer is "did you mean"."""

STANDARD_SPECS = (
    "local", "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.bert.bert_layer_specs", "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec", "gpt_layer_local_spec", "gpt_layer_with_transformer_engine_spec",
    "get_gpt_decoder_block_spec", "bert_layer_local_spec", "bert_layer_with_transformer_engine_spec",
)  # fmt: skip
"""Words of Megatron's --spec for the blocks that it has without the flag."""

HARMLESS_VALUES: dict[str, tuple[str, ...]] = {
    "attention-head-type": ("multihead",), "rope-type": ("rope",), "spec": STANDARD_SPECS,
    "mlp-type": ("standard", "mlp"), "moe-input-jitter-eps": ("0", "0.0"),
    "pre-tockens": ("65536", "2147483647"), "next-tockens": ("0",),
    "moe-jitter-eps": ("0", "0.0"), "moe-zloss-weight": ("0", "0.0"),
    "vocab-extra-ids": ("0",), "mtp-num-layers": ("0",), "label-smoothing": ("0", "0.0"),
    "fim-rate": ("0", "0.0"), "mid-level-dataset-surplus": ("0.005",),
    "softmax-type": ("vanilla",), "qk-clip-threshold": ("0",), "glu-linear-offset": ("0", "0.0"),
    "main-grads-dtype": ("fp32", "bf16"), "main-params-dtype": ("fp32",), "exp-avg-dtype": ("fp32",), "exp-avg-sq-dtype": ("fp32",),
    "encoder-tensor-model-parallel-size": ("0", "1"), "encoder-pipeline-model-parallel-size": ("0", "1"), "sample-rate": ("1.0", "1"),
}  # fmt: skip
"""Refused flags that are ignored with these values, because they then ask for what happens anyway."""


OFF_VALUES: dict[str, tuple[str, ...]] = {"num-experts": ("1",), "moe-num-experts": ("1",)}
"""Words with which a flag of ours that asks for a family's feature does not ask for it."""


class Family(NamedTuple):
    """Refused flags of one feature, which have no effect unless one of them enables it.

    Attributes:
        asks: flags that enable the feature.
        names: the other flags.
        prefix: prefix of further flags; empty if there are none.
    """

    asks: tuple[str, ...]
    names: frozenset[str]
    prefix: str = ""

    def has(self, name: str) -> bool:
        """Return whether ``name`` is one of the flags that do not enable the feature."""
        return name not in self.asks and (name in self.names or bool(self.prefix and name.startswith(self.prefix)))

    @property
    def reason(self) -> str:
        """Explanation shown for an ignored flag."""
        return f"without --{self.asks[0]} it has no effect"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


FAMILIES = (
    Family(
        ("num-experts", "moe-num-experts"),
        _names("""
            moe-expert-capacity-factor moe-pad-expert-input-to-capacity moe-token-drop-policy moe-train-capacity-factor
            moe-eval-capacity-factor moe-min-capacity moe-token-dropping expert-tensor-parallel-size
            enable-expert-tensor-parallelism mlp-type expert-interval moe-input-jitter-eps moe-jitter-eps moe-router-force-load-balancing
            moe-shared-expert-gate moe-use-shared-expert-gate moe-use-upcycling moe-apply-probs-on-input"""),
    ),
    Family(
        ("fp8-format", "fp8-hybrid", "fp8-e4m3", "fp4-format"),
        _names("""
            fp8-margin fp8-recipe fp8-interval fp8-amax-history-len fp8-amax-compute-algo fp8-amax-reduce fp8-coverage no-fp8-wgrad
            fp4-recipe keep-fp8-weight-transpose-cache first-last-layers-bf16 num-layers-at-start-in-bf16 num-layers-at-end-in-bf16"""),
    ),
    Family(
        ("multi-latent-attention",),
        _names("""
            q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim rotary-scaling-factor mscale mscale-all-dim
            cache-mla-latents beta-fast beta-slow original-max-position-embeddings"""),
    ),
    Family(("mtp-num-layers",), _names("mtp-loss-scaling-factor mtp-detach-heads mtp-use-repeated-layer")),
    Family(("qk-clip",), _names("qk-clip-alpha qk-clip-threshold")),
    Family(("load", "auto-resume"), _names("reset-iteration no-load-lr-state")),
)  # fmt: skip
