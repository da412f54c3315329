#!/usr/bin/env bash
# Test the plugin with another Python, torch, NumPy or fairseq. docs/compatibility.md lists the runs.
#
#   bash tests/other_fairseqs.sh PYTHON TORCH FAIRSEQ [NUMPY]
#   bash tests/other_fairseqs.sh python3.12 2.13.0 fairseq-fixed==0.12.3.1
#   bash tests/other_fairseqs.sh python3.10 2.6.0 ../fairseq 1.26.4
#
# PYTHON is an interpreter. TORCH and NUMPY are versions; the default of NUMPY is the newest that pip finds. FAIRSEQ is a
# pip requirement or a folder with fairseq's source. The script installs into a temporary virtual environment, of up to
# 6 GB if pip's torch brings CUDA. It runs the plugin, which is not installed, with fairseq's programs. On Python >= 3.10
# it also runs the tests, except those of install.sh. It exits with 0 if everything passed.
#
# It also runs with the bash 3.2 and the BSD tools of macOS.
set -euo pipefail
if [ $# -lt 3 ] || [ $# -gt 4 ]; then
    echo "usage: bash tests/other_fairseqs.sh PYTHON TORCH FAIRSEQ [NUMPY]" >&2
    exit 2
fi
python=$1 torch=$2 fairseq=$3 numpy=${4:-}
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1

refuse() {
    printf 'other_fairseqs.sh: %s\n' "$1" >&2
    exit 1
}

run() { # run a command with its output in $work/log, which is shown only if the command fails
    printf '+ %s\n' "$*"
    "$@" >"$work/log" 2>&1 || {
        cat "$work/log" >&2
        refuse "this failed: $*"
    }
}

# --- Installation -----------------------------------------------------------------------------------------------------

"$python" -m venv "$work/venv"
PATH=$work/venv/bin:$PATH
# git main needs an omegaconf whose metadata newer pips reject; the build writes into the source, so build a copy
if [ -d "$fairseq" ]; then
    run pip install 'pip<24.1'
    cp -R "$fairseq" "$work/fairseq"
    fairseq=$work/fairseq
fi
run pip install "torch==$torch" "numpy${numpy:+==$numpy}" 'setuptools>=77' wheel
pip freeze | grep -E '^(torch|numpy)==' >"$work/constraints.txt"
READTHEDOCS=1 run pip install -c "$work/constraints.txt" --no-build-isolation "$fairseq"  # nothing is compiled

cd "$work"
python -c 'import platform; print("VERSIONS python", platform.python_version())'
pip freeze | grep -E '^(torch|numpy|fairseq|fairseq-fixed|hydra-core|omegaconf)(==| @)'

# --- The plugin as a folder, through fairseq's programs ---------------------------------------------------------------

python - <<'END'
import random

words = "the a dog cat sees takes red blue big old house book under over".split()
for name, size in (("train", 1000), ("valid", 20), ("test", 20)):
    pairs = [random.choices(words, k=random.randint(2, 9)) for _ in range(size)]
    open(name + ".en", "w").writelines(" ".join(pair) + "\n" for pair in pairs)
    open(name + ".de", "w").writelines(" ".join(reversed(pair)).upper() + "\n" for pair in pairs)
END
run fairseq-preprocess -s en -t de --trainpref train --validpref valid --testpref test --joined-dictionary --destdir bin

plugin="--user-dir $root/fairseq_rope --cpu"
train="fairseq-train bin $plugin --arch transformer_rope_tiny --share-all-embeddings --optimizer adam --lr 0.01
    --lr-scheduler inverse_sqrt --warmup-updates 20 --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --max-tokens 500 --seed 3 --num-workers 0 --save-dir checkpoints --log-format json"
run $train --max-epoch 2
run $train --max-epoch 3
grep -q 'Loaded checkpoint.*checkpoint_last.pt (epoch 3' "$work/log" || refuse "training did not resume from the last checkpoint"
test -f checkpoints/checkpoint3.pt || refuse "the third epoch left no checkpoint"

PYTHONPATH=$root run python -m fairseq_rope average --inputs checkpoints --num-epoch-checkpoints 3 --output average.pt
translations() { # number and text of each hypothesis
    grep '^H-' "$work/log" | cut -f 1,3 | LC_ALL=C sort
}
run fairseq-generate bin $plugin --path average.pt --beam 4
translations >generated.txt
[ "$(wc -l <generated.txt)" -eq 20 ] || refuse "fairseq-generate did not translate all 20 sentences"
run fairseq-interactive bin $plugin --path average.pt --beam 4 --input test.en
translations >interactive.txt
diff generated.txt interactive.txt || refuse "fairseq-generate and fairseq-interactive differ"

echo "PASSED the plugin through fairseq's programs"

# --- The tests --------------------------------------------------------------------------------------------------------

if python -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    mkdir package # a copy, because the build writes into it
    cp -R "$root/setup.py" "$root/pyproject.toml" "$root/README.md" "$root/LICENSE" "$root/fairseq_rope" package
    run pip install -c constraints.txt --no-build-isolation './package[ctranslate2,compare,test]'
    cd "$root"
    pytest tests -n 2 --dist worksteal --ignore tests/test_install.py -p no:cacheprovider
fi
