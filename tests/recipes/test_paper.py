"""recipes.paper: its data, its table and figure, and an experiment that is interrupted."""

import contextlib
import gzip
import json
import math
import os
import re
import shlex
import shutil
import threading

import numpy as np
import pytest
import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDataset
from fairseq.tasks.language_modeling import LanguageModelingTask
from hypothesis import given
from hypothesis import strategies as st

from fairseq_rope import plugin  # noqa: F401  registers the models
from fairseq_rope.errors import InputError
from fairseq_rope.positions import ENCODINGS
from recipes.paper import fine_tuning, language_model, long_documents, masked_lm, study, texts
from recipes.paper.results import as_markdown, curve_of, draw, trained_in
from recipes.paper.runs import PaperRun, Training, stages_of
from recipes.paper.study import HERE, read_settings
from recipes.run import launch, machine
from recipes.run.moves import Moves
from recipes.run.runner import Runner
from recipes.run.stamps import Stamps
from recipes.run.yaml_file import SettingsError
from tests import forked_programs
from tests.commands import ENVIRONMENT, ROOT, call, run_program
from tests.recipes.small_demo import AVX512_BF16

PROGRAMS = {
    "language_model": language_model,
    "masked_lm": masked_lm,
    "long_documents": long_documents,
    "fine_tuning": fine_tuning,
}


def items(prefix):
    data = MMapIndexedDataset(str(prefix))
    return [data[n].tolist() for n in range(len(data))]


def words(prefix, dictionary):
    """The lines of binary data as their tokens, without the end of the line, which each of them has."""
    dictionary = Dictionary.load(str(dictionary))
    lines = items(prefix)
    assert all(line[-1] == dictionary.eos() for line in lines)
    return [[dictionary[token] for token in line[:-1]] for line in lines]


def test_every_byte_of_a_language_model_is_one_token(tmp_path, monkeypatch):
    monkeypatch.setattr(language_model, "BLOCK", 100)
    whole = bytes(range(256)) + "é\n".encode()
    parts = language_model.divided(whole, {"train": 250, "valid": 6, "test": 3})
    assert parts == {"train": whole[:250], "valid": whole[250:256], "test": whole[256:]}
    language_model.prepare(parts, tmp_path / "data")
    dictionary = Dictionary.load(str(tmp_path / "data" / "dict.txt"))
    for name, part in parts.items():
        tokens = [token for item in items(tmp_path / "data" / name) for token in item]
        assert bytes.fromhex("".join(dictionary[token] for token in tokens)) == part  # no end of a line between


def test_the_binary_data_are_those_of_fairseq_preprocess(tmp_path):
    pages = "Ein  Satz.\nzwei\n\n\ndrei Sätze \n"
    (tmp_path / "train.txt").write_text(pages)
    assert texts.pages_of(tmp_path / "train.txt") == [["Ein  Satz.", "zwei"], ["drei Sätze"]]
    sources = {"train": tmp_path / "train.txt", "valid": tmp_path / "train.txt"}
    masked_lm.prepare(sources, 0, tmp_path / "ours")
    spaced = [" ".join(line.replace(" ", "▁")) for line in ("Ein  Satz.", "zwei", "drei Sätze")]
    (tmp_path / "spaced").write_text("\n".join(spaced) + "\n")
    theirs = ["--only-source", "--trainpref", tmp_path / "spaced", "--destdir", tmp_path / "theirs"]
    call("fairseq-preprocess", *theirs, "--srcdict", tmp_path / "ours" / "dict.txt", "--workers", 1)
    assert items(tmp_path / "ours" / "train") == items(tmp_path / "theirs" / "train")
    assert words(tmp_path / "ours" / "valid", tmp_path / "ours" / "dict.txt") == [line.split() for line in spaced]


def test_subwords_give_the_text_back(tmp_path):
    lines = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog"] * 3
    tokenise = texts.learn_tokens(lines, 40, tmp_path)
    assert texts.tokens_in(tmp_path)(lines[0]) == tokenise(lines[0]) != texts.characters(lines[0])
    assert "".join(tokenise(lines[1])).replace("▁", " ").strip() == lines[1]
    assert {token for line in lines for token in tokenise(line)} == {
        *Dictionary.load(str(tmp_path / "dict.txt")).symbols[4:]
    }


def test_characters_that_sentencepiece_leaves_out_are_no_words_of_the_dictionary(tmp_path):
    """They are rarer than one in 10,000, and their texts would add as many entries as there are."""
    rare = [f"a cat {chr(0x4E00 + number)}{chr(0x5E00 + number)}" for number in range(3)]
    texts.learn_tokens(["the cat sat on the mat and a dog sat on the log"] * 2000 + rare, 40, tmp_path)
    known = Dictionary.load(str(tmp_path / "dict.txt")).symbols[4:]
    assert "▁the" in known and not any(ord(character) >= 0x4E00 for token in known for character in token)


def test_subwords_are_also_learnt_from_long_paragraphs(tmp_path):
    tokenise = texts.learn_tokens(["zu " * 3000, "a b c"], 11, tmp_path)  # SentencePiece's default limit is 4,192 bytes
    assert tokenise("zu zu") == ["▁zu", "▁zu"]


def test_a_damaged_subword_model_is_named(tmp_path):
    (tmp_path / texts.SUBWORDS).write_bytes(b"cut")
    with pytest.raises(InputError, match=f"{texts.SUBWORDS}: cannot be read as a sentencepiece model"):
        texts.tokens_in(tmp_path)


