"""Stands in for the programs that a recipe calls. Each output is a checksum of the program's inputs and flags.

``install(folder)`` writes them there. A fake training takes the time of SECONDS for each epoch, and notes each finished
epoch in the file LEDGER. It has no memory for batches of more than MEMORY tokens.
"""

import textwrap

# Settings of a quick run.
FEW = ["precision=fp32", "gpus=0", "max_epochs=2", "average_checkpoints=2"]
# A Python whose recipes call the fake programs, for commands in processes of their own.
RECIPES = """#!/bin/bash
exec {python} -c "from recipes import script, __main__; script.PROGRAMS='{programs}'; __main__.main()" "${{@:3}}"
"""

PYTHON = r"""
#!/usr/bin/env bash
set -euo pipefail
digest() { cat "$@" | sha256sum | cut -c 1-16; }
lines() { for n in 1 2 3 4 5 6; do printf '%s %d\n' "$1" $n; done; }
tool=$2; shift 2; all=$*
files=() output= ; while [ $# -gt 0 ]; do case $1 in
    --output) output=$2; shift ;;
    --input|--reference|--generated|--source|--sys|--ref|--src|--inputs|--codes|--path|--data) files+=("$2"); shift ;;
    *{lang}*) files+=("$1") ;;
    --*) ;;
    *) [ ! -f "$1" ] || files+=("$1") ;;
esac; shift; done
# paths have hashes of the settings, which a program does not read
flags=$(sed -E 's#[^ ]*/##g' <<<"$all" | sed -E 's/--(manifest|output|input|inputs) [^ ]*//g')
case $tool in
    recipes.text.extract)
        for lang in en de; do lines "$(cat ${files[0]/\{lang\}/$lang} | digest) $lang" >$output.$lang; done ;;
    recipes.text.clean)
        for lang in en de; do lines "$(echo "$flags" | cat - ${files[0]}.$lang | digest)" >$output.$lang; done ;;
    fairseq_rope)
        case $flags in
            average*)
                last=$(ls ${files[0]}/checkpoint[0-9]*.pt | sort -V | tail -n 2)
                { echo "$flags"; tail -n 1 -q $last; } | digest >$output ;;
            score*)
                printf '{"references": [{"sacreBLEU_after_moses": %s}], ' ${CEILING:-99.5}
                printf '"systems": [{"metrics": [{"name": "sacreBLEU", "score": %d, "signature": "s"}]}]}' \
                    $((16#$(cat "${files[@]}" | digest | cut -c 1-4))) ;;
            export*) mkdir $output; { echo "$flags"; cat ${files[0]}; } | digest >$output/model.bin ;;
        esac ;;
    *) lines "$({ echo "$flags"; cat "${files[@]}"; } | digest)" >$output ;;
esac
"""

PREPROCESS = r"""
#!/usr/bin/env bash
set -euo pipefail
prefixes=() ; while [ $# -gt 0 ]; do case $1 in --trainpref|--validpref|--testpref) prefixes+=($2) ;; esac; shift; done
for prefix in "${prefixes[@]}"; do for lang in en de; do
    cat $prefix.$lang | sha256sum | cut -c 1-16 >>data.$lang; cp data.$lang dict.$lang.txt
done; done
"""

GENERATE = r"""
#!/usr/bin/env bash
set -euo pipefail
data=$1
while [ $# -gt 0 ]; do case $1 in --path) model=$2 ;; --beam) beam=$2 ;; esac; shift; done
echo "beam $beam of $(cat $model $data/data.*)"
"""

TRAIN = r"""
#!/usr/bin/env bash
set -euo pipefail
data=$1; flags=$(sed -E 's#[^ ]*/##g; s/--(max-epoch|max-update|keep-last-epochs) [^ ]*//g' <<<"${*:2}")
while [ $# -gt 0 ]; do case $1 in
    --max-epoch) most=$2 ;; --keep-last-epochs) keep=$2 ;; --max-tokens) tokens=$2 ;;
esac; shift; done
mkdir -p checkpoints; epoch=0
[ ! -e checkpoints/checkpoint_last.pt ] || epoch=$(head -n 1 checkpoints/checkpoint_last.pt)
if [ $tokens -gt ${MEMORY:-99999} ]; then echo "OOM: Ran out of memory with exception"; sleep 60; fi
case $flags in *--fail*) echo "no memory"; exit 3 ;; esac
while [ $epoch -lt $most ]; do
    epoch=$((epoch + 1))
    sleep ${SECONDS_AN_EPOCH:-0}
    { echo $epoch; { echo "$flags $epoch"; cat $data/data.*; } | sha256sum; } >checkpoints/part
    cp checkpoints/part checkpoints/checkpoint$epoch.pt
    mv checkpoints/part checkpoints/checkpoint_last.pt
    echo "$(basename "$PWD") $epoch" >>"$LEDGER"
    rm -f checkpoints/checkpoint$((epoch - keep)).pt
    echo "{\"epoch\": $epoch, \"train_loss\": \"5\", \"train_num_updates\": \"$((10 * epoch))\"}"
    loss=$(sed -E 's/.*--lr ([0-9.e-]+) .*/\1/' <<<"$flags")
    echo "{\"epoch\": $epoch, \"valid_loss\": \"$loss\", \"valid_num_updates\": \"$((10 * epoch))\"}"
done
"""


def install(folder):
    """Write the programs into *folder*, and return it."""
    folder.mkdir(exist_ok=True)
    programs = {"python": PYTHON, "fairseq-preprocess": PREPROCESS, "fairseq-generate": GENERATE}
    for name, text in {**programs, "fairseq-train": TRAIN}.items():
        (folder / name).write_text(textwrap.dedent(text).lstrip())
        (folder / name).chmod(0o755)
    return folder


def change_data(place, content, name="data"):
    (place / name).mkdir(exist_ok=True)
    for part in ("train", "valid", "test", "news"):
        for lang in ("en", "de"):
            (place / name / f"{part}.{lang}.gz").write_text(f"{content} {part} {lang}")
