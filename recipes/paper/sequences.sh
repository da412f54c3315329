#!/usr/bin/env bash
# Copy, repeat and reverse random sequences (Kogkalidis et al. 2024, arXiv:2312.16045): what can an encoding do?
#
#     [VARIABLE=VALUE …] bash recipes/paper/sequences.sh WORK [FLAG …]
#
# WORK gets the data and the models. Each FLAG goes to fairseq-train. The last two lines have the perplexity and the
# share of exact sequences (greedy search, in %), for the lengths of training and for twice these lengths. To
# continue after an interruption, repeat the command.
#
# The defaults are for CPUs. The authors: WIDTH=512 HEADS=8 LENGTH=100 DEVIATION=10 LR=5e-4 WARMUP=470 EPOCHS=400
set -euo pipefail
work=${1:?WORK: a folder for data and models}
TASK=${TASK:-copy} # copy, repeat or reverse
LENGTH=${LENGTH:-20} DEVIATION=${DEVIATION:-2}
LAYERS=${LAYERS:-2} WIDTH=${WIDTH:-128} HEADS=${HEADS:-4}
LR=${LR:-0.001} WARMUP=${WARMUP:-470} EPOCHS=${EPOCHS:-20}
ENCODING=${ENCODING:-rope} SEED=${SEED:-1}

root=$(CDPATH="" cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
data=$work/$TASK/data-bin model=$work/$TASK/$ENCODING.seed$SEED text=$work/$TASK/text

if [ ! -d "$data" ]; then
    rm -rf "$data.tmp"
    python -m recipes.paper.sequences "$TASK" "$text" "$LENGTH" "$DEVIATION"
    fairseq-preprocess --source-lang source --target-lang target --joined-dictionary --trainpref "$text/train" \
        --validpref "$text/valid" --testpref "$text/test,$text/long" --destdir "$data.tmp"
    mv "$data.tmp" "$data"
fi

sizes() { echo "--$1-layers $LAYERS --$1-embed-dim $WIDTH --$1-ffn-embed-dim $((4 * WIDTH)) --$1-attention-heads $HEADS"; }
fairseq-train "$data" --user-dir "$root/fairseq_rope" --arch transformer_rope --position-encoding "$ENCODING" \
    $(sizes encoder) $(sizes decoder) --share-all-embeddings --dropout 0.1 --criterion cross_entropy \
    --optimizer adam --adam-betas '(0.9, 0.98)' --lr "$LR" --lr-scheduler inverse_sqrt --warmup-updates "$WARMUP" \
    --batch-size 64 --max-epoch "$EPOCHS" --no-epoch-checkpoints --log-interval 50 --num-workers 0 \
    --distributed-world-size 1 --seed "$SEED" --save-dir "$model" "${@:2}"
evaluated=("$data" --user-dir "$root/fairseq_rope" --path "$model/checkpoint_best.pt" --batch-size 64)
results=()
for part in test test1; do # of training's lengths, and of twice these
    fairseq-validate "${evaluated[@]}" --task translation --valid-subset $part >"$model/$part.validate"
    fairseq-generate "${evaluated[@]}" --gen-subset $part --beam 1 --max-len-a 2 --max-len-b 10 >"$model/$part.generate"
    exact=$(awk -F '\t' '/^T-/ { target = $2 } /^H-/ { all++; exact += $3 == target } END { print 100 * exact / all }' \
        "$model/$part.generate")
    results+=("$part | $(grep -o 'ppl [0-9.]*' "$model/$part.validate") | exact $exact")
done
printf '%s\n' "${results[@]}"