def test_triples_are_cut_to_the_limit_in_pairs(tmp_path):
    triples = [("甲" * 30, "乙" * 5, "丙" * 9, 1), ("丁", "戊" * 20, "己", 0)]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "dict.txt").write_text("".join(f"{character} 1\n" for character in "甲乙丙丁戊己"))
    long_documents.prepare({"train": triples}, 24, tmp_path / "text", tmp_path / "24")
    for number, expected in enumerate((["甲" * 10, "丁"], ["乙" * 5, "戊" * 10], ["丙" * 9, "己"])):
        folder = tmp_path / "24" / f"input{number}"
        assert words(folder / "train", folder / "dict.txt") == [list(text) for text in expected]
        assert all(len(text) + 10 + 4 <= 24 for text in expected)
    assert (tmp_path / "24" / "label" / "train.label").read_text() == "1\n0\n"


def test_passages_are_joined_paragraphs_of_equal_length():
    page = ["Insert", "a chart", "Choose Insert, and then Chart, to open the dialog.", "Charts", "show"]
    assert texts.passages_of(page, 10) == ["Insert a c", "Choose Ins", "Charts sho"]
    assert texts.passages_of(page, 30) == ["Insert a chart Choose Insert, "], "the rest has 11 characters"


def test_pairs_of_passages_follow_each_other_or_are_of_two_documents():
    pages = [[f"{name} {n}" for n in range(length)] for name, length in (("a", 9), ("b", 1), ("c", 2))]
    pages[2].append("a 0")  # also in the first document, so it is no wrong passage there
    pairs = texts.following_pairs(pages)
    assert [pair[:2] for pair in pairs if pair[2] == "1"] == [
        *zip(pages[0], pages[0][1:]),
        *zip(pages[2], pages[2][1:]),
    ]
    wrong = [pair for pair in pairs if pair[2] == "0"]
    assert [pair[0] for pair in wrong] == [*pages[0][:-1], *pages[2][:-1]]
    page_of = {paragraph: page for page in pages for paragraph in page}
    assert all(second not in page_of[first] for first, second, _ in wrong)
    assert {second[0] for first, second, _ in wrong if first[0] == "a"} == {"b", "c"}
    assert texts.following_pairs(pages[:1]) == [], "there is no other document"


GLUE = {
    "MRPC": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tHe \"said\tHe said so\n",
    "SST-2": "sentence\tlabel\nit is good \t1\n",
    "STS-B": "index\tsentence1\tsentence2\tscore\n0\tA plane.\tA train.\t3.250\n",
}  # fmt: skip
# RoFormer §4.3: F1 for MRPC and QQP, Spearman's correlation for STS-B, accuracy for the others
METRICS = {"MRPC": "f1", "QQP": "f1", "STS-B": "spearman", "SST-2": "accuracy", "QNLI": "accuracy", "MNLI": "accuracy"}
ROWS = {
    "MRPC": ['He "said', "He said so", "1"],
    "SST-2": ["it is good", "1"],
    "STS-B": ["A plane.", "A train.", "3.250"],
}


@pytest.mark.parametrize("name", GLUE)
def test_the_columns_of_glue(tmp_path, name):
    (tmp_path / "train.tsv").write_text(GLUE[name])
    assert fine_tuning.rows(tmp_path / "train.tsv", fine_tuning.TASKS[name], None) == [ROWS[name]]


def test_the_metrics_of_glue_are_those_of_the_paper():
    assert {name: task.metric for name, task in fine_tuning.TASKS.items()} == {**METRICS, "own": "accuracy"}


@pytest.mark.parametrize("metric, kept", [("loss", "last"), ("accuracy", "best"), ("f1", "best")])
def test_the_checkpoint_that_is_tested_is_the_one_with_the_highest_metric(tmp_path, metric, kept):
    """fairseq keeps the one with the lowest metric if --maximize-best-checkpoint-metric is not given."""
    training = Training("train", tmp_path, "sentence_prediction", "--arch roberta_rope_base", metric=metric)
    run = PaperRun("rope", 1, tmp_path, (training,), 0)
    words = shlex.split(run.command(training))[1:]
    args, _ = options.get_training_parser("sentence_prediction").parse_known_args(words)
    assert (args.best_checkpoint_metric, args.maximize_best_checkpoint_metric) == (metric, metric != "loss")
    assert run.checkpoint(training).name == f"checkpoint_{kept}.pt"


def logs(run, name, valid, **test):
    """Write fairseq's logs of the training *name*: *valid*, the numbers of each validation, and of the *test*."""
    folder = run.model / name
    folder.mkdir(parents=True)
    of_valid = [{"valid_num_updates": str(n)} | {f"valid_{key}": str(x) for key, x in numbers.items()}
                for n, numbers in enumerate(valid, 1)]  # fmt: skip
    (folder / "valid.json").write_text(json.dumps(of_valid))
    (folder / "test.json").write_text(json.dumps({f"test_{key}": str(x) for key, x in test.items()}))


