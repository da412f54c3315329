#!/usr/bin/env bash
# Run a recipe: bash recipes/pipeline/run.sh NAME|FOLDER [flags]; the run.sh of a recipe calls this.
# Uses the active Python if it has fairseq and what the recipes import, else the one that `make install` set up in .venv.
set -eu
root=$(CDPATH="" cd "$(dirname "$0")/../.." && pwd)

is_able() {
    "$1" -c '
import sys
from importlib.util import find_spec

names = "fairseq", "sacrebleu", "sacremoses", "subword_nmt", "sentencepiece", "ruamel.yaml", "tqdm"
# A folder of this name has no origin. A package that is missing ends this in an error.
sys.exit(sys.version_info < (3, 10) or not all(find_spec(name).origin for name in names))
' >/dev/null 2>&1
}

for python in python3 python "$root/.venv/bin/python"; do
    if is_able "$python"; then
        # With -m, Python would look for the module in the caller's folder first.
        PYTHONUTF8=1 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$root/recipes/pipeline/__main__.py" "$@"
    fi
done
echo "recipes: no Python >= 3.10 with fairseq and the packages of the recipes found (neither the active one nor $root/.venv); run 'make install' first" >&2
exit 1
