#!/usr/bin/env bash
# Measures this machine's GPUs: bash scripts/first_light.sh [--minutes 10|30|60] [--out first_light] [--device auto|cuda|cpu]
#
# docs/how-to/first_light.md says what one will see; --help has every flag. The same command goes on where the last one stopped. PYTHON names
# another interpreter than .venv's, which is made where it is missing.
set -euo pipefail
root="$(cd "$(dirname "$0")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
if [ -z "${PYTHON:-}" ]; then
    [ -x "$python" ] && "$python" -c 'import pytest' 2>/dev/null || bash "$root/scripts/setup_env.sh" dev # pytest runs tests/gpu
fi
export PYTHONPATH="$root/benchmarks:$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m first_light "$@" # takes the place of this shell: signals reach it, and its exit code is this script's
