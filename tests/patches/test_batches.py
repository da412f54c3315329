"""Sentences with more tokens than --max-tokens: named in one sentence before training, or skipped with a count."""

import re

import numpy as np
import pytest
from fairseq.data import FairseqDataset, data_utils
from fairseq.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from fairseq.tasks import FairseqTask

from fairseq_rope.errors import InputError
from tests.commands import PLUGIN, call, outputs, train
from tests.patches.fairseq_alone import translation_task

SKIP = "--skip-invalid-size-inputs-valid-test"
LONG = 60  # words in the long sentence, the second of each set; the set of training has two


@pytest.fixture(scope="module")
def long_bin(data_bin, tmp_path_factory):
    """The corpus with one long pair in the validation and test sets, and two in the training set.

    The set valid1 is the validation set without the long pair.
    """
    folder, text = tmp_path_factory.mktemp("long"), data_bin.parent / "text"
    for name in ("train", "valid", "test"):
        for language, word in (("en", "dog"), ("de", "DOG")):
            lines = (text / f"{name}.{language}").read_text().splitlines()
            lines[1:2] = [" ".join([word] * LONG)] * (2 if name == "train" else 1)
            (folder / f"{name}.{language}").write_text("\n".join(lines) + "\n")
            (folder / f"short-{name}.{language}").write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    prefixes = [word for name in ("train", "valid", "test") for word in (f"--{name}pref", folder / name)]
    prefixes[prefixes.index("--validpref") + 1] = f"{folder / 'valid'},{folder / 'short-valid'}"
    dictionary = ["--joined-dictionary", "--srcdict", data_bin / "dict.en.txt"]
    call("fairseq-preprocess", "-s", "en", "-t", "de", *prefixes, *dictionary, "--destdir", folder / "bin")
    return folder / "bin"


def test_the_places_of_sentences_in_large_files_are_right(tmp_path):
    """fairseq-preprocess --workers merges the files of its processes like this. The words themselves are left out."""
    sizes = [[2**29] * 3, [2**30, 5, 7], [1]]
    builder = MMapIndexedDatasetBuilder(str(tmp_path / "all.bin"), dtype=np.uint16)
    for number, of_part in enumerate(sizes):
        (tmp_path / f"{number}.bin").touch()
        with MMapIndexedDataset.Index.writer(str(tmp_path / f"{number}.idx"), np.uint16) as index:
            index.write(of_part)
        builder.merge_file_(str(tmp_path / str(number)))
    builder.finalize(str(tmp_path / "all.idx"))
    merged = MMapIndexedDataset.Index(str(tmp_path / "all.idx"))
    joined = sum(sizes, [])
    assert [merged[n] for n in range(len(joined))] == [(2 * sum(joined[:n]), size) for n, size in enumerate(joined)]


def test_buckets_of_lengths_pad_sentences_and_change_no_loss_and_no_translation(data_bin, trained, tmp_path):
    buckets = ["--num-batch-buckets", 3]
    log = train(data_bin, tmp_path, *buckets)
    lengths = sorted(len(line.split()) + 1 for line in (data_bin.parent / "text" / "valid.en").read_text().splitlines())
    longest = {lengths[int(part * (len(lengths) - 1))] for part in (1 / 3, 2 / 3, 1)}  # of each bucket
    logged = re.search(r"bucketing source lengths: (.*)", log)[1]  # the validation set is read first
    assert [int(number) for number in re.findall(r"\b\d+\b", logged)] == sorted(longest)
    words = [data_bin, "--path", trained / "checkpoint_last.pt", "--user-dir", PLUGIN, "--cpu", "--max-tokens", 500]
    validate = ["fairseq-validate", *words, "--task", "translation", "--log-format", "json"]
    losses = [float(re.search(r'"valid_loss": "(.*?)"', call(*validate, *flags))[1]) for flags in ([], buckets)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3)
    printed = [call("fairseq-generate", *words, *flags) for flags in ([], buckets)]
    assert outputs(printed[0]) == outputs(printed[1]) and "bucketing" in printed[1]


def refusal(limit, flag="--max-tokens"):
    return (
        rf"^sentence 1 has {LONG + 1} tokens, more than {flag} {limit}: "
        rf"give {LONG + 1} or more, or skip such sentences with {SKIP}$"
    )


@pytest.mark.parametrize("flags", [["--max-tokens", 50], ["--max-tokens", 500, "--max-tokens-valid", 50]])
def test_a_long_validation_sentence_is_named_before_training(long_bin, tmp_path, flags, caplog):
    with pytest.raises(InputError, match=refusal(50, "--max-tokens-valid")):
        train(long_bin, tmp_path, "--ignore-unused-valid-subsets", *flags)
    assert "begin training epoch" not in caplog.text and list(tmp_path.iterdir()) == []


