"""The trainings that are run on the fake device, and the other programs."""

from __future__ import annotations

from fake_gpu.jobs import Job

NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
LLAMA = (
    f"--bf16 {NO_DROPOUT} --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear"
    " --untie-embeddings-and-output-weights --num-query-groups 2"
)
CHUNKED = "--sp-overlap-mode chunked --sp-overlap-comm --attention-dropout 0"
SPLIT = "--sp-overlap-mode split-qkv --sp-overlap-comm --attention-dropout 0"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
DOCUMENTS = "--reset-attention-mask --reset-position-ids"
TP, TP_SEQ, SP = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel", "--sequence-parallel-size 2"
EXPERTS = "--num-experts 4 --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 --moe-shared-expert-intermediate-size 32"
BIASED = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
CP, PP = "--context-parallel-size 2", "--pipeline-model-parallel-size 2"

JOBS = {
    "bf16": Job("--bf16"), "fp16": Job("--fp16"), "fp32": Job(""), "llama": Job(LLAMA), "SGD": Job("--bf16 --optimizer sgd"),
    "tp": Job(f"--bf16 {TP}", 2), "tp_seq, dp": Job(f"--bf16 {TP_SEQ}", 4),
    "sp, no overlap": Job(f"--bf16 {SP}", 2), "sp, split": Job(f"--bf16 --sequence-parallel-size 4 {SPLIT}", 4),
    "sp, chunked": Job(f"--bf16 {SP} {CHUNKED}", 2), "sp, chunked, fp32": Job(f"{SP} {CHUNKED}", 2),
    "sp, the mode is timed": Job(f"--bf16 {SP} --sp-overlap-mode auto --attention-dropout 0", 2),
    "sp, uneven": Job(f"--bf16 --sequence-parallel-size 3 {CHUNKED} --num-query-groups 2", 3),
    "tp, sp, fp32": Job(f"{TP} {SP} {CHUNKED}", 4),
    "tp_seq, sp, dp, stage 1": Job(f"--bf16 {TP_SEQ} {SP} {CHUNKED} --zero-stage 1", 8),
    "dp": Job("--bf16", 4), "stage 1": Job("--bf16 --zero-stage 1", 4), "stage 2": Job("--bf16 --zero-stage 2", 4),
    "stage 3": Job("--bf16 --zero-stage 3", 4), "stage 3, fp32": Job("--zero-stage 3", 4),
    "stage 3, fetch by all_reduce": Job("--bf16 --zero-stage 3 --zero3-fetch all_reduce", 4),
    "stage 3, untied": Job("--bf16 --zero-stage 3 --untie-embeddings-and-output-weights", 4),
    "stage 3, keeps a unit": Job("--bf16 --zero-stage 3 --zero3-keep-units 1", 4),
    "stage 2, bf16 reduction": Job("--bf16 --zero-stage 2 --grad-reduce-in-bf16", 4),
    "dp, bf16 reduction": Job("--bf16 --grad-reduce-in-bf16", 4),
    "optimizer on the host": Job("--bf16 --offload-optimizer"),
    "optimizer on the host, stage 1": Job("--bf16 --zero-stage 1 --offload-optimizer", 4),
    "optimizer on the host, stage 3": Job("--bf16 --zero-stage 3 --offload-optimizer", 4),
    "optimizer on the host, stage 2, fp32": Job("--zero-stage 2 --offload-optimizer", 4),
    "optimizer on the host, a skipped step": Job("--fp16 --zero-stage 1 --offload-optimizer", 4, skips_first=True),
    "activations on the host": Job("--bf16 --attention-dropout 0 --offload-activations"),
    "activations on the host, full recomputation": Job(f"--bf16 --attention-dropout 0 --offload-activations {FULL}"),
    "activations on the host, sp, stage 3": Job(f"--bf16 --offload-activations {SP} {CHUNKED} --zero-stage 3", 2),
    "activations on the host, tp_seq": Job(f"--bf16 --attention-dropout 0 --offload-activations {TP_SEQ}", 2),
    "full recomputation": Job(f"--bf16 {FULL}"), "selective recomputation": Job("--bf16 --recompute-granularity selective"),
    "full recomputation, stage 3": Job(f"--bf16 --zero-stage 3 {FULL}", 4),
    "MLP in chunks": Job(f"--bf16 --mlp-chunks 4 {TP_SEQ}", 2), "unfused attention": Job("--bf16 --attention-backend unfused"),
    "window": Job("--bf16 --attention-dropout 0 --window-size 8"), "window, fp32": Job("--attention-dropout 0 --window-size 8"),
    "documents": Job(f"--bf16 --attention-dropout 0 {DOCUMENTS}"), "documents, sp": Job(f"--bf16 {SP} {SPLIT} {DOCUMENTS}", 2),
    "cp": Job(f"--bf16 {CP} {NO_DROPOUT}", 2), "cp, sp, chunked, stage 3": Job(f"{LLAMA} {CP} {SP} {CHUNKED} --zero-stage 3 {FULL}", 4),
    "cp, all at once, kept": Job(f"--bf16 --context-parallel-size 4 --cp-stages-ahead all --cp-keep-kv {NO_DROPOUT}", 4),
    "weights delayed, sp, tp": Job(f"--bf16 {SP} {TP} {CHUNKED} --delay-wgrad", 4),
    "weights delayed, cp, stage 3": Job(f"{LLAMA} {CP} --delay-wgrad --zero-stage 3 {FULL}", 2),
    "cp, documents": Job(f"--bf16 {CP} --attention-dropout 0 {DOCUMENTS}", 2),
    "cp, window, on the host": Job(f"--bf16 {CP} --attention-dropout 0 --window-size 8 --offload-activations", 2),
    "cp, heads made again, tp_seq": Job(f"--bf16 {CP} {TP_SEQ} {SP} {CHUNKED} --recompute-qkv", 8),
    "cp, sp, uneven": Job(f"--bf16 {CP} --sequence-parallel-size 3 {CHUNKED} --num-query-groups 2", 6),
    "cp, unfused, dropout": Job(f"--bf16 {CP} --attention-backend unfused", 2),
    "cp, BERT": Job(f"--bf16 {CP} --attention-dropout 0", 2, "bert"), "cp, report": Job(f"{LLAMA} {CP} {SP} --report-overlap 1", 4),
    "pp": Job(f"--bf16 {PP} --num-layers 4", 2, micro_batches=3),
    "pp, interleaved, stage 1": Job(
        f"{LLAMA} {PP} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2 --zero-stage 1", 4, micro_batches=4
    ),
    "pp, zb1p, stage 3": Job(f"--bf16 {PP} --num-layers 4 --pipeline-schedule zb1p --zero-stage 3 {FULL}", 4, micro_batches=3),
    "pp, zbv, tp_seq": Job(f"--bf16 {PP} {TP_SEQ} --num-layers 4 --pipeline-schedule zbv --mlp-chunks 2", 4, micro_batches=3),
    "pp, slices, sp": Job(f"{LLAMA} {PP} {SP} {CHUNKED} --num-layers 4 --pipeline-slices 3 --zero-stage 2", 4),
    "pp, cp, slices, documents": Job(f"--bf16 {PP} {CP} {NO_DROPOUT} --num-layers 4 --pipeline-slices 2 {DOCUMENTS}", 4),
    "pp, three stages, BERT": Job("--bf16 --pipeline-model-parallel-size 3 --attention-dropout 0", 3, "bert", micro_batches=4),
    "pp, activations on the host, validation": Job(
        f"--bf16 --attention-dropout 0 {PP} --num-layers 4 --offload-activations --eval-iters 1 --eval-interval 1", 2, micro_batches=3
    ),
    "pp, report": Job(f"--bf16 {PP} --num-layers 4 --report-overlap 1", 2, micro_batches=3, rehearsals=2),
    "pp, sp, zbv, report": Job(
        f"--bf16 {PP} {SP} {CHUNKED} --num-layers 5 --pipeline-schedule zbv --report-overlap 1", 4, micro_batches=3, rehearsals=2
    ),
    "experts": Job(f"--bf16 {EXPERTS}"), "experts, fp16, one by one": Job(f"--fp16 {EXPERTS} --ep-size 2", 2),
    "experts, ep, chunks, stage 2": Job(f"{LLAMA} {EXPERTS} --ep-size 2 --moe-chunks 2 --zero-stage 2", 4),
    "experts, ep, tp_seq, stage 3": Job(f"{LLAMA} {EXPERTS} {TP_SEQ} --ep-size 2 --zero-stage 3 {FULL}", 4),
    "experts, pp, zb1p, biases": Job(
        f"--bf16 {EXPERTS} {BIASED} {PP} --ep-size 2 --num-layers 4 --pipeline-schedule zb1p", 4, micro_batches=3
    ),
    "experts, sp, norms over all heads": Job(f"{LLAMA} {EXPERTS} {SP} --ep-size 2 --qk-layernorm --qk-layernorm-scope all {FULL}", 2),
    "experts, report": Job(f"--bf16 {EXPERTS} --ep-size 2 --report-overlap 1", 2),
    "validation, stage 3": Job("--bf16 --zero-stage 3 --eval-iters 1 --eval-interval 1", 4),
    "overlap report": Job(f"--bf16 {SP} {CHUNKED} --report-overlap 1", 2),
    "overlap report, tp_seq": Job(f"--bf16 {TP_SEQ} --mlp-chunks 4 --report-overlap 1", 2),
    "saves": Job("--bf16 --save run --save-interval 1"),
    "saves, not asynchronous": Job("--bf16 --save run --save-interval 1 --no-async-save"),
    "BERT": Job("--bf16", family="bert"), "BERT, tp, sp": Job(f"--bf16 --attention-dropout 0 {TP} {SP}", 4, "bert"),
    "BERT, post-norm, tp_seq, MLP in chunks": Job(
        f"--bf16 --attention-dropout 0 {TP_SEQ} --norm-placement post --mlp-chunks 2", 2, "bert"
    ),
    "BERT, post-norm, tp, sp": Job(f"--bf16 --attention-dropout 0 {TP} {SP} --norm-placement post", 4, "bert"),
    "BERT, stage 2, fp32": Job("--zero-stage 2", 2, "bert"),
    "QK norm, rope, 1p, GEGLU, sp": Job(
        f"--bf16 --qk-layernorm --position-embedding-type rope --apply-layernorm-1p --geglu {SP} {CHUNKED}", 2
    ),
}  # fmt: skip

