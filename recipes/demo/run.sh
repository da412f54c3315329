#!/usr/bin/env bash
# Runs the recipe of this folder: docs/recipes.md. A copy outside the clone needs FAIRSEQ_ROPE, the path of the clone.
here=$(cd "$(dirname "$0")" && pwd) && root=${FAIRSEQ_ROPE:-$here/../..}
PATH="$root/.venv/bin:$PATH" PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec python -m recipes "$here" "$@"
