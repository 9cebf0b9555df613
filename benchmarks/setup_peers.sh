#!/usr/bin/env bash
# Makes .venv-peers with the programs that the benchmarks compare with; it never touches .venv.
#
#   benchmarks/setup_peers.sh [deepspeed] [megatron] [ring] [experts]
#
# Always: torch (the same version as ours, first, so that nothing pulls another one in) and transformers. On request DeepSpeed
# (built for CPU), Megatron-core with this package (tests/peers), ring-flash-attention and USP without what they need of CUDA
# (benchmarks/flash_attn_cpu.py stands in for it), and what transformers' expert parallelism needs (moe_block.py). What is there already
# is kept. Variables: PYTHON (an interpreter >= 3.11), TORCH_INDEX_URL (where torch comes from; machines without a GPU save gigabytes with
# PyTorch's CPU index).
set -euo pipefail

TORCH=2.13.0
TRANSFORMERS=5.23.0
DEEPSPEED=0.19.8
MEGATRON_CORE=0.16.1
RING_FLASH_ATTN=0.1.8
YUNCHANG=0.6.4
ACCELERATE=1.15.0
PSUTIL=7.2.2

cd "$(dirname "$0")/.."
say() { printf 'setup_peers: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

for wanted in "$@"; do
    case "$wanted" in
    deepspeed | megatron | ring | experts) ;;
    *) die "unknown argument '$wanted': expected deepspeed, megatron, ring or experts" ;;
    esac
done

new_enough() { "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
find_python() {
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate"; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    return 1
}

peer=.venv-peers/bin/python
if [ -e .venv-peers ] && ! { [ -x "$peer" ] && new_enough "$peer"; }; then
    die ".venv-peers is there but holds no working Python >= 3.11: remove the folder and start again"
fi
if [ ! -e .venv-peers ]; then
    base=$(find_python) || die "no Python >= 3.11 found (transformers $TRANSFORMERS needs it): set PYTHON to one"
    say "making .venv-peers with $("$base" --version)"
    "$base" -m venv .venv-peers
fi

# installed DISTRIBUTION VERSION: is exactly this version there? (a local part such as +cpu does not count)
installed() {
    "$peer" -c 'import sys, importlib.metadata as m
try: found = m.version(sys.argv[1]).partition("+")[0]
except m.PackageNotFoundError: found = None
raise SystemExit(found != sys.argv[2])' "$1" "$2"
}
pip() { "$peer" -m pip --disable-pip-version-check install --quiet "$@"; }

if installed torch "$TORCH"; then
    say "torch $TORCH is there"
else
    say "installing torch $TORCH"
    pip numpy
    pip "torch==$TORCH" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}
fi
# the constraint keeps later installations from replacing torch
constraint=$(mktemp)
trap 'rm -f "$constraint"' EXIT
printf 'torch==%s\n' "$TORCH" >"$constraint"
add() {
    if installed "$1" "$2"; then
        say "$1 $2 is there"
    else
        say "installing $1 $2"
        pip --constraint "$constraint" "${@:3}" "$1==$2"
    fi
}
add transformers "$TRANSFORMERS"
for wanted in "$@"; do
    case "$wanted" in
    deepspeed)
        export DS_ACCELERATOR=cpu DS_BUILD_OPS=0
        add deepspeed "$DEEPSPEED"
        ;;
    megatron)
        add megatron-core "$MEGATRON_CORE"
        add psutil "$PSUTIL" # which its distributed checkpoints need and it does not ask for
        pip --constraint "$constraint" --editable . # tests/peers train with both
        ;;
    ring)
        pip einops # this package's, which runs beside the two
        add ring-flash-attn "$RING_FLASH_ATTN" --no-deps
        add yunchang "$YUNCHANG" --no-deps
        ;;
    experts)
        pip einops # as above
        add accelerate "$ACCELERATE" --no-deps
        add psutil "$PSUTIL"
        ;;
    esac
done
say "ready: $peer"
