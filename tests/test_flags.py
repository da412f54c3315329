"""Flags of fairseq's searches and of this plugin's models: each has an effect.

In the tables, a line has a flag with its value and, after "|", flags of both runs: the run with the flag must give
something else than the run without it. ENDS has the error of a run with the flag.
"""

import argparse
import re
import shlex
import string

import pytest
import torch
from fairseq import options
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY, LegacyFairseqTask

from tests.commands import PLUGIN, call, outputs, training

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
# (program, flags, the end): what the error of a run says.
ENDS = [
    ("generate", "--shard-id 2 --num-shards 2", "shard_id must be between 0 and num_shards"),
    ("interactive", "--lm-path x.pt", "--lm-path x.pt"),
    ("train", "--tie-adaptive-weights --tie-adaptive-proj --adaptive-softmax-cutoff 8,16", "--tie-adaptive-weights"),
    ("train", "--continue-once missing.pt", "--continue-once missing.pt"),
]


def table(lines, **places):
    """The rows of a table: (flag, its words, the words of both runs)."""
    filled = string.Template(lines).substitute(places).split("\n")
    parts = [[shlex.split(part) for part in f"{line}|".split("|")[:2]] for line in filled]
    return [(words[0].split("=")[0], words, both) for words, both in parts if words]


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
    _, words, both = row
    words = [word.replace("FOLDER", str(search.folder)) for word in words]
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


@pytest.mark.parametrize("program, flags, end", ENDS, ids=lambda value: value[:40])
def test_a_flag_ends_a_run(data_bin, tmp_path, search, program, flags, end):
    with pytest.raises(Exception, match=end):
        if program == "train":
            call(*training(data_bin, tmp_path, "--max-update", 1, *shlex.split(flags)))
        else:
            search(program, *shlex.split(flags), again=True)


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
    register("mine", LegacyFairseqTask, {"--beam": 0, "--buffer-size": 5, "--sacrebleu": "x", "--lm-path": "x"})
    given = parsed("training", "--task", "mine", "--arch", "transformer_rope")
    assert (given.beam, given.buffer_size, given.sacrebleu, given.lm_path) == (0, 5, "x", "x")
    register("mine", LegacyFairseqTask, {"--buffer-size": 5})
    given = parsed("generation", "--task", "mine", "--num-shards", "3", "--shard-id", "2", "--sacrebleu")
    assert (given.distributed_world_size, given.distributed_rank, given.scoring) == (3, 2, "sacrebleu")
    synthesis = parsed("speech_generation", "--task", "mine", "--num-shards", "3", "--shard-id", "2")
    assert synthesis.distributed_world_size == 1, "fairseq's generate_waveform.py reads one part itself"


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
