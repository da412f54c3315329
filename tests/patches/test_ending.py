"""fairseq_rope/patches/ending.py, causes.py: fairseq's programs end with one sentence if the cause is known."""

import json
import re
import shutil
from argparse import Namespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, NestedDictionaryDataset, RawLabelDataset, data_utils
from fairseq.file_chunker_utils import find_offsets
from fairseq.tasks.translation import TranslationTask
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader

from fairseq_rope.checkpoints import CheckpointError
from fairseq_rope.errors import InputError
from fairseq_rope.patches.ending import sentence_for
from fairseq_rope.positions.rotary import RotaryEmbedding
from fairseq_rope.positions.scaling import RopeScaling
from fairseq_rope.tools import export
from tests.commands import PLUGIN, ROOT, call, run_program, training


def sentence(function, *args, **kwargs):
    """The sentence for the error of *function*."""
    with pytest.raises(Exception) as ended:
        function(*args, **kwargs)
    found = sentence_for(ended.value, ended.tb)
    assert found is not None, f"a traceback: {ended.value!r}"
    assert "\n" not in found
    return found


def words(template, **paths):
    """The words of a command line, in which {name} is one of *paths*."""
    return [word.format(plugin=PLUGIN, **paths) for word in template.split()]


# {bin}: binary data of translation, {lm}: of a language model, {model}: a checkpoint of translation
GENERATE = "fairseq-generate {bin} --user-dir {plugin} --cpu --path {model}"
COMMANDS = [
    ("fairseq-generate {bin} --user-dir {plugin} --cpu", "--path required"),
    ("fairseq-eval-lm {lm} --user-dir {plugin} --cpu", "--path: must be given"),
    ("fairseq-interactive {bin} --user-dir {plugin} --cpu", "--path: must be given"),
    ("fairseq-validate {bin} --user-dir {plugin} --path {model} --max-tokens 500", "--task: must be given"),
    ("fairseq-validate {bin} --user-dir {plugin} --task translation --path {model}", "--max-tokens or --batch-size"),
    ("fairseq-validate {bin} --user-dir {plugin} --task translation --max-tokens 9 --cpu", "--path: must be given"),
    (GENERATE + " --sampling --beam 5", "--sampling requires --nbest"),
    (GENERATE + " --replace-unk", "--dataset-impl=raw"),
    (GENERATE + " --sampling-topk 5", "requires --sampling"),
    (GENERATE + " --temperature 0", "--temperature must be greater"),
    (GENERATE + " --beam 0", "--beam 0: must be 1 or more"),
    (GENERATE + " --bpe subword_nmt", "--bpe-codes: must be given"),
    (GENERATE + " --min-len 99 --max-len-b 3", "--min-len 99: .* 3"),
    (GENERATE + " --lm-path {model}", "--lm-path: must be"),
    (GENERATE + " --model-overrides {{a", "--model-overrides {a: must"),
    (GENERATE + " --model-overrides {{'dropout'}}", "--model-overrides {'dropout'}: must be a Python dictionary"),
    ("fairseq-validate {bin} --user-dir {plugin} --task translation --path {model} --max-tokens 500 --cpu "
     "--model-overrides {{'dropout'}}", "--model-overrides {'dropout'}: must be a Python dictionary"),
    (GENERATE + " --bpe sentencepiece --sentencepiece-model {model}", "--sentencepiece-model .*: is not a model"),
    ("fairseq-eval-lm {lm} --user-dir {plugin} --cpu --path {model}", "language_modeling: needs a language model"),
    ("fairseq-preprocess --user-dir {plugin}", "--trainpref must be set if --srcdict is not"),
    ("fairseq-preprocess --user-dir {plugin} -s en -t de --trainpref {bin}/../text/train --destdir {bin}",
     r"bin/dict\.en\.txt: exists already"),
]  # fmt: skip


