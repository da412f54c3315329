#!/usr/bin/env bash
# Installs fairseq-rope and all that its recipes and tests need into .venv. `make` calls it when that is needed.
#
#   PYTHON=python3.12 TORCH=torch==2.13.0+cpu bash install.sh
#
# PYTHON is the interpreter, 3.11 or newer (default: python3). TORCH is what pip is asked for as torch (default:
# torch==2.13.0): another build than the one pip would choose, if pip is told where to find it (PIP_EXTRA_INDEX_URL,
# PIP_FIND_LINKS or pip.conf). Run again after an interruption, it goes on with what is there.
#
# Written for bash 3.2 and BSD tools as well, so for macOS as it comes.
set -euo pipefail
case $0 in */*) cd "${0%/*}" ;; esac

STAMP=.venv/.installed
PY=.venv/bin/python
FAIRSEQ=fairseq-fixed==0.12.3.1
# Measured: 1.4 GB with a CPU build of torch, and the rest to build in. On Linux pip's default torch is the one with CUDA's
# libraries, which needs some 5 GB.
case $OSTYPE in linux*) default_kb=6000000 ;; *) default_kb=2000000 ;; esac
case ${TORCH:-} in *+cpu*) default_kb=2000000 ;; esac
NEEDED_KB=${FAIRSEQ_ROPE_MIN_DISK_KB:-$default_kb}

refuse() {
    printf 'install.sh: %s\n' "$1" >&2
    exit 1
}

run() {
    printf '+ %s\n' "$*"
    "$@"
}

said() { # what the stamp of the last installation says about $1
    sed -n "s/^$1 //p" "$STAMP" 2>/dev/null || true
}

# --- Can it be installed? Nothing is written before every answer is yes -----------------------------------------------

# What was asked for the last time holds until something else is asked for.
python=${PYTHON:-$(said python)}
python=${python:-python3}
asked_torch=${TORCH:-$(said torch)}
torch=${asked_torch:-torch==2.13.0}
folder=$(said folder)

version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || version=
case $version in
    [0-9]*.[0-9]*.[0-9]*) ;;
    *) refuse "no Python runs under the name $python: name one of 3.11 or newer with PYTHON=..." ;;
esac
minor=${version#*.}
minor=${minor%%.*}
if [ "${version%%.*}" -lt 3 ] || { [ "${version%%.*}" -eq 3 ] && [ "$minor" -lt 11 ]; }; then
    refuse "$python is Python $version and 3.11 or newer is needed (name one with PYTHON=...), though a fairseq that already runs on an older Python needs no installation, only --user-dir fairseq_rope"
fi
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    refuse "$python (Python $version) lacks the modules venv and ensurepip: install them (on Debian and Ubuntu the package python3-venv) or name another Python with PYTHON=..."
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -f "$headers/Python.h" ] ||
    refuse "$python (Python $version) has no headers, as $headers/Python.h is missing: install them (on Debian and Ubuntu the package python3-dev) or name another Python with PYTHON=..."
compiler=
for candidate in ${CXX:+"${CXX%% *}"} c++ g++ clang++; do
    if command -v "$candidate" >/dev/null 2>&1; then
        compiler=$candidate
        break
    fi
    # A compiler asked for by name is the one that the build will call.
    [ -z "${CXX:-}" ] || refuse "the C++ compiler that CXX names, $CXX, is not found, and fairseq has parts to compile"
done
[ -n "$compiler" ] ||
    refuse "no C++ compiler is found (c++, g++ or clang++, or the one that CXX names), and fairseq has parts to compile"
# Python's build would call the compiler that Python itself was built with, which need not be here.
if [ "$compiler" = clang++ ] && [ -z "${CXX:-}" ]; then
    export CC=clang CXX=clang++
fi
there_kb=0
[ ! -d .venv ] || there_kb=$(du -sk .venv | awk '{ print $1 }')
# The free space is the field before the percentage: a file system's name can hold blanks.
free_kb=$(df -Pk . | awk 'NR == 2 { for (i = 3; i < NF; i++) if ($(i + 1) ~ /%$/) { print $i; exit } }')
missing_kb=$((NEEDED_KB - there_kb - free_kb))
[ "$missing_kb" -le 0 ] ||
    refuse "too little room on the disk of $PWD: $((free_kb / 1000)) MB are free and $(((NEEDED_KB - there_kb) / 1000)) MB are needed (2000 MB with a CPU build of torch, named with TORCH=...)"

# --- The virtual environment ------------------------------------------------------------------------------------------

rm -f "$STAMP"

identity='import os, sys; print(sys.version, os.path.realpath(sys.base_prefix))'
usable() {
    # See below: a pip that was itself installed to the end.
    grep -q /INSTALLER, .venv/lib/python3.*/site-packages/pip-*.dist-info/RECORD 2>/dev/null || return 1
    "$PY" -m pip --version >/dev/null 2>&1 || return 1
    [ -z "$folder" ] || [ "$folder" = "$(pwd -P)" ] || return 1
    "$PY" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || return 1
    [ -z "${PYTHON:-}" ] || [ "$("$PY" -c "$identity")" = "$("$python" -c "$identity")" ]
}
if ! usable; then
    # The interpreter behind $python, since $python itself can be the one in .venv, about to be cleared.
    base=$("$python" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)')
    run "$base" -m venv --clear .venv
fi

# A pip that was killed leaves packages that the next one takes for whole, though their commands in bin/ are missing. The
# last that pip writes of a package is its RECORD, over the one that the wheel brought: with INSTALLER, which no wheel has.
"$PY" - <<'END'
import pathlib, shutil, sysconfig

site = pathlib.Path(sysconfig.get_path("purelib"))
for info in site.glob("*.dist-info"):
    record = info / "RECORD"
    if not record.exists() or "/INSTALLER," not in record.read_text(encoding="utf-8"):
        shutil.rmtree(info)
for replaced in site.glob("~*"):  # where pip keeps the old version until the new one is there
    shutil.rmtree(replaced)
END

# --- The packages, in the order that fairseq's build needs ------------------------------------------------------------

export PIP_DISABLE_PIP_VERSION_CHECK=1
pip="$PY -m pip install"

run $pip "$torch"
# From here on pip has to take the torch that is there.
"$PY" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >.venv/constraints.txt
run $pip -c .venv/constraints.txt numpy cython setuptools wheel
# With build isolation, pip would download a second torch with CUDA's gigabytes, and build against that.
run $pip -c .venv/constraints.txt --no-build-isolation "$FAIRSEQ"
run $pip -c .venv/constraints.txt --no-build-isolation -e '.[ctranslate2,plots,test,lint]'
run "$PY" -c 'import torch, fairseq.data.data_utils_fast; print("torch", torch.__version__, "fairseq", fairseq.__version__)'

{
    printf 'folder %s\n' "$(pwd -P)"
    printf 'python %s\n' "$python"
    printf 'torch %s\n' "$asked_torch"
} >"$STAMP.part"
mv "$STAMP.part" "$STAMP"
