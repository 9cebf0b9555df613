#!/usr/bin/env bash
# torchrun with meaningful exit codes: scripts/launch.sh NPROC SCRIPT [FLAGS of the script]
#
# torchrun turns every failure into exit code 1. This reads the run's run_status.json afterwards and exits with the code listed in
# docs/reference/exit_codes.md (75: preempted after a save, start the same command again). NPROC may also come as NPROC_PER_NODE. Variables:
#   NNODES, NODE_RANK, MASTER_ADDR   a job of several hosts: how many, which one this is (from 0), the address of host 0; the same command
#                                    on each of them (docs/how-to/launching/several_hosts.md)
#   MASTER_PORT                      port of the rendezvous on host 0 (29400)
#   JOIN_TIMEOUT                     seconds that hosts wait for each other (600)
#   JOB_ID                           tells two jobs on one host and port apart
#   RESTARTS                         times to restart a failed job from its last checkpoint (0); a host that died may rejoin as often,
#                                    if the same command is started on it again within JOIN_TIMEOUT
#   PYTHON                           the interpreter (.venv/bin/python)
set -uo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
die() { # CODE TEXT
    printf 'error: %s\n' "$2" >&2
    exit "$1"
}
number() { [[ "$1" =~ ^[0-9]{1,9}$ ]]; }

mistyped="$(PYTHONPATH="$root/scripts" "$python" -c '
import os
from recipe_variables import LAUNCHER_NAMES, misspelled
found = misspelled(os.environ, ("NPROC_PER_NODE", "NNODES", *LAUNCHER_NAMES))
print("; ".join(f"{name} is unknown: did you mean {meant}?" for name, meant in found.items()))' 2>/dev/null)" || true
[ -z "$mistyped" ] || die 2 "$mistyped"

restarts="${RESTARTS:-0}"
number "$restarts" || die 2 "RESTARTS=$restarts must be a number, 0 or more"
nproc="${NPROC_PER_NODE:-}"
if [[ "${1:-}" =~ ^([0-9]+|auto|gpu|cpu)$ ]]; then
    [ -z "$nproc" ] || [ "$nproc" = "$1" ] ||
        die 2 "NPROC_PER_NODE=$nproc and the first argument ($1) both say how many processes to start here: leave one out"
    nproc="$1"
    shift
fi
if [ $# -lt 1 ] || ! [[ "$nproc" =~ ^([1-9][0-9]*|auto|gpu|cpu)$ ]]; then
    echo "usage: scripts/launch.sh NPROC SCRIPT [FLAGS of the script]    NPROC: processes on this host, at least 1 (or NPROC_PER_NODE=N)" >&2
    exit 2
fi

case "$1" in
-*) ;; # -m MODULE
*) [ -f "$1" ] || die 2 "$1 is not there, or is no file: scripts/launch.sh NPROC SCRIPT [FLAGS of the script]" ;;
esac

# ------------------------------------------------------------------------------------------------- one host or several
nnodes="${NNODES:-1}"
number "$nnodes" && [ "$nnodes" -ge 1 ] || die 2 "NNODES=$nnodes must be the number of hosts, 1 or more"
nnodes=$((10#$nnodes))
if [ "${SLURM_STEP_NUM_NODES:-1}" -gt 1 ] && [ -z "${NNODES:-}" ]; then
    die 2 "srun starts this on $SLURM_STEP_NUM_NODES hosts, but NNODES is not set, so each would train on its own: see scripts/slurm.sbatch, or set NNODES=1"
fi
if [ "${SLURM_STEP_NUM_TASKS:-1}" -gt "${SLURM_STEP_NUM_NODES:-1}" ]; then
    die 2 "srun starts this $SLURM_STEP_NUM_TASKS times on ${SLURM_STEP_NUM_NODES:-1} host(s), but once for each host is right: --ntasks-per-node=1 (in an interactive shell: unset SLURM_STEP_NUM_TASKS)"
fi
if [ "$nnodes" -gt 1 ]; then
    missing=""
    [ -n "${NODE_RANK:-}" ] || missing="NODE_RANK=0..$((nnodes - 1)), a different one on each host"
    [ -n "${MASTER_ADDR:-}" ] || missing="${missing:+$missing, and }MASTER_ADDR, the address of host 0"
    [ -z "$missing" ] || die 2 "NNODES=$nnodes hosts train together, so give each of them $missing"
    number "$NODE_RANK" && [ "$NODE_RANK" -lt "$nnodes" ] ||
        die 2 "NODE_RANK=$NODE_RANK must be between 0 and $((nnodes - 1)), for NNODES=$nnodes: hosts are counted from 0"
    port="${MASTER_PORT:-29400}"
    number "$port" && [ "$port" -ge 1 ] && [ "$port" -le 65535 ] || die 2 "MASTER_PORT=$port must be a port, 1 to 65535"
    join_timeout="${JOIN_TIMEOUT:-600}"
    number "$join_timeout" && [ "$join_timeout" -ge 1 ] || die 2 "JOIN_TIMEOUT=$join_timeout must be a number of seconds, 1 or more"
elif [ -n "${NODE_RANK:-}" ] && [ "$NODE_RANK" != 0 ]; then
    die 2 "NODE_RANK=$NODE_RANK says that this is one of several hosts, but NNODES is ${NNODES:-not set}: set NNODES on every host, or leave NODE_RANK out"
fi

# for several processes this silences torchrun, and the program divides the cores; a single process would take it as a limit
if number "$nproc" && [ "$nproc" -gt 1 ]; then export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"; fi
# from torch 2.13 on: how long torchrun waits for the last save after SIGTERM before it kills (30 s is its default, and fixed before)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-60}"

# mistakes in the flags are reported here, at once and only once, not by torchrun's report about dead processes
resolved=""
trains() { # takes the flags of a training, so that --print-config checks them
    if [ "$1" = -m ]; then case "${3:-}" in pretrain | finetune) [ "$2" = megatron_sp ] ;; *) false ;; esac
    else grep -qsE 'parse_config\(|megatron_sp\.commands\.(pretrain|finetune)' "$1"; fi
}
if number "$nproc" && trains "$@"; then
    resolved="$(WORLD_SIZE=$((nproc * nnodes)) "$python" "$@" --print-config)" || exit $?
