#!/usr/bin/env bash
# Called by scripts/pretrain_*.sh: finds the interpreter; recipe.py does the rest.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
if ! command -v "$python" >/dev/null; then
    echo "error: there is no $python: bash scripts/setup_env.sh makes it, or PYTHON=... names another interpreter" >&2
    exit 2
fi
exec "$python" "$root/scripts/recipe.py" "$@"