def test_the_table_of_fine_tuning_has_the_last_metric_of_each_training(tmp_path):
    both = (Training(name, tmp_path, "", "", metric="f1") for name in ("pre-trained", "untrained"))
    run = PaperRun("rope", 3, tmp_path, tuple(both))
    logs(run, "pre-trained", [{"f1": 50.0}, {"f1": 90.0}, {"f1": 80.0}])
    logs(run, "untrained", [{"f1": 40.0}, {"f1": 45.0}])
    rows, panels = fine_tuning.report([run], "f1")
    column = "f1 on the development set (%)"
    assert rows == {"rope, pre-trained": {column: {3: 80.0}}, "rope, untrained": {column: {3: 45.0}}}
    assert panels == {
        column: {"rope, pre-trained": [([1, 2, 3], [50, 90, 80])], "rope, untrained": [([1, 2], [40, 45])]}
    }


def test_the_table_of_language_models_has_the_last_validation_and_the_test(tmp_path):
    run = PaperRun("rope", 2, tmp_path, (Training("train", tmp_path, "", "", is_tested=True),))
    logs(run, "train", [{"loss": 3.0}, {"loss": 2.0}], loss=2.5)
    rows, _ = language_model.report([run])
    assert rows == {"rope": {"validation (bits per character)": {2: 2.0}, "test (bits per character)": {2: 2.5}}}


def test_the_table_of_long_documents_has_the_highest_validation_and_the_test(tmp_path):
    tuned = Training("512", tmp_path, "", "", metric="accuracy", is_tested=True)
    run = PaperRun("rope", 2, tmp_path, (Training("text", tmp_path, "", ""), tuned))
    logs(run, "text", [{"loss": 5.0}])
    logs(run, "512", [{"accuracy": 60.0}, {"accuracy": 70.0}, {"accuracy": 65.0}], accuracy=55.0)
    rows, panels = long_documents.report([run])
    assert rows == {"rope-512": {"validation accuracy (%)": {2: 70.0}, "test accuracy (%)": {2: 55.0}}}
    assert [*panels.values()][1] == {"rope-512": [([1, 2, 3], [60, 70, 65])]}


def test_the_last_ten_megabytes_of_enwik8_are_for_validation_and_test(monkeypatch):
    """As usual since Mahoney's benchmark was divided: the first 90 million bytes train."""
    whole = bytearray(100_000_000)
    whole[89_999_999], whole[90_000_000], whole[95_000_000] = b"tve"
    monkeypatch.setattr(language_model, "uncompressed", lambda path: bytes(whole))
    parts = language_model.parts_of({"enwik8": None})
    assert (parts["train"][-1], parts["valid"][0], parts["test"][0]) == tuple(b"tve")
    assert {name: len(part) for name, part in parts.items()} == {
        "train": 9 * 10**7,
        "valid": 5 * 10**6,
        "test": 5 * 10**6,
    }


def test_one_of_two_fine_tunings_starts_from_the_weights_of_its_encoding_and_seed(tmp_path, capsys):
    start = tmp_path / "mlm"
    (start / "data").mkdir(parents=True)
    (start / "settings.yaml").write_text("{model: '', flags after --: ''}")
    (start / "data" / "dict.txt").write_text("a 1\nb 1\n")
    runs = [f"{encoding}.seed{seed}" for encoding in ("rope", "learned") for seed in (1, 2)]
    for name in runs:
        (start / name / "train").mkdir(parents=True)
        (start / name / "train" / "valid.json").write_text("[]")
    (tmp_path / "a.tsv").write_text("sentence1\tsentence2\tlabel\na\tb\t0\nb\ta\t1\n")
    files = [
        "--from",
        start,
        "--train",
        tmp_path / "a.tsv",
        "--dev",
        tmp_path / "a.tsv",
        "--work-dir",
        tmp_path / "work",
    ]
    fine_tuning.cli_main([*map(str, files), *"--encodings rope,learned --seeds 2 --gpus 0 --dry-run".split()])
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("fairseq-train")]
    starts = {
        words[words.index("--save-dir") + 1]: (["", *words])[words.index("--finetune-from-model") + 2]
        if "--finetune-from-model" in words
        else None
        for words in commands
    }
    of_pre_trained = {
        f"{tmp_path}/work/{name}/pre-trained": f"{start}/{name}/train/checkpoint_last.pt" for name in runs
    }
    assert starts == {**of_pre_trained, **{f"{tmp_path}/work/{name}/untrained": None for name in runs}}


def test_fine_tuning_takes_the_flags_of_the_model_and_not_those_of_the_pre_training():
    flags = "--mask-prob 0.2 --encoder-kv-heads 2 --lr 0.1 --qk-norm --max-update 3"
    assert fine_tuning.flags_of_model(flags) == "--encoder-kv-heads 2 --qk-norm"
    assert fine_tuning.flags_of_model("--arch roberta_rope_base --lr 0.1") == "--arch roberta_rope_base"


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_language_model_with_linear_attention_takes_the_encodings_that_can_be_built(tmp_path, encoding):
    flags = f"--arch transformer_lm_rope --attention-type linear --position-encoding {encoding} --tokens-per-sample 9"
    words = ["data", *flags.split(), "--task", "language_modeling", "--decoder-layers", "1"]
    args = options.parse_args_and_arch(options.get_training_parser("language_modeling"), words)
    task = LanguageModelingTask(args, Dictionary())
    try:
        task.build_model(args)
        sentence = "one of --enwik8 and --data-dir must be given"
    except ValueError:
        sentence = f"--encodings {encoding}: linear attention can only have "
    with pytest.raises(SystemExit, match=sentence):
        language_model.cli_main(["--encodings", encoding, "--work-dir", str(tmp_path)])


