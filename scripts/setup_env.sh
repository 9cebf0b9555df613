#!/usr/bin/env bash
# Leaves a working .venv/bin/python in the root of the repository, with this package in it (editable).
#
#   scripts/setup_env.sh [runtime|dev]     runtime: train and plot (default); dev: tests and checks too
#
# Where the first Python on the PATH (of an active environment, a container, ...) has a torch that works here, that torch is used
# and never replaced; else torch is installed. A second call takes a fraction of a second. Variables:
#   PYTHON            the interpreter to build on (default: the first of python3, python3.12, ... that is 3.10 or later)
#   TORCH_INDEX_URL   where torch comes from; machines without a GPU save gigabytes with PyTorch's CPU index
set -euo pipefail

TORCH_VERSION=2.13.0 # installed where none is found
TORCH_RANGE="(2, 11) <= version < (2, 14)"
READY=.venv/.megatron_sp_ready # written last: what the environment was built for
OURS=.venv/.megatron_sp_made   # written first: this script made the folder and may rebuild it

cd "$(dirname "$0")/.."
say() { printf 'setup_env: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

wanted="${1:-runtime}"
case "$wanted" in
runtime) extras="plot" ;;
dev) extras="dev,docs,plot" ;;
*) die "unknown argument '$wanted': expected runtime or dev" ;;
esac
key="$(cksum <setup.py | tr ' ' '-') $PWD" # an editable install and the scripts in bin/ know the absolute path
runs() { "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

# ------------------------------------------------------------------------------------------------- is it there already?
healthy() {
    [ -x .venv/bin/python ] && runs .venv/bin/python &&
        .venv/bin/python -c 'import importlib.util as u, os, sys
here = os.path.realpath(sys.prefix) == os.path.realpath(".venv")
raise SystemExit(not (here and all(u.find_spec(name) for name in ("torch", "numpy", "pip"))))' >/dev/null 2>&1
}
if [ -f "$READY" ] && healthy; then
    while IFS= read -r line; do
        if [ "$line" = "$wanted $key" ] || [ "$line" = "dev $key" ]; then exit 0; fi
    done <"$READY"
fi

# ------------------------------------------------------------------------------------------------- an interpreter
find_python() {
    if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3 python3.12 python3.11 python3.10 python3.13 python; fi
    for candidate in "$@"; do
        if command -v "$candidate" >/dev/null 2>&1 && runs "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

# The version of the torch that this interpreter imports, if it is one that works here.
usable_torch() {
    "$1" - <<PY 2>/dev/null
import re
import torch
version = tuple(int(part) for part in re.match(r"(\d+)\.(\d+)", torch.__version__).groups())
if $TORCH_RANGE:
    print(torch.__version__)
else:
    raise SystemExit(1)
PY
}

make_venv() { # BASE_PYTHON [--system-site-packages]
    local log
    log="$(mktemp "${TMPDIR:-/tmp}/megatron_sp_venv.XXXXXX")"
    for module in venv virtualenv; do
        mkdir .venv
        : >"$OURS"
        if "$1" -m "$module" ${2:-} .venv >>"$log" 2>&1 && [ -x .venv/bin/pip ]; then rm -f "$log"; return 0; fi
        rm -rf .venv
    done
    say "$1 cannot create a virtual environment; its message:"
    sed 's/^/    /' "$log" | tail -n 12 >&2
    rm -f "$log"
    die "install the module: 'apt install python3-venv' (Debian, Ubuntu), or '$1 -m pip install --user virtualenv'; then run this again"
}

# ------------------------------------------------------------------------------------------------- the folder
if [ -e .venv ] || [ -L .venv ]; then
    if [ -f "$OURS" ] && ! { [ -f "$READY" ] && grep -qF " $PWD" "$READY" && healthy; }; then
        say "rebuilding .venv: it was moved, broken or left half-built"
        rm -rf .venv
    elif [ ! -f "$OURS" ] && ! runs .venv/bin/python; then
        kept=".venv.old-$(date +%Y%m%d-%H%M%S)"
        say "the existing .venv does not work; it is kept as $kept"
        mv .venv "$kept"
    fi
fi

if [ ! -e .venv ]; then
    base="$(find_python)" || die "no Python 3.10 or later found (looked for ${PYTHON:-python3, python3.12, python3.11, python3.10, python3.13}):" \
        "install one, or name it: PYTHON=/path/to/python $0"
    if found="$(usable_torch "$base")"; then
        say "building .venv on $base and its torch $found"
        make_venv "$base" --system-site-packages
        if ! usable_torch .venv/bin/python >/dev/null; then
            # $base is a virtual environment itself; a venv made from it sees the packages of *its* base only.
            "$base" -c 'import sys, sysconfig; print("\n".join(dict.fromkeys(sysconfig.get_path(k) for k in ("purelib", "platlib"))))' \
                >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_base_environment.pth"
        fi
    else
        say "building .venv on $base"
        make_venv "$base"
    fi
fi
rm -f "$READY"

# ------------------------------------------------------------------------------------------------- the packages
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
pip() { .venv/bin/python -m pip "$@"; }
# pip compiles what it installs one file after the other, a minute for all of it; this takes every core, and leaves out the thousands
# of models in transformers, of which few are ever imported. A file that cannot be compiled does not matter, nor does it to pip.
compile() {
    local site
    site="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    .venv/bin/python -m compileall -q -j 0 -x '/transformers/' "$site${1:+/$1}" >/dev/null 2>&1 || true
}
failed() { die "installing $1 failed; without a network, start from an environment that has torch and the packages in setup.py"; }

if ! found="$(usable_torch .venv/bin/python)"; then
    say "installing torch $TORCH_VERSION"
    pip install --no-compile ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "torch==$TORCH_VERSION" || failed torch
    compile torch & # beside what is fetched next
    found="$(usable_torch .venv/bin/python)" || die "torch $TORCH_VERSION is installed but cannot be imported: .venv/bin/python -c 'import torch'"
fi
# The version that pip knows it by: PyPI's torch calls itself 2.13.0+cu130 and is installed as 2.13.0.
known="$(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null)" || known="$found"
printf 'torch==%s\n' "$known" >.venv/constraints.txt

# The build runs in this environment, so that nothing is fetched when everything is there. A new environment of Python 3.11 or
# earlier starts with an old setuptools, which hides a newer one that may be visible behind it. The range is what every torch of ours
# accepts: 2.11 and 2.12 want less than 82, 2.13 at least 77.0.3.
builds() {
    .venv/bin/python -c 'import setuptools as s; raise SystemExit(tuple(map(int, s.__version__.split(".")[:2])) < (70, 1))' >/dev/null 2>&1
}
builds || pip uninstall -q -y setuptools >/dev/null 2>&1 || true
builds || pip install -q -c .venv/constraints.txt "setuptools>=77.0.3,<82" || failed setuptools
say "installing megatron_sp and what it needs ($extras)"
pip install -q --no-compile --no-build-isolation -c .venv/constraints.txt -e ".[$extras]" || failed "megatron_sp[$extras]"
wait
compile

usable_torch .venv/bin/python >/dev/null || die "the environment no longer has its torch ($found): remove .venv and run this again"
printf '%s %s\n' "$wanted" "$key" >"$READY"
say "ready: .venv/bin/python"
