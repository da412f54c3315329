#!/usr/bin/env bash
# RoFormer §4.4, figure 3 on the right: a language model of bytes with linear attention, with and without RoPE.
#
#     [VARIABLE=VALUE …] bash recipes/paper/language_model.sh DATA WORK [ARCH [FLAG …]]
#
# DATA is enwik8 (split 90 : 5 : 5), or a folder with train.txt, valid.txt and test.txt. WORK gets the binary data and
# the models. Each FLAG goes to fairseq-train. ARCH can be fairseq's transformer_lm, which has no linear attention.
# The last line has the loss of the test set in bits per byte. To continue after an interruption, repeat the command.
#
# The defaults are for CPUs. The paper: LAYERS=12 WIDTH=768 HEADS=12 EMBED=768 TOKENS=1024 BATCH=16 LR=1e-4
# UPDATES=100000 with the flags --update-freq 8 --lr-scheduler fixed --feature-map favor
set -euo pipefail
data=${1:?DATA: enwik8, or a folder with train.txt, valid.txt and test.txt}
work=${2:?WORK: a folder for binary data and models}
arch=${3:-transformer_lm_rope}
LAYERS=${LAYERS:-4} WIDTH=${WIDTH:-128} HEADS=${HEADS:-4} EMBED=${EMBED:-512} # EMBED: width of the embeddings
TOKENS=${TOKENS:-512} BATCH=${BATCH:-4} LR=${LR:-0.003} WARMUP=${WARMUP:-100} UPDATES=${UPDATES:-1500}
INTERVAL=${INTERVAL:-125} # updates between validations
ENCODING=${ENCODING:-rope} SEED=${SEED:-1}

root=$(CDPATH="" cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
case $arch in *rope*) name=$ENCODING ours="--position-encoding $ENCODING --attention-type linear" ;; *) name=$arch ours="" ;; esac
model=$work/$name.seed$SEED

if [ ! -d "$work/data-bin" ]; then
    rm -rf "$work/data-bin.tmp"
    python -m recipes.paper.prepare bytes "$data" "$work/text"
    fairseq-preprocess --only-source --srcdict "$work/text/dict.txt" --trainpref "$work/text/train.txt" \
        --validpref "$work/text/valid.txt" --testpref "$work/text/test.txt" --destdir "$work/data-bin.tmp"
    mv "$work/data-bin.tmp" "$work/data-bin"
fi

fairseq-train "$work/data-bin" --user-dir "$root/fairseq_rope" --task language_modeling --criterion cross_entropy \
    --arch "$arch" --decoder-layers "$LAYERS" --decoder-embed-dim "$WIDTH" --decoder-ffn-embed-dim $((4 * WIDTH)) \
    --decoder-attention-heads "$HEADS" --decoder-input-dim "$EMBED" --decoder-output-dim "$EMBED" \
    --share-decoder-input-output-embed --dropout 0.1 $ours --tokens-per-sample "$TOKENS" --batch-size "$BATCH" \
    --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 --lr "$LR" --lr-scheduler inverse_sqrt \
    --warmup-updates "$WARMUP" --max-update "$UPDATES" --validate-interval-updates "$INTERVAL" \
    --save-interval-updates "$INTERVAL" --keep-interval-updates 1 --no-epoch-checkpoints --log-interval 50 \
    --num-workers 0 --distributed-world-size 1 --seed "$SEED" --save-dir "$model" "${@:4}"
fairseq-eval-lm "$work/data-bin" --user-dir "$root/fairseq_rope" --path "$model/checkpoint_last.pt" \
    --gen-subset test --tokens-per-sample "$TOKENS" --batch-size 8
