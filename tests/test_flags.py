"""Every flag of fairseq's programs that a translator uses works, ends in one sentence, or changes nothing for a reason.

In the first tables, a line has a flag with its value and, after "|", flags of both runs: the run with the flag must
print or write something else than the run without it. ENDS has the error of a run with the flag, WARNINGS the warning,
ELSEWHERE the test of the flag, and NOT_SEEN why a flag changes nothing in a test. docs/compatibility.md lists the flags
that are ignored.
"""

import argparse
import json
import re
import shlex
import shutil
import string

import fairseq_cli.score
import pytest
import torch
from fairseq import options
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY, LegacyFairseqTask

from fairseq_rope.checkpoints import load_checkpoint
from fairseq_rope.errors import InputError
from tests.commands import PLUGIN, ROOT, call, outputs, training

# Of fairseq-generate and fairseq-interactive.
SEARCH = """
--beam 2
--nbest 2
--max-len-a 0.5
--max-len-b 3
--min-len 9
--match-source-len
--unnormalized
--lenpen 3
--unkpen -100
--no-repeat-ngram-size 2
--sampling | --nbest 5
--sampling-topk 1 | --sampling --nbest 5
--sampling-topp 0.1 | --sampling --nbest 5
--seed 7 | --sampling --nbest 5
--no-seed-provided | --sampling --nbest 5
--temperature 5
--diverse-beam-groups 5 | --nbest 5
--diverse-beam-strength 5 | --nbest 5 --diverse-beam-groups 5
--diversity-rate 5
--print-alignment hard
--retain-dropout
--retain-dropout-modules TransformerDecoderBase | --retain-dropout
--bf16
--memory-efficient-bf16
--fp16
--memory-efficient-fp16
--model-overrides "{'no_scale_embedding': True}"
--post-process sentencepiece
"""
OF_GENERATE = """
--gen-subset valid
--quiet
--results-path $folder/results
--scoring chrf
--sacrebleu
--num-shards 2
--shard-id 1 | --num-shards 2
--distributed-world-size 2
--distributed-rank 1 | --distributed-world-size 2
--score-reference
--prefix-size 2
--log-interval 1
--log-format json | --log-interval 1
--truncate-source | --max-source-positions 5 --skip-invalid-size-inputs-valid-test
"""
# Three updates without validation.
TRAINING = """
--log-interval 1
--log-format simple
--log-file $folder/log
--seed 7
--bf16
--memory-efficient-bf16
--memory-efficient-fp16
--fp16-init-scale 4 | --memory-efficient-fp16
--fp16-scale-window 1 | --memory-efficient-fp16 --fp16-init-scale 4
--optimizer adagrad
--lr-scheduler fixed
--required-batch-size-multiple 1
--required-seq-len-multiple 8
--max-tokens 100
--batch-size 5
--train-subset valid
--curriculum 1
--update-ordered-indices-seed
--stop-time-hours 0.000001
--max-epoch 1 | --max-update 30
--max-update 2
--clip-norm 0.01
--sentence-avg
--update-freq 2
--lr 0.5
--stop-min-lr 1
--skip-remainder-batch | --update-freq 3 --max-update 8
--store-ema
--ema-decay 0.1 | --store-ema
--ema-start-update 5 | --store-ema
--ema-update-freq 2 | --store-ema --ema-decay 0.5
--max-source-positions 5
--max-target-positions 5
--left-pad-source
--left-pad-target
--truncate-source | --max-source-positions 5
--label-smoothing 0.4
--report-accuracy
--ignore-prefix-size 2
--adam-betas (0.1,0.2)
--adam-eps 0.1
--weight-decay 0.5
--warmup-updates 3
--warmup-init-lr 0.001 | --warmup-updates 3
"""
# Two epochs of training with validation.
SAVING = """
--validate-interval 2
--validate-interval-updates 1
--validate-after-updates 6
--disable-validation
--valid-subset test
--max-valid-steps 1 | --batch-size-valid 4
--eval-bleu
--eval-bleu-args '{"beam":1,"max_len_b":5}' | --eval-bleu
--eval-bleu-print-samples | --eval-bleu --eval-bleu-args '{"beam":1,"max_len_b":5}'
--save-interval 2
--save-interval-updates 1
--keep-interval-updates 1 | --save-interval-updates 1
--keep-interval-updates-pattern 2 | --save-interval-updates 1 --keep-interval-updates 1
--keep-last-epochs 1
--keep-best-checkpoints 1
--no-save
--no-epoch-checkpoints
--no-last-checkpoints
--no-save-optimizer-state
--maximize-best-checkpoint-metric
--best-checkpoint-metric nll_loss
--checkpoint-suffix=-x
"""
# Two more updates after those of another folder.
RESUMING = """
--restore-file $other/checkpoint_last.pt
--continue-once $other/checkpoint_last.pt | --save-dir $folder/new
--finetune-from-model $other/checkpoint_last.pt | --save-dir $folder/new
--reset-optimizer
--reset-dataloader
--reset-meters
--optimizer-overrides "{'weight_decay': 0.9}"
"""
# Models of transformer_rope_tiny with the flag and without it.
MODEL = """
--activation-fn gelu
--dropout 0.9
--attention-dropout 0.5
--activation-dropout 0.5
--relu-dropout 0.5
--encoder-embed-dim 32
--encoder-ffn-embed-dim 32
--encoder-layers 1
--encoder-attention-heads 1
--encoder-normalize-before
--encoder-layerdrop 0.9
--decoder-embed-dim 32
--decoder-ffn-embed-dim 32
--decoder-layers 1
--decoder-attention-heads 1
--decoder-normalize-before
--decoder-layerdrop 0.9
--decoder-output-dim 32
--share-decoder-input-output-embed
--share-all-embeddings
--merge-src-tgt-embed
--layernorm-embedding
--no-scale-embedding
--no-cross-attention
--no-decoder-final-norm | --decoder-normalize-before
--quant-noise-pq 0.5
--quant-noise-pq-block-size 4 | --quant-noise-pq 0.5
--adaptive-softmax-cutoff 8,16
--adaptive-softmax-dropout 0.9 | --adaptive-softmax-cutoff 8,16
--adaptive-softmax-factor 2 | --adaptive-softmax-cutoff 8,16
--position-encoding none
--encoder-position-encoding none
--decoder-position-encoding none
--attention-length-scaling 100
--norm-type rms
--ffn-type glu
--scale-glu-width | --ffn-type glu
--attention-type linear
--encoder-attention-type linear
--decoder-attention-type linear
--feature-map favor | --attention-type linear
--favor-features 6 | --attention-type linear --feature-map favor
--favor-seed 7 | --attention-type linear --feature-map favor
--qk-norm
--no-projection-bias
--encoder-kv-heads 1
--decoder-kv-heads 1
--cross-kv-heads 1
--shape-max-shift 5 | --position-encoding shape
--rope-base 50
--rope-layout half
--rope-fraction 0.5
--rope-scaling '{"rope_type": "linear", "factor": 2}'
--encoder-rope-scaling '{"rope_type": "linear", "factor": 2}'
--decoder-rope-scaling '{"rope_type": "linear", "factor": 2}'
--alibi-type asymmetric | --position-encoding alibi
--relative-attention-num-buckets 8 | --position-encoding t5
--relative-attention-max-distance 20 | --position-encoding t5
--max-relative-positions 2 | --position-encoding shaw
--deberta-max-distance 2 | --position-encoding deberta
--tupe-absolute-only | --position-encoding tupe
--xpos-scale-base 5 | --position-encoding rope --decoder-position-encoding xpos
"""
PREPROCESSING = """
--source-lang de
--target-lang en
--trainpref $text/valid
--validpref $text/valid
--testpref $text/test
--destdir $folder/other
--thresholdsrc 120
--thresholdtgt 120
--nwordssrc 5
--nwordstgt 5
--srcdict $bin/dict.en.txt | --padding-factor 64
--tgtdict $bin/dict.de.txt | --padding-factor 64
--joined-dictionary
--only-source
--padding-factor 64
--dict-only
--dataset-impl raw
--align-suffix align | --trainpref $aligned/train
--alignfile $aligned/train.align | --trainpref $aligned/train
"""
SCORING = """
--sys $text/other
--ref $text/other
--order 1
--ignore-case
"""
# (programs, flags, the end): what the error of a run says.
PROGRAMS = ("generate", "interactive", "train", "preprocess", "score")
ENDS = [
    ("generate", "--shard-id 2 --num-shards 2", "shard_id must be between 0 and num_shards"),
    ("generate", "--print-step", "steps"),
    ("generate", "--retain-iter-history", "history"),
    ("generate", "--max-target-positions 5", "Size of sample #"),
    ("generate", "--distributed-world-size 2 --num-shards 2", "both divide the data: give one of them"),
    ("interactive", "--lm-path x.pt", "--lm-path: fairseq-interactive reads no language model"),
    ("interactive", "--score-reference", "--score-reference: fairseq-interactive has no references"),
    ("interactive", "--print-alignment soft", "too many values to unpack"),
    ("interactive", "--distributed-world-size 2", "world size is 2 but have 0 available devices"),
    ("interactive", "--pipeline-model-parallel", "--pipeline-balance is currently required"),
    ("interactive train", "--num-shards 2", "--num-shards 2: is for fairseq-generate and fairseq-eval-lm"),
    (
        "interactive train",
        "--distributed-init-method env://",
        "env://: fairseq starts a process for each GPU, and there",
    ),
    ("generate interactive", "--checkpoint-suffix=-x", "Model file not found: .*checkpoint_last-x.pt"),
    ("generate interactive", "--checkpoint-shard-count 2", "Model file not found: .*checkpoint_last_part0.pt"),
    ("generate interactive", "--max-source-positions 5", "Size of sample #"),
    ("train", "--write-checkpoints-asynchronously", "--write-checkpoints-asynchronously: needs iopath"),
    ("train", "--tpu", "--tpu: needs torch_xla"),
    ("train", "--model-parallel-size 2", "install the megatron submodule"),
    ("train", "--use-plasma-view", "pip install pyarrow"),
    ("train", "--profile", "Torch not compiled with CUDA enabled|NVTX|CUDA"),
    ("train", "--pipeline-model-parallel", "--pipeline-balance is currently required"),
    ("train", "--distributed-world-size 2", "world size is 2 but have 0 available devices"),
    ("train", "--ddp-backend fully_sharded", "pip install fairscale"),
    ("train", "--zero-sharding os", "pip install fairscale"),
    ("train", "--cpu-offload", "--cpu-offload requires --ddp-backend=fully_sharded"),
    ("train", "--quantization-config-path missing.yaml", "missing.yaml"),
    ("train", "--quant-noise-scalar 0.5", "Torch not compiled with CUDA enabled|CUDA"),
    ("train", "--tie-adaptive-weights --tie-adaptive-proj --adaptive-softmax-cutoff 8,16", "weights_for_band"),
    ("train", "--fp16-adam-stats", "--fp16-adam-stats is only supported with FusedAdamV1"),
    ("train", "--base-layers 1", "Default process group has not been initialized"),
    ("train", "--store-ema --ema-seed-model missing.pt", "missing.pt"),
    ("train", "--continue-once missing.pt", "--continue-once missing.pt does not exist"),
]
# (programs, flags, the warning): the run has the result of a run without the flags.
WARNINGS = [
    ("generate", "--num-shards 1 --shard-id 1", "--shard-id 1: has no effect without --num-shards, and all is read"),
    ("interactive", "--print-step", "--print-step: has no effect: fairseq-interactive prints no steps"),
    ("interactive", "--retain-iter-history", "--retain-iter-history: has no effect: fairseq-interactive prints no "),
    ("interactive", "--prefix-size 2", "--prefix-size: has no effect: fairseq-interactive has no references"),
    ("interactive train", "--shard-id 1", "--shard-id 1: has no effect in this program, and all is read"),
    ("train", "--amp", "--amp: has no effect without a GPU, and this training computes in float32"),
]
COMPATIBILITY, PRECISION = "tests/test_compatibility.py", "tests/patches/test_precision.py"
ELSEWHERE = {
    "--amp-init-scale --amp-scale-window": "tests/patches/test_optimizers.py",
    "--fp16-no-flatten-grads --fp16 --use-bmuf": PRECISION,
    "--user-dir": "tests/patches/test_patches.py",
    "--criterion": "tests/patches/other_tasks/test_criteria.py",
    "--tokenizer --bpe": f"{COMPATIBILITY}::test_from_pretrained_translates_raw_text_as_fairseq_interactive",
    "--skip-invalid-size-inputs-valid-test --max-tokens --max-tokens-valid --ignore-unused-valid-subsets": (
        "tests/patches/test_batches.py::test_a_long_validation_sentence_is_named_before_training"
    ),
    "--batch-size": f"{COMPATIBILITY}::test_batch_size_and_order_do_not_change_translations",
    "--num-batch-buckets": (
        "tests/patches/test_batches.py::test_buckets_of_lengths_pad_sentences_and_change_no_loss_and_no_translation"
    ),
    "--replace-unk --dataset-impl": f"{COMPATIBILITY}::test_unknown_words_are_replaced_with_the_aligned_source_words",
    "--constraints": f"{COMPATIBILITY}::test_lexical_constraints_appear_in_the_output",
    "--lm-path --lm-weight": (
        "tests/transformer/test_language_model.py::test_a_translation_is_searched_with_a_language_model"
    ),
    "--buffer-size --input": f"{COMPATIBILITY}::test_interactive_reads_from_a_file_in_buffers",
    "--load-alignments": f"{COMPATIBILITY}::test_supervised_alignment_trains_and_prints_alignments",
    "--eval-bleu-remove-bpe": f"{COMPATIBILITY}::test_bleu_in_training_is_logged_and_picks_the_best",
    "--patience": "tests/test_end_to_end.py",
    "--encoder-embed-path --decoder-embed-path": f"{COMPATIBILITY}::test_embeddings_are_read_from_a_file",
    "--encoder-layers-to-keep --decoder-layers-to-keep": (
        f"{COMPATIBILITY}::test_layers_to_keep_builds_the_model_of_those_layers"
    ),
    "--checkpoint-activations --offload-activations": (
        f"{COMPATIBILITY}::test_activation_checkpointing_and_offloading_train_to_the_same_loss"
    ),
    "--encoder-learned-pos --decoder-learned-pos --encoder-xformers-att-config --decoder-xformers-att-config "
    "--cross-self-attention --no-token-positional-embeddings": (
        "tests/transformer/test_refusals.py::test_options_that_cannot_work_are_refused_in_one_sentence"
    ),
    "--distributed-world-size --distributed-rank --distributed-backend --distributed-no-spawn --ddp-backend": (
        "tests/test_distributed.py"
    ),
}
# In the call of every test here.
ALWAYS = {"--user-dir", "--task", "--path", "--source-lang", "--target-lang", "--arch", "--save-dir", "--cpu", "--help"}
# Why a flag of a program has no effect that a test could see.
NOT_SEEN = {
    "generate": {
        "how data are read": "--num-workers --data-buffer-size",
        "other batches and padding, the same translations": (
            "--required-batch-size-multiple --required-seq-len-multiple --left-pad-source --left-pad-target"
        ),
        "a bar in a terminal": "--no-progress-bar",
        "models on several GPUs, and processes": "--pipeline-model-parallel --distributed-init-method",
    },
    "interactive": {"other padding, the same translations": "--left-pad-source"},
    "train": {
        "a bar in a terminal": "--no-progress-bar",
        "services, and packages that are not installed": (
            "--aim-repo --aim-run-hash --tensorboard-logdir --wandb-project --azureml-logging --plasma-path"
        ),
        "a GPU": (
            "--on-cpu-convert-precision --min-loss-scale --threshold-loss-scale --fp16-scale-tolerance "
            "--amp-batch-retries --empty-cache-freq --use-old-adam"
        ),
        "several processes": (
            "--all-gather-list-size --grouped-shuffling --update-epoch-batch-itr --distributed-num-procs "
            "--distributed-port --device-id --ddp-comm-hook --bucket-cap-mb --fix-batches-to-gpus "
            "--find-unused-parameters --gradient-as-bucket-view --heartbeat-timeout --broadcast-buffers "
            "--slowmo-momentum --slowmo-base-algorithm --localsgd-frequency --nprocs-per-node "
            "--load-checkpoint-on-all-dp-ranks --base-sublayers --base-shuffle"
        ),
        "fairscale, which is not installed": (
            "--no-reshard-after-forward --fp32-reduce-scatter --use-sharded-state --not-fsdp-flatten-parameters "
            "--min-params-to-wrap"
        ),
        "fairseq's own models for pipelines": (
            "--pipeline-balance --pipeline-devices --pipeline-chunks --pipeline-encoder-balance "
            "--pipeline-encoder-devices --pipeline-decoder-balance --pipeline-decoder-devices --pipeline-checkpoint"
        ),
        "how data are read": "--num-workers --data-buffer-size",
        "other batches, the same validation loss": "--batch-size-valid",
        "several files of the training or validation set": "--upsample-primary --combine-valid-subsets",
        "a scheduler that has a state": "--reset-lr-scheduler",
        "no random numbers in validation": "--fixed-validation-seed",
        "names of parameters for debugging an optimiser": "--debug-param-names",
        "16 bits": "--ema-fp32",
        "punctuation, which the corpus lacks": "--eval-tokenized-bleu --eval-bleu-detok --eval-bleu-detok-args",
    },
    "preprocess": {"the same files, sooner": "--workers"},
    "score": {},
}