def test_labels_and_texts_of_a_task_are_binary_data(tmp_path):
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "dict.txt").write_text("a 2\nb 1\n▁ 1\n")
    read = {"train": [["a b", "b", "no"], ["b", "a", "yes"]], "valid": [["a", "a", "yes"]]}
    fine_tuning.prepare(read, fine_tuning.TASKS["own"], ["no", "yes"], tmp_path / "start", tmp_path / "data", 3)
    data = tmp_path / "data"
    # of "a b" and "b", together 4 tokens, 3 are kept: the longer text is cut
    assert words(data / "input0" / "train", data / "input0" / "dict.txt") == [["a", "▁"], ["b"]]
    assert words(data / "input1" / "train", data / "input1" / "dict.txt") == [["b"], ["a"]]
    assert words(data / "label" / "valid", data / "label" / "dict.txt") == [["yes"]]


@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=2), most=st.integers(1, 9))
def test_the_longer_text_of_a_pair_is_cut_until_both_fit(lengths, most):
    """The reference takes the last token of the longer text away, of the second one if both are as long."""
    texts = [[f"{name}{n}" for n in range(length)] for name, length in zip("ab", lengths)]
    expected = [[*text] for text in texts]
    while sum(map(len, expected)) > most:
        max(reversed(expected), key=len).pop()
    assert fine_tuning.cut(texts, most) == expected


def test_the_positions_of_a_model_are_read_from_its_flags():
    assert long_documents.positions_of("--arch roberta_rope --max-positions 99 --lr 1") == 99
    assert long_documents.positions_of("--arch roberta_rope") == 512


def finished(folder, values):
    """Finished runs of masked_lm, whose last validation losses are *values*, by system and seed."""
    finished_runs = []
    for system, of_seeds in values.items():
        for seed, loss in of_seeds.items():
            run = PaperRun(system, seed, folder, (Training("train", folder, "masked_lm", ""),))
            (run.model / "train").mkdir(parents=True)
            losses = [{"valid_num_updates": str(n), "valid_loss": str(value)} for n, value in ((1, 9.0), (2, loss))]
            (run.model / "train" / "valid.json").write_text(json.dumps(losses))
            finished_runs.append(run)
    return finished_runs


@pytest.fixture
def no_stamps(monkeypatch):
    """A run is done if its result is there. Other tests of this file train, and compare stamps."""
    monkeypatch.setattr(launch, "is_done", lambda run, _: (run.model / "train" / "valid.json").exists())

    class FinishedRunner(Runner):
        def ensure(self, stage):
            return stage.trains and launch.is_done(self.run, None) or super().ensure(stage)

    monkeypatch.setattr(launch, "Runner", FinishedRunner)


def test_the_table_and_the_figure_have_the_means_and_every_seed(tmp_path):
    values = {"rope": {1: 2.0, 2: 4.0}, "learned": {1: 3.125, 2: 8.125}, "none": {2: 5.0}}
    rows, panels = masked_lm.report(finished(tmp_path, values))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in as_markdown(rows).splitlines()]
    of_rope, of_learned = np.std([2, 4], ddof=1), np.std([3.125, 8.125], ddof=1)
    assert cells[2:] == [
        ["rope", "1, 2", f"3.000 ± {of_rope:.3f}", ""],
        ["learned", "1, 2", f"5.625 ± {of_learned:.3f}", f"+2.625 ± {np.std([1.125, 4.125], ddof=1):.3f}"],
        ["none", "2", "5.000", "+1.000"],
    ]
    (axes,) = draw(panels).axes
    drawn = sorted((*line.get_xdata(), *line.get_ydata()) for line in axes.get_lines())
    assert drawn == sorted((1, 2, 9.0, loss) for of_seeds in values.values() for loss in of_seeds.values())
    assert {line.get_color() for line in axes.get_lines()} == {axes.get_lines()[n].get_color() for n in (0, 2, 4)}
    assert len({line.get_color() for line in axes.get_lines()}) == 3


@pytest.mark.parametrize(
    "values, cells",
    [
        ({1: 16.7}, ["16.7"]),  # 1 of 6, as fairseq logs an accuracy
        ({1: 50.0, 2: 66.7}, ["58.4 ± 11.8"]),
        ({1: 50.0, 2: 100.0}, ["75.0 ± 35.4"]),
        ({1: 2.125, 2: 2.5}, ["2.312 ± 0.265"]),
        ({1: float("nan")}, ["nan"]),
    ],
)
def test_the_table_has_no_more_digits_than_fairseqs_log(values, cells):
    head, rule, first, second = as_markdown({"a": {"x": values}, "b": {"x": {3: 0.0, 1: values[1]}}}).splitlines()
    assert [first.split(" | ")[2]] == cells
    digits = len(cells[0].partition(" ")[0].partition(".")[2]) or 1
    assert second.split(" | ")[3].split()[0] == f"{values[1] - values[1]:+.{digits}f}"


def test_the_later_one_of_two_validations_at_an_update_counts():
    entries = [{"valid_num_updates": str(n), "valid_f1": str(f1)} for n, f1 in ((1, 50), (2, 60), (2, 61), (3, 59))]
    assert curve_of(entries, "f1") == ([1, 2, 3], [50, 61, 59])


