"""Names of the flags of Megatron-LM, Megatron-DeepSpeed and DeepSpeed, so that none of them is ever taken for a typo.

A name that is neither one of ours nor in a table of ``ignored_flags.py`` is answered by its family
(``IGNORED_PREFIXES`` and ``REFUSED_PREFIXES`` there); the tests go through all of them. Names alone, without leading dashes, with hyphens.

Sources: NVIDIA/Megatron-LM, ``megatron/training/arguments.py`` at 000c4ac and the dataclasses from which newer versions
generate flags (``megatron/training/config`` at 008e9cd, ``megatron/core`` 0.16.1), and newer
names from its tests and examples (e9cec93, 10ce7bc); Megatron-DeepSpeed,
``megatron/arguments.py`` of 2025; DeepSpeed's ``add_config_arguments``. Names that come from a fork or an older version
stand in ``FORKS``.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MEGATRON_LM = _names("""
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split accumulate-allreduce-grads-in-fp32
    activation-func-clamp-value activation-func-fp8-input-store adam-beta1 adam-beta2 adam-eps add-qkv-bias adlr-autoresume
    adlr-autoresume-interval allow-ambiguous-pad-tokens app-tag-run-name app-tag-run-version apply-layernorm-1p apply-rope-fusion

    apply-query-key-layer-scaling apply-residual-connection-post-layernorm apply-wd-to-qk-layernorm async-ckpt-cpu-priority
    async-ckpt-io-priority async-ckpt-use-cpu-shm async-save async-strategy attention-backend attention-dropout attention-output-gate
    attention-softmax-in-fp32 auto-detect-ckpt-format batch-invariant-mode batch-size bert-embedder-type bert-load
    bert-no-binary-head beta-fast beta-slow bf16 biencoder-projection-dim biencoder-shared-query-context-model block-data-path
    cache-mla-latents calc-ft-timeouts calculate-per-token-loss check-for-large-grads check-for-nan-in-loss-and-grad
    check-for-spiky-loss check-weight-hash-across-dp-replicas-interval checkpoint-activations ckpt-assume-constant-structure
    ckpt-convert-format ckpt-convert-save ckpt-convert-update-legacy-dist-opt-format ckpt-format ckpt-fully-parallel-load
    ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-load-process-group ckpt-fully-parallel-load-replicate-local
    ckpt-fully-parallel-save ckpt-fully-parallel-save-process-group ckpt-fully-parallel-save-replicate-local ckpt-step
    classes-fraction clip-grad config-logger-dir context-parallel-size cp-comm-type cpu-offloading-double-buffering
    cpu-offloading-num-layers cpu-offloading-weights cross-entropy-fusion-impl cross-entropy-loss-fusion cuda-graph-impl
    cuda-graph-modules cuda-graph-retain-backward-graph cuda-graph-scope cuda-graph-share-io-buffers cuda-graph-use-single-mempool
    cuda-graph-warmup-steps data-args-path data-cache-path data-parallel-random-init data-parallel-sharding-strategy data-path
    data-per-class-fraction dataloader-type ddp-average-in-collective ddp-bucket-size ddp-num-buckets
    ddp-pad-buckets-for-high-nccl-busbw ddp-reduce-scatter-with-fp32-accumulation decode-only-cuda-graphs
    decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers decoder-num-layers decoder-seq-length decoupled-lr
    decoupled-min-lr decrease-batch-size-if-needed defer-embedding-wgrad-compute delay-wgrad-compute deterministic-mode
    dino-bottleneck-size dino-freeze-last-layer dino-head-hidden-size dino-local-crops-number dino-local-img-size dino-norm-last-layer
    dino-teacher-temp dino-warmup-teacher-temp dino-warmup-teacher-temp-epochs disable-async-tensor-model-parallel-allreduce
    disable-attention-softmax-in-fp32 disable-batch-p2p-comm disable-batch-p2p-sync disable-bf16-reduced-precision-matmul
    disable-bias-linear disable-chunked-prefill disable-clone-scatter-output-in-embedding disable-cpu-offloading-activations
    disable-fp8-wgrad disable-gloo-process-groups disable-jit-fuser disable-mamba-mem-eff-path disable-msc
    disable-parameter-transpose-cache disable-straggler-on-startup disable-symmetric-registration disable-tp-comm-bulk-dgrad
    disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-split-ag
    disable-tp-comm-split-rs dist-ckpt-format dist-ckpt-optim-fully-reshardable dist-ckpt-save-pre-mcore-014 dist-ckpt-strictness
    distrib-optim-fully-reshardable-mem-efficient distribute-saved-activations distributed-backend distributed-timeout-minutes
    distributed-timeout-seconds-after-init dsa-indexer-head-dim dsa-indexer-loss-coeff dsa-indexer-n-heads dsa-indexer-topk
    dsa-indexer-use-sparse-loss dump-param-to-param-group-map embedding-init-method-std embedding-path empty-unused-memory-level
    enable-chunked-prefill enable-cuda-graph enable-experimental enable-ft-package enable-full-sharding-in-hsdp
    enable-gloo-process-groups enable-one-logger encoder-num-layers encoder-seq-length end-weight-decay eod-mask-loss
    ep-overlap-early-attn-memory-release error-injection-rate error-injection-type eval-global-batch-size eval-interval eval-iters
    eval-micro-batch-size evidence-data-path exit-duration-in-mins exit-interval exit-on-missing-checkpoint exit-signal
    exit-signal-handler exit-signal-handler-for-dataloader exit-signal-handler-for-training exp-avg-dtype exp-avg-sq-dtype
    experimental-attention-variant expert-model-parallel-size expert-tensor-parallel-size external-cuda-graph
    fault-injector-delay-start-iteration ffn-hidden-size fim-data fim-eod-token fim-extra-tokens fim-fragment-rate fim-middle-token
    fim-no-prefix fim-pad-token fim-prefix-token fim-rate fim-split-sample fim-spm-rate fim-suffix-token
    fine-grained-activation-offloading finetune first-last-layers-bf16 flash-decode fp16 fp16-lm-cross-entropy
    fp32-residual-connection fp4-format fp4-param-gather fp4-quantizer-factory fp4-recipe fp8-amax-compute-algo fp8-amax-history-len
    fp8-dot-product-attention fp8-format fp8-interval fp8-margin fp8-multi-head-attention fp8-param-gather fp8-quantizer-factory
    fp8-recipe fsdp-double-buffer fsdp-manual-registration full-validation fused-single-qkv-rope global-batch-size glu-linear-offset
    gpu-sniff-test-interval grad-reduce-in-bf16 group-query-attention grpo-clamp-eps-lower grpo-clamp-eps-upper
    grpo-default-temperature grpo-default-top-p grpo-entropy-term-weight grpo-filter-groups-with-same-reward grpo-group-size
    grpo-iterations grpo-kl-beta grpo-prompts-per-step head-lr-mult heterogeneous-layers-config-encoded-json
    heterogeneous-layers-config-path hidden-dropout hidden-size hierarchical-context-parallel-sizes high-priority-stream-groups
    hybrid-attention-ratio hybrid-context-parallel hybrid-layer-pattern hybrid-mlp-ratio hybrid-override-pattern hysteresis
    ict-head-size ict-load img-h img-w indexer-batch-size indexer-log-interval inference-batch-times-seqlen-threshold
    inference-coordinator-port inference-cuda-graph-all-prefills inference-cuda-graph-max-tokens inference-disable-ep-consensus
    inference-dynamic-batching inference-dynamic-batching-block-size inference-dynamic-batching-buffer-guaranteed-fraction
    inference-dynamic-batching-buffer-overflow-factor inference-dynamic-batching-buffer-size-gb
    inference-dynamic-batching-enable-prefix-caching inference-dynamic-batching-max-requests
    inference-dynamic-batching-max-requests-override inference-dynamic-batching-max-tokens
    inference-dynamic-batching-max-tokens-override inference-dynamic-batching-num-cuda-graphs
    inference-dynamic-batching-sampling-backend inference-dynamic-batching-track-paused-request-events
    inference-dynamic-batching-unified-memory-level inference-fuse-tp-communication inference-logging-step-interval
    inference-max-batch-size inference-max-requests inference-max-seq-length inference-rng-tracker inference-text-gen-server-logging
    inference-wandb-logging inference-wandb-logging-step-interval init-method-std init-method-xavier-uniform
    init-model-with-meta-device initial-loss-scale inprocess-active-world-size inprocess-barrier-timeout inprocess-completion-timeout
    inprocess-empty-cuda-cache inprocess-granularity inprocess-hard-timeout inprocess-heartbeat-interval inprocess-heartbeat-timeout
    inprocess-last-call-wait inprocess-max-iterations inprocess-monitor-process-interval inprocess-monitor-thread-interval
    inprocess-progress-watchdog-interval inprocess-restart inprocess-soft-timeout inprocess-termination-grace-time is-hybrid-model
    iter-per-epoch iterations-to-skip keep-fp8-transpose-cache kitchen-attention-backend kitchen-config-file kitchen-recipe-number
    kv-channels kv-lora-rank langrl-env-config langrl-external-server langrl-inference-server-conversation-template
    langrl-inference-server-type lazy-mpu-init legacy-tokenizer linear-attention-freq linear-attention-type linear-conv-kernel-dim
    linear-key-head-dim linear-num-key-heads linear-num-value-heads linear-value-head-dim load load-main-params-from-ckpt local-rank
    log-device-memory-used log-energy log-interval log-l2-norm-grad-to-tensorboard log-loss-scale-to-tensorboard
    log-max-attention-logit log-memory-interval log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm log-progress
    log-runtime-to-tensorboard log-straggler log-throughput log-throughput-to-tensorboard log-timers-to-tensorboard
    log-validation-ppl-to-tensorboard log-world-size-to-tensorboard logging-level loss-scale loss-scale-window lr lr-decay-iters
    lr-decay-samples lr-decay-style lr-warmup-fraction lr-warmup-init lr-warmup-iters lr-warmup-samples lr-wsd-decay-iters
    lr-wsd-decay-samples lr-wsd-decay-style main-grads-dtype main-params-dtype make-vocab-size-divisible-by mamba-head-dim
    mamba-inference-conv-states-dtype mamba-inference-ssm-states-dtype mamba-num-groups mamba-num-heads mamba-state-dim manual-gc
    manual-gc-interval mask-factor mask-prob mask-type max-position-embeddings max-seqlen-per-dp-cp-rank max-tokens-to-oom
    dynamic-context-parallel megatron-fsdp-version memory-keys memory-snapshot-path merge-file micro-batch-size
    microbatch-group-size-per-virtual-pipeline-stage
    mid-level-dataset-surplus min-loss-scale min-lr min-offloaded-tensor-size mlp-chunks-for-prefill mock-data model-parallel-size
    modules-to-filter moe-apply-probs-on-input moe-aux-loss-coeff moe-deepep-num-sms moe-enable-deepep moe-enable-routing-replay
    moe-expert-capacity-factor moe-expert-rank-capacity-factor moe-extended-tp moe-ffn-hidden-size moe-flex-dispatcher-backend
    moe-grouped-gemm moe-hybridep-num-sms moe-input-jitter-eps moe-latent-size moe-layer-freq moe-layer-recompute
    moe-mlp-glu-interleave-size moe-pad-expert-input-to-capacity moe-pad-experts-for-cuda-graph-inference moe-paged-stash
    moe-per-layer-logging moe-permute-fusion moe-router-bias-update-rate moe-router-dtype moe-router-enable-expert-bias
    moe-router-force-biased moe-router-force-load-balancing moe-router-fusion moe-router-group-topk moe-router-load-balancing-type
    moe-router-num-groups moe-router-padding-for-fp8 moe-router-padding-for-quantization moe-router-pre-softmax
    moe-router-score-function moe-router-topk moe-router-topk-limited-devices moe-router-topk-scaling-factor
    moe-routing-trace-capture-hidden-states moe-routing-trace-capture-logits moe-routing-trace-dump-weights
    moe-routing-trace-max-training-iters moe-routing-trace-path moe-shared-expert-gate moe-shared-expert-intermediate-size
    moe-shared-expert-overlap moe-token-dispatcher-type moe-token-drop-policy moe-token-dropping moe-upcycling-granularity
    moe-use-legacy-grouped-gemm moe-use-upcycling moe-z-loss-coeff most-recent-k mrope-section mscale mscale-all-dim
    mtp-detach-heads mtp-loss-scaling-factor mtp-num-layers mtp-use-repeated-layer multi-latent-attention multiple-validation-sets
    muon-extra-scale-factor muon-fp32-matmul-prec muon-momentum muon-no-split-qkv muon-num-ns-steps muon-scale-mode muon-tp-mode
    muon-use-nesterov nccl-all-reduce-for-prefill nccl-communicator-config-path nccl-ub no-align-grad-reduce no-align-param-gather
    no-async-tensor-model-parallel-allreduce no-barrier-with-level-1-timing no-bias-dropout-fusion no-bias-gelu-fusion
    no-bias-swiglu-fusion no-check-for-nan-in-loss-and-grad no-ckpt-fully-parallel-save no-clone-scatter-output-in-embedding
    no-create-attention-mask-in-dataloader no-data-sharding no-decoupled-weight-decay no-filter-warnings no-fp8-wgrad
    no-gradient-accumulation-fusion no-gradient-reduce-div-fusion no-initialization no-load-optim no-load-rng
    no-log-loss-scale-to-tensorboard no-manual-gc-eval no-masked-softmax-fusion no-mmap-bin-files no-one-logger
    no-overlap-p2p-communication no-pad-vocab-size no-persist-layer-norm no-pin-cpu-grads no-pin-cpu-params no-position-embedding
    no-rope-freq no-rope-fusion no-save-optim no-save-rng no-save-tokenizer-assets no-scatter-gather-tensors-in-pipeline
    no-strict-fsdp-dtensor-load no-use-tokenizer-model-from-checkpoint-args no-weight-decay-cond-type
    no-weight-gradient-accumulation-fusion non-persistent-ckpt-type non-persistent-global-ckpt-dir non-persistent-local-ckpt-algo
    non-persistent-local-ckpt-dir non-persistent-save-interval norm-epsilon normalization num-attention-heads num-channels
    num-classes num-dataset-builder-threads num-distributed-optimizer-instances num-experts num-layers num-layers-at-end-in-bf16
    num-layers-at-start-in-bf16 num-layers-per-virtual-pipeline-stage num-microbatches-with-partial-activation-checkpoints
    num-query-groups num-speculative-tokens num-virtual-stages-per-pipeline-rank num-workers nvtx-ranges object-storage-cache-path
    offload-modules one-logger-async one-logger-project one-logger-run-name onnx-safe openai-gelu optimizer optimizer-cpu-offload
    optimizer-offload-fraction original-max-position-embeddings outer-dp-sharding-strategy output-bert-embeddings
    overlap-cpu-optimizer-d2h-h2d overlap-grad-reduce overlap-moe-expert-parallel-comm overlap-p2p-communication-warmup-flush
    overlap-param-gather overlap-param-gather-with-optimizer-step override-opt-param-scheduler pad-vocab-size-to padded-vocab-size
    patch-dim per-split-data-args-path perform-rl-step persistent-save-interval pipeline-model-parallel-comm-backend
    pipeline-model-parallel-layout pipeline-model-parallel-size position-embedding-type pretrained-checkpoint profile profile-ranks
    profile-step-end profile-step-start pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra
    pytorch-profiler-collect-shapes q-lora-rank qk-clip qk-clip-alpha qk-clip-threshold qk-head-dim qk-l2-norm qk-layernorm
    qk-pos-emb-head-dim query-in-block-prob quick-geglu rampup-batch-size recompute-activations recompute-granularity
    recompute-method recompute-modules recompute-num-layers record-memory-history record-shapes relative-attention-max-distance
    relative-attention-num-buckets replication replication-factor replication-jump rerun-mode reset-attention-mask
    reset-position-ids result-rejected-tracker-filename retriever-report-topk-accuracies retriever-score-scaling
    retriever-seq-length retro-add-retriever retro-attention-gate retro-cyclic-train-iters retro-encoder-attention-dropout
    retro-encoder-hidden-dropout retro-encoder-layers retro-no-verify-neighbor-count retro-num-neighbors retro-num-retrieved-chunks
    retro-project-dir return-log-probs reuse-grad-buf-for-mxfp8-param-ag rl-calculate-intra-group-similarity
    rl-importance-sampling-truncation-coef rl-inference-logprobs-is-correction rl-offload-kv-cache-during-training
    rl-offload-optimizer-during-inference rl-partial-rollouts rl-prompts-per-eval rl-remove-kv-cache-during-training
    rl-reset-cuda-graphs rl-sequence-packing-algo rl-sequence-packing-bin-size rl-use-sequence-packing rope-scaling-factor rope-type
    rotary-base rotary-interleaved rotary-percent rotary-scaling-factor rotary-seq-len-interpolation-factor
    run-workload-inspector-server runtime-time-unit sample-rate save save-activations-interval save-config-filepath
    save-dgrads-interval save-interval save-params-interval save-retain-interval save-tokens-per-expert-interval
    save-wgrads-interval seed seq-length sequence-parallel set-level-for-all-loggers sft sft-tokenizer-prompt-format sgd-momentum
    sharp-enabled-group short-seq-prob skip-prompt-log-probs skip-train softmax-scale softmax-type spec split squared-relu
    start-eval-at-iter start-weight-decay step-batch-size-schedule straggler-ctrlr-port straggler-minmax-count
    suggested-communication-unit-size swiglu swin-backbone-type symmetric-ar-type te-precision-config-file te-rng-tracker
    tensor-model-parallel-size tensorboard-dir tensorboard-log-interval tensorboard-queue-size test-data-path test-mode
    throughput-window-size tiktoken-num-special-tokens tiktoken-pattern tiktoken-special-tokens timing-log-level timing-log-option
    titles-data-path tokenizer-hf-no-use-fast tokenizer-metadata tokenizer-model tokenizer-sentencepiece-legacy
    tokenizer-special-tokens tokenizer-type torch-fsdp2-no-reshard-after-forward tp-comm-atomic-ag tp-comm-atomic-rs
    tp-comm-bootstrap-backend tp-comm-overlap tp-comm-overlap-cfg tp-comm-overlap-disable-fc1 tp-comm-overlap-disable-qkv
    tp-comm-overlap-rs-dgrad tp-only-amax-red train-data-path train-iters train-samples train-sync-interval transformer-impl
    trust-remote-code untie-embeddings-and-output-weights use-checkpoint-args use-checkpoint-opt-param-scheduler
    use-cpu-initialization use-custom-fsdp use-dist-ckpt use-distributed-optimizer use-flash-attn use-flashinfer-fused-rope
    use-fused-weighted-squared-relu use-inference-optimized-layers use-kitchen use-kitchen-attention use-legacy-models
    min-dynamic-context-parallel-size null-tokenizer-pad-id sequence-packing-scheduler use-varlen-dataset
    varlen-mock-dataset-config-json
    use-legacy-static-engine use-mcore-models use-megatron-fsdp use-mp-args-from-checkpoint-args use-mup use-nccl-ub
    use-nsys-profiler use-one-sent-docs use-persistent-ckpt-worker use-precision-aware-optimizer use-pytorch-profiler
    use-ring-exchange-p2p use-rope-scaling use-rotary-position-embeddings use-sharp use-te-activation-func use-te-rng-tracker
    use-torch-fsdp2 use-torch-optimizer-for-cpu-offload use-tp-pp-dp-mapping use-transformer-engine-op-fuser v-head-dim
    valid-data-path validation-set-names variable-seq-lengths verify-integrity vision-backbone-type vision-pretraining
    vision-pretraining-type vocab-extra-ids vocab-file vocab-size wandb-entity wandb-exp-name wandb-project wandb-save-dir warmup
    weight-decay weight-decay-incr-style wgrad-deferral-limit window-attn-skip-freq window-size yaml-cfg
    """)  # fmt: skip
"""Flags of Megatron-LM."""

MEGATRON_DEEPSPEED = _names("""
    DDP-impl aml-data-download-path checkpoint-in-cpu checkpoint-num-layers compression-training contigious-checkpointing
    cpu-optimizer cpu-torch-adam create-moe-param-group curriculum-learning-legacy custom-token-counting
    data-efficiency-curriculum-learning data-impl
    deepspeed-activation-checkpointing disable-mem-efficient-ln disable-moe-token-dropping disable-moe-top2-2nd-expert-sampling
    distribute-checkpointed-activations ds-fused-adam ds-inference ds-sequence-parallel-fpdt ds-sequence-parallel-fpdt-chunk-size
    ds-sequence-parallel-fpdt-offloading ds-sequence-parallel-size embedding-weights-in-fp32 enable-expert-tensor-parallelism
    enable-zbh1-exact-semantics enable-zbh1-pipeline expert-interval finetune-data-split finetune-hf-dataset
    force-ds-sequence-parallel fp8-e4m3 fp8-hybrid hidden-size-teacher inference kd kd-alpha-ce kd-beta-ce kd-temp
    layernorm-epsilon load-tag load-teacher log-batch-size-to-tensorboard log-optimizer-states-to-tensorboard lr-decay-tokens
    lr-warmup-tokens memory-centric-tiled-linear mlp-type mmap-warmup moe-eval-capacity-factor moe-expert-parallel-size
    moe-loss-coeff moe-min-capacity moe-train-capacity-factor mos multiprocessing-context no-contiguous-buffers-in-local-ddp
    no-load-lr-state no-log-learnig-rate-to-tensorboard no-pipeline-parallel no-query-key-layer-scaling num-attention-heads-teacher
    num-experts-switch num-experts-teacher num-key-value-heads num-layers-teacher overlap-p2p-communication partition-activations
    pipeline-model-parallel-split-rank profile-backward profile-steps random-ltd recompute-non-linear-layer-in-mlp remote-device
    repeated-dataloader reset-iteration retro-return-doc-ids retro-workdir return-data-index rotary-position-embeddings-theta
    scattered-embeddings split-transformers standalone-embedding-stage synchronize-each-layer tile-factor topk
    train-data-exact-num-epochs train-desc-path train-doc-idx-path train-idx-path train-sample-idx-path train-shuffle-idx-path
    train-tokens universal-checkpoint use-dataset-only use-flash-attn-builder use-flash-attn-triton use-flash-attn-v1
    use-flash-attn-v2 use-pin-memory use-pure-low-precision use-tutel zero-allgather-bucket-size zero-contigious-gradients
    zero-reduce-bucket-size zero-reduce-scatter zero-stage
    """)  # fmt: skip
"""Flags that Megatron-DeepSpeed has besides."""

DEEPSPEED = _names("deepspeed deepspeed-config deepscale deepscale-config deepspeed-mpi")
"""Flags that DeepSpeed adds to any program's parser."""