def test_long_sentences_are_skipped_with_a_count(long_bin, tmp_path):
    sets = ["--valid-subset", "valid,valid1", "--ignore-unused-valid-subsets"]
    log = train(long_bin, tmp_path, "--max-tokens", 50, SKIP, *sets)
    assert "2 samples have invalid sizes and will be skipped" in log  # fairseq's own words, for the training set
    assert "1 of 20 sentences have more than --max-tokens-valid 50 tokens and are skipped: 1" in log
    losses = [re.search(rf'"{name}_loss": "([^"]*)"', log)[1] for name in ("valid", "valid1")]
    assert losses[0] == losses[1]
    exact = train(
        long_bin, tmp_path / "exact", "--max-tokens", LONG + 1, SKIP, "--max-update", 1, "--ignore-unused-valid-subsets"
    )
    assert "are skipped" not in exact, "the longest sentence and its end have exactly as many tokens"


@pytest.mark.parametrize("flags", [[], [SKIP]])
def test_a_long_sentence_is_named_or_skipped_in_translation(long_bin, trained, flags):
    words = ["--path", trained / "checkpoint_last.pt", "--user-dir", PLUGIN, "--cpu", "--max-tokens", 50, *flags]
    text = (long_bin.parent / "test.en").read_text()
    if not flags:
        with pytest.raises(InputError, match=refusal(50)):
            call("fairseq-generate", long_bin, *words, "--max-len-b", 20)
        with pytest.raises(InputError, match=refusal(50)):
            call("fairseq-interactive", long_bin, *words, "--max-len-b", 20, "--buffer-size", 20, stdin=text)
        return
    others = sorted({*range(20)} - {1})
    assert sorted(outputs(call("fairseq-generate", long_bin, *words, "--max-len-b", 20))) == others
    printed = call("fairseq-interactive", long_bin, *words, "--max-len-b", 20, "--buffer-size", 20, stdin=text)
    assert sorted(outputs(printed)) == others


def test_the_task_that_samples_languages_skips_no_sentence(long_bin, tmp_path):
    task = "--task translation_multi_simple_epoch --lang-pairs en-de,de-en --encoder-langtok src".split()
    sampling = "--sampling-method temperature --virtual-epoch-size 200 --ignore-unused-valid-subsets".split()
    with pytest.raises(InputError, match=rf"^sentence \d+ has {LONG + 2} tokens, .*: give {LONG + 2} or more$"):
        train(long_bin, tmp_path, *task, *sampling, "--max-tokens", 50, SKIP)


class OfEpoch(FairseqDataset):
    """Data that depend on the epoch, as the masks of a masked language model do."""

    can_reuse_epoch_itr_across_epochs = True
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return self.epoch

    def __len__(self):
        return 4

    def num_tokens(self, index):
        return 1

    size = num_tokens

    def collater(self, samples):
        return samples


def test_processes_that_load_data_know_the_epoch(data_bin):
    epochs = translation_task(data_bin).get_batch_iterator(OfEpoch(), max_sentences=4, num_workers=1)
    assert [list(epochs.next_epoch_itr()) for _ in range(3)] == [[[1] * 4], [[2] * 4], [[3] * 4]]


def test_the_lengths_of_other_data_sets_are_checked_too():
    lengths = {0: 9, 1: 70, 2: 5}
    with pytest.raises(InputError, match="^sentence 1 has 70 tokens, more than --max-tokens 69: "):
        data_utils.batch_by_size([0, 1, 2], lengths.__getitem__, max_tokens=69)
    assert len(data_utils.batch_by_size([0, 1, 2], lengths.__getitem__, max_tokens=70)) == 3


@pytest.mark.parametrize("flag", ["update_epoch_batch_itr", "disable_iterator_cache"])
def test_batches_are_composed_for_each_epoch_on_request(data_bin, flag):
    task, ours, earlier = translation_task(data_bin), FairseqTask.get_batch_iterator, []
    task.load_dataset("train")
    for epoch in (1, 2, 3):
        options = {"max_tokens": 200, "seed": 5, "epoch": epoch, flag: True}
        both = [get(task, task.dataset("train"), **options).frozen_batches for get in (ours, ours.__wrapped__)]
        actual, of_fairseq = ([list(batch) for batch in batches] for batches in both)
        assert actual == of_fairseq and actual not in earlier
        earlier.append(actual)
