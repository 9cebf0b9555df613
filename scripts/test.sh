#!/usr/bin/env bash
# All tests and all checks; arguments go to pytest: scripts/test.sh -k config
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup_env.sh dev
python=.venv/bin/python
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the tests start processes of their own
unset PYTHONDONTWRITEBYTECODE                  # some containers set it: each of those would compile this package again

beside="$(mktemp -d)" # what runs beside the first tests: half a minute of mypy on a fresh clone, 20 seconds of MkDocs
trap 'rm -rf "$beside"' EXIT
bash scripts/checks.sh >"$beside/checks" 2>&1 &
checks=$!
NO_MKDOCS_2_WARNING=1 "$python" -m mkdocs build --strict --site-dir "$beside/site" >"$beside/docs" 2>&1 &
docs=$!
# at least four workers: half of the tests wait for their own processes or a disk; more only where there are cores for them
workers="$("$python" -c 'import os; print(max(4, (os.cpu_count() or 2) // 2))')" # nproc is not everywhere
printf '== pytest\n'
failed=0
"$python" -m pytest -q --durations=10 -n "$workers" --dist worksteal "$@" || failed=$?
wait "$checks" || failed=1
cat "$beside/checks"
if wait "$docs"; then
    printf '== documentation site: %s\n' "$(tail -n 1 "$beside/docs")"
else
    failed=1
    printf '== documentation site: failed\n'
    grep -v '^INFO' "$beside/docs"
fi
exit "$failed"
