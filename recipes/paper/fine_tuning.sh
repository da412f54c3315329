#!/usr/bin/env bash
# RoFormer §4.3, table 2: a masked language model is fine-tuned on a task of GLUE, or on one that is made from text.
#
#     [VARIABLE=VALUE …] bash recipes/paper/fine_tuning.sh DATA WORK [ARCH [FLAG …]]
#
# WORK has a finished model of masked_lm.sh with this ARCH, ENCODING, SEED and these sizes. DATA is a folder with
# train.tsv and dev.tsv of TASK or, with TASK=documents, with train.txt and valid.txt (blank lines between documents).
# Each FLAG goes to fairseq-train. The last line has the score of the development set after the last update. To
# continue after an interruption, repeat the command. The defaults are for CPUs. The paper: the sizes of masked_lm.sh,
# BATCH=32, LR=2e-5, 3e-5, 4e-5 and 5e-5, and the flags --max-epoch 3 --max-update 0 --lr-scheduler fixed
set -euo pipefail
data=${1:?DATA: a folder with train.tsv and dev.tsv, or with train.txt and valid.txt}
work=${2:?WORK: the folder of masked_lm.sh}
arch=${3:-roberta_rope}
TASK=${TASK:-documents}       # MRPC, SST-2, QNLI, STS-B, QQP, MNLI, or own: columns sentence1, sentence2, label
PASSAGE=${PASSAGE:-120}       # characters of each text of TASK=documents
PRETRAINED=${PRETRAINED:-yes} # no: start from random weights
LAYERS=${LAYERS:-4} WIDTH=${WIDTH:-128} HEADS=${HEADS:-4} TOKENS=${TOKENS:-512}
BATCH=${BATCH:-16} LR=${LR:-0.0003} WARMUP=${WARMUP:-50} UPDATES=${UPDATES:-1000} INTERVAL=${INTERVAL:-100}
ENCODING=${ENCODING:-rope} SEED=${SEED:-1}

root=$(CDPATH="" cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
case $arch in *rope*) name=$ENCODING ours="--position-encoding $ENCODING" ;; *) name=$arch ours="" ;; esac
text=$work/$TASK.text bin=$work/$TASK.bin
model=$work/$name.seed$SEED.$TASK.pretrained-$PRETRAINED.lr$LR

binarise() { # PART DICTIONARY
    fairseq-preprocess --only-source --srcdict "$2" --trainpref "$text/$1/train.txt" --validpref "$text/$1/valid.txt" \
        --destdir "$bin.tmp/$1"
}
if [ ! -d "$bin" ]; then
    rm -rf "$text" "$bin.tmp"
    python -m recipes.paper.prepare pairs "$data" "$text" "$work/subwords.model" "$TASK" "$PASSAGE"
    sort -u "$text/label/train.txt" | sed 's/$/ 1/' >"$text/label/dict.txt"
    for input in "$text"/input*; do binarise "${input##*/}" "$work/data-bin/dict.txt"; done
    binarise label "$text/label/dict.txt"
    for part in train valid; do cp "$text/label/$part.txt" "$bin.tmp/label/$part.label"; done # numbers of STS-B
    mv "$bin.tmp" "$bin"
fi
case $TASK in
MRPC | QQP) task="--num-classes 2 --report-acc-and-f1" ;;
STS-B) task="--num-classes 1 --regression-target --report-pearson-and-spearman" ;;
*) task="--num-classes $(wc -l <"$text/label/dict.txt")" ;;
esac
[ "$PRETRAINED" = no ] || ours="$ours --finetune-from-model $work/$name.seed$SEED/checkpoint_last.pt"

fairseq-train "$bin" --user-dir "$root/fairseq_rope" --task sentence_prediction --criterion sentence_prediction $task \
    --init-token 0 --separator-token 2 --shorten-method truncate --arch "$arch" --encoder-layers "$LAYERS" \
    --encoder-embed-dim "$WIDTH" --encoder-ffn-embed-dim $((4 * WIDTH)) --encoder-attention-heads "$HEADS" \
    --max-positions "$TOKENS" $ours --batch-size "$BATCH" --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 \
    --lr "$LR" --lr-scheduler inverse_sqrt --warmup-updates "$WARMUP" --max-update "$UPDATES" \
    --validate-interval-updates "$INTERVAL" --save-interval-updates "$INTERVAL" --keep-interval-updates 1 \
    --no-epoch-checkpoints --log-interval 50 --num-workers 0 --distributed-world-size 1 --seed "$SEED" \
    --save-dir "$model" "${@:4}"
fairseq-validate "$bin" --user-dir "$root/fairseq_rope" --task sentence_prediction --criterion sentence_prediction \
    --path "$model/checkpoint_last.pt" --batch-size "$BATCH"
