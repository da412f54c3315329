"""Searches in tests: sentences, models as fairseq-generate prepares them, and comparisons of hypotheses."""

import pytest
import torch
from fairseq.search import BeamSearch
from fairseq.sequence_generator import SequenceGenerator

from fairseq_rope.search import ensemble
from tests.models import EOS, PAD, teacher_forced


def sentences(lengths=(9, 3, 6, 12, 5)):
    """A sample of sentences of *lengths*, padded on the left as in fairseq."""
    tokens = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in enumerate(lengths):
        tokens[row, -length:-1] = torch.randint(4, 44, (length - 1,))
        tokens[row, -1] = EOS
    return {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor(lengths)}}


def fast(model):
    """*model* as fairseq-generate prepares it."""
    model.make_generation_fast_(beamable_mm_beam_size=4, need_attn=False)
    # An untrained model does not end sentences. A larger weight for the end lets them end at different times.
    with torch.no_grad():
        model.decoder.output_projection.weight[EOS] *= 3.0
    return model


def search(model, sample, plain=False, beam_size=4, strategy=BeamSearch, prefix_tokens=None, max_len_b=6, **options):
    """The hypotheses of SequenceGenerator, and whether its decoder took bound steps.

    *plain* turns the fast search off.
    """
    torch.manual_seed(5)
    words = model.decoder.dictionary
    options = {"beam_size": beam_size, "max_len_b": max_len_b, "search_strategy": strategy(words), **options}
    begun = []
    real = ensemble.begin

    def begin(*args):
        begun.append(real(*args))
        return begun[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ensemble, "begin", begin)
        if plain:
            patch.setenv("FAIRSEQ_ROPE_FAST_SEARCH", "0")
        generator = SequenceGenerator([model], words, **options)
        hypotheses = generator.generate([model], sample, prefix_tokens=prefix_tokens)
    return hypotheses, bool(begun) and None not in begun


def assert_same(actual, expected):
    """Assert that two searches have the same hypotheses, with the same scores but for rounding."""
    assert len(actual) == len(expected)
    for hypotheses, true in zip(actual, expected, strict=True):
        assert [h["tokens"].tolist() for h in hypotheses] == [h["tokens"].tolist() for h in true]
        for one, other in zip(hypotheses, true, strict=True):
            scores, expected_scores = one["positional_scores"], other["positional_scores"]
            rounding = 1e-6 * len(scores)  # scores are differences of sums
            torch.testing.assert_close(scores, expected_scores, rtol=0, atol=1e-5 + rounding)


def search_both_ways(model, sample, bound=True, **options):
    """The hypotheses of the default search, which must equal those of the plain search and be fast if *bound*."""
    expected, took_steps = search(model, sample, plain=True, **options)
    assert not took_steps
    actual, took_steps = search(model, sample, **options)
    assert took_steps is bound
    assert_same(actual, expected)
    return actual


def assert_scores_of_the_full_pass(model, sample, found):
    """Assert that the scores that a search *found* step by step are those of all tokens at once."""
    source, lengths = sample["net_input"]["src_tokens"], sample["net_input"]["src_lengths"]
    for row, hypotheses in enumerate(found):
        for hypothesis in hypotheses:
            tokens = hypothesis["tokens"].unsqueeze(0)
            alone = source[row : row + 1, -int(lengths[row]) :]
            with torch.no_grad():
                scores = teacher_forced(model, alone, lengths[row : row + 1], tokens).log_softmax(2)
            scores = scores.gather(2, tokens.unsqueeze(2)).flatten()
            torch.testing.assert_close(hypothesis["positional_scores"], scores, atol=1e-4, rtol=1e-4, check_dtype=False)
