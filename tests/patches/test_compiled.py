"""fairseq's compiled modules in Python give what plain loops give. ``tests/nightly`` has the compiled ones."""

import random
import sys

import numpy as np
import pytest
import sacrebleu
import torch
from fairseq.data import data_utils
from fairseq.scoring import bleu

from fairseq_rope.patches.compiled import data_utils_fast, libbleu, provide_missing, token_block_utils_fast


@pytest.mark.parametrize("seed", range(40))
def test_batches_are_those_of_the_rule_written_with_slices(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(seed % 3 > 0, 30) for _ in range(draw.randint(1, 60))]
    max_tokens = draw.choice([-1, 0, max(lengths), 60, 200])
    max_sentences, multiple = draw.choice([-1, 1, 2, 7, 20]), draw.choice([1, 2, 4, 8])

    def too_large(batch):
        return 0 < max_sentences < len(batch) or 0 < max_tokens < len(batch) * max(batch)

    ends, start, end = [], 0, 0
    for last in range(1, len(lengths) + 1):
        batch, tail = lengths[start:last], lengths[end:last]
        if too_large(batch):
            if 0 < max_tokens < len(tail) * max(tail):
                ends.append(end)
                end = last - 1
            ends.append(end)
            start, end = end, last
        elif len(batch) < multiple or len(batch) % multiple == 0:
            end = last
    ends += [end] if end < len(lengths) else []
    indices = draw.sample(range(len(lengths)), len(lengths))
    expected = [indices[first:last] for first, last in zip([0, *ends], [*ends, len(lengths)])]

    array, limits = np.array(indices), (max_tokens, max_sentences, multiple)
    by_vector = data_utils_fast.batch_by_size_vec(array, np.array(lengths), *limits)
    length_of = dict(zip(indices, lengths)).__getitem__
    by_function = data_utils_fast.batch_by_size_fn(array, length_of, *limits)
    assert [batch.tolist() for batch in by_vector] == [batch.tolist() for batch in by_function] == expected


def test_batches_of_fixed_shapes_fit_into_them():
    """The shapes hold 4 sentences of 5 tokens, or 2 of 10. An entry of a batch is the number of a sentence."""
    lengths = [3, 5, 4, 2, 3, 9, 8, 4]
    shapes = np.array([[4, 5], [2, 10]])
    batches = data_utils_fast.batch_fixed_shapes_fast(np.arange(len(lengths)), lengths.__getitem__, shapes)
    assert batches == [[0, 1, 2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("mode", ["none", "complete", "complete_doc", "eos"])
@pytest.mark.parametrize("seed", range(10))
def test_blocks_are_those_of_a_walk_over_the_tokens(mode, seed):
    """Each token is (sentence, its place in the sentence); documents end with a sentence of one token."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 9) for _ in range(draw.randint(2, 40))]
    block_size = draw.randint(3, 20)
    sentences = [[(number, place) for place in range(size)] for number, size in enumerate(sizes)]
    tokens = [token for sentence in sentences for token in sentence]
    blocks = []
    if mode == "none":
        blocks = [tokens[first : first + block_size] for first in range(0, len(tokens), block_size)]
    elif mode == "eos":
        blocks = sentences
    else:
        block = []
        for sentence in sentences:
            separates = mode == "complete_doc" and len(sentence) == 1
            if separates or block and len(block) + len(sentence) > block_size:
                blocks.append(block)
                block = []
            block = [] if separates else block + sentence
        blocks = [block for block in [*blocks, block] if len(block) > (mode == "complete_doc")]
    if not blocks:
        pytest.skip("this text has only documents without text")
    slices = token_block_utils_fast._get_slice_indices_fast(np.array(sizes), mode, block_size, 1)
    assert [tokens[first:end] for first, end in slices] == blocks
    places = token_block_utils_fast._get_block_to_dataset_index_fast(np.array(sizes), slices)
    assert places.tolist() == [[block[0][0], block[0][1], block[-1][0]] for block in blocks]


def test_counts_of_bleu_are_those_of_sacrebleu():
    pad, eos, unk = 1, 2, 3
    draw = random.Random(1)
    scorer = object.__new__(bleu.Scorer)
    libbleu.init(scorer, bleu.BleuConfig(pad=pad, eos=eos, unk=unk))
    references, hypotheses = [], []
    for _ in range(50):
        reference, hypothesis = ([draw.randint(3, 8) for _ in range(draw.randint(1, 12))] for _ in range(2))
        libbleu.add(scorer, torch.IntTensor([pad, *reference, eos]), torch.IntTensor([*hypothesis, eos, pad, pad]))
        references.append(" ".join("unknown" if word == unk else str(word) for word in reference))
        hypotheses.append(" ".join(map(str, hypothesis)))
    expected = sacrebleu.corpus_bleu(hypotheses, [references], tokenize="none")
    stat = scorer.stat
    assert [stat.match1, stat.match2, stat.match3, stat.match4] == expected.counts
    assert [stat.count1, stat.count2, stat.count3, stat.count4] == expected.totals
    assert (stat.reflen, stat.predlen) == (expected.ref_len, expected.sys_len)
    libbleu.reset(scorer, one_init=True)
    assert [(stat := scorer.stat).match1, stat.match4, stat.count1, stat.count4, stat.reflen] == [0, 1, 0, 1, 0]


def test_compiled_modules_stay(monkeypatch):
    compiled = object()
    monkeypatch.setitem(sys.modules, "fairseq.data.data_utils_fast", compiled)
    provide_missing()
    assert sys.modules["fairseq.data.data_utils_fast"] is compiled


def test_fairseq_finds_the_modules():
    batches = data_utils.batch_by_size(np.arange(3), [2, 3, 4].__getitem__, max_tokens=6)
    assert [batch.tolist() for batch in batches] == [[0, 1], [2]]
    scorer = bleu.Scorer(bleu.BleuConfig())
    scorer.add(torch.IntTensor([5, 6, 7, 8, 2]), torch.IntTensor([5, 6, 7, 8, 2]))
    assert scorer.score() == 100
