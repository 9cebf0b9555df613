"""Command lines of the kinds that public launch scripts of Megatron-LM and Megatron-DeepSpeed start a pretraining with.

Flags and values are those that such scripts use; the lines are put together here. ``DATA``, ``TOK``, ``OUT`` stand for
paths. A JSON for DeepSpeed, where a script writes one, is the ``json`` of the line.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Launch(NamedTuple):
    """One script.

    Attributes:
        name: what is trained, in which dialect.
        words: the flags.
        processes: that it starts.
        needs: why it is refused: the feature, as a part of the message; empty: it is accepted.
        json: DeepSpeed's file.
        family: gpt or bert.
    """

    name: str
    words: str
    processes: int = 8
    needs: str = ""
    json: dict[str, Any] | None = None
    family: str = "gpt"


def _shape(layers: int, hidden: int, heads: int, seq: int, positions: int | None = None) -> str:
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {seq}"
        f" --max-position-embeddings {positions or seq} "
    )


_SAVE = "--save OUT --load OUT --save-interval 10000 --log-interval 100 --eval-interval 1000 --eval-iters 10 --tensorboard-dir OUT/tb "
_BPE = "--data-path DATA --vocab-file TOK/vocab.json --merge-file TOK/merges.txt --split 949,50,1 "
_WORDS = "--data-path DATA --vocab-file TOK/vocab.txt --split 949,50,1 "
_GPT2 = _shape(24, 1024, 16, 1024)
_COSINE = "--lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 "
_OLD = _GPT2 + _BPE + _SAVE + _COSINE + "--train-iters 500000 --lr-decay-iters 320000 --micro-batch-size 4 --fp16 "
_NEW_GPT3 = (
    "--attention-backend auto --micro-batch-size 8 --global-batch-size 128 --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9"
    " --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6"
    " --lr-warmup-fraction .001 --lr-decay-iters 430000 "
) + _BPE + _SAVE  # fmt: skip
_BERT = (
    _shape(24, 1024, 16, 512) + _WORDS + _SAVE + "--train-iters 1000000 --weight-decay 1e-2 --clip-grad 1.0 --fp16 --lr 0.0001"
    " --lr-decay-iters 990000 --lr-decay-style linear --min-lr 1.0e-5 --lr-warmup-fraction .01 "
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------------------- Megatron-LM, Llama kind
_LLAMA3_8B = (
    "--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention"
    " --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope"
    " --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std 0.0134"
    " --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1"
    " --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015"
    " --min-lr 0.00001 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16"
    " --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1"
    " --exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --data-cache-path OUT/cache"
    " --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32 --eval-interval 100"
    " --save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist"
    " --distributed-timeout-minutes 60 --save OUT --load OUT --tensorboard-dir OUT/tb --tensor-model-parallel-size 1"
    " --context-parallel-size 1 --sequence-parallel "
)  # fmt: skip
_MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --tiktoken-pattern v2 --split \"'99,1,0'\" "
_REAL = "--data-path DATA --tokenizer-type HuggingFaceTokenizer --tokenizer-model TOK --split \"'99,1,0'\" --vocab-size 128256 "
_FP8 = "--fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather "
_AMD_LLAMA2 = (
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 1 --context-parallel-size 1 --num-layers 80 --hidden-size 8192"
    " --ffn-hidden-size 28672 --num-attention-heads 64 --seq-length 4096 --max-position-embeddings 32000"
    " --untie-embeddings-and-output-weights --position-embedding-type rope --no-position-embedding --swiglu --disable-bias-linear"
    " --init-method-std 0.02 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm --micro-batch-size 1"
    " --global-batch-size 8 --train-iters 12 --no-async-tensor-model-parallel-allreduce --bf16 --no-masked-softmax-fusion --split 99990,8,2"
    " --dataloader-type cyclic --save-interval 200000 --tensorboard-dir OUT/tb --log-interval 1 --eval-interval 320000 --num-workers 8"
    " --log-throughput --no-save-optim --no-save-rng --eval-iters -1 --group-query-attention --num-query-groups 8"
    " --no-gradient-accumulation-fusion --distributed-backend nccl --distributed-timeout-minutes 120 --overlap-grad-reduce"
    " --use-distributed-optimizer --overlap-param-gather --sequence-parallel --use-mcore-models --lr 1e-4 --min-lr 1e-5"
    " --lr-decay-iters 320000 --lr-decay-style cosine --weight-decay 1.0e-1 --clip-grad 1.0 --optimizer adam --adam-beta1 0.9"
    " --adam-beta2 0.95 "
)  # fmt: skip
_AMD_QWEN2 = (
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 --context-parallel-size 1 --num-layers 28 --hidden-size 1536"
    " --ffn-hidden-size 8960 --num-attention-heads 12 --seq-length 2048 --max-position-embeddings 131072"
    " --untie-embeddings-and-output-weights --position-embedding-type rope --no-position-embedding --disable-bias-linear --swiglu"
    " --use-te-activation-func --no-bias-swiglu-fusion --init-method-std 0.02 --attention-dropout 0.0 --hidden-dropout 0.0"
    " --normalization RMSNorm --micro-batch-size 2 --global-batch-size 8 --train-iters 10 --bf16 --no-masked-softmax-fusion"
    " --add-qkv-bias --rotary-percent 1.0 --rotary-base 1000000 --rotary-seq-len-interpolation-factor 1"
    " --tokenizer-type HuggingFaceTokenizer --tokenizer-model TOK --dataloader-type cyclic --save-interval 200000 --log-interval 1"
    " --eval-interval 320000 --eval-iters -1 --num-workers 8 --data-path DATA --log-throughput --no-save-optim --group-query-attention"
    " --num-query-groups 2 --no-gradient-accumulation-fusion --distributed-backend nccl --distributed-timeout-minutes 120"
    " --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce --attention-backend fused --sequence-parallel"
    " --use-mcore-models --lr 1e-4 --min-lr 1e-5 --lr-decay-iters 320000 --lr-decay-style cosine --weight-decay 1.0e-1 --clip-grad 1.0"
    " --optimizer adam "
)  # fmt: skip
_SWISS_8B = (
    "--transformer-impl transformer_engine --use-precision-aware-optimizer --main-grads-dtype bf16 --num-layers 32 --hidden-size 4096"
    " --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --max-position-embeddings 8192"
    " --position-embedding-type rope --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8 --make-vocab-size-divisible-by 128"
    " --normalization RMSNorm --swiglu --untie-embeddings-and-output-weights --log-throughput --log-progress --tensorboard-dir OUT/tb"
    " --log-timers-to-tensorboard --no-log-loss-scale-to-tensorboard --log-memory-to-tensorboard --attention-dropout 0.0"
    " --hidden-dropout 0.0 --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --micro-batch-size 1"
    " --global-batch-size 128 --no-check-for-nan-in-loss-and-grad --train-iters 500 --log-interval 1 --cross-entropy-loss-fusion"
    " --disable-bias-linear --optimizer adam --dataloader-type single --manual-gc --manual-gc-interval 500 --seed 28"
    " --init-method-std 0.008944 --lr 0.00022 --min-lr 0.000022 --lr-decay-style cosine --lr-warmup-iters 200 --save OUT"
    " --save-interval 250 --ckpt-format torch_dist --load OUT --async-save --bf16 --tensor-model-parallel-size 1"
    " --pipeline-model-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    " --tokenizer-type HuggingFaceTokenizer --tokenizer-model TOK --split 100,0,0 --seq-length 8192 --num-workers 1"
    " --num-dataset-builder-threads 1 --data-path DATA --data-cache-path OUT/cache --wandb-save-dir OUT --wandb-project p"
    " --wandb-exp-name e "
)  # fmt: skip
_LLAMA2_HF = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --max-position-embeddings 4096"
    " --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --transformer-impl local"
    " --use-legacy-models --micro-batch-size 1 --global-batch-size 256 --train-iters 50 --weight-decay 0.1 --adam-beta1 0.9"
    " --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --bf16 --use-distributed-optimizer --disable-bias-linear"
    " --attention-dropout 0 --hidden-dropout 0 --swiglu --lr 3.0e-5 --lr-decay-style cosine --min-lr 3.0e-6 --lr-warmup-iters 1"
    " --ckpt-format torch --ddp-average-in-collective --overlap-grad-reduce --use-flash-attn --sequence-parallel"
    " --tensor-model-parallel-size 1 --data-path DATA --seq-length 4096 --split 949,50,1 --tokenizer-type Llama2Tokenizer"
    " --tokenizer-model TOK/tokenizer.model --log-throughput --eval-iters 50 --log-interval 1 --save-interval 1000"
    " --eval-interval 1000 --save OUT --load OUT --tensorboard-dir OUT/tb "
)  # fmt: skip
_MIXTRAL = (
    "--use-mcore-models --disable-bias-linear --seq-length 256 --max-position-embeddings 2048 --num-layers 2 --hidden-size 256"
    " --ffn-hidden-size 896 --num-attention-heads 2 --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0"
    " --normalization RMSNorm --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --group-query-attention"
    " --num-query-groups 2 --no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000 --tokenizer-type Llama2Tokenizer"
    " --tokenizer-model TOK/tokenizer.model --mock-data --split 99990,8,2 --micro-batch-size 1 --global-batch-size 4 --lr 1e-4"
    " --train-iters 7 --min-lr 1.0e-5 --weight-decay 0.1 --clip-grad 1.0 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"
    " --use-distributed-optimizer --sequence-parallel --eval-iters 10 --no-load-optim --no-load-rng "
)  # fmt: skip
_EXPERTS = (
    "--num-experts 2 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
    " --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 "
)
_INTEL_LLAMA = (
    "--transformer-impl transformer_engine --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --distributed-backend nccl"
    " --seq-length 8192 --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8"
    " --ffn-hidden-size 14336 --position-embedding-type rope --rotary-base 500000 --max-position-embeddings 8192 --normalization RMSNorm"
    " --swiglu --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0.0 --weight-decay 1e-1 --clip-grad 1.0"
    " --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-5 --lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 8000 --min-lr 3e-6"
    " --use-torch-compile=0 --use-fused-sdpa-with-recompute 0 --use-fused-sdpa 1 --use-fused-rmsnorm 1 --use-fast-softmax 1"
    " --micro-batch-size 1 --global-batch-size 2048 --train-iters 937500 --log-interval 10 --log-throughput --disable-bias-linear"
    " --optimizer fusedadamw --no-gradient-accumulation-fusion --no-masked-softmax-fusion --use-mcore-models --bf16 --exit-interval 0"
    " --tensorboard-dir OUT/tb --load OUT --eval-interval 1000 --eval-iters 100 --data-path DATA --num-workers 2 --sequence-parallel"
    " --no-create-attention-mask-in-dataloader --use-distributed-optimizer --deterministic-mode --save OUT --save-interval 2000"
    " --dist-ckpt-format torch_dist --tokenizer-type Llama3Tokenizer --tokenizer-model TOK "
)  # fmt: skip

# -------------------------------------------------------------------------------------------------------------------- Megatron-DeepSpeed
_ENGINE = "--deepspeed --deepspeed_config JSON "
_TOKENS = (
    "--override-opt_param-scheduler --adam-beta1 0.9 --adam-beta2 0.95 --lr-decay-tokens 300000000000 --lr-warmup-tokens 3000000000"
    " --exit-duration-in-mins 30000000 --train-tokens 300000000000 --train-samples 292968750 --lr 2.0e-4 --min-lr 1.0e-6"
    " --lr-decay-style cosine --split 949,50,1 --log-interval 10 --eval-interval 100 --eval-iters 10 --save-interval 100"
    " --weight-decay 0.1 --clip-grad 1.0 --hysteresis 2 --num-workers 0 --fp16 --seed 1234 --load OUT --save OUT"
    " --tensorboard-queue-size 1 --log-timers-to-tensorboard --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard"
    " --tensorboard-dir OUT/tb --log-optimizer-states-to-tensorboard --data-path DATA --data-impl mmap"
    " --vocab-file TOK/vocab.json --merge-file TOK/merges.txt "
)  # fmt: skip
_TOKENS_1B = (
    _TOKENS + _shape(24, 2048, 16, 2048) + "--init-method-std 0.013 --micro-batch-size 2 --global-batch-size 512"
    " --no-async-tensor-model-parallel-allreduce --checkpoint-activations --deepspeed-activation-checkpointing "
)
_DENSE_MOE = (
    "--moe-expert-parallel-size 1 --num-experts 1 --moe-loss-coeff 0.01 --moe-train-capacity-factor 1.0 --moe-eval-capacity-factor 1.0"
    " --moe-min-capacity 4 --mlp-type standard --topk 1 --create-moe-param-group "
)
_MDS_LLAMA = (
    "--num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 32"
    " --seq-length 2048 --max-position-embeddings 2048 --train-iters 250000 --save OUT --load OUT --data-path 1 DATA --data-impl mmap"
    " --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model TOK/tokenizer.model --split 949,50,1 --distributed-backend nccl"
    " --lr 3e-4 --lr-decay-style cosine --min-lr 3e-5 --weight-decay 0.1 --clip-grad 1 --lr-warmup-iters 2000 --optimizer adam"
    " --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --bf16"
    " --no-query-key-layer-scaling --attention-dropout 0 --hidden-dropout 0 --use-rotary-position-embeddings"
    " --untie-embeddings-and-output-weights --swiglu --normalization rmsnorm --disable-bias-linear --deepspeed --deepspeed_config=JSON "
)  # fmt: skip
_UNIVERSAL = (
    _shape(24, 1024, 32, 1024) + "--loss-scale 12 --train-iters 100000 --lr 6.0e-3 --min-lr 6.0e-4 --lr-decay-style cosine"
    " --log-interval 1 --eval-iters 40 --eval-interval 10 --data-path DATA --vocab-file TOK/vocab.json --merge-file TOK/merges.txt"
    " --save-interval 100 --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006"
    " --checkpoint-activations --exit-interval 200 --save OUT --load OUT --make-vocab-size-divisible-by 256 --tensorboard-dir OUT/tb"
    " --deepspeed-activation-checkpointing "
) + _ENGINE  # fmt: skip
_MDS_BERT = (
    _shape(24, 1024, 16, 512) + "--override-lr-scheduler --adam-beta1 0.9 --adam-beta2 0.999 --tensor-model-parallel-size 1"
    " --lr-decay-iters 2000000 --lr-warmup-iters 10000 --train-iters 2000000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style linear"
    " --split 949,50,1 --log-interval 100 --eval-interval 1000 --eval-iters 10 --save-interval 20000 --weight-decay 1e-2 --clip-grad 1.0"
    " --num-workers 4 --fp16 --load OUT --save OUT --tensorboard-queue-size 1 --log-timers-to-tensorboard"
    " --log-batch-size-to-tensorboard --log-validation-ppl-to-tensorboard --tensorboard-dir OUT/tb --vocab-file TOK/vocab.txt"
    " --data-path DATA --data-impl mmap --zero-stage 0 --pipeline-model-parallel-size 1 --no-pipeline-parallel "
) + _ENGINE  # fmt: skip
_BLOOM = (
    "--override-lr-scheduler --no-load-rng --num-layers 30 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048"
    " --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 1024 --train-samples 220_000"
    " --tokenizer-type PretrainedFromHF --tokenizer-name-or-path TOK --init-method-std 0.0048 --fp16 --seed 42 --checkpoint-activations"
    " --abort-on-unmet-fused-kernel-constraints --pad-vocab-size-to 250880 --pp-partition-method type:transformer|embedding --lr 2e-5"
    " --min-lr 2e-6 --lr-decay-style cosine --lr-decay-samples 200_000 --lr-warmup-samples 183_105 --clip-grad 1.0 --weight-decay 1e-1"
    " --exit-duration-in-mins 599000 --log-interval 1 --save-interval 200000 --eval-interval 40000 --eval-iters 1"
    " --tensorboard-dir OUT/tb --tensorboard-queue-size 5 --log-timers-to-tensorboard --log-batch-size-to-tensorboard"
    " --log-validation-ppl-to-tensorboard --save OUT --load OUT --data-path DATA --split 998,1,1 --data-impl mmap"
    " --distributed-backend nccl --zero-stage 1 --deepspeed-activation-checkpointing "
) + _ENGINE  # fmt: skip


def _json(total: int, micro: int, stage: int = 0, **more: Any) -> dict[str, Any]:
    return {"train_batch_size": total, "train_micro_batch_size_per_gpu": micro, "zero_optimization": {"stage": stage}, **more}


_FP16_ON = {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 11}
_ON, _OFF = {"enabled": True}, {"enabled": False}
_TEMPLATE = {
    "steps_per_print": 10, "gradient_clipping": 1.0, "prescale_gradients": True, "fp16": _FP16_ON, "bf16": _OFF,
    "wall_clock_breakdown": False,
    "curriculum_learning": {"enabled": False, "curriculum_type": "seqlen", "min_difficulty": 72, "max_difficulty": 2048,
        "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8}},
}  # fmt: skip
_CURRICULUM = {"curriculum_learning": _TEMPLATE["curriculum_learning"] | _ON}
_ADAMW = {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
LAUNCHES = (
    # Megatron-LM, GPT and BERT
    Launch("lm: gpt, one GPU",
        _OLD.replace("--fp16", "--global-batch-size 8 --fp16 --data-impl mmap --distributed-backend nccl"), 1),
    Launch("lm: gpt, data parallel", _OLD + "--global-batch-size 64 --tensor-model-parallel-size 1"),
    Launch("lm: gpt, tp and pp", _OLD
        + "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"),
    Launch("lm: gpt, checkpointed", _OLD
        + "--checkpoint-activations --distribute-checkpointed-activations --DDP-impl torch"),
    Launch("lm: gpt, attention in fp32", _OLD
        + "--attention-softmax-in-fp32 --apply-query-key-layer-scaling --use-cpu-initialization"),
    Launch("lm: gpt 857M", _shape(24, 1024, 16, 2048) + _NEW_GPT3
        + "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 1"),
    Launch("lm: gpt 175B", _shape(96, 12288, 96, 2048) + _NEW_GPT3
        + "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16"
        " --rampup-batch-size 16 16 5859375 --global-batch-size 1536 --micro-batch-size 1", 1024),
    Launch("lm: gpt, weighted blend", _OLD.replace("--data-path DATA", "--data-path 0.3 DATA 0.7 DATA2") + "--seed 1"),
    Launch("lm: gpt, mcore flags", _OLD
        + "--use-mcore-models --ckpt-format torch_dist --auto-detect-ckpt-format --dist-ckpt-strictness log_all --no-mmap-bin-files"
        " --manual-gc --manual-gc-interval 100 --log-params-norm --log-num-zeros-in-grad --timing-log-level 2 --deterministic-mode"
        " --ckpt-fully-parallel-load --async-save --use-persistent-ckpt-worker --log-memory-to-tensorboard --no-rope-fusion"
        " --exit-interval 50 --tensorboard-queue-size 5 --use-checkpoint-opt_param-scheduler --ckpt-assume-constant-structure"),
    Launch("lm: gpt, interleaved", _OLD + "--num-layers-per-virtual-pipeline-stage 2", 8,
        "pipeline_model_parallel_size 1"),
    Launch("lm: gpt, virtual stages named", _OLD + "--pipeline-model-parallel-layout Et*3|(tt|)*4L", 8,
        "with pipeline_model_parallel_size 1 there is none"),
    Launch("lm: gpt, expert flags alone", _OLD + "--moe-aux-loss-coeff 0.01 --moe-router-topk 2 --moe-grouped-gemm"),
    Launch("lm: gpt, eval without training data", _OLD + "--eval-iters -1 --no-save-optim"),
    Launch("lm: bert, one GPU", _BERT + "--micro-batch-size 4 --global-batch-size 8", 1, family="bert"),
    Launch("lm: bert, data parallel", _BERT
        + "--micro-batch-size 4 --global-batch-size 32 --DDP-impl torch --data-impl mmap", family="bert"),
    Launch("lm: bert 340M", _BERT
        + "--attention-backend auto --micro-batch-size 4 --global-batch-size 32 --tensor-model-parallel-size 8"
        " --pipeline-model-parallel-size 16", 128, family="bert"),
    Launch("lm: bert, tp", _BERT + "--micro-batch-size 2 --global-batch-size 16 --tensor-model-parallel-size 2",
        family="bert"),
    Launch("lm: bert, no order", _BERT
        + "--micro-batch-size 4 --bert-no-binary-head --mask-prob 0.15 --short-seq-prob 0.1", family="bert"),
    Launch("lm: bert, old names", _BERT.replace("--max-position-embeddings", "--max-absolute-position-embeddings")
        + "--position-embedding-type absolute"
        " --micro-batch-size 2 --global-batch-size 16 --distributed-backend nccl", family="bert"),
    # Megatron-LM, Llama and its kind
    Launch("lm: llama 3 8B, FP8, mock", _LLAMA3_8B + _FP8 + _MOCK, 8, "the formats today are"),
    Launch("lm: llama 3 8B, FP8", _LLAMA3_8B + _FP8 + _REAL, 8, "the formats today are"),
    Launch("lm: llama 3 8B, bf16, mock", _LLAMA3_8B + _MOCK),
    Launch("lm: llama 3 8B, bf16", _LLAMA3_8B + _REAL
        + "--wandb-project p --wandb-exp-name e --wandb-save-dir OUT --log-params-norm"),
    Launch("lm: llama 3 8B, one layer", _LLAMA3_8B + _MOCK
        + "--num-layers 1 --cuda-graph-impl local --cuda-graph-scope full_iteration", 1),
    Launch("amd: llama 2 70B, mock", _AMD_LLAMA2
        + "--mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model TOK --use-flash-attn"),
    Launch("amd: llama 2 70B, from a checkpoint", _AMD_LLAMA2
        + "--data-path DATA --tokenizer-type Llama2Tokenizer --tokenizer-model TOK/tokenizer.model --exit-on-missing-checkpoint"
        " --no-load-optim --no-load-rng --use-checkpoint-args --load OUT --use-contiguous-parameters-in-local-ddp"),
    Launch("amd: llama 2, FP8", _AMD_LLAMA2 + "--mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model TOK"
        " --transformer-impl=transformer_engine --fp8-margin=0 --fp8-format=hybrid --fp8-interval=1 --fp8-amax-history-len=1024"
        " --fp8-amax-compute-algo=max --attention-softmax-in-fp32", 8, "the formats today are"),
    Launch("amd: llama 2, FSDP", _AMD_LLAMA2 + "--mock-data --vocab-size 32000 --use-torch-fsdp2"),
    Launch("amd: llama 2, recompute", _AMD_LLAMA2
        + "--mock-data --vocab-size 32000 --recompute-num-layers 80 --recompute-granularity full --recompute-method block"),
    Launch("amd: qwen 2", _AMD_QWEN2
        + "--exit-on-missing-checkpoint --no-load-optim --use-checkpoint-args --no-load-rng"),
    Launch("amd: qwen 2, fp8 left off", _AMD_QWEN2 + "--fp8-margin=0 --fp8-interval=1 --fp8-amax-history-len=1024"),
    Launch("swiss: llama 3 8B", _SWISS_8B),
    Launch("das: llama 2 7B", _LLAMA2_HF),
    Launch("das: llama 2 7B, pipeline", _LLAMA2_HF + "--pipeline-model-parallel-size 2"),
    Launch("das: llama 2 7B, profiled", _LLAMA2_HF
        + "--profile --profile-step-start 4 --profile-step-end 5 --use-pytorch-profiler"
        " --profile-ranks 0 1 2 3 4 5 6 7 --profile-dir prof_data"),
    Launch("das: llama 2 7B, fp16", _LLAMA2_HF.replace("--bf16", "--fp16")
        + "--loss-scale 1024 --recompute-granularity full" " --recompute-num-layers 5 --recompute-method block"),
    Launch("lm: mixtral", _MIXTRAL + _EXPERTS, 2),
    Launch("lm: mixtral without experts", _MIXTRAL + "--num-experts 1 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2",
        2),
    Launch("lm: mistral 7B", _MIXTRAL
        + "--window-size 4095,0 --exit-on-missing-checkpoint --use-checkpoint-args --ckpt-format torch", 2),
    Launch("lm: ring attention", _MIXTRAL + "--context-parallel-size 2 --cp-comm-type p2p", 2),
    Launch("lm: Ulysses", _MIXTRAL + "--context-parallel-size 2 --cp-comm-type a2a", 2),
    Launch("lm: two types of exchange", _MIXTRAL + "--context-parallel-size 2 --cp-comm-type p2p a2a p2p a2a", 2,
        "all layers exchange alike"),
    Launch("lm: one rank of context", _MIXTRAL + "--context-parallel-size 1 --cp-comm-type p2p", 2),
    Launch("lm: latent attention", _MIXTRAL + "--multi-latent-attention --kv-lora-rank 512 --v-head-dim 128", 2,
        "latent attention is not there"),
    Launch("lm: latent attention's sizes alone", _MIXTRAL + "--kv-lora-rank 512 --v-head-dim 128 --qk-head-dim 128", 2),
    Launch("lm: several tokens ahead", _MIXTRAL + "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.1", 2,
        "predicts the next token alone"),
    Launch("lm: muon", _MIXTRAL + "--optimizer muon --muon-momentum 0.95", 2,
        "the optimizers are adam (AdamW) and sgd"),
    Launch("lm: own end of document", _OLD.replace(_BPE, "--data-path DATA --split 1 ")
        + "--tokenizer-type NullTokenizer --vocab-size 50303 --eod-id 0"),
    Launch("lm: tiktoken", _OLD.replace(_BPE, "--data-path DATA --split 1 ")
        + "--tokenizer-type TikTokenizer --tokenizer-model TOK/v.json", 8, "as a tokenizer.json"),
    Launch("lm: knowledge distillation", _OLD + "--export-kd-teacher-load OUT2", 8, "distillation"),
    Launch("lm: own configuration file", _OLD + "--yaml-cfg TOK/gpt.yaml", 8, "for --config FILE"),
    Launch("intel: llama 3.1 8B", _INTEL_LLAMA),
    Launch("intel: llama 3.1 8B, recompute", _INTEL_LLAMA
        + "--recompute-granularity=full --recompute-method uniform --recompute-num-layers 1"),
    # Megatron-DeepSpeed
    Launch("ds: gpt 1.3B", _TOKENS_1B + _ENGINE
        + "--tensor-model-parallel-size 2 --zero-stage 1 --pipeline-model-parallel-size 1 --no-pipeline-parallel",
        json=_json(512, 2, 1, **_TEMPLATE)),
    Launch("ds: gpt 1.3B, pipeline", _TOKENS_1B + _ENGINE
        + "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1",
        json=_json(512, 2, 1, **_TEMPLATE)),
    Launch("ds: gpt 1.3B, flash", _TOKENS_1B + _ENGINE
        + "--use-flash-attn --zero-stage 0 --no-pipeline-parallel --use-flash-attn-v2",
        json=_json(512, 2, **_TEMPLATE)),
    Launch("ds: gpt 1.3B, dense of the experts' scripts", _TOKENS_1B + _DENSE_MOE + _ENGINE
        + "--zero-stage 0 --no-pipeline-parallel", json=_json(512, 2, **_TEMPLATE)),
    Launch("ds: gpt 350M, 128 experts", _TOKENS_1B + _DENSE_MOE
        + "--num-experts 128 --moe-expert-parallel-size 8 --zero-stage 0 " + _ENGINE, 8,
        json=_json(512, 2, **_TEMPLATE)),
    Launch("ds: residual experts", _TOKENS_1B + "--num-experts 32 32 64 64 --mlp-type residual " + _ENGINE, 8,
        "weighed against them by a router of its own", _json(512, 2, **_TEMPLATE)),
    Launch("ds: curriculum", _TOKENS_1B + "--curriculum-learning-legacy " + _ENGINE,
        json=_json(512, 2, **{**_TEMPLATE, **_CURRICULUM})),
    Launch("ds: curriculum in the file", _TOKENS_1B + _ENGINE, 8, "curriculum_learning",
        _json(512, 2, **{**_TEMPLATE, "curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"}})),
    Launch("ds: random layer dropping", _TOKENS_1B + "--random-ltd " + _ENGINE, 8, "every layer computes all",
        _json(512, 2, **_TEMPLATE)),
    Launch("ds: distillation", _TOKENS_1B
        + "--mos --kd --kd-alpha-ce 1 --kd-beta-ce 1 --kd-temp 1.0 --load-teacher OUT2 " + _ENGINE, 8, "distillation",
        _json(512, 2, **_TEMPLATE)),
    Launch("ds: compression", _TOKENS_1B + "--compression-training " + _ENGINE, 8, "compression",
        _json(512, 2, **_TEMPLATE)),
    Launch("ds: zero bubble", _TOKENS_1B + "--enable-zbh1-pipeline " + _ENGINE, 8, "pipeline_model_parallel_size 1",
        _json(512, 2, **_TEMPLATE)),
    Launch("ds: gpt 30B, ulysses", _TOKENS + _shape(64, 6144, 64, 32768)
        + "--ds-sequence-parallel-size 4 --init-method-std 0.008 --micro-batch-size 1"
        " --global-batch-size 2 --zero-stage 3 --pipeline-model-parallel-size 1 --no-pipeline-parallel --checkpoint-activations"
        " --deepspeed-activation-checkpointing --use-flash-attn-v2 " + _ENGINE, json=_json(2, 1, 3, **_TEMPLATE)),
    Launch("ds: gpt 6.7B, ulysses in chunks of the host", _TOKENS + _shape(32, 4096, 32, 262144)
        + "--ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-chunk-size 65536"
        " --ds-sequence-parallel-fpdt-offloading --ds-sequence-parallel-size 4 --micro-batch-size 1 --global-batch-size 2 --zero-stage 3"
        " --use-rotary-position-embeddings --rotary-percent 0.25 --rotary-position-embeddings-theta 100000000 --checkpoint-in-cpu "
        + _ENGINE, 8, "attention itself is not cut into chunks", _json(2, 1, 3, **_TEMPLATE)),
    Launch("ds: llama", _MDS_LLAMA + "--tensor-model-parallel-size 2 --zero-stage=0",
        json=_json(32, 4, bf16=_ON, steps_per_print=1)),
    Launch("ds: llama 2", _MDS_LLAMA + "--tensor-model-parallel-size 2 --num-key-value-heads 4 --zero-stage=0",
        json=_json(32, 4, bf16=_ON)),
    Launch("ds: llama 2, pipeline", _MDS_LLAMA
        + "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-key-value-heads 4",
        json=_json(32, 4, bf16=_ON)),
    Launch("ds: llama, universal checkpoint", _MDS_LLAMA + "--universal-checkpoint --zero-stage=1",
        json=_json(32, 4, 1, bf16=_ON)),
    Launch("ds: llama, finetuning flags", _MDS_LLAMA.replace("--data-path 1 DATA", "--data-path DATA")
        + "--finetune --no-masked-softmax-fusion --no-bias-gelu-fusion"
        " --no-bias-dropout-fusion --no-gradient-accumulation-fusion --repeated-dataloader --num-workers 0 --zero-stage 0",
        json=_json(32, 4, bf16=_ON)),
    Launch("ds: gpt bf16", _UNIVERSAL
        + "--bf16 --micro-batch-size 4 --global-batch-size 32 --zero-stage=1 --ds-sequence-parallel-size 1",
        json=_json(32, 4, 1, bf16=_ON, data_types={"grad_accum_dtype": "fp32"}, wall_clock_breakdown=False)),
    Launch("ds: gpt fp16, a loss scale in both places", _UNIVERSAL
        + "--fp16 --micro-batch-size 4 --global-batch-size 32 --zero-stage=1", json=_json(32, 4, 1, fp16=_FP16_ON)),
    Launch("ds: gpt bf16, another stage in the file", _UNIVERSAL
        + "--bf16 --micro-batch-size 4 --global-batch-size 32 --zero-stage=0",
        json=_json(32, 4, 2, bf16=_ON, gradient_clipping=0.5)),
    Launch("ds: gpt 3.6B on other GPUs", _UNIVERSAL.replace("--loss-scale 12", "")
        + "--bf16 --micro-batch-size 4 --distributed-backend ccl --no-pipeline-parallel", 12,
        json=_json(48, 4, 2, bf16=_ON)),
    Launch("ds: bert 336M", _MDS_BERT + "--micro-batch-size 128 --global-batch-size 1024",
        json=_json(1024, 128, **_TEMPLATE), family="bert"),
    Launch("ds: bert 336M, checkpointed", _MDS_BERT
        + "--micro-batch-size 16 --global-batch-size 1024 --checkpoint-activations --deepspeed-activation-checkpointing",
        json=_json(1024, 16, **_TEMPLATE), family="bert"),
    Launch("bigscience: gpt on one node", _shape(2, 64, 2, 1024)
        + "--micro-batch-size 4 --global-batch-size 8 --lr 0.00015 --train-iters 50"
        " --lr-decay-style cosine --vocab-file TOK/vocab.json --merge-file TOK/merges.txt --fp16 --log-interval 10 --save-interval 500"
        " --eval-interval 100 --eval-iters 10 --checkpoint-activations --save OUT --load OUT --data-path DATA", 2),
    Launch("bigscience: gpt, tiny", _OLD.replace(_BPE, "--data-path DATA --split 949,50,1 ")
        + "--tokenizer-type PretrainedFromHF"
        " --tokenizer-name-or-path TOK --data-impl mmap --checkpoint-activations --distributed-backend nccl --global-batch-size 8",
        1),
    Launch("bigscience: gpt of many tongues",
        _OLD.replace("--data-path DATA", "--data-path 0.01 DATA 0.32 DATA2 0.67 DATA3")
        + "--extra-eval-data-path VALID-EN 1.0 DATA, VALID-FR 1.0 DATA2", 1, "groups of --valid-weighted-split-paths"),
    Launch("bigscience: 7B1", _BLOOM,
        json=_json(1024, 1, 1, gradient_clipping=1.0, fp16={**_FP16_ON, "initial_scale_power": 12}, optimizer=_ADAMW)),
    Launch("lm: gpt, no checkpoint kept", _OLD.replace("--save OUT --load OUT ", "")
        + "--no-load-optim --no-load-rng --no-save-rng"),
    Launch("lm: gpt, resumed by hand", _OLD + "--ckpt-step 500 --no-load-optim --override-opt_param-scheduler"),
    Launch("bigscience: 7B1 with alibi", _BLOOM + "--position-embedding-type alibi", 8,
        "positions are learned_absolute, rope or none", _json(1024, 1, 1, fp16=_FP16_ON)),
    Launch("bigscience: 7B1, embedding normed", _BLOOM + "--embed-layernorm", 8,
        "embeddings go into the first block as they are", _json(1024, 1, 1, fp16=_FP16_ON)),
    Launch("lm: gpt, of 2020",
        _OLD.replace("--micro-batch-size 4", "--batch-size 8").replace("--lr-warmup-fraction", "--warmup")
        + "--model-parallel-size 2 --data-impl mmap --distributed-backend nccl --checkpoint-activations"),
    Launch("lm: bert, of 2020", _BERT.replace("--lr-warmup-fraction", "--warmup")
        + "--batch-size 4 --model-parallel-size 1", family="bert"),
    Launch("ds: gpt, of 2020", _OLD.replace("--micro-batch-size 4", "--batch-size 8").replace("--lr-warmup-fraction",
        "--warmup")
        + "--model-parallel-size 1 --zero-reduce-bucket-size 50000000 --zero-allgather-bucket-size 5000000000 --zero-contigious-gradients"
        " --zero-reduce-scatter --checkpoint-activations --checkpoint-num-layers 1 --partition-activations --synchronize-each-layer"
        " --contigious-checkpointing --zero-stage 2 --deepspeed --deepspeed_config JSON", json=_json(64, 8, 2,
        fp16=_FP16_ON)),
    Launch("ds: sequence parallelism, insisted on", _OLD
        + "--ds-sequence-parallel-size 4 --force-ds-sequence-parallel"),
    Launch("amd: llama 3 8B", _LLAMA3_8B + _REAL + "--disable-te-fused-rope"),
)  # fmt: skip