@pytest.mark.parametrize("command, expected", COMMANDS, ids=[expected for _, expected in COMMANDS])
def test_a_wrong_command_ends_with_one_sentence(data_bin, text_bin, trained, tmp_path, monkeypatch, command, expected):
    monkeypatch.chdir(tmp_path)
    model = trained / "checkpoint_last.pt"
    assert re.search(expected, sentence(call, *words(command, bin=data_bin, lm=text_bin, model=model)))


def test_the_model_of_a_checkpoint_that_no_user_dir_has_is_named(data_bin, trained, tmp_path):
    """As with the user dir of someone else, or with an architecture that this plugin no longer has."""
    state = torch.load(trained / "checkpoint_last.pt", weights_only=False)
    state["cfg"]["model"]._name = state["cfg"]["model"].arch = "transformer_of_others"
    path = tmp_path / "theirs.pt"
    torch.save(state, path)
    expected = f"{path}: neither fairseq nor --user-dir has its model, transformer_of_others"
    assert sentence(call, *words(GENERATE, bin=data_bin, model=path)) == expected
    to_export = ["--path", str(path), "--data", str(data_bin), "--output", str(tmp_path / "exported")]
    with pytest.raises(SystemExit, match="neither fairseq nor --user-dir has its model, transformer_of_others$"):
        export.main(to_export)
    state["cfg"]["model"]._name = state["cfg"]["model"].arch = "transformer_rope_tiny"
    state["cfg"]["task"]["_name"] = "task_of_others"
    torch.save(state, path)
    with pytest.raises(SystemExit, match="neither fairseq nor --user-dir has its task, task_of_others$"):
        export.main(to_export)
    call(*words(GENERATE, bin=data_bin, model=path))  # has a task of its own
    # With an override, fairseq reads the entry of a task of fairseq up to 0.10; and the task of the first file alone.
    theirs, ours = str(path), str(trained / "checkpoint_last.pt")
    state["cfg"]["task"] = Namespace(
        **{**vars(state["cfg"]["model"]), **state["cfg"]["task"], "task": "task_of_others"}
    )
    torch.save(state, path)
    data = {"data": str(data_bin)}
    assert checkpoint_utils.load_model_ensemble_and_task([theirs], {**data, "task": "translation"})
    assert checkpoint_utils.load_model_ensemble_and_task([ours, theirs], data)
    with pytest.raises(CheckpointError, match="has its task, task_of_others"):
        checkpoint_utils.load_model_ensemble_and_task([theirs, ours], data)


@pytest.mark.parametrize(
    "part, flag", [("model", "arch"), *((part, part) for part in ("task", "criterion", "optimizer", "lr_scheduler"))]
)
def test_a_part_of_an_old_checkpoint_that_no_user_dir_has_is_named(data_bin, trained, tmp_path, part, flag):
    """fairseq looks for all parts of the training while it upgrades a checkpoint of fairseq up to 0.10."""
    state = torch.load(trained / "checkpoint_last.pt", weights_only=False)
    state["args"], state["cfg"] = state["cfg"]["model"], None
    setattr(state["args"], flag, "of_others")
    path = tmp_path / "theirs.pt"
    torch.save(state, path)
    expected = f"{path}: neither fairseq nor --user-dir has its {part}, of_others"
    assert sentence(call, *words(GENERATE, bin=data_bin, model=path)) == expected


def without_files(folder, data_bin, pattern):
    return shutil.copytree(data_bin, folder, ignore=shutil.ignore_patterns(pattern))


