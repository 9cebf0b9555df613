#!/usr/bin/env bash
# From a clean clone to a trained GPT on real text: bash scripts/quickstart.sh
#
# Everything it makes is in runs/quickstart; a second call reuses what is there, and `rm -r runs/quickstart` starts over.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup_env.sh runtime

out="${QUICKSTART_OUT:-runs/quickstart}"
run="$out/gpt"
python=.venv/bin/python
steps="${QUICKSTART_STEPS:-280}"
every=$((steps / 4 > 0 ? steps / 4 : 1)) # validate and save four times
log=$((every / 12 > 0 ? every / 12 : 1))
mkdir -p "$out"
began=$SECONDS
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

say "1. Text: the Python reference and the standard library's sources"
[ -f "$out/corpus.jsonl" ] || "$python" tools/make_corpus.py --output "$out/corpus.jsonl"
say "2. Tokenizer: 8,000 pieces"
[ -f "$out/tokenizer.model" ] || "$python" tools/train_tokenizer.py --input "$out/corpus.jsonl" --output "$out/tokenizer.model"
say "3. Tokens: Megatron's .bin/.idx"
tokenizer=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$out/tokenizer.model")
[ -f "$out/corpus_text_document.idx" ] ||
    "$python" tools/preprocess_data.py --input "$out/corpus.jsonl" --output-prefix "$out/corpus" "${tokenizer[@]}" --append-eod --workers 2

gpus="$("$python" -c 'import torch; print(torch.cuda.device_count())')"
if [ "$gpus" -gt 0 ]; then
    nproc="$gpus"
    precision=(--bf16)
else
    nproc=2
    precision=()
fi
# Each sequence is cut over as many processes as there are, or the most (of the 4 heads each needs one) that divide them: sequence
# parallel (Ulysses), its exchanges under computation. What is left over is data parallel.
heads=4
sp=$((nproc < heads ? nproc : heads))
while [ $((nproc % sp)) -ne 0 ]; do sp=$((sp - 1)); done
layout=()
[ "$sp" -eq 1 ] || layout=(--sequence-parallel-size "$sp" --sp-overlap-comm)
train=(pretrain_gpt.py
    --num-layers 4 --hidden-size 256 --num-attention-heads "$heads" --seq-length 256
    --attention-dropout 0 --hidden-dropout 0 --data-path "$out/corpus_text_document" --split 96,3,1 "${tokenizer[@]}"
    --micro-batch-size $((4 * sp)) --global-batch-size $((4 * nproc)) --train-iters "$steps"
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.08 --weight-decay 0.1 --adam-beta2 0.95
    --eval-interval "$every" --eval-iters 8 --log-interval "$log"
    --save "$run" --save-interval "$every" --auto-resume
    ${precision[@]+"${precision[@]}"} ${layout[@]+"${layout[@]}"})

# The step that the run has reached, from its log; 0 before the first one.
reached() {
    local step # with the comma behind it: the last line may be half written
    step="$(grep -a '"train"' "$run/metrics.jsonl" 2>/dev/null | sed -n 's/.*"step": *\([0-9]*\),.*/\1/p' | tail -n 1)" || true
    echo "${step:-0}"
}

if [ ! -f "$out/killed" ] && [ ! -f "$run/run_status.json" ]; then
    say "4. Training on $nproc processes, each sequence cut over $sp of them; half-way it will be killed without warning"
    victim=$((steps / 2 + every / 2))
    bash scripts/launch.sh "$nproc" "${train[@]}" 2>"$out/first_attempt.err" & # torchrun reports the kill at length
    job=$!
    trap 'kill -TERM $job 2>/dev/null || true' EXIT
    while kill -0 "$job" 2>/dev/null && [ "$(reached)" -lt "$victim" ]; do sleep 0.2; done
    if kill -0 "$job" 2>/dev/null; then
        pids="$("$python" -c 'import json, sys; print(*json.load(open(sys.argv[1]))["pids"])' "$run/run_status.json")"
        # shellcheck disable=SC2086  # a list of numbers
        kill -9 $pids || true
        touch "$out/killed"
    fi
    wait "$job" 2>/dev/null || true
    trap - EXIT
    if [ ! -f "$out/killed" ]; then
        cat "$out/first_attempt.err" >&2
        echo "training ended before it could be killed" >&2
        exit 1
    fi
    say "5. Killed (SIGKILL) at step $(reached). The same command again:"
else
    say "4. Training, from where it was"
fi
bash scripts/launch.sh "$nproc" "${train[@]}"

say "6. What it has learned"
"$python" tools/generate.py --load "$run" --prompt "def " --prompt "The statement " --max-new-tokens 60 --temperature 0.7 --top-p 0.9 || exit $?
"$python" tools/plot_metrics.py "$run" -o "$out/loss.png"
"$python" tools/report.py "$run" -o "$out/report.html"
"$python" tools/summarize_run.py "$run" --extra "picture of the losses=$out/loss.png" --extra "page about the run=$out/report.html" \
    --extra "tokenizer=$out/tokenizer.model" --extra "data=$out/corpus_text_document.{bin,idx}"
echo "this call took $((SECONDS - began)) s"
cat <<EOF

What next:
  bash scripts/test.sh                                                        prove the code on this machine
  $python tools/generate.py --load $run --interactive               talk to it
  $python pretrain_gpt.py --help                                       every flag
  rm -r $run $out/killed && QUICKSTART_STEPS=1000 bash scripts/quickstart.sh   train four times longer
EOF
