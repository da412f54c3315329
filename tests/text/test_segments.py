"""Segments of documents: which sentences they contain, and the sentences of a translated segment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq_rope.text.segments import divided, joined, segments


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 60))
def test_segments_contain_each_sentence_once_and_as_many_as_fit(lengths, limit):
    found = segments(lengths, lambda: limit)
    assert [n for segment in found for n in segment] == list(range(len(lengths)))
    for segment, following in zip(found, [*found[1:], None], strict=True):
        tokens = sum(lengths[n] for n in segment) + len(segment) - 1
        assert tokens <= limit or len(segment) == 1
        if following is not None:
            assert tokens + 1 + lengths[following[0]] > limit


def test_each_segment_has_its_own_limit():
    limits = iter([9, 1, 4])
    assert segments([4, 4, 4, 1, 2], lambda: next(limits)) == [range(0, 2), range(2, 3), range(3, 5)]


@given(st.lists(st.lists(st.sampled_from(["a", "b@@", "."]), max_size=4), min_size=1, max_size=6))
def test_dividing_undoes_joining(sentences):
    assert divided(joined(sentences), len(sentences)) == (sentences, True)


@pytest.mark.parametrize(
    "translation, count, sentences",
    [
        ("a . ‖ b .", 3, [["a", "."], ["b", "."], []]),
        ("a ‖ b ‖ c", 2, [["a"], ["b", "c"]]),
        ("a ‖ b", 1, [["a", "b"]]),
        ("", 2, [[], []]),
    ],
)
def test_a_translation_with_other_separators_still_has_as_many_sentences_as_its_source(translation, count, sentences):
    assert divided(translation.split(), count) == (sentences, False)
