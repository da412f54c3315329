#!/usr/bin/env bash
# RoFormer §4.5, table 5: long Chinese documents. Which of B and C belongs to A?
#
#     [VARIABLE=VALUE …] bash recipes/paper/long_documents.sh DATA WORK [ARCH [FLAG …]]
#
# DATA is a folder with text.train.txt and text.valid.txt (a paragraph a line), and train.json, valid.json and test.json
# in the layout of CAIL2019-SCM. masked_lm.sh trains a model of characters on the text. It is then fine-tuned once for
# each of LIMITS, to which A with B and A with C are cut. Each FLAG goes to fairseq-train. The last line of a limit has
# the test accuracy of the checkpoint with the best accuracy in validation. To continue after an interruption, repeat
# the command. The defaults are for CPUs. With the paper's sizes: LAYERS=12 WIDTH=768 HEADS=12 BATCH=256 LR=1e-4
# WARMUP=10000 UPDATES=200000 TUNING_BATCH=32 TUNING_LR=2e-5 EPOCHS=5
set -euo pipefail
data=${1:?DATA: a folder with text.train.txt, text.valid.txt, train.json, valid.json and test.json}
work=${2:?WORK: a folder for binary data and models}
arch=${3:-roberta_rope}
LIMITS=${LIMITS:-512 1024}
export LAYERS=${LAYERS:-2} WIDTH=${WIDTH:-128} HEADS=${HEADS:-4} ENCODING=${ENCODING:-rope} SEED=${SEED:-1}
export TOKENS=${TOKENS:-1024} BATCH=${BATCH:-2} UPDATES=${UPDATES:-800} SUBWORDS=0                # pre-training
TUNING_BATCH=${TUNING_BATCH:-4} TUNING_LR=${TUNING_LR:-0.0003} TUNING_WARMUP=${TUNING_WARMUP:-20} # fine-tuning
EPOCHS=${EPOCHS:-2}

root=$(CDPATH="" cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
case $arch in *rope*) name=$ENCODING ours="--position-encoding $ENCODING" ;; *) name=$arch ours="" ;; esac
bash "$root/recipes/paper/masked_lm.sh" "$data" "$work" "$arch" "${@:4}"

for limit in $LIMITS; do
    text=$work/$limit.text bin=$work/$limit.bin model=$work/$name.seed$SEED.$limit
    if [ ! -d "$bin" ]; then
        rm -rf "$text" "$bin.tmp"
        python -m recipes.paper.prepare triples "$data" "$text" "$work/subwords.model" "$limit"
        for input in input0 input1 input2; do
            fairseq-preprocess --only-source --srcdict "$work/data-bin/dict.txt" --trainpref "$text/$input/train.txt" \
                --validpref "$text/$input/valid.txt" --testpref "$text/$input/test.txt" --destdir "$bin.tmp/$input"
        done
        mkdir "$bin.tmp/label"
        for part in train valid test; do cp "$text/label/$part.txt" "$bin.tmp/label/$part.label"; done
        mv "$bin.tmp" "$bin"
    fi
    fairseq-train "$bin" --user-dir "$root/fairseq_rope" --task sentence_ranking --criterion sentence_ranking \
        --num-classes 2 --init-token 0 --separator-token 2 --arch "$arch" --encoder-layers "$LAYERS" \
        --encoder-embed-dim "$WIDTH" --encoder-ffn-embed-dim $((4 * WIDTH)) --encoder-attention-heads "$HEADS" \
        --max-positions "$TOKENS" $ours --finetune-from-model "$work/$name.seed$SEED/checkpoint_last.pt" \
        --batch-size "$TUNING_BATCH" --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 --lr "$TUNING_LR" \
        --lr-scheduler inverse_sqrt --warmup-updates "$TUNING_WARMUP" --max-epoch "$EPOCHS" --no-epoch-checkpoints \
        --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric --log-interval 50 --num-workers 0 \
        --distributed-world-size 1 --seed "$SEED" --save-dir "$model" "${@:4}"
    fairseq-validate "$bin" --user-dir "$root/fairseq_rope" --task sentence_ranking --valid-subset test \
        --path "$model/checkpoint_best.pt" --batch-size 8
done
