#!/usr/bin/env bash
# Installs fairseq-rope and everything that its recipes and tests need into .venv. `make` calls it if necessary.
#
#   PYTHON=python3.12 TORCH=torch==2.13.0+cpu bash install.sh
#
# PYTHON is the interpreter, 3.11 to 3.13 (default: python3). TORCH is pip's requirement for torch (default: torch==2.13.0).
# It also runs with the bash 3.2 and the BSD tools of macOS.
set -euo pipefail
# Packages of other places would count as installed, and would be missing in another shell.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX
export PIP_USER=0
case $0 in */*) cd "${0%/*}" ;; esac
refuse() { printf 'install.sh: %s\n' "$1" >&2; exit 1; }
run() { printf '+ %s\n' "$*"; "$@"; }
said() { # a setting of the last installation, the default of this one
    local stamp=.venv/.installed
    [ -f $stamp ] || stamp=.venv/.begun
    sed -n "s/^$1 //p" $stamp 2>/dev/null || true
}
python=${PYTHON:-$(said python)} asked_torch=${TORCH:-$(said torch)}
python=${python:-python3} torch=${asked_torch:-torch==2.13.0}

# All checks come before the first file is written.
version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) ||
    refuse "no Python runs under the name $python: name one of 3.11 to 3.13 with PYTHON=..."
case $version in
    3.1[1-3].*) ;;
    3.1[4-9].* | 3.[2-9][0-9].*) refuse "$python is Python $version, on which fairseq cannot be imported (docs/compatibility.md): name one of 3.11 to 3.13 with PYTHON=..." ;;
    *) refuse "$python is Python $version and 3.11 to 3.13 is needed (name one with PYTHON=...), though a fairseq that already runs on an older Python needs no installation, only --user-dir fairseq_rope" ;;
esac
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    refuse "$python (Python $version) lacks the modules venv and ensurepip: install them (on Debian and Ubuntu the package python3-venv) or name another Python with PYTHON=..."
# Measured: 1.4 GB with a CPU build of torch. On Linux, pip's default torch adds 3 GB of CUDA.
case "$OSTYPE $torch" in *+cpu*) needed_kb=2000000 ;; linux*) needed_kb=6000000 ;; *) needed_kb=2000000 ;; esac
needed_kb=${FAIRSEQ_ROPE_MIN_DISK_KB:-$needed_kb} there_kb=0
[ ! -d .venv ] || there_kb=$(du -sk .venv | awk '{ print $1 }')
free_kb=$(df -Pk . | awk 'NR == 2 { for (i = 3; i < NF; i++) if ($(i + 1) ~ /%$/) { print $i; exit } }') # a name can hold blanks
[ $((needed_kb - there_kb)) -le "$free_kb" ] ||
    refuse "too little room on the disk of $PWD: $((free_kb / 1000)) MB are free and $(((needed_kb - there_kb) / 1000)) MB are needed (2000 MB with a CPU build of torch, named with TORCH=...)"

# Only a complete installation has the stamp .installed. .begun marks a .venv that this script made; it names the folder
# if the installation was complete before, so that a failed update goes on in place.
base=$("$python" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)') # $python can be the one in .venv
if [ "$(said folder)" = "$(pwd -P)" ] && [ "$(said python) $(said version)" = "$python $version" ] && .venv/bin/python -m pip --version >/dev/null; then
    printf 'folder %s\npython %s\nversion %s\ntorch %s\n' "$(pwd -P)" "$python" "$version" "$(said torch)" >.venv/.new
    mv .venv/.new .venv/.begun # with the settings that worked
    rm -f .venv/.installed
else
    [ ! -e .venv ] || [ -e .venv/.begun ] || [ -e .venv/.installed ] || refuse "$PWD/.venv is there and was not made by install.sh: move it away, or remove it"
    rm -rf .venv && mkdir .venv && touch .venv/.begun
    run "$base" -m venv .venv
fi
pip=".venv/bin/python -m pip install --disable-pip-version-check"
run $pip "$torch" numpy 'setuptools>=77' wheel
.venv/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >.venv/constraints.txt
# With READTHEDOCS, fairseq's setup compiles nothing: the plugin has its compiled parts in Python. Its setup imports torch.
# With build isolation, pip would download a second torch with CUDA's gigabytes for it.
run env READTHEDOCS=1 $pip -c .venv/constraints.txt --no-build-isolation fairseq-fixed==0.12.3.1 -e '.[ctranslate2,compare,test]'
if ! run .venv/bin/python -c 'import torch, fairseq_rope.plugin, fairseq; print("torch", torch.__version__, "fairseq", fairseq.__version__)'; then
    : >.venv/.begun
    refuse 'the installed packages do not work: repeat the command, which then installs all of them again'
fi
printf 'folder %s\npython %s\nversion %s\ntorch %s\n' "$(pwd -P)" "$python" "$version" "$asked_torch" >.venv/.installed # last