def table(lines, **places):
    """The rows of a table: (flag, its words, the words of both runs)."""
    filled = string.Template(lines).substitute(places).split("\n")
    parts = [[shlex.split(part) for part in f"{line}|".split("|")[:2]] for line in filled]
    return [(words[0].split("=")[0], words, both) for words, both in parts if words]


def ignored_flags(program):
    """The flags of *program* that a row of docs/compatibility.md lists as ignored."""
    page = (ROOT / "docs" / "compatibility.md").read_text().split("## Flags that a program accepts and ignores")[1]
    rows = [line.split(" | ")[:2] for line in page.split("\n## ")[0].splitlines() if line.startswith("| `fairseq-")]
    of_program = [flags.split(";")[0] for programs, flags in rows if f"`fairseq-{program}`" in programs]
    return (
        {flag for flags in of_program for flag in re.findall("`(--[\\w-]+)`", flags)} if program != "score" else set()
    )


def actions(program):
    """The parser's actions for each flag of *program*, as a translator calls it."""
    if program == "score":
        parser = fairseq_cli.score.get_parser()
    else:
        name = {"interactive": "interactive_generation", "generate": "generation", "train": "training"}.get(program)
        parser = getattr(options, f"get_{name or 'preprocessing'}_parser")()
    if program in ("generate", "interactive", "train"):
        criterion = "--criterion label_smoothed_cross_entropy --optimizer adam --lr-scheduler inverse_sqrt --lr 1"
        model = f"--arch transformer_rope {criterion}".split() if program == "train" else []
        options.parse_args_and_arch(parser, ["data", "--task", "translation", *model])
    return {
        next(name for name in action.option_strings if name.startswith("--")): action
        for action in parser._actions
        if action.option_strings
    }