@pytest.mark.parametrize("metric, gpus, device", [
    ("loss", 2, "--distributed-world-size 2 --find-unused-parameters"),
    ("accuracy", 2, "--distributed-world-size 2 --find-unused-parameters"),
    ("f1", 2, "--distributed-world-size 1"),  # fairseq adds the lists of predictions of two GPUs to the number 0
    ("spearman", 0, "--cpu --distributed-world-size 1"),
])  # fmt: skip
def test_metrics_that_need_all_predictions_are_computed_on_one_gpu(tmp_path, metric, gpus, device):
    training = Training("train", tmp_path, "sentence_prediction", "", metric=metric)
    assert f" {device} --seed" in PaperRun("rope", 1, tmp_path, (training,), gpus).command(training)


def test_a_training_takes_one_of_several_gpus_by_default(tmp_path, monkeypatch):
    training = Training("train", tmp_path, "masked_lm", "")
    for number in (4, 1, 0):
        monkeypatch.setattr("recipes.paper.runs.gpus_here", lambda number=number: number)
        assert PaperRun("rope", 1, tmp_path, (training,)).devices(training) == min(number, 1)


def with_histories(runs, *processes):
    """Write the last process of each of *runs* into its history."""
    for run, process in zip(runs, processes, strict=True):
        path = run.model / run.trainings[0].name / "history.jsonl"
        path.write_text(f"{json.dumps({'process': process})}\n" if process else "")


def test_the_table_comes_after_the_precision_and_the_device_of_the_trainings(tmp_path):
    runs = finished(tmp_path, {"rope": {1: 2.0, 2: 4.0}, "learned": {1: 3.0}})
    of_cpu, of_gpus = (
        {"command": f"fairseq-train {flags}"} for flags in ("--cpu", "--distributed-world-size 2 --bf16")
    )
    assert trained_in(runs) == ""
    with_histories(runs, of_cpu, of_cpu, None)
    assert trained_in(runs) == "Trained in fp32 on the CPU.\n\n"
    with_histories(runs, of_cpu, of_gpus, of_cpu)
    differ = "The trainings differ in precision or device: fp32 on the CPU, bf16 on 2 GPUs.\n\n"
    assert trained_in(runs) == differ


def test_emulated_bf16_is_warned_of_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "a").write_text("one\n")
    flags = f"--work-dir {tmp_path} --gpus 0 --seeds 2 --encodings rope,none --train {tmp_path}/a --valid {tmp_path}/a"
    monkeypatch.setattr(launch, "outcomes", lambda *_: [])

    def warnings(*more):
        masked_lm.cli_main([*flags.split(), *more, "--", "--bf16"])
        return [line for line in capsys.readouterr().err.splitlines() if "warning" in line]

    (line,) = warnings()
    assert line.startswith("recipes.paper.masked_lm: warning: --bf16: this CPU has no instructions for bf16 ")
    monkeypatch.setattr(launch, "launcher_of", lambda *_: None)
    assert not warnings("--launcher", "slurm", "--slurm", "time=9"), "other machines train"
    monkeypatch.setattr(machine, "cpu_info", lambda: AVX512_BF16)
    assert not warnings()


def test_the_first_encoding_of_the_command_is_the_first_row_although_its_first_run_failed(tmp_path, no_stamps):
    flags = f"--work-dir {tmp_path} --gpus 0 --seeds 2 --encodings rope,none --train {tmp_path}/a --valid {tmp_path}/a"
    (tmp_path / "a").write_text("one\n")
    finished(tmp_path, {"rope": {2: 2.0}, "none": {1: 3.0, 2: 4.0}})
    (tmp_path / "rope.seed1").touch()  # its training fails
    with pytest.raises(SystemExit, match="1 of 4 runs failed"):
        masked_lm.cli_main(flags.split())
    assert re.findall(r"^\| (\w+) \|", (tmp_path / "results.md").read_text(), re.M) == ["system", "rope", "none"]


def test_two_commands_in_one_work_folder_that_end_together_both_succeed(tmp_path, monkeypatch, no_stamps):
    """The second one begins to write its results while the first one writes its own."""
    (tmp_path / "a").write_text("one\n")
    flags = f"--work-dir {tmp_path} --gpus 0 --seeds 1 --train {tmp_path}/a --valid {tmp_path}/a --encodings".split()
    finished(tmp_path, {"rope": {1: 2.0}, "none": {1: 3.0}})
    errors = []

    def second():
        try:
            masked_lm.cli_main([*flags, "none"])
        except SystemExit as stopped:
            errors.append(stopped.code)

    other, written_whole = threading.Thread(target=second, daemon=True), study.written_whole

    @contextlib.contextmanager
    def meanwhile(*paths):
        with written_whole(*paths) as files:
            if other.ident is None:
                other.start()
                other.join(2)  # without a lock, it ends now
            yield files

    monkeypatch.setattr(study, "written_whole", meanwhile)
    masked_lm.cli_main([*flags, "rope"])
    other.join(60)
    assert not errors and not other.is_alive() and not [*tmp_path.glob("*.tmp")]
    table, figure = (tmp_path / "results.md").read_text(), (tmp_path / "curves.svg").read_text()
    assert "| none | 1 |" in table and "none" in figure and "rope" not in table + figure