fi

run_dir=""
case " $* " in *" --config"*) # --save may stand in that file; one on the command line wins, below
    run_dir="$(printf '%s' "$resolved" | "$python" -c '
import sys, yaml
print(((yaml.safe_load(sys.stdin) or {}).get("checkpoint") or {}).get("save") or "")')" ;;
esac
previous=""
for word in "$@"; do
    case "$word" in --save=*) run_dir="${word#--save=}" ;; esac
    [ "$previous" = "--save" ] && run_dir="$word"
    previous="$word"
done

status="$run_dir/run_status.json"
before="$([ -f "$status" ] && cat "$status" 2>/dev/null)" # every report has its time: the same text is one of an earlier launch

# Find the other hosts, and set `torchrun` to the program and its arguments.
meet() {
    local met address interface
    if [ "$nnodes" -eq 1 ]; then
        torchrun=("$root/scripts/torchrun.py" --standalone)
        return 0
    fi
    met="$("$python" "$root/scripts/several_hosts.py" "$NODE_RANK" "$MASTER_ADDR" "$port" "$join_timeout")" || return $?
    read -r address interface <<<"$met"
    [ "$interface" = "-" ] || export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}"
    # torchrun's agents tell each other the address of a store that they share in their first round only: a host that comes back in a
    # later one would wait for it in vain. Without sharing, each round has its own store, on the first rank's host.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    echo "launch: host $NODE_RANK of $nnodes ($address), $nproc processes here; all meet at $MASTER_ADDR:$port" >&2
    # is_host says who opens the port, so that it is not guessed from names; this rendezvous ignores --node-rank and orders hosts by address
    torchrun=("$root/scripts/torchrun.py" --nnodes "$nnodes" --rdzv-backend reachable-c10d
        --rdzv-id "${JOB_ID:-megatron_sp}" --rdzv-endpoint "$MASTER_ADDR:$port" --local-addr "$address"
        --rdzv-conf "is_host=$([ "$NODE_RANK" -eq 0 ] && echo 1 || echo 0),join_timeout=$join_timeout")
}

# Succeeds if the job may be restarted here although torchrun did not: its rendezvous is on host 0, which may have died.
may_return() {
    [ "$nnodes" -gt 1 ] && [ "$NODE_RANK" -ne 0 ] && [ "$relaunched" -lt "$restarts" ] && [ -z "$signalled" ] || return 1
    [ -n "$run_dir" ] && [ -f "$status" ] && [ "$(cat "$status")" != "$before" ] || return 0
    "$python" -c '
import json, sys
status = json.load(open(sys.argv[1]))
sys.exit(not (status.get("status") == "running" or status.get("exit_code") == 7))' "$status"
}

signalled=""
relaunched=0
while :; do
    trap - TERM INT HUP # a trap would have to wait until the others have come
    meet || exit $?
    child=""
    trap 'signalled=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM INT HUP
    MEGATRON_SP_RELAUNCHED=$relaunched "$python" "${torchrun[@]}" --nproc-per-node "$nproc" \
        --max-restarts "$((restarts - relaunched))" "$@" &
    child=$!
    [ -z "$signalled" ] || kill -TERM "$child" 2>/dev/null
    # a trapped signal interrupts `wait`: wait again until torchrun has ended
    while :; do
        wait "$child"
        code=$?
        kill -0 "$child" 2>/dev/null || break
    done
    [ "$code" -ne 0 ] && may_return || break
    relaunched=$((relaunched + 1))
    echo "launch: host 0 or the connection to it was lost: waiting up to $join_timeout s for it to come back (restart $relaunched of $restarts)" >&2
done
if [ "$code" -ne 0 ] && [ -n "$run_dir" ] && [ -f "$status" ] && [ "$(cat "$status")" != "$before" ]; then
    "$python" - "$status" "$code" "$nnodes" <<'PY'
import json, sys
status = json.load(open(sys.argv[1]))
code = status.get("exit_code")
if status.get("status") == "running" or not isinstance(code, int) or code == 0:
    code = int(sys.argv[2])  # it died before it could say why
if status.get("message"):  # which a rank has told, on this host or another
    print(f"{status['status']} (exit code {code})" + (f": {status['message']}" if sys.argv[3] != "1" else ""), file=sys.stderr)
sys.exit(code)
PY
    code=$?
elif [ "$code" -ne 0 ] && [ "$nnodes" -gt 1 ]; then
    echo "launch: the job of $nnodes hosts ended before training began, or this host cannot see the run folder" >&2
fi
exit "$code"
