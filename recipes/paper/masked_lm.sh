#!/usr/bin/env bash
# RoFormer §4.2, figure 3 on the left: a masked language model with RoPE, beside one with BERT's learned positions.
#
#     [VARIABLE=VALUE …] bash recipes/paper/masked_lm.sh DATA WORK [ARCH [FLAG …]]
#
# DATA is a folder with train.txt and valid.txt, or train.en and valid.en: a paragraph a line. WORK gets the binary data
# and the models. Each FLAG goes to fairseq-train. ARCH can be fairseq's roberta. The last line has the validation loss
# in bits per masked token. To continue after an interruption, repeat the command.
#
# The defaults are for CPUs. The paper: LAYERS=12 WIDTH=768 HEADS=12 BATCH=32 LR=1e-5 UPDATES=100000, here with
# SUBWORDS=30000 and the flags --update-freq 2 --lr-scheduler fixed --weight-decay 0.01 --adam-betas '(0.9, 0.999)'
set -euo pipefail
data=${1:?DATA: a folder with train.txt and valid.txt}
work=${2:?WORK: a folder for binary data and models}
arch=${3:-roberta_rope}
LAYERS=${LAYERS:-4} WIDTH=${WIDTH:-128} HEADS=${HEADS:-4}
SUBWORDS=${SUBWORDS:-0} # 0: tokens are characters
TOKENS=${TOKENS:-512} BATCH=${BATCH:-4} LR=${LR:-0.002} WARMUP=${WARMUP:-100} UPDATES=${UPDATES:-2000}
INTERVAL=${INTERVAL:-100} # updates between validations
ENCODING=${ENCODING:-rope} SEED=${SEED:-1}

root=$(CDPATH="" cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
case $arch in *rope*) name=$ENCODING ours="--position-encoding $ENCODING" ;; *) name=$arch ours="" ;; esac
model=$work/$name.seed$SEED

if [ ! -d "$work/data-bin" ]; then
    rm -rf "$work/data-bin.tmp"
    mkdir -p "$work"
    python -m recipes.paper.prepare text "$data" "$work/text" "$work/subwords.model" "$SUBWORDS"
    fairseq-preprocess --only-source --trainpref "$work/text/train.txt" --validpref "$work/text/valid.txt" \
        --padding-factor 1 --destdir "$work/data-bin.tmp"
    mv "$work/data-bin.tmp" "$work/data-bin"
fi

fairseq-train "$work/data-bin" --user-dir "$root/fairseq_rope" --task masked_lm --criterion masked_lm \
    --arch "$arch" --encoder-layers "$LAYERS" --encoder-embed-dim "$WIDTH" --encoder-ffn-embed-dim $((4 * WIDTH)) \
    --encoder-attention-heads "$HEADS" --max-positions "$TOKENS" $ours --tokens-per-sample "$TOKENS" \
    --batch-size "$BATCH" --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 --lr "$LR" \
    --lr-scheduler inverse_sqrt --warmup-updates "$WARMUP" --max-update "$UPDATES" \
    --validate-interval-updates "$INTERVAL" --save-interval-updates "$INTERVAL" --keep-interval-updates 1 \
    --no-epoch-checkpoints --log-interval 50 --num-workers 0 --distributed-world-size 1 --seed "$SEED" \
    --save-dir "$model" "${@:4}"
fairseq-validate "$work/data-bin" --user-dir "$root/fairseq_rope" --task masked_lm \
    --path "$model/checkpoint_last.pt" --batch-size "$BATCH"
