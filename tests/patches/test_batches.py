"""Sentences with more tokens than --max-tokens: named in one sentence before training, or skipped with a count."""

import re

import numpy as np
import pytest
from fairseq.data import FairseqDataset
from fairseq.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from fairseq.tasks import FairseqTask

from tests.commands import PLUGIN, call, outputs, train
from tests.patches.fairseq_alone import translation_task


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


@pytest.mark.slow  # torch waits for the end of a process for 5 seconds
def test_processes_that_load_data_know_the_epoch(data_bin):
    epochs = translation_task(data_bin).get_batch_iterator(OfEpoch(), max_sentences=4, num_workers=1)
    assert [list(epochs.next_epoch_itr()) for _ in range(3)] == [[[1] * 4], [[2] * 4], [[3] * 4]]


@pytest.mark.parametrize("flag", ["update_epoch_batch_itr", "disable_iterator_cache"])
def test_batches_are_composed_for_each_epoch_on_request(data_bin, flag):
    task, ours, earlier = translation_task(data_bin), FairseqTask.get_batch_iterator, []
    task.load_dataset("train")
    for epoch in (1, 2):
        options = {"max_tokens": 200, "seed": 5, "epoch": epoch, flag: True}
        both = [get(task, task.dataset("train"), **options).frozen_batches for get in (ours, ours.__wrapped__)]
        actual, of_fairseq = ([list(batch) for batch in batches] for batches in both)
        assert actual == of_fairseq and actual not in earlier
        earlier.append(actual)
