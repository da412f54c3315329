#!/usr/bin/env bash
# Documents, English-German: from News Commentary with its articles to the BLEU of documents. Flags: see docs/recipes.md.
here=$(cd "$(dirname "$0")" && pwd)
clone=${FAIRSEQ_ROPE:-$here/../..} # a copy of this folder elsewhere needs FAIRSEQ_ROPE
if [ ! -f "$clone/recipes/pipeline/run.sh" ]; then
    echo "run.sh: $here is not in fairseq-rope's recipes/: set FAIRSEQ_ROPE to the folder of fairseq-rope" >&2
    exit 1
fi
exec bash "$clone/recipes/pipeline/run.sh" "$here" "$@"