PLACES = dict.fromkeys(("folder", "other", "text", "bin", "aligned"), "")
TABLES = {
    "generate": (SEARCH, OF_GENERATE),
    "interactive": (SEARCH,),
    "train": (TRAINING, SAVING, RESUMING, MODEL),
    "preprocess": (PREPROCESSING,),
    "score": (SCORING, "--sacrebleu\n--sentence-bleu"),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_flag_has_a_row(program):
    run = {flag for lines in TABLES[program] for flag, *_ in table(lines, **PLACES)}
    ending = " ".join(words.replace("=", " ") for programs, words, _ in ENDS + WARNINGS if program in programs.split())
    others = " ".join([ending, *ELSEWHERE, *NOT_SEEN[program].values()]).split()
    known = {*run, *others, *ignored_flags(program), *ALWAYS}
    flags = set(actions(program))
    assert sorted(flags - known) == []
    unknown = run | ignored_flags(program) | set(" ".join(NOT_SEEN[program].values()).split())
    assert sorted(unknown - flags - ALWAYS) == [], "these are no flags of the program"


def test_the_tests_of_other_flags_exist():
    for flags, place in ELSEWHERE.items():
        path, _, name = place.partition("::")
        source = (ROOT / path).read_text()
        names = [spelling for flag in flags.split() for spelling in (flag, flag[2:].replace("-", "_"))]
        assert name in source and any(spelling in source for spelling in names), place


# -- generate, interactive -----------------------------------------------------------------------------

VOLATILE = re.compile(r"(?m)^.*'_name': None.*$|^W-.*$|^.*(?:Total time|Translated).*$|wps\W+\d+|(?<=-\d\.\d{3})\d+")


@pytest.fixture(scope="module")
def search(data_bin, trained, tmp_path_factory):
    """search(program, *flags): what it prints, without times and the last digits. Equal calls run once."""
    text = (data_bin.parent / "text" / "test.en").read_text()
    words = ["--user-dir", PLUGIN, "--path", trained / "checkpoint_last.pt", "--cpu"]
    folder, known = tmp_path_factory.mktemp("search"), {}

    def run(program, *flags, again=False):
        if again or (program, flags) not in known:
            buffered = ["--buffer-size", 20, "--max-tokens", 1000] if program == "interactive" else ["--num-workers", 0]
            given = [data_bin, *words, *buffered, "--max-len-b", 10, *flags]
            printed = call(f"fairseq-{program}", *given, stdin=text)
            known[program, flags] = sorted(VOLATILE.sub("", printed).splitlines())
        return known[program, flags]

    run.folder = folder
    return run


SEARCHES = [(program, row) for program in ("generate", "interactive") for row in table(SEARCH)]
SEARCHES += [("generate", row) for row in table(OF_GENERATE, folder="FOLDER")]


@pytest.mark.slow
@pytest.mark.parametrize("program, row", SEARCHES, ids=lambda value: value if isinstance(value, str) else value[0])
def test_a_flag_changes_what_a_search_prints(search, program, row):
    flag, words, both = row
    words = [word.replace("FOLDER", str(search.folder)) for word in words]
    if flag == "--no-seed-provided":  # it draws other samples in each run
        both, words = [*both, *words], []
        assert search(program, *both) != search(program, *both, again=True)
    else:
        assert search(program, *both, *words) != search(program, *both)


def test_shards_divide_the_sentences(search):
    everything, parts = search("generate"), [search("generate", "--num-shards", 2, "--shard-id", n) for n in (0, 1)]
    hypotheses = [outputs("\n".join(printed)) for printed in (everything, *parts)]
    assert hypotheses[1] | hypotheses[2] == hypotheses[0] and not hypotheses[1].keys() & hypotheses[2].keys()
    assert hypotheses[1] and hypotheses[2]


@pytest.mark.parametrize("size", [1, 2])
def test_no_hypothesis_repeats_words(search, size):
    repeats = {}
    for n in (0, size):
        words = [hypothesis[0].split() for hypothesis in outputs("\n".join(search("generate", *repeating(n)))).values()]
        ngrams = [[tuple(line[i : i + size]) for i in range(len(line) - size + 1)] for line in words]
        repeats[n] = sum(len(of_line) != len(set(of_line)) for of_line in ngrams)
    assert repeats[0] > 0 and repeats[size] == 0


def repeating(size):
    """Flags with which the model of the tests repeats words, unless *size* prevents it."""
    return ["--model-overrides", "{'no_scale_embedding': True}", "--min-len", 6, "--no-repeat-ngram-size", size]


def test_sacrebleu_is_the_scoring_of_that_name(search):
    printed = search("generate", "--sacrebleu")
    assert printed == search("generate", "--scoring", "sacrebleu")
    assert any(re.match(r"Generate test with beam=5: BLEU = [\d.]+ ", line) for line in printed)


def another_value(flag, action):
    """Words that set *flag* to another value than its default."""
    if action.nargs == 0:
        return [flag]
    special = {
        **{"--criterion": "cross_entropy", "--optimizer": "sgd", "--lr-scheduler": "fixed", "--scoring": "bleu"},
        **{"--task": "translation", "--tokenizer": "space", "--bpe": "bert", "--eval-bleu-detok": "space"},
        **{"--eval-bleu-args": "{}", "--eval-bleu-detok-args": "{}", "--num-workers": "1"},
        "--update-epoch-batch-itr": "True",
    }
    if flag in special or action.choices:
        return [flag, special.get(flag) or next(choice for choice in action.choices if choice != action.default)]
    for value in ("7", "[7]", "True"):
        try:
            (action.type or str)(value)
        except (ValueError, TypeError, argparse.ArgumentTypeError):
            continue
        return [flag, value]
    raise AssertionError(flag)


@pytest.mark.parametrize("program", ["generate", "interactive"])
def test_flags_that_are_listed_as_ignored_change_nothing(search, program):
    """All at once, with those that have another reason."""
    others = " ".join(NOT_SEEN[program].values()).split()
    known = actions(program)
    words = [word for flag in sorted({*ignored_flags(program), *others}) for word in another_value(flag, known[flag])]
    changed, plain = (text_and_numbers(search(program, *more)) for more in (words, ()))
    assert changed[0] == plain[0]
    assert changed[1] == pytest.approx(plain[1], abs=2e-3)  # scores of another batch can round to another last digit


def text_and_numbers(lines):
    """The words of *lines*, and the numbers among them with a fraction."""
    words = [word for line in lines for word in line.split()]
    is_number = [bool(re.fullmatch(r"-?\d+\.\d+", word)) for word in words]
    numbers = [float(word) for word, number in zip(words, is_number, strict=True) if number]
    return ["a number" if number else word for word, number in zip(words, is_number, strict=True)], numbers


@pytest.mark.parametrize(
    "program, flags, end",
    [(program, flags, end) for programs, flags, end in ENDS for program in programs.split()],
    ids=lambda value: value[:40],
)
def test_a_flag_ends_a_run(data_bin, tmp_path, search, program, flags, end):
    with pytest.raises(Exception, match=end):
        if program == "train":
            call(*training(data_bin, tmp_path, "--max-update", 1, *shlex.split(flags)))
        else:
            search(program, *shlex.split(flags), again=True)


@pytest.mark.parametrize(
    "program, flags, warning",
    [(program, flags, warning) for programs, flags, warning in WARNINGS for program in programs.split()],
    ids=lambda value: value[:40],
)
def test_a_flag_without_an_effect_gives_one_warning(data_bin, tmp_path, search, run_training, program, flags, warning):
    if program == "train":
        log = call(*training(data_bin, tmp_path, *QUICK, *shlex.split(flags)))
        assert trained_state(tmp_path, log)[0] == run_training(*QUICK)[0]
    else:
        log = "\n".join(search(program, *shlex.split(flags)))
        expected = [line for line in search(program) if re.match("[A-Z]-[0-9]|Generate", line)]
        assert [line for line in log.splitlines() if re.match("[A-Z]-[0-9]|Generate", line)] == expected != []
    assert log.count("has no effect") == log.count(warning) == 1


# -- tasks of a user dir -------------------------------------------------------------------------------


def parsed(program, *words):
    parser = getattr(options, f"get_{program}_parser")()
    return options.parse_args_and_arch(parser, ["data", *words])


@pytest.fixture
def register(monkeypatch):
    """register(name, task, flags): registers *task* with more *flags*, a dict of defaults."""

    def run(name, task, flags):
        def add_args(parser):
            task.add_args(parser)
            if task is LegacyFairseqTask:
                parser.add_argument("data")
            for flag, default in flags.items():
                parser.add_argument(flag, default=default, type=type(default))

        members = {"add_args": staticmethod(add_args), "__module__": "my_user_dir"}
        monkeypatch.setitem(TASK_REGISTRY, name, type("MyTask", (task,), members))

    return run


def test_flags_of_a_users_task_are_not_those_of_other_programs(register):
    """Flags with which only one of fairseq's parsers begins say nothing if a task adds them."""
    others = {"--beam": 0, "--buffer-size": 5, "--context-window": 7, "--sacrebleu": "x", "--lm-path": "x"}
    register("mine", LegacyFairseqTask, {**others, "--prefix-size": 3, "--print-step": "x", "--num-batch-buckets": 2})
    training = ["--task", "mine", "--arch", "transformer_rope", "--num-shards", "1"]
    given = parsed("training", *training)
    assert (given.beam, given.buffer_size, given.prefix_size, given.num_batch_buckets) == (0, 5, 3, 2)
    with pytest.raises(InputError, match="--num-shards 2: is for fairseq-generate"):
        parsed("training", *training, "--num-shards", "2")
    with pytest.raises(InputError, match="--distributed-init-method env://"):
        parsed("training", *training, "--distributed-init-method", "env://")
    register("mine", LegacyFairseqTask, {"--context-window": 7, "--buffer-size": 5, "--max-epoch": 3})
    given = parsed("generation", "--task", "mine", "--num-shards", "3", "--shard-id", "2", "--sacrebleu")
    assert (given.distributed_world_size, given.distributed_rank, given.scoring) == (3, 2, "sacrebleu")
    assert parsed("generation", "--task", "mine", "--write-checkpoints-asynchronously")
    synthesis = parsed("speech_generation", "--task", "mine", "--num-shards", "3", "--shard-id", "2")
    assert synthesis.distributed_world_size == 1, "fairseq's generate_waveform.py reads one part itself"


# -- train ---------------------------------------------------------------------------------------------

QUICK = ["--max-update", 3, "--disable-validation", "--max-tokens", 150, "--warmup-updates", 1]
EPOCHS = ["--max-epoch", 2, "--max-tokens", 400]


def trained_state(folder, log):
    """What a training wrote and logged, without times."""
    files = {}
    for path in sorted(folder.rglob("*.pt")):
        state = load_checkpoint(str(path))
        parts = [state["model"], state["extra_state"].get("ema") or {}]
        sums = [sum(float(weight.double().abs().sum()) for weight in part.values()) for part in parts]
        epoch = state["extra_state"]["train_iterator"]["epoch"]
        meters = json.dumps(state["extra_state"]["metrics"], default=lambda meter: None).count("train")
        updates = state["optimizer_history"][-1]["num_updates"]
        files[path.name] = (*sums, epoch, updates, "last_optimizer_state" in state, meters)
    times = r'"(?:train_|valid_)?(?:wps|ups|wall|train_wall|gb_free)": "[^"]*"'
    logged = [re.sub(times, "", line) for line in re.findall(r"\{\"epoch\".*\}|example hypothesis.*", log)]
    return files, logged, log.count(" | "), sorted(path.name for path in folder.iterdir() if path.is_file())


@pytest.fixture(scope="module")
def run_training(data_bin, tmp_path_factory):
    """run_training(flags, start): the state of a training; *start* is a folder to resume from. Equal calls run once."""
    known = {}

    def run(*flags, start=None):
        if (flags, start) not in known:
            folder = tmp_path_factory.mktemp("run")
            if start is not None:
                shutil.copytree(start, folder / "run")
            given = [str(flag).replace("FOLDER", str(folder)) for flag in flags]
            log = call(*training(data_bin, folder / "run", *given))
            known[flags, start] = trained_state(folder, log)
        return known[flags, start]

    return run


TRAININGS = [(base, row) for base, lines in ((QUICK, TRAINING), (EPOCHS, SAVING))
             for row in table(lines, folder="FOLDER")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("base, row", TRAININGS, ids=[row[0] for _, row in TRAININGS])
def test_a_flag_changes_a_training(run_training, base, row):
    _, words, both = row
    assert run_training(*base, *both, *words) != run_training(*base, *both)


@pytest.mark.slow
@pytest.mark.parametrize("row", table(RESUMING, folder="FOLDER", other="OTHER"), ids=lambda row: row[0])
def test_a_flag_changes_a_resumed_training(run_training, data_bin, tmp_path_factory, row):
    folders = {}
    for name, more in (("start", []), ("other", ["--seed", 9])):
        folders[name] = tmp_path_factory.getbasetemp() / f"resumed-{name}"
        if not folders[name].exists():
            call(*training(data_bin, folders[name], *QUICK, *more))
    _, words, both = row
    words = [word.replace("OTHER", str(folders["other"])) for word in words]
    more = [*QUICK, "--max-update", 5, *both]
    assert run_training(*more, *words, start=folders["start"]) != run_training(*more, start=folders["start"])


@pytest.mark.slow
def test_equal_trainings_have_equal_states_and_logs(run_training):
    """Without this, each flag would seem to change a training."""
    assert run_training(*QUICK, *QUICK) == run_training(*QUICK)


@pytest.mark.slow
def test_flags_of_trainings_that_change_nothing_here(run_training):
    """All at once: those that are listed as ignored, and those that have another reason."""
    known = actions("train")
    services = NOT_SEEN["train"]["services, and packages that are not installed"].split()
    others = set(" ".join(NOT_SEEN["train"].values()).split()) - set(services)
    skipped = {"--ddp-comm-hook", "--upsample-primary", "--device-id", "--distributed-port"}
    flags = sorted((ignored_flags("train") | others) - skipped)
    words = [word for flag in flags for word in another_value(flag, known[flag])]
    assert run_training(*QUICK, *words)[0] == run_training(*QUICK)[0]


# -- models --------------------------------------------------------------------------------------------


def built(task, flags):
    """The shapes of the model of *flags*, and what it computes in training from one seed."""
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    ARCH_MODEL_REGISTRY["transformer_rope_tiny"].add_args(parser)
    args = parser.parse_args(["--encoder-layers", "2", "--decoder-layers", "2", *flags])
    args.arch = "transformer_rope_tiny"
    ARCH_CONFIG_REGISTRY[args.arch](args)
    torch.manual_seed(1)
    model = ARCH_MODEL_REGISTRY[args.arch].build_model(args, task).train()
    model.set_num_updates(1)
    torch.manual_seed(2)
    source, target = torch.randint(4, 40, (2, 30)), torch.randint(4, 40, (2, 25))
    output = model(source, torch.tensor([30, 30]), target)[0]
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    softmax = model.decoder.adaptive_softmax
    if softmax is not None:
        output = torch.stack([loss.sum() for loss in softmax(output, target)[0] if loss is not None])
    return shapes, [*output.shape], round(float(output.detach().double().abs().sum()), 6)


@pytest.mark.parametrize("row", table(MODEL), ids=lambda row: row[0])
def test_a_flag_changes_the_model(task, row):
    _, words, both = row
    if words[0] == "--adaptive-softmax-dropout":
        both = [*both, "--dropout", "0"]
    assert built(task, [*both, *words]) != built(task, both)


# -- preprocess, score ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def preprocessed(data_bin, tmp_path_factory):
    """preprocessed(flags): the contents of the files that fairseq-preprocess writes. Equal calls run once."""
    known, aligned = {}, tmp_path_factory.mktemp("aligned")
    for language in ("en", "de"):
        shutil.copy(data_bin.parent / "text" / f"valid.{language}", aligned / f"train.{language}")
    lines = len((aligned / "train.en").read_text().splitlines())
    (aligned / "train.align").write_text("0-0 1-1\n" * lines)
    places = {"text": data_bin.parent / "text", "bin": data_bin, "aligned": aligned}

    def run(*flags):
        if flags not in known:
            folder = tmp_path_factory.mktemp("preprocessed")
            base = ["-s", "en", "-t", "de", "--trainpref", places["text"] / "train", "--destdir", folder / "bin"]
            given = [string.Template(str(flag)).substitute(places, folder=folder) for flag in flags]
            call("fairseq-preprocess", *base, *given)
            paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".log"]
            known[flags] = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        return known[flags]

    return run


@pytest.mark.parametrize("row", [
    (flag, words, both)
    for flag, words, both in table(PREPROCESSING, **{name: f"${name}" for name in PLACES})
], ids=lambda row: row[0])  # fmt: skip
def test_a_flag_changes_what_fairseq_preprocess_writes(preprocessed, row):
    _, words, both = row
    assert preprocessed(*both, *words) != preprocessed(*both)


def test_flags_that_fairseq_preprocess_ignores(preprocessed):
    known = actions("preprocess")
    words = [word for flag in sorted(ignored_flags("preprocess")) for word in another_value(flag, known[flag])]
    assert preprocessed(*words, "--workers", 2) == preprocessed()
    joined = ["--joined-dictionary"]
    assert preprocessed(*joined, "--thresholdtgt", 120, "--nwordstgt", 5) == preprocessed(*joined)


@pytest.fixture(scope="module")
def scored(data_bin, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    lines = (data_bin.parent / "text" / "test.de").read_text().splitlines()
    (folder / "ref").write_text("\n".join(lines))
    (folder / "sys").write_text("\n".join([*lines[:10], *(line.lower() for line in lines[10:15]), *lines[:5]]))
    (folder / "other").write_text("\n".join(lines[::-1]))

    def run(*flags):
        given = [string.Template(str(flag)).substitute(text=folder) for flag in flags]
        printed = call("fairseq-score", "--sys", folder / "sys", "--ref", folder / "ref", *given)
        return [line for line in printed.splitlines() if "Namespace" not in line]

    return run


@pytest.mark.parametrize("row", table(SCORING, text="$text"), ids=lambda row: row[0])
def test_a_flag_changes_what_fairseq_score_prints(scored, row):
    assert scored(*row[1]) != scored()


@pytest.mark.parametrize("flag", ["--sacrebleu", "--sentence-bleu"])
def test_flags_of_fairseq_score_fail_as_with_fairseq(scored, flag):
    with pytest.raises(TypeError):
        scored(flag)