TRAININGS = [
    ("", ("--max-tokens 500",), "--max-tokens or --batch-size"),
    ("", ("--arch transformer_rope_tiny",), "--arch: must be given"),
    ("--lr-scheduler polynomial_decay", (), "--total-num-update: must be given"),
    ("--best-checkpoint-metric bleu", (), "--best-checkpoint-metric bleu: must be one of .*loss, nll_loss"),
    ("--eval-bleu --eval-bleu-args {beam:4}", (), r"--eval-bleu-args {beam:4}, .* must be JSON"),
    ("--eval-bleu --eval-bleu-args [1]", (), r"--eval-bleu-args \[1\], .* must be JSON"),
    ("--warmup-updates 0", (), "--warmup-updates 0: must be at least 1 with --lr-scheduler inverse_sqrt"),
    ("--arch transformer_tiny --encoder-embed-dim 31", (), r"the width 31 .* must be divisible by .* heads, 2 "),
    ("--eval-bleu --eval-bleu-detok mose", (), "mose: must be one of moses, nltk, space"),
    ("--skip-remainder-batch --max-tokens 50000", (), "--skip-remainder-batch: an epoch has fewer batches"),
    ("--adam-betas 0.9", (), "--adam-betas 0.9: must be two numbers"),
    ("--update-freq 0", (), r"--update-freq \[0\]: must be 1 or more"),
    ("--required-batch-size-multiple 0", (), "--required-batch-size-multiple 0: must be 1 or more"),  # fairseq crashes
    ("--num-workers -1", (), "--num-workers -1: must be 0 or more"),
    ("--dropout 1.5", (), "--dropout 1.5: must be from 0 to 1"),
    *(
        (f"--lr-scheduler manual {flag} {value}", ("--warmup-updates 20",), f"--epoch2lr or --update2lr {value}: must")
        for flag, value in (("--epoch2lr", "{1-3:0.001}"), ("--update2lr", "{1:0.001}"), ("--epoch2lr", "{'a':0.001}"))
    ),
]


@pytest.mark.parametrize("flags, without, expected", TRAININGS, ids=[expected for *_, expected in TRAININGS])
def test_a_wrong_training_ends_with_one_sentence(data_bin, tmp_path, flags, without, expected):
    command = training(data_bin, tmp_path, "--max-update", 1, *flags.split(), without=without)
    assert re.search(expected, sentence(call, *command))


def test_the_optimiser_overrides_are_named(data_bin, trained, tmp_path):
    shutil.copy(trained / "checkpoint_last.pt", tmp_path)
    command = training(data_bin, tmp_path, "--optimizer-overrides", "{lr:3}", "--max-epoch", 30)
    assert sentence(call, *command).startswith("--optimizer-overrides {lr:3}: must be a Python dictionary")


def test_a_model_without_scores_is_named(data_bin, trained, tmp_path):
    state = torch.load(trained / "checkpoint_last.pt", weights_only=False)
    state["model"]["decoder.layers.0.fc2.bias"][:] = float("nan")
    torch.save(state, tmp_path / "model.pt")
    command = words(GENERATE, bin=data_bin, model=tmp_path / "model.pt")
    assert sentence(call, *command).startswith(
        "the scores of all hypotheses of a sentence are not numbers, because the m"
    )


def test_data_that_do_not_fit_together_are_named(data_bin, tmp_path):
    once = ["--max-update", 1, "--num-workers", 0]
    no_target = without_files(tmp_path / "no-target", data_bin, "train*.de.*")
    assert "no target side" in sentence(call, *training(no_target, tmp_path / "new", *once))
    unequal = without_files(tmp_path / "unequal", data_bin, "none")
    for end in ("bin", "idx"):
        shutil.copy(unequal / f"valid.en-de.de.{end}", unequal / f"train.en-de.de.{end}")
    expected = f"{unequal}: its set train has 200 source and 20 target sentences"
    assert sentence(call, *training(unequal, tmp_path / "new", *once)).startswith(expected)
    few = without_files(tmp_path / "few", data_bin, "none")
    for dictionary in few.glob("dict.*.txt"):
        dictionary.write_text("")
    expected = r"the data have a word with the number \d+, and the dictionary .* has 4 entries"
    assert re.match(expected, sentence(call, *training(few, tmp_path / "new", *once)))


