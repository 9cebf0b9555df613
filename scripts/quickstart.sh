#!/usr/bin/env bash
# From a clean clone to a trained model on real text:
#
#   bash scripts/quickstart.sh        a GPT
#   bash scripts/quickstart.sh bert   a BERT
#
# All output goes to runs/quickstart; a second call reuses what is there, and `rm -r runs/quickstart` starts over. Variables:
#   QUICKSTART_STEPS   steps of training (1200, of a BERT 1400); with more than before a second call goes on from the last checkpoint
#   QUICKSTART_BYTES   bytes of text to take at most (all there is, about 10 MB)
#   QUICKSTART_OUT     where everything goes (runs/quickstart)
set -euo pipefail
case " $* " in *" -h "* | *" --help "*) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0"; exit 0 ;; esac
wrong() { printf 'error: %s\n' "$1" >&2; exit 2; }
for name in "${!QUICKSTART_@}"; do
    case "$name" in
    QUICKSTART_OUT) ;;
    QUICKSTART_STEPS | QUICKSTART_BYTES)
        [[ -z "${!name}" || "${!name}" =~ ^[1-9][0-9]{0,14}$ ]] || wrong "$name=${!name} must be a whole number, 1 or more"
        ;;
    *) wrong "$name is unknown: there are QUICKSTART_STEPS, QUICKSTART_BYTES and QUICKSTART_OUT" ;;
    esac
done
[ $# -le 1 ] || wrong "one argument at most, gpt (the default) or bert: $*"
family="${1:-gpt}"
case "$family" in
gpt) # sequences: in a step, of each process; mark: in the names of what both leave in one folder
    usual_steps=1200 sequences=4 mark=""
    # small, so that five minutes are enough for 2.5 million tokens; with more pieces or a wider model the text reads worse by then
    model=(--num-layers 4 --hidden-size 128 --seq-length 256 --position-embedding-type rope --init-method-std 0.05)
    pace=(--lr 6e-3 --min-lr 3e-4 --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.95)
    ;;
bert) # only one token in seven is predicted: masked words alone, and rows without padding; rotary positions help it learn sooner
    usual_steps=1400 sequences=8 mark="bert-"
    model=(--num-layers 3 --hidden-size 128 --seq-length 128 --position-embedding-type rope --init-method-std 0.05
        --bert-no-binary-head --bert-pack-sequences)
    pace=(--lr 5e-3 --min-lr 2e-4 --lr-warmup-fraction 0.05 --weight-decay 0.05 --adam-beta2 0.98)
    ;;
*)
    wrong "unknown argument '$family': expected gpt (the default) or bert"
    ;;
esac
cd "$(dirname "$0")/.."
bash scripts/setup_env.sh runtime

out="${QUICKSTART_OUT:-runs/quickstart}"
run="$out/$family"
killed="$out/${mark}killed"
python=.venv/bin/python
steps="${QUICKSTART_STEPS:-$usual_steps}"
every=$((steps / 4 > 0 ? steps / 4 : 1)) # validate and save four times
evaluated=$((every < 8 ? every : 8))     # global batches in a validation: of a short run no more than were trained on
log=$((every / 12 > 0 ? every / 12 : 1))
mkdir -p "$out"
began=$SECONDS
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }

say "1. Text: the Python reference and the standard library's sources"
[ -f "$out/corpus.jsonl" ] ||
    "$python" tools/make_corpus.py --output "$out/corpus.jsonl" ${QUICKSTART_BYTES:+--max-bytes "$QUICKSTART_BYTES"}
if [ "$family" = bert ]; then
    say "2. Tokenizer: WordPiece, lower case, 2,000 pieces"
    [ -f "$out/vocab.txt" ] ||
        "$python" tools/train_tokenizer.py --type wordpiece --input "$out/corpus.jsonl" --output "$out/vocab.txt" --vocab-size 2000
    say "3. Tokens: Megatron's .bin/.idx, a sequence for each sentence"
    tokenizer=(--tokenizer-type BertWordPieceLowerCase --vocab-file "$out/vocab.txt")
    data="$out/corpus_text_sentence"
    preprocess=(--split-sentences)
else
    say "2. Tokenizer: 1,024 pieces"
    [ -f "$out/tokenizer.model" ] ||
        "$python" tools/train_tokenizer.py --input "$out/corpus.jsonl" --output "$out/tokenizer.model" --vocab-size 1024
    say "3. Tokens: Megatron's .bin/.idx"
    tokenizer=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$out/tokenizer.model")
    data="$out/corpus_text_document"
    preprocess=(--append-eod)
fi
[ -f "$data.idx" ] ||
    "$python" tools/preprocess_data.py --input "$out/corpus.jsonl" --output-prefix "$out/corpus" "${tokenizer[@]}" "${preprocess[@]}" --workers 2
