"""recipes/text/clean.py: which pairs are kept, which are held out, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_rope.errors import InputError
from recipes.text.clean import EMPTY, LONG, LONG_WORD, UNLIKE, clean, main, why_not
from tests.recipes.texts import read_lines, write_lines


def pairs_of(folder, name):
    return list(zip(read_lines(folder / f"{name}.en"), read_lines(folder / f"{name}.de"), strict=True))


def write_pairs(folder, name, pairs):
    for lang, side in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        write_lines(folder / f"{name}.{lang}", side)


def run(folder, *flags):
    words = ["--source-lang", "en", "--target-lang", "de", "--input", folder / "in", "--output", folder / "out"]
    main([str(word).replace("FOLDER", str(folder)) for word in (*words, *flags)])


def cleaned(folder, pairs, *flags):
    write_pairs(folder, "in", pairs)
    run(folder, *flags)
    return pairs_of(folder, "out")


def some(words):
    """A sentence of *words* words."""
    return " ".join("a" * words)


def counted(capsys):
    """The printed counts by name."""
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    return {name: int(number) for number, name in rows}


@pytest.mark.parametrize(
    "source, target, max_ratio, reason",
    [
        (0, 1, 9, EMPTY), (1, 0, 9, EMPTY), (0, 0, 9, EMPTY), (0, 300, 9, EMPTY),
        (250, 250, 9, None), (251, 250, 9, LONG), (250, 251, 9, LONG), (300, 10, 9, LONG),
        (9, 1, 9, None), (1, 9, 9, None), (10, 1, 9, UNLIKE), (1, 10, 9, UNLIKE), (2, 18, 9, None), (2, 19, 9, UNLIKE),
        (1, 1, 9, None), (1, 250, 0, None), (2, 3, 1.5, None), (3, 5, 1.5, UNLIKE),
        (["ä" * 1000], 1, 9, None), (1, ["ä" * 1001], 9, LONG_WORD),
    ],
)  # fmt: skip
def test_pairs_are_removed_by_length_ratio_and_the_longest_word(source, target, max_ratio, reason):
    pair = [["a"] * words if isinstance(words, int) else words for words in (source, target)]
    assert why_not(pair, 250, max_ratio) == reason


def test_a_language_without_blanks_is_measured_in_characters(tmp_path, capsys):
    """12 words and 15 characters are a ratio of 15 : 12, and 251 characters are too long."""
    write_lines(tmp_path / "in.en", ["The small dog runs over the green hill to its old house", "no", "yes " * 250])
    chinese = ["小狗跑过绿色的山丘去它的老房子", "小狗跑过绿色的山丘去它的老房子小狗跑过", "小" * 251]
    for code in ("zh", "zh_CN"):
        write_lines(tmp_path / f"in.{code}", chinese)
        run(tmp_path, "--target-lang", code)
        assert read_lines(tmp_path / f"out.{code}") == chinese[:1]
        counts = counted(capsys)
        assert counts[f"removed: {LONG.format(max_words=250)}"] == counts[f"removed: {UNLIKE.format(max_ratio=9)}"] == 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1),
    st.integers(1, 10), st.sampled_from([0, 1, 1.5, 2, 9]), st.integers(2, 4),
)  # fmt: skip
def test_any_corpus_is_cleaned_and_split_by_the_rules(tmp_path_factory, lengths, max_words, max_ratio, every):
    folder = tmp_path_factory.mktemp("any")
    pairs = [(f"{some(s)} {n}" if s else "", f"{n} {some(t)}" if t else "") for n, (s, t) in enumerate(lengths)]
    good = []
    for source, target in pairs:
        s, t = len(source.split()), len(target.split())
        if 1 <= s <= max_words and 1 <= t <= max_words:
            if max_ratio == 0 or (s <= max_ratio * t and t <= max_ratio * s):
                good.append((source, target))
    held_out = good[every - 1 :: every]
    rest = [pair for number, pair in enumerate(good, 1) if number % every]
    write_pairs(folder, "in", pairs)
    paths = [[str(folder / f"{name}.{lang}") for lang in ("en", "de")] for name in ("in", "out", "held")]
    if not rest or not held_out:
        with pytest.raises(InputError):
            clean(*paths, max_words, max_ratio, every)
        assert sorted(path.name for path in folder.iterdir()) == ["in.de", "in.en"]
        return
    counts = clean(*paths, max_words, max_ratio, every)
    assert pairs_of(folder, "out") == rest and pairs_of(folder, "held") == held_out
    assert (counts["read"], counts["kept"], counts["held out"]) == (len(pairs), len(rest), len(held_out))
    assert counts.total() == 2 * len(pairs)  # every pair counts as read and once more


def test_dirty_lines_stay_aligned_and_white_space_becomes_one_blank(tmp_path, capsys):
    pairs = [
        ("one\r two", "eins\rzwei"), ("next\x85line", "nächste Zeile"), ("a\u2028b", "a b"),
        ("", "leer"), ("zero\u200bwidth", "null  breit "), ("  \t ", "blank"), (some(300), some(300)),
        (some(12), "a"), ("\u00a0no break\u00a0here ", "hier nicht"), ("last", "letzte"),
    ]  # fmt: skip
    assert cleaned(tmp_path, pairs) == [
        ("one two", "eins zwei"), ("next line", "nächste Zeile"), ("a b", "a b"),
        ("zero\u200bwidth", "null breit"), ("no break here", "hier nicht"), ("last", "letzte"),
    ]  # fmt: skip
    assert [*counted(capsys).values()] == [10, 6, 2, 1, 1, 0]  # read, kept, empty, too long, unlike, a long word


def test_every_nth_kept_pair_is_held_out(tmp_path, capsys):
    pairs = [("s1", "t1"), ("", ""), *((f"s{n}", f"t{n}") for n in range(2, 8))]
    out = cleaned(tmp_path, pairs, "--holdout-every", 3, "--heldout", "FOLDER/held")
    assert out == [(f"s{n}", f"t{n}") for n in (1, 2, 4, 5, 7)]
    assert pairs_of(tmp_path, "held") == [("s3", "t3"), ("s6", "t6")]
    counts = counted(capsys)
    assert (counts["pairs read"], counts["pairs kept"], counts["pairs held out"]) == (8, 5, 2)


HELD = ["--heldout", "FOLDER/held", "--holdout-every"]
PAIRS = b"a b\nc\n\n", b"a b\nd\ne\n"


@pytest.mark.parametrize(
    "source, target, flags, values",
    [
        (*PAIRS, [*HELD, 1], "3 pairs"),
        (*PAIRS, [*HELD, 3], "--holdout-every 3: .*2"),
        (*PAIRS, ["--output", "FOLDER/no/out"], r"no/out\.en"),
        (*PAIRS, ["--input", "FOLDER/none"], "/none"),
        (b"", b"a\n", [], "in.en"),
        (b"a\n", b"", [], "in.de"),
        (b"a\n", b"\n", [], "1 pairs"),
        (b"a\nb\n", b"a\n\xfcber\n", [], "in.de, line 2: .*0xfc"),
        (b"a\n" * 3, b"a\n" * 2, [], r"in\.en .*3 .*in\.de .*2"),
    ],
)
def test_wrong_flags_and_bad_text_are_refused_and_an_earlier_output_stays(tmp_path, source, target, flags, values):
    before = {"in.en": source, "in.de": target, "out.en": b"of an earlier run"}
    for name, content in before.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=f"^recipes.text.clean: .*{values}"):
        run(tmp_path, *flags)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