STATED = {  # by RoFormer, in §4.4, §4.2, §4.3 and §4.5
    ("language_model", "model"): "--decoder-layers 12 --decoder-embed-dim 768 --decoder-attention-heads 12",
    ("language_model", "training"): "--lr 1e-4 --tokens-per-sample 1024",
    ("masked_lm", "training"): "--lr 1e-5 --tokens-per-sample 512 --max-update 100000",
    ("fine_tuning", "training"): "--batch-size 32 --max-epoch 3",
    ("long_documents", "pre-training"): "--max-update 200000",
}
BATCHES = {("language_model", "training"): 128, ("masked_lm", "training"): 64, ("long_documents", "pre-training"): 256}


def test_the_large_settings_are_those_that_the_paper_states():
    for (name, key), flags in STATED.items():
        written = read_settings(HERE / "paper.yaml", name, PROGRAMS[name].KINDS)[key].split()
        values = dict(zip(written, written[1:]))
        assert {word: values[word] for word in flags.split()[::2]} == dict(zip(*[iter(flags.split())] * 2))
        if blocks := BATCHES.get((name, key)):
            assert int(values["--batch-size"]) * int(values["--update-freq"]) == blocks
    assert read_settings(HERE / "paper.yaml", "long_documents", long_documents.KINDS)["limits"] == [512, 1024]


