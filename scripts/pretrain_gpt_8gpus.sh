#!/usr/bin/env bash
# What the scripts for one model on the 8 GPUs of a host share; scripts/pretrain_gpt_*.sh source it after they have set
#   title       one line for the reader
#   shape       array of flags: the model, its sequence, schedule
#   gib_static  GiB per GPU of weights, gradients and optimizer state with tp=1: 18 bytes for each parameter
#   gib_active  GiB per GPU of activations, about
# Variables of the user: DATA_PATH (prefix of a .bin/.idx pair, or "mock"), TOKENIZER_MODEL, SAVE, TRAIN_ITERS, TP and SP (TP * SP = 8), SMOKE.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
name="$(basename "$0" .sh)"
refuse() { printf 'error: %s\n' "$*" >&2; exit 2; }

gpus=8
tp="${TP:-1}" sp="${SP:-}"
[[ "$tp" =~ ^[1248]$ ]] || refuse "TP=$tp must be 1, 2, 4 or 8, so that TP * SP is the $gpus GPUs of a host"
sp="${sp:-$((gpus / tp))}"
[[ "$sp" =~ ^[1-8]$ ]] && [ $((tp * sp)) -eq $gpus ] || refuse "TP * SP ($tp * $sp) must be $gpus, the GPUs of a host: with TP=$tp give SP=$((gpus / tp))"

common=(
    --attention-dropout 0 --hidden-dropout 0 --position-embedding-type rope --disable-bias-linear
    --bf16 --attention-backend auto # flash-attn where it is installed, else torch's own fused kernels
    --micro-batch-size 1 --global-batch-size 16 --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
    --lr-decay-style cosine --save-interval 500 --eval-interval 500 --eval-iters 4 --log-interval 10 --keep-last 2 --auto-resume)

if [ "${SMOKE:-0}" = 1 ]; then
    save="${SAVE:-$(mktemp -d "${TMPDIR:-/tmp}/$name.XXXXXX")}"
    [ -n "${SAVE:-}" ] || trap 'rm -rf "$save"' EXIT
    echo "$name, smoke test: the flags of the real run with a tiny model, 2 CPU processes, sp=2, made-up data, 3 steps"
    bash "$root/scripts/launch.sh" 2 "$root/pretrain_gpt.py" "${common[@]}" "${shape[@]}" \
        --sequence-parallel-size 2 --sp-overlap-comm --device cpu --mock-data --vocab-size 500 --save "$save" \
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 \
        --global-batch-size 2 --train-iters 3 --lr-warmup-iters 1 --log-interval 1 --eval-iters 1 --peak-tflops 1 "$@"
    exit 0
fi

read -r found smallest <<<"$("$python" -c 'import torch
count = torch.cuda.device_count()
print(count, min((torch.cuda.get_device_properties(i).total_memory >> 30 for i in range(count)), default=0))')"
[ "$found" -ge $gpus ] || refuse "$name needs $gpus GPUs on this host, and there are $found. On this machine SMOKE=1 bash scripts/$name.sh tries the" \
    "same flags with a tiny model on 2 CPU processes; a smaller model trains on any number of GPUs with scripts/launch.sh (see README.md)."
needed=$((gib_static / tp + gib_active))
if [ "$smallest" -lt "$needed" ]; then
    way_out="take GPUs with more memory"
    for more in 8 4 2; do
        [ $more -le "$tp" ] || [ $((gib_static / more + gib_active)) -gt "$smallest" ] ||
            way_out="TP=$more SP=$((gpus / more)) bash scripts/$name.sh divides the first over $more GPUs"
    done
    refuse "a GPU here has $smallest GiB, and each needs about $needed GiB: $((gib_static / tp)) for weights, gradients and optimizer state," \
        "$gib_active for activations; $way_out"
fi

if [ "${DATA_PATH:-mock}" = mock ]; then
    data=(--mock-data --vocab-size 50304)
    told="made-up (set DATA_PATH=PREFIX and TOKENIZER_MODEL=FILE for your own)"
else
    [ -f "$DATA_PATH.idx" ] || refuse "DATA_PATH=$DATA_PATH: there is no $DATA_PATH.idx; tools/preprocess_data.py makes it (see README.md)"
    [ -f "${TOKENIZER_MODEL:-}" ] || refuse "TOKENIZER_MODEL=${TOKENIZER_MODEL:-}: give the SentencePiece model that $DATA_PATH was made with"
    data=(--data-path "$DATA_PATH" --split 99,1,0 --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER_MODEL")
    told="$DATA_PATH, tokenizer $TOKENIZER_MODEL"
fi
save="${SAVE:-runs/${name#pretrain_}}"
layout=(--tensor-model-parallel-size "$tp" --sequence-parallel-size "$sp")
[ "$tp" -eq 1 ] || layout+=(--sequence-parallel)
[ "$sp" -eq 1 ] || layout+=(--sp-overlap-comm)
hosts="${NNODES:-1}"
cat <<TEXT
$title
  devices     $hosts host(s) with $gpus GPUs: tp=$tp, sp=$sp, dp=$hosts; exchanges $([ "$sp" -eq 1 ] && echo none || echo "under computation, in the fastest way found at the start")
  memory      about $needed of $smallest GiB on each GPU ($((gib_static / tp)) weights, gradients and optimizer state, $gib_active activations)
  data        $told
  run folder  $save; the same command goes on from its newest checkpoint
TEXT
exec bash "$root/scripts/launch.sh" $gpus "$root/pretrain_gpt.py" "${common[@]}" "${shape[@]}" "${data[@]}" --save "$save" \
    "${layout[@]}" "$@"
