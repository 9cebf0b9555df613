#!/usr/bin/env bash
# First process of a pod: scripts/kubernetes/start.sh SCRIPT [FLAGS of the script], as in trainjob.yaml and pytorchjob.yaml.
#
# Translates what Kubeflow's operators set (torchrun's PET_... variables) into what scripts/launch.sh takes, waits until the name of host 0
# is known to the cluster's DNS, passes SIGTERM on, and chooses the exit code. Variables:
#   PET_NNODES, PET_NODE_RANK           pods of the job, and which one this is: set by both operators
#   PET_NPROC_PER_NODE, NPROC_PER_NODE  processes of a pod; the second wins
#   PET_MASTER_ADDR, MASTER_ADDR, ...   host 0 and its port: Trainer sets the first, Training Operator the second
#   RESTART_CODE                        exit with this code where another start may help (7, 8 and 75 of docs/reference/exit_codes.md): Training
#                                       Operator takes codes below 128 for final
#   LOCK_WAIT                           seconds to wait before ending with 8 (120): the lock of a pod that was killed is taken over after that
set -uo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
export NNODES="${PET_NNODES:-1}" NPROC_PER_NODE="${NPROC_PER_NODE:-${PET_NPROC_PER_NODE:-gpu}}"
if [ "$NNODES" -gt 1 ]; then
    export NODE_RANK="${PET_NODE_RANK:?}" MASTER_ADDR="${PET_MASTER_ADDR:-${MASTER_ADDR:?}}" MASTER_PORT="${PET_MASTER_PORT:-${MASTER_PORT:-29400}}"
    for ((second = 0; ; second++)); do # the pod of host 0 may be younger than this one, and its name comes with it
        getent hosts "$MASTER_ADDR" >/dev/null && break
        if [ "$second" -ge "${JOIN_TIMEOUT:-600}" ]; then
            echo "error: the cluster's DNS has not known $MASTER_ADDR for $second s: is the pod of host 0 there? (kubectl get pods)" >&2
            exit 7
        fi
        sleep 1
    done
else
    unset NODE_RANK MASTER_ADDR MASTER_PORT
fi
# launch.sh says all this to torchrun itself; RANK and WORLD_SIZE are of pods here, not of processes
unset RANK WORLD_SIZE "${!PET_@}"

child=""
trap '[ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM INT
bash "$root/scripts/launch.sh" "$@" &
child=$!
while :; do # a trapped signal interrupts `wait`
    wait "$child"
    code=$?
    kill -0 "$child" 2>/dev/null || break
done
if [ "$code" -eq 8 ]; then
    echo "start: ending with exit code 8 in ${LOCK_WAIT:-120} s, when the lock of a pod that was killed is no longer respected" >&2
    sleep "${LOCK_WAIT:-120}"
fi
case "$code" in 7 | 8 | 75) code="${RESTART_CODE:-$code}" ;; esac
exit "$code"
