#!/usr/bin/env bash
# Documents, English-German: from News Commentary with its articles to the BLEU of documents. Flags: see docs/recipes.md.
here=$(CDPATH="" cd "$(dirname "$0")" && pwd)
run=${FAIRSEQ_ROPE:-$here/../..}/recipes/pipeline/run.sh # a copy of this folder elsewhere needs FAIRSEQ_ROPE
[ -f "$run" ] || { echo "run.sh: $here is not in fairseq-rope's recipes/: set FAIRSEQ_ROPE to its folder, or, for a job, give sbatch --wrap 'bash PATH/run.sh FLAGS'" >&2 && exit 1; }
exec bash "$run" "$here" "$@"
