#!/usr/bin/env bash
# All checks and all tests; arguments go to pytest: scripts/test.sh -k config
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup_env.sh dev
python=.venv/bin/python
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the tests start processes of their own
unset PYTHONDONTWRITEBYTECODE                  # some containers set it: each of those would compile this package again
step() { printf '== %s\n' "$1"; shift; "$@"; }

step "ruff check" "$python" -m ruff check .
step "ruff format" "$python" -m ruff format --check --quiet . || { echo "run: make style"; exit 1; }
beside="$(mktemp -d)" # what runs beside the first tests
trap 'rm -rf "$beside"' EXIT
"$python" -m mypy >"$beside/mypy" 2>&1 & # half a minute on a fresh clone
mypy=$!
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict --site-dir "$beside/site" >"$beside/docs" 2>&1 & # 20 seconds of one core
docs=$!
step "codespell" "$python" -m codespell_lib
# at least four workers: half of the tests wait for their own processes or a disk; more only where there are cores for them
workers="$("$python" -c 'import os; print(max(4, (os.cpu_count() or 2) // 2))')" # nproc is not everywhere
step "pytest" "$python" -m pytest -q --durations=10 -n "$workers" --dist worksteal "$@"
wait "$mypy" || { printf '== mypy\n'; cat "$beside/mypy"; exit 1; }
step "mypy" cat "$beside/mypy"
wait "$docs" || { printf '== documentation site\n'; grep -v '^INFO' "$beside/docs"; exit 1; }
step "documentation site" tail -n 1 "$beside/docs"
