"""The plugin's flags of models change the model, and what the plugin does with flags of fairseq's programs.

fairseq's own flags are fairseq's to test. Here are those that the plugin mends, refuses or warns about.
"""

import argparse
import re
import shlex

import pytest
import torch
from fairseq import options
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY, LegacyFairseqTask

from tests.commands import PLUGIN, call, outputs, train

# A flag with its value and, after "|", flags of both models: with the flag, transformer_rope_tiny is another model.
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
# (program, flags, the flag and the value in the error of a run)
ENDS = [
    ("interactive", "--lm-path x.pt", "--lm-path x.pt"),
    ("train", "--continue-once missing.pt", "--continue-once missing.pt"),
]


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


@pytest.mark.parametrize("row", MODEL.split("\n")[1:-1], ids=lambda row: row.split()[0])
def test_a_flag_changes_the_model(task, row):
    words, both = (shlex.split(part) for part in f"{row}|".split("|")[:2])
    if words[0] == "--adaptive-softmax-dropout":
        both = [*both, "--dropout", "0"]
    assert built(task, [*both, *words]) != built(task, both)


# -- programs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def search(data_bin, trained):
    """search(program, *flags): what it prints."""
    text = (data_bin.parent / "text" / "test.en").read_text()
    words = [data_bin, "--user-dir", PLUGIN, "--path", trained / "checkpoint_last.pt", "--cpu", "--max-len-b", 10]

    def run(program, *flags):
        buffered = ["--buffer-size", 20, "--max-tokens", 1000] if program == "interactive" else []
        return call(f"fairseq-{program}", *words, *buffered, *flags, stdin=text)

    return run


PARSERS = {
    "train": options.get_training_parser,
    "generate": options.get_generation_parser,
    "interactive": options.get_interactive_generation_parser,
    "speech": options.get_speech_generation_parser,
}


def parsed(program, *words):
    """The options that *program* reads from its flags."""
    arch = ["--arch", "transformer_rope"] if program == "train" else []
    return options.parse_args_and_arch(PARSERS[program](), ["data", *arch, *words])


@pytest.mark.parametrize("program, flags, end", ENDS)
def test_a_flag_ends_a_run(data_bin, tmp_path, search, program, flags, end):
    with pytest.raises(Exception, match=end):
        train(data_bin, tmp_path, *shlex.split(flags)) if program == "train" else search(program, *shlex.split(flags))


def test_shards_divide_the_sentences(search):
    whole, *parts = ((), *(("--num-shards", 2, "--shard-id", shard) for shard in (0, 1)))
    everything, first, second = (outputs(search("generate", *flags)) for flags in (whole, *parts))
    assert first and second and not first.keys() & second.keys()
    assert first | second == everything


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_no_hypothesis_repeats_words(search, size):
    repeats = {}
    for n in (0, size):
        # With this override, the model of the tests repeats words.
        flags = ["--model-overrides", "{'no_scale_embedding': True}", "--min-len", 6, "--no-repeat-ngram-size", n]
        words = [text.split() for (text, *_) in outputs(search("generate", *flags)).values()]
        ngrams = [[tuple(line[i : i + size]) for i in range(len(line) - size + 1)] for line in words]
        repeats[n] = sum(len(of_line) != len(set(of_line)) for of_line in ngrams)
    assert repeats[0] > 0 and repeats[size] == 0


def test_sacrebleu_is_the_scoring_of_that_name(search):
    (score,) = re.findall("^Generate test .* BLEU = .*$", search("generate", "--sacrebleu"), re.M)
    assert score in search("generate", "--scoring", "sacrebleu")


# -- tasks of a user dir -------------------------------------------------------------------------------


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
    given = parsed("train", "--task", "mine")
    assert (given.beam, given.buffer_size, given.sacrebleu, given.lm_path) == (0, 5, "x", "x")
    register("mine", LegacyFairseqTask, {"--buffer-size": 5})
    given = parsed("generate", "--task", "mine", "--num-shards", "3", "--shard-id", "2", "--sacrebleu")
    assert (given.distributed_world_size, given.distributed_rank, given.scoring) == (3, 2, "sacrebleu")
    synthesis = parsed("speech", "--task", "mine", "--num-shards", "3", "--shard-id", "2")
    assert synthesis.distributed_world_size == 1, "fairseq's generate_waveform.py reads one part itself"