@pytest.mark.parametrize(
    "text, expected",
    [
        ("big 3\nred 2\nbig 1\n", "has the word big twice"),
        ("big 3\nred\n", "the line red must be a word and its count"),
        ("big 3\nred two\n", "the line red must be a word and its count"),
    ],
)
def test_a_damaged_dictionary_is_named(tmp_path, text, expected):
    (tmp_path / "dict.en.txt").write_text(text)
    assert sentence(Dictionary.load, str(tmp_path / "dict.en.txt")).startswith(f"{tmp_path}/dict.en.txt: {expected}")


def test_a_dictionary_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / "dict.en.txt").write_bytes(b"big\xff 3\n")
    assert f"Incorrect encoding detected in {tmp_path}/dict.en.txt" in sentence(
        Dictionary.load, str(tmp_path / "dict.en.txt")
    )


@pytest.mark.parametrize("end", ["idx", "bin"])
@pytest.mark.parametrize("size", [0, 20, 50])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # fairseq closes what it never opened
def test_damaged_binary_data_are_named(data_bin, tmp_path, end, size):
    for file in data_bin.glob("valid.en-de.en.*"):
        shutil.copy(file, tmp_path)
    damaged = tmp_path / f"valid.en-de.en.{end}"
    damaged.write_bytes(damaged.read_bytes()[:size])

    def read():
        data = data_utils.load_indexed_dataset(str(tmp_path / "valid.en-de.en"))
        return [data[number] for number in range(len(data))]

    assert sentence(read).startswith(f"{damaged}: is damaged, or has another --dataset-impl")


def test_damaged_binary_data_are_reported_by_a_process_that_loads_them(data_bin, tmp_path):
    for file in data_bin.glob("valid.en-de.en.*"):
        shutil.copy(file, tmp_path)
    damaged = tmp_path / "valid.en-de.en.bin"
    damaged.write_bytes(damaged.read_bytes()[:50])
    data = data_utils.load_indexed_dataset(str(tmp_path / "valid.en-de.en"))
    loader = DataLoader(data, collate_fn=list, num_workers=1)
    assert sentence(list, loader).startswith("a .bin file of the data is damaged")


def test_a_text_that_is_not_utf_8_is_named(tmp_path):
    text = tmp_path / "train.en"
    text.write_bytes(b"a \xff\n")

    def read(size):
        text.write_bytes(b"a b c\n" * size + b"a \xff\n")
        Dictionary.add_file_to_dictionary(str(text), Dictionary(), str.split, 1)

    assert sentence(read, 0) == sentence(read, 5000) == f"{text}: must be text in UTF-8"
    assert sentence(find_offsets, str(text), 0) == "--workers 0: must be at least 1"


# -- flags ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--rope-bsae 500", "--rope-bsae: unknown flag; the nearest one is --rope-base"),
        ("--qqqqqq", "--qqqqqq: unknown flag"),
        ("--arch transformer_rop", "argument --arch/-a: transformer_rop is unknown; the nearest one is transformer_r"),
        ("--log-format jsn", "argument --log-format: invalid choice: 'jsn' (choose from"),
        ("--lr-scheduler triangular", "--max-lr: must be given"),
        ("--criterion cross_entropy", "--label-smoothing: is a flag of other values of --criterion, such as label_sm"),
        ("--task masked_lm --eval-bleu", "--eval-bleu: is a flag of "),
        ("--lr x", "--lr x: must be a number, or a list like 1,2"),
        ("--update-freq x,", "--update-freq x,: must be a number, or a list like 1,2"),
        ("--max-epoch ten", "argument --max-epoch: invalid int value: 'ten'"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_named_without_the_list_of_flags(data_bin, tmp_path, capsys, flags, expected):
    with pytest.raises(SystemExit, match="2"):
        call(*training(data_bin, tmp_path, *flags.split()))
    refused, hint = capsys.readouterr().err.splitlines()
    assert refused.startswith(f"fairseq-train: error: {expected}") and hint == "see fairseq-train --help"


OF_TRAINING = "is a flag of fairseq-train; this program takes the options of the model from the checkpoint"


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--rope-bsae 3", "--rope-bsae: unknown flag"),  # no flag of fairseq-generate is like it
        ("--bream 3", "--bream: unknown flag; the nearest one is --beam"),
        ("--rope-base 3", f"--rope-base: {OF_TRAINING}"),
        ("--decoder-layers 3", f"--decoder-layers: {OF_TRAINING}"),
        ("--label-smoothing 0.1", f"--label-smoothing: {OF_TRAINING}"),
        ("--max-epoch 3", f"--max-epoch: {OF_TRAINING}"),
    ],
)
def test_a_flag_of_another_program_is_named(tmp_path, capsys, flags, expected):
    with pytest.raises(SystemExit, match="2"):
        call("fairseq-generate", tmp_path, "--user-dir", PLUGIN, "--path", "x.pt", *flags.split())
    assert capsys.readouterr().err.splitlines()[0] == f"fairseq-generate: error: {expected}"


