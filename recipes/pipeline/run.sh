#!/usr/bin/env bash
# Run a recipe: bash recipes/pipeline/run.sh NAME|FOLDER [flags]; the run.sh of a recipe calls this.
# Uses the active Python if it has fairseq and what the recipes import, else the one that `make install` set up in .venv.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)

is_able() {
    "$1" -c '
import sys
from importlib.util import find_spec

assert sys.version_info >= (3, 10)
for name in "fairseq", "sacrebleu", "ruamel.yaml", "tqdm":
    assert find_spec(name).origin  # a folder of this name has none
' >/dev/null 2>&1
}

for python in python3 python "$root/.venv/bin/python"; do
    if is_able "$python"; then
        # With -m, Python would look for the module in the caller's folder first.
        PYTHONUTF8=1 PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$root/recipes/pipeline/__main__.py" "$@"
    fi
done
echo "recipes: no Python >= 3.10 with fairseq, sacrebleu, ruamel.yaml and tqdm found (neither the active one nor $root/.venv); run 'make install' first" >&2
exit 1