@pytest.mark.parametrize("file", ["small", "paper"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_both_settings_files_have_every_experiment(name, file):
    of = read_settings(HERE / f"{file}.yaml", name, PROGRAMS[name].KINDS)
    assert all("--max-update" in value or "--max-epoch" in value for key, value in of.items() if "training" in key)
    with pytest.raises(SettingsError, match="must have the settings nothing, and no others"):
        read_settings(HERE / f"{file}.yaml", name, {"nothing": str})


TRIPLE = '{"A": "a", "B": "b", "C": "c", "label": "B"}\n'
REFUSED = [
    ("language_model", "", "one of --enwik8 and --data-dir must be given, and not both"),
    ("language_model", "--enwik8 {}/short", "--enwik8 {}/short: has 3 bytes, and must have 100000000"),
    ("language_model", "--data-dir {}", "--data-dir: {}/train.txt is not a file"),
    ("language_model", "--data-dir {} --encodings alibi", "--encodings alibi: linear attention can only have none, "),
    ("masked_lm", "--encodings rope,rope", "--encodings rope,rope: must be different ones of none, "),
    ("masked_lm", "--seeds 0", "--seeds 0: must be N, for seeds 1 to N, or FIRST-LAST, from 1 to 21474"),
    ("masked_lm", "--gpus -1", "--gpus -1: must be 0 or more"),
    ("masked_lm", "--gpus 99", f"--gpus 99: this machine has {torch.cuda.device_count()}"),
    ("masked_lm", "--work-dir {}/a:b", "--work-dir {}/a:b: must not contain a colon, because fairseq splits paths at"),
    ("masked_lm", "--settings {}/latin", "--settings {}/latin, line 1: the byte 0xe4 is not UTF-8"),
    ("masked_lm", "--launcher slurm --slurm time=9 --slurm wrong=1", "--launcher slurm --slurm time=9 wrong=1: "),
    ("masked_lm", "-- --disable-validation", "after --: --disable-validation among the flags for fairseq-train: the"),
    (
        "language_model",
        "-- --log-format tqdm",
        "after --: --log-format tqdm among the flags for fairseq-train: must be json",
    ),
    ("language_model", "-- --no-save", "after --: the experiment needs the last checkpoint; drop --no-save"),
    (
        "masked_lm",
        "-- --checkpoint-suffix=X",
        "after --: the experiment needs the last checkpoint; drop --checkpoint-s",
    ),
    ("masked_lm", "-- --no-last-checkpoints", "after --: the experiment needs the last checkpoint; drop --no-last-c"),
    ("masked_lm", "-- --lr 1 --seed=2", "after --: the experiment sets --seed, --save-dir, --position-enc"),
    ("masked_lm", "-- --encoder-position-encoding rope", "after --: the experiment sets "),
    ("masked_lm", "--settings {}/seed", "{}/seed: masked_lm: training: the experiment sets --seed, --save-dir, "),
    ("masked_lm", "--settings {}/log", "{}/log: masked_lm: training: --log-format simple among the flags for"),
    ("masked_lm", "--settings {}/quote", '{}/quote: masked_lm: model: "\'x" cannot be divided into words (No closing'),
    ("masked_lm", "--train {}/nothing", "--train: {}/nothing is not a file"),
    ("masked_lm", "--train .", "--train: . is not a file"),
    ("masked_lm", "--settings {}/short", "{}/short: masked_lm must have the settings model, training, subwords"),
    ("long_documents", "--data-dir {}/triples", "{}/triples/valid.json, line 2: must be JSON with the texts "),
    ("long_documents", "--data-dir . --settings {}/limits", "{}/limits: limits has 600, and must be at most --max-pos"),
    (
        "long_documents",
        "--data-dir . -- --max-positions 1000",
        f"{HERE}/small.yaml: limits has 1024, and must be at most --max-positions, which is 1000",
    ),
    ("fine_tuning", "--from {} --train {}/a.tsv --dev {}/a.tsv", "--from: {}/settings.yaml is not a file"),
    ("fine_tuning", "--from {}/mlm --train {}/b.tsv --dev {}/a.tsv", "{}/b.tsv: has no column sentence1; it has x, y"),
    (
        "fine_tuning",
        "--from {}/mlm --train {}/a.tsv --dev {}/c.tsv",
        "{}/c.tsv: the label 2 is not in the training set",
    ),
    (
        "fine_tuning",
        "--from {}/mlm --train {}/c.tsv --dev {}/c.tsv",
        "{}/c.tsv: the labels in label are 2, and must be ",
    ),
    (
        "fine_tuning",
        "--from {}/mlm --train {}/d.tsv --dev {}/a.tsv",
        "{}/d.tsv, line 3: has 2 cells, and must have 3, ",
    ),
    (
        "fine_tuning",
        "--from {}/mlm --documents --train {}/short --dev {}/short",
        "{}/short: must have two documents or more, one of them with two passages of ",
    ),
    (
        "fine_tuning",
        "--from {}/mlm --settings {}/zero --documents --train {}/short --dev {}/short",
        "{}/zero: passage is 0, and must be 1 character or more",
    ),
]


@pytest.mark.parametrize("name, flags, sentence", REFUSED)
def test_bad_input_ends_in_one_sentence_before_work(tmp_path, monkeypatch, name, flags, sentence):
    (tmp_path / "bin").mkdir()
    for program in ("sbatch", "squeue", "scancel", "srun"):  # the machine may have no SLURM
        (tmp_path / "bin" / program).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    (tmp_path / "short").write_text("abc")
    (tmp_path / "latin").write_bytes("ä: 1\n".encode("latin-1"))
    (tmp_path / "zero").write_text("fine_tuning: {training: '', passage: 0}")
    of_documents = "model: --max-positions 599, pre-training: '', fine-tuning: '', limits: [512, 600]"
    (tmp_path / "limits").write_text(f"long_documents: {{{of_documents}}}")
    settings = {"seed": ("", "--seed 1"), "log": ("", "--log-format simple"), "quote": ("'x", "")}
    for file, (model, training) in settings.items():
        of = {"masked_lm": {"model": model, "training": training, "subwords": 9}}
        (tmp_path / file).write_text(json.dumps(of))
    (tmp_path / "triples").mkdir()
    for file in long_documents.TEXTS.values():
        (tmp_path / "triples" / file).write_text("字\n")
    for part in long_documents.SETS:
        (tmp_path / "triples" / f"{part}.json").write_text(TRIPLE + ('{"A": "a"}\n' if part == "valid" else TRIPLE))
    for encoding in ("rope", "learned"):
        (tmp_path / "mlm" / f"{encoding}.seed1" / "train").mkdir(parents=True)
        (tmp_path / "mlm" / f"{encoding}.seed1" / "train" / "valid.json").write_text("[]")
    (tmp_path / "mlm" / "settings.yaml").write_text("{}")
    head = "sentence1\tsentence2\tlabel\n"
    for file, content in {"a": f"{head}a\tb\t0\nb\ta\t1\n", "b": "x\ty\n1\t2\n", "c": f"{head}a\tb\t2\n"}.items():
        (tmp_path / f"{file}.tsv").write_text(content)
    (tmp_path / "d.tsv").write_text(f"{head}a\tb\t0\na\tb\n")
    words = [word.replace("{}", str(tmp_path)) for word in flags.split()]
    seeds = [] if "--seeds" in flags else ["--seeds", "1"]
    with pytest.raises(SystemExit) as stopped:
        PROGRAMS[name].cli_main([*seeds, "--work-dir", str(tmp_path / "work"), *words])
    assert str(stopped.value).startswith(f"recipes.paper.{name}: {sentence.replace('{}', str(tmp_path))}")
    assert not [*tmp_path.glob("work/data")]


def test_data_are_whole_and_made_for_one_set_of_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "outcomes", lambda *_: [])
    flags = ["--work-dir", str(tmp_path / "work"), *"--gpus 0 --seeds 2 --encodings rope,none".split()]
    small = tmp_path / "text.gz"
    small.write_bytes(gzip.compress(b"one\ntwo\n"))
    flags += ["--train", str(small), "--valid", str(small)]
    (tmp_path / "work" / "data.tmp").mkdir(parents=True)
    (tmp_path / "work" / "data.tmp" / "half").touch()
    masked_lm.cli_main([*flags, "--", "--lr", "0.5"])
    assert not [*tmp_path.glob("work/data*/half")] and (tmp_path / "work" / "data" / "train.idx").exists()
    made = (tmp_path / "work" / "data" / "dict.txt").stat().st_mtime_ns
    masked_lm.cli_main([*flags, "--", "--lr", "0.5"])
    assert (tmp_path / "work" / "data" / "dict.txt").stat().st_mtime_ns == made
    with pytest.raises(SystemExit, match="was begun with another value of flags after --; choose another folder"):
        masked_lm.cli_main([*flags, "--", "--lr", "0.4"])
    with pytest.raises(SystemExit, match="was begun with another value of flags after --; choose another folder"):
        masked_lm.cli_main([*flags, "--dry-run", "--", "--lr", "0.4"])


def test_fine_tuning_refuses_a_dictionary_that_has_changed_since_its_data_were_made(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "outcomes", lambda *_: [])
    start, work = tmp_path / "mlm", tmp_path / "work"
    for folder in (start / "data", start / "rope.seed1" / "train"):
        folder.mkdir(parents=True)
    (start / "settings.yaml").write_text("{model: '', flags after --: ''}")
    (start / "rope.seed1" / "train" / "valid.json").write_text("[]")
    (start / "data" / "dict.txt").write_text("a 1\nb 1\n")
    (tmp_path / "a.tsv").write_text("sentence1\tsentence2\tlabel\na\tb\t0\nb\ta\t1\n")
    files = ["--from", start, "--train", tmp_path / "a.tsv", "--dev", tmp_path / "a.tsv", "--work-dir", work]
    words = [*map(str, files), "--encodings", "rope", "--seeds", "1", "--gpus", "0"]
    fine_tuning.cli_main(words)
    fine_tuning.cli_main(words)
    (start / "data" / "dict.txt").write_text("b 1\na 1\n")
    with pytest.raises(SystemExit, match="was begun with another value of --from dict.txt; choose another folder"):
        fine_tuning.cli_main(words)


def test_a_training_with_other_flags_is_moved_aside_and_comes_back_without_its_checkpoints(tmp_path, capsys):
    data, folder = tmp_path / "data", tmp_path / "rope.seed1" / "train"
    for path in (data, folder):
        path.mkdir(parents=True)
    (data / "train.bin").write_text("data")

    def prepared(flags):
        run = PaperRun("rope", 1, tmp_path, (Training("train", data, "masked_lm", flags),))
        (stage,), stamps = stages_of(run), Stamps(run)
        stage.prepare(run, stamps, Moves(run))
        return stage, stamps.of(stage)

    _, begun = prepared("--lr 1")
    for name, contents in (("begun.json", json.dumps(begun)), ("checkpoint_last.pt", ""), ("valid.json", "[]")):
        (folder / name).write_text(contents)
    prepared("--lr 1")
    assert (folder / "valid.json").exists()
    prepared("--lr 2")
    assert not folder.exists() and "has other flags, data or weights: moved to" in capsys.readouterr().out
    (tmp_path / "rope.seed1" / "earlier" / "1" / "train" / "checkpoint_last.pt").unlink()
    prepared("--lr 1")
    assert sorted(path.name for path in folder.iterdir()) == ["begun.json", "valid.json"]


def test_a_dry_run_prints_the_commands_and_leaves_the_choice_of_settings_to_the_next_run(tmp_path, monkeypatch, capsys):
    text, work = tmp_path / "text", tmp_path / "work"
    text.write_text("one\ntwo\n")
    flags = ["--work-dir", str(work), *"--gpus 0 --seeds 2 --encodings rope,none".split()]
    flags += ["--train", str(text), "--valid", str(text)]
    masked_lm.cli_main([*flags, "--dry-run", "--", "--lr", "0.5"])
    commands = capsys.readouterr().out.splitlines()
    assert len(commands) == 4
    assert all(re.match(f"fairseq-train {work}/data .* --lr 0.5 *$", command) for command in commands)
    assert not work.exists()
    monkeypatch.setattr(launch, "outcomes", lambda *_: [])
    masked_lm.cli_main([*flags, "--", "--lr", "0.4"])
    assert (work / "data" / "train.idx").exists()


TINY = (
    "--decoder-layers 1 --decoder-embed-dim 32 --decoder-ffn-embed-dim 32 --tokens-per-sample 64 --batch-size 4 "
    "--max-update 2 --validate-interval-updates 1 --save-interval-updates 1 --keep-interval-updates -1"
)


@pytest.mark.slow
def test_an_interrupted_experiment_resumes_and_gives_the_same_results(tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "FORKED_PROGRAMS", forked_programs.folder())
    data, work = tmp_path / "data", tmp_path / "work"
    data.mkdir()
    text = (ROOT / "README.md").read_bytes()
    for name, part in {"train": text[:5000], "valid": text[5000:5500], "test": text[5500:6000]}.items():
        (data / f"{name}.txt.gz").write_bytes(gzip.compress(part))
    words = ["--data-dir", data, "--work-dir", work, "--gpus", 0, "--encodings", "rope", "--seeds", 1]
    command = ["python", "-m", "recipes.paper.language_model", *words, "--", *TINY.split()]
    run_program(*command, cwd=ROOT)
    table, figure = (work / "results.md").read_text(), (work / "curves.svg").read_bytes()
    folder = work / "rope.seed1" / "train"
    validations, test = (json.loads((folder / f"{name}.json").read_text()) for name in ("valid", "test"))
    assert curve_of(validations, "loss")[0] == [1, 2] and float(test["test_loss"]) < 1.1 * math.log2(260)
    loss = float(validations[-1]["valid_loss"])
    assert re.search(rf"\| {loss}0* \|", table) and b"<svg" in figure
    assert "\n\nTrained in fp32 on the CPU.\n\n" in table
    # As after an interruption in update 2; after its checkpoint, but before its summary in the history; never.
    for checkpoint, updates in (("1_1", ["2"]), ("1_2", []), (None, [])):
        if checkpoint:
            (folder / "valid.json").unlink()
            shutil.copy(folder / f"checkpoint_{checkpoint}.pt", folder / "checkpoint_last.pt")
        if checkpoint == "1_2":
            lines = (folder / "history.jsonl").read_text().splitlines(keepends=True)
            (folder / "history.jsonl").write_text("".join(line for line in lines if "train_loss" not in line))
        assert re.findall(r"^  update (\d):", run_program(*command, cwd=ROOT).stdout, re.M) == updates
        assert (work / "results.md").read_text() == table and (work / "curves.svg").read_bytes() == figure