FORKS = _names("""
    label-smoothing
    activations-checkpoint-method activations-checkpoint-num-layers create-attention-mask-in-dataloader defer-grad-reduce
    delay-grad-reduce delay-param-gather encoder-pipeline-model-parallel-size encoder-tensor-model-parallel-size epochs
    export-kd-cfg export-kd-finalize export-kd-teacher-load log-learning-rate-to-tensorboard log-optimizer-states
    no-delay-grad-reduce no-log-learning-rate-to-tensorboard override-lr-scheduler out-seq-length task teacher-model-config
    text-generate-input-file train-data use-checkpoint-lr-scheduler use-contiguous-buffers-in-ddp
    use-contiguous-parameters-in-local-ddp valid-data vision-model-type

    codecarbon-dir curriculum-learning abort-on-unmet-fused-kernel-constraints embed-layernorm glu-activation log-level
    log-level-replica log-path loss-on-targets-only mean-noise-span-length noise-density pp-partition-method prefixlm
    reweight-loss-based-on-position-frequency skip-train-iteration-range sync-tp-duplicated-parameters test-weighted-split-paths
    test-weighted-split-paths-path tokenizer-name-or-path train-weighted-split-paths train-weighted-split-paths-path
    use-bnb-optimizer valid-weighted-split-paths valid-weighted-split-paths-path no-tie-embed-logits use-alibi-position-embeddings

    attention-head-type kill-switch-path structured-logs wandb-entity-name wandb-project-name kill-switch-file
    wandb-api-key wandb-id wandb-name wandb-resume use-rms-norm vocab-extra-ids-list

    mlp-impl moe-capacity-factor moe-expert-model-parallelism moe-jitter-eps moe-lbl-in-fp32 moe-loss-weight
    moe-normalize-expert-weights moe-num-experts moe-top-k moe-weight-parallelism moe-zloss-in-fp32 moe-zloss-weight

    enable-exactly-numeric-match enable-optimizer-post-validation enable-zbv-pipeline enable-zero-bubble schedule-method
    zero-bubble-adaptive-memory-limit-percentile zero-bubble-max-pending-backward zero-bubble-pipeline-timers-end-iter
    zero-bubble-pipeline-timers-start-iter zero-bubble-v-schedule

    ai-framework attention-mask-type is-instruction-dataset next-tockens no-shared-storage npu-deterministic optimization-level
    param-and-grad-buffer-pad pre-tockens prompt-type rope-scaling-beta-fast rope-scaling-beta-slow rope-scaling-mscale
    rope-scaling-mscale-all-dim rope-scaling-type router-gating-in-fp32 stage tokenizer-not-use-fast yarn-scaling-factor
    context-parallel-algo cp-window-size disable-gloo-group enable-recompute-layers-per-pp-rank first-k-dense-replace fix-router
    gemm-gradient-accumulation-fusion jit-compile kv-head-repeat-before-uly-alltoall megatron-cp-in-bnsd moe-allgather-overlap-comm
    moe-alltoall-overlap-comm moe-intermediate-size moe-permutation-async-comm moe-tp-extend-ep moe-zero-memory
    moe-zero-memory-num-layers multi-head-latent-attention n-shared-experts noop-layers norm-topk-prob qk-nope-head-dim
    qk-rope-head-dim recompute-activation-function recompute-activation-function-num-layers recompute-in-advance recompute-norm
    recompute-norm-num-layers reuse-fp32-param routed-scaling-factor seq-aux shape-order swap-attention swap-optimizer topk-group
    ulysses-degree-in-cp use-ascend-coc use-ascend-mc2 use-cp-send-recv-overlap use-fused-moe-token-permute-and-unpermute
    use-fused-ring-attention-update use-fused-rotary-pos-emb use-fused-swiglu use-fusion-attn-v2 use-ulysses-allgather-kv

    dist-ckpt-workers extra-eval-data-path fp8-amax-reduce fp8-coverage keep-fp8-weight-transpose-cache skip-warmup
    max-absolute-position-embeddings moe-use-shared-expert-gate use-mpi
    batch-p2p-communication no-batch-p2p-communication one-logger-entity
    disable-te-fused-rope fused-residual-rmsnorm profile-dir
    attn-logit-softcapping dataloader-inter-document-masking xielu
    masked-softmax-fusion scaled-masked-softmax-fusion no-scaled-masked-softmax-fusion bias-dropout-fusion persist-layer-norm
    moe-router-aux-loss-fusion no-moe-router-aux-loss-fusion tokenizer-library
    moe-capacity-bins-num verify-checkpoint verify-checkpoint-model-type
    use-fast-softmax use-fused-rmsnorm use-fused-sdpa use-fused-sdpa-with-recompute use-torch-compile
    wandb-group wandb-host wandb-mode wandb-run-name wandb-tags wandb-team
    """)  # fmt: skip
"""Older versions' of both, forks' (BigScience, BigCode, epfLLM, megablocks, zero bubble, Habana, MindSpeed), and GPT-NeoX's for W&B."""

LAUNCHERS = _names("""
    nnodes nproc-per-node node-rank master-addr master-port rdzv-backend rdzv-endpoint rdzv-id max-restarts standalone num-gpus num-nodes
    hostfile
    """)  # fmt: skip
"""Flags of torchrun and of DeepSpeed's launcher, which end up behind the program's name."""
UPSTREAM = MEGATRON_LM | MEGATRON_DEEPSPEED | DEEPSPEED | FORKS | LAUNCHERS
