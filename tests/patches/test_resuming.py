"""The place in an epoch at which a training resumes with other batches."""

import math

import pytest
import torch
from fairseq.data.iterators import EpochBatchIterator, GroupedIterator
from torch.utils.data import TensorDataset


def iterator(size, shards=1, shard=0, sentences=120):
    """fairseq's iterator over 120 sentences, in batches of *size*, for one of *shards* processes."""
    numbers = torch.arange(sentences)
    batches = [numbers[first : first + size].tolist() for first in range(0, sentences, size)]
    data = TensorDataset(numbers)
    process = {"num_shards": shards, "shard_id": shard, "persistent_workers": False}
    return EpochBatchIterator(data, lambda items: [int(number) for (number,) in items], batches, seed=3, **process)


def state_after(place, *args, **sizes):
    """The state after *place* batches of the second epoch, and the sentences in them, of all processes."""
    seen = []
    shards = args[1] if len(args) > 1 else 1
    for shard in range(shards):
        of_process = iterator(*args, *([shard] if shards > 1 else []), **sizes)
        of_process.load_state_dict({"version": 2, "epoch": 2, "iterations_in_epoch": 0, "shuffle": True})
        epoch = of_process.next_epoch_itr()
        seen += [number for _ in range(place) for number in next(epoch)]
        state = of_process.state_dict()
    return state, seen


def rest_after(state, size, shards=1, sentences=120):
    """The sentences of the rest of the epoch, of all processes."""
    rest = []
    for shard in range(shards):
        of_process = iterator(size, shards, shard, sentences)
        of_process.load_state_dict(state)
        assert of_process.next_epoch_idx == 2
        rest += [number for batch in of_process.next_epoch_itr() for number in batch]
    return rest


@pytest.mark.parametrize("before, place, after", [((2, 1), 20, (2, 4)), ((2, 4), 5, (2, 1)), ((2, 4), 5, (2, 2))])
def test_another_number_of_processes_sees_each_sentence_once(before, place, after):
    state, seen = state_after(place, *before)
    assert len(seen) == 40 and sorted(seen + rest_after(state, *after)) == [*range(120)]


@pytest.mark.parametrize("before, place, after", [(1, 54, 8), (8, 7, 1), (6, 1, 8), (8, 1, 6), (3, 17, 8)])
@pytest.mark.parametrize("sentences", [59, 10])
def test_another_number_of_processes_skips_no_batch(before, place, after, sentences):
    place = min(place, -(-sentences // before) - 1)
    state, seen = state_after(place, 1, before, sentences=sentences)
    rest = rest_after(state, 1, after, sentences)
    assert {*seen, *rest} == {*range(sentences)} and len(seen) + len(rest) - sentences < max(after, before)


def test_batches_of_another_size_resume_after_the_same_share_of_the_epoch():
    state, _ = state_after(45, 2)  # 45 of 60 batches
    assert len(rest_after(state, 8)) == 4 * 8 and len(rest_after(state, 1)) == 30
    with pytest.raises(RuntimeError, match="dataloader mismatch"):
        EpochBatchIterator.load_state_dict.__wrapped__(iterator(8), state)


def test_a_checkpoint_without_the_number_of_batches_resumes_as_in_fairseq():
    state, seen = state_after(45, 2)
    del state["batches_seen"]
    assert len(rest_after(state, 1)) == 75
    assert sorted(seen + rest_after(state, 2)) == [*range(120)]


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("place", [0, 4, 7, 18, 19])
def test_with_another_update_freq_the_rest_of_the_epoch_is_seen_once(place, skips):
    """fairseq-train asks for groups of --update-freq batches until there are no more, and then whether it has ended."""
    state, seen = state_after(place, 6) if place else ({"epoch": 2, "iterations_in_epoch": 0}, [])
    resumed = iterator(6)  # 20 batches
    resumed.load_state_dict(state)
    groups = GroupedIterator(resumed.next_epoch_itr(), 3, skips)
    rest = list(groups)
    assert rest and resumed.end_of_epoch() and groups.n == len(groups) == math.ceil(place / 3) + len(rest)
    assert all(len(group) == 3 for group in rest[:-1])
    left_out = (20 - place) % 3 if skips and place < 18 else 0
    batches = [batch for group in rest for batch in group]
    assert len(batches) == 20 - place - left_out
    numbers = sorted(seen + [number for batch in batches for number in batch])
    assert len({*numbers}) == len(numbers) == 120 - 6 * left_out