def test_a_log_whose_package_is_missing_gives_one_warning(data_bin, tmp_path, monkeypatch):
    monkeypatch.setattr("fairseq.logging.progress_bar.SummaryWriter", None)
    monkeypatch.setattr("fairseq.logging.progress_bar.wandb", None)
    logs = ["--tensorboard-logdir", tmp_path / "logs", "--wandb-project", "mine"]
    log = call(*training(data_bin, tmp_path / "new", "--max-epoch", 2, "--no-save", *logs))
    assert log.count("tensorboard is not installed") == log.count("wandb is not installed") == 1
    assert f"--tensorboard-logdir {tmp_path / 'logs'}: writes nothing" in log and not (tmp_path / "logs").exists()
    assert "not found" not in log


# -- what keeps its traceback --------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("--path: bug"), KeyError("None"), AssertionError(), IndexError("x")])
def test_errors_of_other_code_keep_their_traceback(error):
    def validate():  # the name of a place in the table, in another module
        raise error

    with pytest.raises(type(error)) as ended:
        validate()
    assert sentence_for(ended.value, ended.tb) is None


def test_errors_of_fairseq_without_a_known_cause_keep_their_traceback(data_bin):
    with pytest.raises(AssertionError, match="dataset lengths must match") as ended:
        NestedDictionaryDataset({"one": RawLabelDataset([1]), "two": RawLabelDataset([1, 2])})
    assert sentence_for(ended.value, ended.tb) is None
    with pytest.raises(TypeError) as ended:
        Dictionary.load(str(data_bin / "dict.en.txt")).string(None)
    assert sentence_for(ended.value, ended.tb) is None


def ended_in(function, *args):
    """The error of *function* and its sentence, or None."""
    with pytest.raises(Exception) as ended:
        function(*args)
    return ended.value, sentence_for(ended.value, ended.tb)


def test_errors_like_those_of_wrong_flags_are_not_taken_for_them(data_bin, trained, tmp_path, monkeypatch):
    """The same errors have other causes in code of a user dir."""

    def fails(error):
        def failing(*_, **__):
            raise error

        return failing

    validate = f"fairseq-validate {data_bin} --user-dir {PLUGIN} --task translation --cpu --max-tokens 500 --path"
    path = trained / "checkpoint_last.pt"
    monkeypatch.setattr(TranslationTask, "valid_step", fails(TypeError("'NoneType' object is not iterable")))
    for overrides in ("{}", "dict(dropout=0.1)"):  # fairseq-validate evaluates them
        assert ended_in(call, *validate.split(), path, "--model-overrides", overrides)[1] is None
    monkeypatch.undo()
    replace = AttributeError("'NoneType' object has no attribute 'replace'")
    monkeypatch.setattr(TranslationTask, "build_model", fails(replace))
    assert ended_in(call, *validate.split(), path)[1] is None
    monkeypatch.undo()
    decode = json.JSONDecodeError("Expecting value", "", 0)
    monkeypatch.setattr("fairseq.tasks.fairseq_task.FairseqTask.build_model", fails(decode))
    for flags in ([], ["--eval-bleu", "--eval-bleu-args", '{"beam": 4}']):
        assert ended_in(call, *training(data_bin, tmp_path, "--max-update", 1, *flags)) == (decode, None)
    monkeypatch.undo()
    lacking = TypeError("forward() missing 1 required positional argument: 'prev_output_tokens'")
    monkeypatch.setattr("fairseq.models.transformer.TransformerModelBase.forward", fails(lacking))
    assert ended_in(call, *training(data_bin, tmp_path, "--max-update", 1)) == (lacking, None)