GRAPHS = "--train-iters 4 --cuda-graphs on --cuda-graph-warmup-steps 1"
CAPTURED = {
    "bf16": Job(f"--bf16 {GRAPHS}"), "fp16": Job(f"--fp16 {GRAPHS}"), "fp32": Job(GRAPHS), "llama": Job(f"{LLAMA} {GRAPHS}"),
    "SGD": Job(f"--bf16 --optimizer sgd {GRAPHS}"), "an only micro-batch": Job(f"--bf16 {GRAPHS}", micro_batches=1),
    "four micro-batches": Job(f"--bf16 {GRAPHS}", micro_batches=4), "a skipped step": Job(f"--fp16 {GRAPHS}", skips_first=True),
    "tp": Job(f"--bf16 {TP} {GRAPHS}", 2), "tp_seq, dp": Job(f"--bf16 {TP_SEQ} {GRAPHS}", 4),
    "sp, no overlap": Job(f"--bf16 {SP} {GRAPHS}", 2), "sp, split": Job(f"--bf16 --sequence-parallel-size 4 {SPLIT} {GRAPHS}", 4),
    "sp, chunked": Job(f"--bf16 {SP} {CHUNKED} {GRAPHS}", 2),
    "sp, uneven": Job(f"--bf16 --sequence-parallel-size 3 {CHUNKED} --num-query-groups 2 {GRAPHS}", 3),
    "tp_seq, sp, dp, stage 1": Job(f"--bf16 {TP_SEQ} {SP} {CHUNKED} --zero-stage 1 {GRAPHS}", 8),
    "dp": Job(f"--bf16 {GRAPHS}", 4), "stage 1": Job(f"--bf16 --zero-stage 1 {GRAPHS}", 4, micro_batches=3),
    "stage 2": Job(f"--bf16 --zero-stage 2 {GRAPHS}", 4, micro_batches=3),
    "stage 3": Job(f"--bf16 --zero-stage 3 {GRAPHS}", 4, micro_batches=3),
    "stage 3, untied, full recomputation": Job(
        f"--bf16 --zero-stage 3 --untie-embeddings-and-output-weights --attention-dropout 0 {FULL} {GRAPHS}", 4
    ),
    "stage 3, fetch by all_reduce": Job(f"--bf16 --zero-stage 3 --zero3-fetch all_reduce {GRAPHS}", 4),
    "stage 2, bf16 reduction": Job(f"--bf16 --zero-stage 2 --grad-reduce-in-bf16 {GRAPHS}", 4),
    "full recomputation": Job(f"--bf16 --attention-dropout 0 {FULL} {GRAPHS}"),
    "MLP in chunks": Job(f"--bf16 --mlp-chunks 4 {TP_SEQ} {GRAPHS}", 2),
    "window": Job(f"--bf16 --attention-dropout 0 --window-size 8 {GRAPHS}"),
    "weights delayed, sp, tp": Job(f"--bf16 {SP} {TP} {CHUNKED} --delay-wgrad {GRAPHS}", 4),
    "cp": Job(f"--bf16 {CP} {NO_DROPOUT} {GRAPHS}", 2),
    "cp, sp, chunked, stage 3": Job(f"{LLAMA} {CP} {SP} {CHUNKED} --zero-stage 3 {FULL} {GRAPHS}", 4),
    "cp, all at once, kept": Job(f"--bf16 --context-parallel-size 4 --cp-stages-ahead all --cp-keep-kv {NO_DROPOUT} {GRAPHS}", 4),
    "cp, heads made again, tp_seq": Job(f"--bf16 {CP} {TP_SEQ} {SP} {CHUNKED} --recompute-qkv {GRAPHS}", 8),
    "BERT, tp, unfused": Job(f"--bf16 --attention-backend unfused {TP} {GRAPHS}", 2, "bert"),
    "saves and validations": Job(f"--bf16 {GRAPHS} --save run --save-interval 1 --eval-iters 1 --eval-interval 1"),
    "stage 3, validations": Job(f"--bf16 --zero-stage 3 {GRAPHS} --eval-iters 1 --eval-interval 1", 2),
    "overlap report": Job(f"--bf16 {SP} {CHUNKED} {GRAPHS} --report-overlap 2 --train-iters 5", 2),
    "profile": Job(f"--bf16 {GRAPHS} --train-iters 6 --profile --profile-step-start 3 --profile-step-end 4"),
    "auto": Job(f"--bf16 --zero-stage 1 {SP} {CHUNKED} {GRAPHS} --cuda-graphs auto", 4, micro_batches=3),
    "auto, stage 3, fp16": Job(f"--fp16 --zero-stage 3 {GRAPHS} --cuda-graphs auto", 2),
}  # fmt: skip

