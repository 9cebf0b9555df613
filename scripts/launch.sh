#!/usr/bin/env bash
# torchrun with exit codes that mean something: scripts/launch.sh NPROC SCRIPT [FLAGS of the script]
#
# torchrun turns every failure into exit code 1. This reads the run's run_status.json afterwards and exits with the code listed in
# docs/exit_codes.md (75: preempted after a save, start the same command again). With NNODES, NODE_RANK and MASTER_ADDR
# (and MASTER_PORT) set it joins a job of several hosts; RESTARTS=2 restarts a failed job from its last checkpoint.
set -uo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
if [ $# -lt 2 ]; then
    echo "usage: scripts/launch.sh NPROC SCRIPT [FLAGS of the script]" >&2
    exit 2
fi
nproc="$1"
shift
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # silences torchrun; the program gives each process its share of the cores
# from torch 2.13 on: how long torchrun waits for the last save after SIGTERM before it kills (30 s is its default, and fixed before)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-60}"

# a mistake in the flags is answered here, in a moment and once, and not by torchrun's report about dead processes
if [[ "$nproc" =~ ^[0-9]+$ ]] && grep -qs 'parse_config(' "$1"; then
    WORLD_SIZE=$((nproc * ${NNODES:-1})) "$python" "$@" --print-config >/dev/null || exit $?
fi

run_dir=""
previous=""
for word in "$@"; do
    case "$word" in --save=*) run_dir="${word#--save=}" ;; esac
    [ "$previous" = "--save" ] && run_dir="$word"
    previous="$word"
done

status="$run_dir/run_status.json"
before="$([ -n "$run_dir" ] && cat "$status" 2>/dev/null)" # every report has its time: the same text is one of an earlier launch

if [ "${NNODES:-1}" -gt 1 ]; then
    hosts=(--nnodes "$NNODES" --node-rank "${NODE_RANK:?}" --rdzv-backend c10d --rdzv-id "${JOB_ID:-megatron_sp}"
        --rdzv-endpoint "${MASTER_ADDR:?}:${MASTER_PORT:-29400}")
else
    hosts=(--standalone)
fi
"$python" -m torch.distributed.run "${hosts[@]}" --nproc-per-node "$nproc" --max-restarts "${RESTARTS:-0}" "$@" &
child=$!
trap 'kill -TERM "$child" 2>/dev/null' TERM INT
# a trapped signal interrupts `wait`: wait again until torchrun has ended
while :; do
    wait "$child"
    code=$?
    kill -0 "$child" 2>/dev/null || break
done
if [ "$code" -ne 0 ] && [ -n "$run_dir" ] && [ -f "$status" ] && [ "$(cat "$status")" != "$before" ]; then
    "$python" - "$status" "$code" <<'PY'
import json, sys
status = json.load(open(sys.argv[1]))
code = status.get("exit_code")
if status.get("status") == "running" or not isinstance(code, int) or code == 0:
    code = int(sys.argv[2])  # it died before it could say why
if status.get("message"):
    print(f"{status['status']} (exit code {code}): {status['message']}", file=sys.stderr)
sys.exit(code)
PY
    code=$?
fi
exit "$code"