def test_the_error_that_fairseq_hides_is_named(data_bin, trained, monkeypatch):
    def load_dataset(*_, **__):
        raise KeyError("of a user's task")

    monkeypatch.setattr(TranslationTask, "load_dataset", load_dataset)
    validate = f"fairseq-validate {data_bin} --user-dir {PLUGIN} --task translation --cpu --max-tokens 500 --path"
    _, said = ended_in(call, *validate.split(), trained / "checkpoint_last.pt")
    assert said == 'Cannot find dataset: valid (KeyError: "of a user\'s task")'


def test_an_error_while_a_checkpoint_loads_keeps_its_traceback(data_bin, trained, tmp_path, monkeypatch):
    """fairseq says of every error that the architectures must match."""
    shutil.copy(trained / "checkpoint_last.pt", tmp_path)

    def load_state_dict(*args, **kwargs):
        raise errors.pop()

    monkeypatch.setattr("fairseq.models.BaseFairseqModel.load_state_dict", load_state_dict)
    # the second one is like that of --optimizer-overrides, whose value is right
    errors = [InputError("--their-flag 3: is too small"), ValueError("malformed node"), KeyError("of a user's model")]
    for expected in (None, None, "--their-flag 3: is too small"):
        with pytest.raises(Exception, match="ensure that the architectures match") as ended:
            call(*training(data_bin, tmp_path, "--max-epoch", 30))
        assert sentence_for(ended.value, ended.tb) == expected


# -- processes -----------------------------------------------------------------------------------------


def test_the_documented_encoding_refuses_a_value_in_one_sentence(data_bin, tmp_path):
    (code,) = re.findall(
        r"```python\n# my_positions/__init__\.py\n(.*?)```", (ROOT / "docs/encodings.md").read_text(), re.S
    )
    (tmp_path / "my_positions").mkdir()
    (tmp_path / "my_positions" / "__init__.py").write_text(code)
    flags = ["--arch", "transformer_rope", "--position-encoding", "recency", "--recency-strength", "-1"]
    command = training(data_bin, tmp_path / "new", *flags)
    command[command.index(PLUGIN)] = "my_positions"
    done = run_program(*command, check=False, cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert last == "fairseq-train: error: --recency-strength -1.0: must be above 0"
    assert done.returncode == 1 and "Traceback" not in done.stderr


def refuse_rope_base(rank):
    RotaryEmbedding(8, base=0.0)


def refuse_scaling(rank):
    RopeScaling({"rope_type": "linear", "factor": 0.5})


@pytest.mark.parametrize("refuse, flag", [(refuse_rope_base, "--rope-base 0"), (refuse_scaling, "--rope-scaling")])
def test_refusals_of_another_process_end_in_one_sentence(refuse, flag):
    """fairseq-train starts a process for each GPU."""
    with pytest.raises(ValueError) as in_this_process:
        refuse(0)
    assert str(in_this_process.value).startswith(flag)
    with pytest.raises(ProcessRaisedException) as ended:
        torch.multiprocessing.start_processes(refuse, nprocs=1, start_method="fork")
    assert sentence_for(ended.value, ended.tb) == str(in_this_process.value)
