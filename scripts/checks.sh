#!/usr/bin/env bash
# All checks but the tests, of the project's own files; scripts/test.sh and `make checks` call this. `--fix` first repairs what can be
# repaired. What else lies in the folder is the user's, and is not looked at (tests/support/paths.py).
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
failed=0
check() { # NAME HINT COMMAND...: its output, if it fails
    local name="$1" hint="$2" said
    shift 2
    if said="$("$@" 2>&1)"; then
        printf '== %s: %s\n' "$name" "$(tail -n 1 <<<"${said:-nothing found}")"
    else
        failed=1
        printf '== %s: failed\n%s\n%s' "$name" "$said" "${hint:+$hint$'\n'}"
    fi
}
of_ours() { # PATTERNS -- COMMAND...: run the command on our files
    local patterns=()
    while [ "$1" != -- ]; do patterns+=("$1"); shift; done
    shift
    "$python" tests/support/paths.py "${patterns[@]}" | xargs -0 "$@"
}
if [ "${1:-}" = --fix ]; then
    of_ours '*.py' -- "$python" -m ruff check --fix --force-exclude
    of_ours '*.py' -- "$python" -m ruff format --force-exclude
    exit
fi
check "ruff check" "" of_ours '*.py' -- "$python" -m ruff check --force-exclude
check "ruff format" "run: make style" of_ours '*.py' -- "$python" -m ruff format --check --force-exclude
check "codespell" "" of_ours '*' -- "$python" -m codespell_lib
check "mypy" "" "$python" -m mypy
exit "$failed"