_TINY_BERT = "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-file vocab.txt"
_CLASSIFIER = "--global-batch-size 8 --micro-batch-size 2 --train-iters 2 --lr 0.01 --bf16"
_VERIFY = "--verify-parallelism"

PROGRAMS = {
    "generate": Job("--prompt abc --max-new-tokens 3 --greedy", program="generate"),
    "generate, tp, sp": Job("--prompt abc --max-new-tokens 3 --num-samples 2 --tp-size 2 --sp-size 2", 4, program="generate"),
    "serve": Job("", program="serve"), "serve, sp": Job("--sp-size 2", 2, program="serve"),
    "serve, tp, sp": Job("--tp-size 2 --sp-size 2", 4, program="serve"),
    "evaluate": Job("--load gpt --text text.jsonl", program="evaluate"),
    "evaluate, tp, dp": Job("--load gpt --choices choices.jsonl --tp-size 2", 4, program="evaluate"),
    "evaluate, sp": Job("--load gpt --text text.jsonl --sp-size 2", 2, program="evaluate"),
    "evaluate, cp": Job("--load gpt --text text.jsonl --cp-size 2", 2, program="evaluate"),
    "evaluate BERT, tp": Job("--load bert --text text.jsonl --tp-size 2", 2, program="evaluate"),
    "evaluate BERT, sp": Job("--load bert --text text.jsonl --sp-size 2", 2, program="evaluate"),
    "classifier": Job(f"{_CLASSIFIER} --pretrained-checkpoint bert", program="finetune"),
    "classifier, sp, stage 2": Job(f"{_CLASSIFIER} {_TINY_BERT} {SP} --zero-stage 2", 4, program="finetune"),
    "classifier, tp, stage 3, optimizer on the host": Job(
        f"{_CLASSIFIER} {_TINY_BERT} {TP} --zero-stage 3 --offload-optimizer", 4, program="finetune"
    ),
    "verify, tp": Job(f"{_VERIFY} {TP}", 2), "verify, tp_seq": Job(f"{_VERIFY} --bf16 {TP_SEQ}", 2),
    "verify, all modes of sp, stage 2": Job(f"{_VERIFY} {SP} --sp-overlap-mode auto --zero-stage 2", 4),
    "verify BERT, sp": Job(f"{_VERIFY} {SP}", 2, "bert"),
}  # fmt: skip