split=96,3,1
[ "$(wc -l <"$out/corpus.jsonl")" -ge 200 ] || split=80,10,10 # of few documents one in a hundred may be none

gpus="$("$python" -c 'import torch; print(torch.cuda.device_count())')"
if [ "$gpus" -gt 0 ]; then
    nproc="$gpus"
    precision=(--bf16 --deterministic-mode) # else a repeated step differs in its last digits
    export NCCL_ALGO="${NCCL_ALGO:-Ring}"   # so that sums over ranks repeat, too
else
    nproc=2
    precision=()
fi
# Ulysses sequence parallelism, with exchanges overlapped by computation: sp is the number of processes, or its largest divisor that is at
# most the number of heads; dp = processes / sp.
heads=4
sp=$((nproc < heads ? nproc : heads))
while [ $((nproc % sp)) -ne 0 ]; do sp=$((sp - 1)); done
layout=()
[ "$sp" -eq 1 ] || layout=(--sequence-parallel-size "$sp" --sp-overlap-comm)
train=("pretrain_$family.py"
    "${model[@]}" --num-attention-heads "$heads"
    --attention-dropout 0 --hidden-dropout 0 --data-path "$data" --split "$split" "${tokenizer[@]}"
    --micro-batch-size $((sequences * sp)) --global-batch-size $((sequences * nproc)) --train-iters "$steps"
    "${pace[@]}" --lr-decay-style cosine
    --eval-interval "$every" --eval-iters "$evaluated" --log-interval "$log"
    --save "$run" --save-interval "$every" --auto-resume
    ${precision[@]+"${precision[@]}"} ${layout[@]+"${layout[@]}"})

if [ ! -f "$killed" ] && [ ! -f "$run/run_status.json" ]; then
    say "4. Training on $nproc processes, each sequence cut over $sp of them; half-way it will be killed without warning"
    victim=$((steps / 2 + every / 2))
    # in the middle of that step's update, on every rank; torchrun reports the kill at length
    MEGATRON_SP_FAULT="kill:at=optim.step:step=$victim" bash scripts/launch.sh "$nproc" "${train[@]}" --enable-fault-injection \
        2>"$out/${mark}first_attempt.err" || true
    if ! grep -qs SIGKILL "$out/${mark}first_attempt.err"; then
        cat "$out/${mark}first_attempt.err" >&2
        echo "training ended before it could be killed" >&2
        exit 1
    fi
    touch "$killed"
    say "5. Killed (SIGKILL) in step $victim. The same command again:"
else
    say "4. Training, continued"
    train+=(--override-opt-param-scheduler) # with more steps the learning rate falls later
fi
bash scripts/launch.sh "$nproc" "${train[@]}"

say "6. What it has learned"
extra=()
if [ "$family" = bert ]; then
    "$python" tools/fill_mask.py --load "$run" --text "def __init__([MASK], name):" --text "return [MASK]" \
        --text "raise [MASK]('no such file')" || exit $?
    extra+=(--extra "always the most frequent token=$("$python" tools/fill_mask.py --load "$run" --baseline)")
else
    # bytes of text for a token, of which two bytes are stored
    extra+=(--bytes-per-token "$("$python" -c 'import json, os, sys
size = sum(len(json.loads(line)["text"].encode()) for line in open(sys.argv[1], encoding="utf-8"))
print(2 * size / os.path.getsize(sys.argv[2]))' "$out/corpus.jsonl" "$data.bin")")
    "$python" tools/generate.py --load "$run" --prompt "def __init__(self," --prompt "    def read(self" --max-new-tokens 80 --temperature 0.7 --top-p 0.9 || exit $?
fi
"$python" tools/plot_metrics.py "$run" -o "$out/${mark}loss.png"
"$python" tools/report.py "$run" -o "$out/${mark}report.html"
"$python" tools/summarize_run.py "$run" ${extra[@]+"${extra[@]}"} --extra "picture of the losses=$out/${mark}loss.png" \
    --extra "page about the run=$out/${mark}report.html" --extra "tokenizer=${tokenizer[3]}" --extra "data=$data.{bin,idx}"

echo "this call took $((SECONDS - began)) s"
show="$python tools/generate.py --load $run --interactive" own='README.md, "Train on your own text"'
if [ "$family" = bert ]; then
    show="$python tools/fill_mask.py --load $run" own="docs/tutorials/bert.md, also a classifier on your own labels"
fi
cat <<EOF

What next:
  train on your own text          $own
  go on for as many steps again   QUICKSTART_STEPS=$((2 * steps)) bash scripts/quickstart.sh$([ "$family" = gpt ] || echo " $family")
  try what it has learned         $show
  see every flag of a training    $python pretrain_$family.py --help
  prove the code on this machine  bash scripts/test.sh
EOF
