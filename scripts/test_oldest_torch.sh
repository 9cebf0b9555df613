#!/usr/bin/env bash
# The tests of everything that computes, on the oldest torch that setup.py allows; arguments go to pytest.
# The fake device is left out: it needs a build of torch for CPUs.
# Builds .venv-oldest on the first call, which fetches torch's build for GPUs: 3 GB, where there is no index of CPU builds (TORCH_INDEX_URL).
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup_env.sh dev
oldest="$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' setup.py).0"
python=.venv-oldest/bin/python
if ! "$python" -c "import torch; raise SystemExit(not torch.__version__.startswith('$oldest'))" 2>/dev/null; then
    rm -rf .venv-oldest
    .venv/bin/python -m venv .venv-oldest
    "$python" -m pip install -q ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "torch==$oldest"
    # everything else is .venv's, found behind its own
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_rest.pth"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m pytest -q -n 4 --dist worksteal tests/unit/ops tests/unit/optim tests/unit/parallel tests/unit/models tests/unit/comm \
    tests/unit/checkpoint tests/unit/training tests/dist "$@"
