"""fairseq_rope/tools/score.py, compared with the papers' formulas and sacrebleu's own command."""

import gzip
import io
import json
import math
import os
import random
import re
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from sacrebleu.sacrebleu import main as sacrebleu_main

from fairseq_rope.lines import read_lines
from fairseq_rope.metrics import bootstrap_seed
from fairseq_rope.scorers import Scorer
from fairseq_rope.tools.score import main

# Plain text and its hand-made tokens. The translation of the last line is empty.
REFERENCE = {
    "Die Nord-Süd-Bahn fährt heute nicht, sagt der Mann.":
    "Die Nord-Süd-Bahn fährt heute nicht , sagt der Mann .",
    "Zwei Hunde (ein großer) laufen über die Wiese!": "Zwei Hunde ( ein großer ) laufen über die Wiese !",
    "Das TV-Bild ist ein E-Mail-Anhang; das weiß ich.": "Das TV-Bild ist ein E-Mail-Anhang ; das weiß ich .",
    "Danke schön, das ist alles.": "Danke schön , das ist alles .",
}  # fmt: skip
TRANSLATION = {
    "Die Nord-Süd-Bahn fährt nicht heute, sagt ein Mann.":
    "Die Nord-Süd-Bahn fährt nicht heute , sagt ein Mann .",
    "Zwei Hunde (ein großer) laufen über die Straße!": "Zwei Hunde ( ein großer ) laufen über die Straße !",
    "Das TV-Bild ist in der E-Mail; das weiß ich nun.": "Das TV-Bild ist in der E-Mail ; das weiß ich nun .",
    "": "",
}  # fmt: skip
SPLIT = {
    "Nord-Süd-Bahn": "Nord ##AT##-##AT## Süd ##AT##-##AT## Bahn",
    "TV-Bild": "TV ##AT##-##AT## Bild",
    "E-Mail-Anhang": "E ##AT##-##AT## Mail ##AT##-##AT## Anhang",
    "E-Mail": "E ##AT##-##AT## Mail",
}


def ngrams(units, order):
    return Counter(tuple(units[i : i + order]) for i in range(len(units) - order + 1))


def precisions(translations, references, orders=(1, 2, 3, 4)):
    """The fraction of n-grams in *translations* that the references have, for each order. Both are lists of tokens."""
    shares = []
    for order in orders:
        counts = [(ngrams(t, order), ngrams(r, order)) for t, r in zip(translations, references, strict=True)]
        shares.append(sum((t & r).total() for t, r in counts) / sum(t.total() for t, _ in counts))
    return shares


def bleu(translations, references):
    """BLEU (Papineni et al. 2002) with one reference and no smoothing. Both are lists of tokens."""
    log_precision = sum(map(math.log, precisions(translations, references))) / 4
    length, reference_length = sum(map(len, translations)), sum(map(len, references))
    return 100 * math.exp(log_precision + min(0, 1 - reference_length / length))


def chrf(translations, references):
    """chrF++ (Popović 2017) as in sacrebleu: F2 of mean precision and recall, with counts of the whole corpus.

    The n-grams are those of characters of orders 1 to 6 and of words of orders 1 and 2, without their punctuation.
    """
    characters = [["".join(words) for words in side] for side in (translations, references)]
    sides = ((characters, range(1, 7)), ((translations, references), (1, 2)))
    precision = sum(sum(precisions(*pair, orders)) for pair, orders in sides) / 8
    recall = sum(sum(precisions(*pair[::-1], orders)) for pair, orders in sides) / 8
    return 100 * 5 * precision * recall / (4 * precision + recall)


def write(path, lines, end="\n"):
    path.write_text("".join(line + end for line in lines), encoding="utf-8", newline="")
    return str(path)


@pytest.fixture
def files(tmp_path):
    """The paths of reference and translation."""
    return [write(tmp_path / "ref", REFERENCE), write(tmp_path / "sys", TRANSLATION)]


def report(capsys, *flags):
    """The parsed output of --json for German, which must be all of standard output."""
    main(["--target-lang", "de", "--json", *map(str, flags)])
    return json.loads(capsys.readouterr().out)


def metrics(system):
    return {metric["name"]: metric for metric in system["metrics"]}


def test_bleu_equals_the_papers_formula_on_hand_made_tokens(files, capsys):
    reference, translation = ([line.split() for line in side.values()] for side in (REFERENCE, TRANSLATION))
    actual = metrics(report(capsys, "--sys", files[1], "--ref", files[0])["systems"][0])
    shares = [100 * share for share in precisions(translation, reference)]
    for name in ("sacreBLEU", "tokenised BLEU"):
        assert actual[name]["score"] == pytest.approx(bleu(translation, reference))
        assert actual[name]["precisions"] == pytest.approx(shares)
        assert actual[name]["reference_tokens"] == actual[name]["reference_length"] == sum(map(len, reference))
        assert actual[name]["system_tokens"] == sum(map(len, translation))
    reference, translation = (
        [" ".join(SPLIT.get(token, token) for token in line).split() for line in side]
        for side in (reference, translation)
    )
    split = actual["tokenised BLEU, compound split"]
    assert split["score"] == pytest.approx(bleu(translation, reference))
    assert split["reference_tokens"] == sum(map(len, reference))


def test_chrf_and_ter_equal_the_papers_formulas(tmp_path, capsys):
    reference = ["Ein Mann fährt Rad .", "Sie liest ein Buch ."]
    translation = ["Ein Mann fährt ein Rad .", "Ein Buch liest sie ."]
    ref = write(tmp_path / "ref", [line.replace(" .", ".") for line in reference])
    hyp = write(tmp_path / "sys", [line.replace(" .", ".") for line in translation])
    actual = metrics(report(capsys, "--sys", hyp, "--ref", ref)["systems"][0])
    words = [[line.split() for line in side] for side in (translation, reference)]
    assert actual["chrF2++"]["score"] == pytest.approx(chrf(*words))
    assert actual["chrF2++"]["reference_tokens"] == 10
    # line 1 has one word too many; line 2 needs a shift of "ein buch" and, because "buch." differs, 3 edits in all
    assert actual["TER"]["reference_tokens"] == 8
    assert actual["TER"]["score"] == pytest.approx(100 * (1 + 3) / 8)


def sacrebleu(*words):
    """The output of sacrebleu's own command."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file, pytest.MonkeyPatch.context() as patch:
        for name in ("stdin", "stdout"):  # the command opens them again, by their numbers
            patch.setattr(sys, name, SimpleNamespace(fileno=lambda: os.dup(file.fileno())))
        patch.setattr(sys, "argv", ["sacrebleu", *words])
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):  # it closes no file
            sacrebleu_main()
        sys.stdin.close()
        sys.stdout.close()
        file.seek(0)
        return file.read()


def corpus(folder, seeds, size=150):
    """The paths of a reference, and of one system for each seed that translates some words wrongly."""
    draw = random.Random(0)
    words = "der die das Hund Katze Haus sieht nimmt rote große Nord-Süd-Bahn alte Frau über unter".split()
    reference = [" ".join(draw.choices(words, k=draw.randint(5, 25))) + "." for _ in range(size)]
    paths = [write(folder / "ref", reference)]
    for seed, wrong in seeds.items():
        draw = random.Random(seed)
        changed = [
            " ".join(draw.choice(words) if draw.random() < wrong else word for word in line[:-1].split()) + "."
            for line in reference
        ]
        paths.append(write(folder / f"sys{seed}", changed))
    return paths


def test_the_paired_bootstrap_equals_that_of_sacrebleus_command(tmp_path, capsys):
    ref, *systems = corpus(tmp_path, {1: 0.3, 2: 0.28, 3: 0.5}, size=60)
    flags = "-m bleu chrf ter --chrf-word-order 2 --paired-bs --format text --width 6".split()
    table = sacrebleu(ref, "-i", *systems, *flags)
    expected = [tuple(map(float, cell)) for cell in re.findall(r"([\d.]+) \(([\d.]+) ± ([\d.]+)\)", table)]
    chances = [float(p) for p in re.findall(r"\(p = ([\d.]+)\)", table)]

    actual = report(capsys, "--sys", *systems, "--ref", ref, "--names", "base", "close", "far")
    ours = [metrics(system)[name] for system in actual["systems"] for name in ("sacreBLEU", "chrF2++", "TER")]
    assert len(expected) == 9 and len(chances) == 6
    for metric, cell in zip(ours, expected, strict=True):
        assert (metric["score"], metric["mean"], metric["confidence"]) == pytest.approx(cell, abs=1e-6)
    assert [metric["p_value"] for metric in ours[:3]] == [None] * 3
    assert [metric["p_value"] for metric in ours[3:]] == pytest.approx(chances, abs=1e-4)
    assert all(metric["signature"] in table for metric in ours)
    expected = {"baseline": "base", "resamples": 1000, "seed": 12345, "confidence": 0.95}
    assert actual["paired_bootstrap"] == expected
    tokenised = [metrics(system)["tokenised BLEU"]["p_value"] for system in actual["systems"]]
    assert [chance is None for chance in tokenised] == [True, False, False]
    same = report(capsys, "--sys", systems[0], systems[0], "--ref", ref, "--names", "base", "copy")["systems"][1]
    assert {metric["p_value"] for metric in metrics(same).values()} == {1.0}, "chance gives a difference of 0 or more"


def test_every_metric_is_labelled_with_its_tokens(files, capsys):
    actual = report(capsys, "--sys", files[1], "--ref", files[0], "--names", "rope")
    (system,) = actual["systems"]
    signatures = {name: metric["signature"] for name, metric in metrics(system).items()}
    assert system["name"] == "rope" and system["file"] == files[1] and actual["paired_bootstrap"] is None
    names = ["sacreBLEU", "tokenised BLEU", "tokenised BLEU, compound split", "chrF2++", "TER"]
    assert list(signatures) == names
    theirs = json.loads(sacrebleu(files[0], "-i", files[1], "--format", "json"))["signature"]
    assert signatures["sacreBLEU"] == theirs and "|tok:13a|" in theirs
    assert "|tok:moses-de-sacremoses-0.2.0|smooth:none|" in signatures["tokenised BLEU"]
    assert "|tok:moses-de-sacremoses-0.2.0+compound-split|" in signatures["tokenised BLEU, compound split"]
    tokens = {metric["name"]: metric["reference_tokens"] for metric in system["metrics"]}
    assert actual["references"][0]["tokens"] == {
        "13a": tokens["sacreBLEU"],
        "Moses": tokens["tokenised BLEU"],
        "Moses + compound split": tokens["tokenised BLEU, compound split"],
    }
    assert set(actual["versions"]) == {"fairseq_rope", "sacrebleu", "sacremoses"}


def test_each_reference_is_scored_after_moses_tokeniser_and_detokeniser(tmp_path, capsys):
    """Written by hand as Moses' Perl scripts print it; they and sacremoses agree on all 3003 lines of newstest2014."""
    after = {
        "Wählen Sie Fuß-/Endnoten… oder Alle.": "Wählen Sie Fuß- / Endnoten … oder Alle.",
        "Der Zug um 10:30 Uhr kostet 3 000 € und mehr.": "Der Zug um 10: 30 Uhr kostet 3 000 €und mehr.",
        "Er sagt: „Ich komme“, und geht (heute).": "Er sagt: „Ich komme“, und geht (heute).",
    }
    ref, changed = (write(tmp_path / name, lines) for name, lines in (("ref", after), ("changed", after.values())))
    (theirs,) = [json.loads(sacrebleu(ref, "-i", changed, "-w", "6"))]
    alike = write(tmp_path / "alike", ["Ein Satz.", "Noch einer.", "Und der dritte Satz ist länger."])
    one, other = report(capsys, "--sys", changed, "--ref", ref, alike)["references"]
    assert one["sacreBLEU_after_moses"] == pytest.approx(theirs["score"], abs=1e-6) and theirs["score"] < 80
    assert other["sacreBLEU_after_moses"] == pytest.approx(100)


def test_scores_with_several_references_equal_those_of_sacrebleus_command(tmp_path, capsys):
    ref, other, system = corpus(tmp_path, {1: 0.3, 2: 0.4}, size=40)
    theirs = json.loads(sacrebleu(ref, other, "-i", system, "-m", "bleu", "chrf", "ter", "--chrf-word-order", "2"))
    actual = report(capsys, "--sys", system, "--ref", ref, other)
    ours = metrics(actual["systems"][0])
    for name, expected in zip(("sacreBLEU", "chrF2++", "TER"), theirs, strict=True):
        assert round(ours[name]["score"], 1) == expected["score"]
        assert ours[name]["signature"] == expected["signature"] and "nrefs:2|" in expected["signature"]
    length = int(re.search(r"ref_len = (\d+)", theirs[0]["verbose_score"]).group(1))
    assert ours["sacreBLEU"]["reference_length"] == length
    assert [reference["file"] for reference in actual["references"]] == [ref, other]
    tokens = [reference["tokens"]["13a"] for reference in actual["references"]]
    assert ours["sacreBLEU"]["reference_tokens"] == sum(tokens)
    both = report(capsys, "--sys", system, "--ref", other, ref)["systems"][0]
    assert metrics(both)["tokenised BLEU"]["score"] == pytest.approx(ours["tokenised BLEU"]["score"])
    for alone in (ref, other):
        one = metrics(report(capsys, "--sys", system, "--ref", alone)["systems"][0])
        assert ours["tokenised BLEU"]["score"] > one["tokenised BLEU"]["score"]


# languages and tokenisers

CHINESE = ["我喜欢机器翻译。", "今天天气很好,我们去公园。", "他在2024年买了一本书。"]
CHINESE_TRANSLATION = ["我喜欢机器的翻译。", "今天天气好,我们去了公园。", "他2024年买了一本新书。"]


@pytest.mark.parametrize(
    "lang, flags, tokenize", [("zh-Hans", [], "zh"), ("th", [], "char"), ("km", ["--tokenize", "none"], "none")]
)
def test_languages_without_spaces_are_scored_with_sacrebleus_tokenisers(tmp_path, capsys, lang, flags, tokenize):
    ref, system = write(tmp_path / "ref", CHINESE), write(tmp_path / "sys", CHINESE_TRANSLATION)
    src = write(tmp_path / "src", ["a", "b", "c"])
    actual = report(capsys, "--sys", system, "--ref", ref, "--src", src, "--target-lang", lang, *flags)
    (system_found,) = actual["systems"]
    theirs = json.loads(sacrebleu(ref, "-i", system, "-m", "bleu", "chrf", "--tokenize", tokenize))
    assert [metric["name"] for metric in system_found["metrics"]] == ["sacreBLEU", "chrF2"]
    for ours, expected in zip(system_found["metrics"], theirs, strict=True):
        assert round(ours["score"], 1) == expected["score"]
        assert ours["signature"] == expected["signature"]
    assert f"|tok:{tokenize}|" in theirs[0]["signature"]
    (bucket,) = system_found["sacreBLEU_by_source_length"]
    assert bucket["score"] == system_found["metrics"][0]["score"]
    assert list(actual["references"][0]["tokens"]) == [tokenize]
    assert system_found["metrics"][1]["reference_tokens"] == sum(map(len, CHINESE))


def test_another_tokeniser_changes_only_sacrebleu(files, capsys):
    flags = ["--sys", files[1], "--ref", files[0]]
    one, other = (metrics(report(capsys, *flags, *more)["systems"][0]) for more in ([], ["--tokenize", "char"]))
    assert {name for name in one if one[name] != other[name]} == {"sacreBLEU"}
    assert "|tok:char|" in other["sacreBLEU"]["signature"]


def test_an_unavailable_tokeniser_is_refused_by_name(files, tmp_path, capsys, monkeypatch):
    from sacrebleu.tokenizers import tokenizer_ja_mecab

    monkeypatch.setattr(tokenizer_ja_mecab, "MeCab", None)
    flags = ["--sys", tmp_path / "missing", "--ref", files[0], "--tokenize", "ja-mecab"]
    assert "sacrebleu[ja]" in refuse(capsys, *flags)


# gzipped files, standard input


def test_gzipped_files_and_standard_input_give_the_scores_of_plain_files(tmp_path, capsys, monkeypatch):
    texts = {"ref": REFERENCE, "sys": TRANSLATION, "src": ["a b"] * 4}
    plain = {name: write(tmp_path / name, lines) for name, lines in texts.items()}
    packed = {}
    for name, path in plain.items():
        packed[name] = tmp_path / f"{name}.gz"
        packed[name].write_bytes(gzip.compress(Path(path).read_bytes()))

    def scored(paths):
        words = [word for name, path in paths.items() for word in (f"--{name}", path)]
        actual = report(capsys, *words, "--names", "x")
        del actual["references"][0]["file"], actual["systems"][0]["file"]
        return actual

    expected = scored(plain)
    assert scored(packed) == expected
    for name in plain:
        for content in (Path(plain[name]).read_bytes(), packed[name].read_bytes()):
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
            assert scored({**plain, name: "-"}) == expected


# programs of --scorer

SHARED_WORDS = """
import sys
hypotheses, *references = [open(path, newline="").read().split("\\n")[:-1] for path in sys.argv[1:]]
for hypothesis, *others in zip(hypotheses, *references, strict=True):
    print(max([len({*hypothesis.split()} & {*other.split()}) for other in others], default=len(hypothesis) / 4))
"""


def shared_words(hypothesis, *references):
    """The scores that SHARED_WORDS prints."""
    if not references:
        return [len(line) / 4 for line in hypothesis]
    rows = ([{*line.split()} for line in row] for row in zip(hypothesis, *references, strict=True))
    return [max(len(words & other) for other in others) for words, *others in rows]


@pytest.fixture
def program(tmp_path):
    """The start of a command of SHARED_WORDS."""
    return f"{sys.executable} -S -E {write(tmp_path / 'words.py', [SHARED_WORDS], '')} {{hypothesis}}"


def test_a_program_scores_each_sentence_with_the_references_that_its_command_names(tmp_path, capsys, program):
    ref, other, system = corpus(tmp_path, {1: 0.3, 2: 0.4}, size=20)
    source = write(tmp_path / "src", ["a\rb\u2028c"] * 20)  # one line for programs, too
    commands = {"none": "", "both": "{source} {reference}"}
    flags = [word for name, rest in commands.items() for word in ("--scorer", f"{name}={program} {rest}")]
    flags += ["--sys", system, "--ref", ref, "--ref", other, "--src", source, "--lower-is-better", "none"]
    actual = metrics(report(capsys, *flags)["systems"][0])
    plain, *others = (read_lines(path) for path in (system, ref, other))
    texts = {"none": [], "both": [["a b c"] * 20, *others]}
    for name, references in texts.items():
        expected = shared_words(plain, *references)
        assert actual[name]["sentence_scores"] == expected
        assert actual[name]["score"] == pytest.approx(sum(expected) / 20)
        assert actual[name]["signature"] == f"{program} {commands[name]}".strip()
        better = "lower" if name == "none" else "higher"
        assert actual[name]["what"] == f"the mean over the sentences: {better} is better"


def test_scores_of_programs_have_the_paired_bootstrap_of_sacrebleu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fairseq_rope.metrics.RESAMPLES", 200)
    monkeypatch.setattr(Scorer, "scores", lambda _, source, system, references: shared_words(system, *references))
    ref, *systems = corpus(tmp_path, {1: 0.3, 2: 0.28, 3: 0.5}, size=30)
    flags = ["--sys", *systems, "--ref", ref, "--names", "base", "close", "far"]
    flags += ["--scorer", "words=true {hypothesis}\n  {reference}"]
    rows = [metrics(system)["words"] for system in report(capsys, *flags)["systems"]]
    scores = [np.array(shared_words(read_lines(path), read_lines(ref))) for path in systems]
    draws = np.random.default_rng(12345).choice(30, size=(200, 30))
    resampled = [[scored[drawn].mean() for drawn in draws] for scored in scores]
    for row, means in zip(rows, resampled, strict=True):
        ordered = sorted(means)
        assert row["mean"] == pytest.approx(np.mean(means))
        assert row["confidence"] == pytest.approx((ordered[-6] - ordered[5]) / 2), "5 of 200 are beyond each end"
    for row, scored, means in zip(rows[1:], scores[1:], resampled[1:], strict=True):
        differences = [abs(mean - first) for mean, first in zip(means, resampled[0], strict=True)]
        large = [one - np.mean(differences) >= abs(scored.mean() - scores[0].mean()) for one in differences]
        assert row["p_value"] == pytest.approx((sum(large) + 1) / 201)
    assert rows[0]["p_value"] is None


COMET = """#!/usr/bin/env bash
LC_ALL=C.UTF-8 lines=$(cat "$2" "$4" "$6" | wc -l) number=0
[ "$1 $3 $5 $lines" = "-s -t -r 12" ] || exit
while IFS= read -r line; do
    printf '%s\\tSegment %d\\tscore: 0.%02d00\\n' "$4" $((number++)) ${#line}
done <"$4"
printf '%s\\tscore: 0.5000\\n' "$4"
"""


def test_the_output_of_comet_score_is_read(files, tmp_path, capsys, monkeypatch):
    """It has the form of ``comet/cli/score.py`` of unbabel-comet 2.2, with a last line for the system."""
    (tmp_path / "comet-score").write_text(COMET)
    (tmp_path / "comet-score").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    src = write(tmp_path / "src", ["one", "two\rparts", "", "four"])
    command = "COMET=comet-score -s {source} -t {hypothesis} -r {reference} --quiet"
    flags = ["--sys", files[1], "--ref", files[0], "--scorer", command]
    actual = metrics(report(capsys, *flags, "--src", src)["systems"][0])["COMET"]["sentence_scores"]
    assert actual == [len(line) / 100 for line in TRANSLATION]
    assert f"--scorer {command}: needs the source text: give --src" in refuse(capsys, *flags)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--scorer", "words"], "--scorer words: "),
        (["--scorer", "=cat {hypothesis}"], "--scorer =cat {hypothesis}: "),
        (["--scorer", "a/b=cat {hypothesis}"], "a/b"),
        (["--scorer", "ter=cat {hypothesis}"], "ter"),
        (["--scorer", "a=cat {hypothesis}", "--scorer", "A=cat {hypothesis}"], "A"),
        (["--scorer", "a=cat 'b {hypothesis}"], "--scorer a=cat 'b {hypothesis}: "),
        (["--scorer", "a=cat {hypothesis} {src}"], "{src}"),
        (["--scorer", "a=cat {reference}"], "{hypothesis}"),
        (["--scorer", "a=./no/such {hypothesis}"], "./no/such"),
        (["--lower-is-better", "a"], "--lower-is-better a: "),
    ],
)
def test_programs_that_cannot_run_are_refused_before_a_file_is_read(tmp_path, capsys, flags, message):
    assert message in refuse(capsys, "--sys", tmp_path / "missing", "--ref", tmp_path / "missing", *flags)


@pytest.mark.parametrize(
    "code, message",
    [
        ("seq 5", "printed 5 lines"),
        ("printf '1\\n2\\nthree\\n4'", "printed 'three' for sentence 3"),
        ("printf '1\\n2\\n3\\nnan'", "printed 'nan' for sentence 4"),
        ("printf 'first\\nno such model\\n' >&2; exit 1", "ended with status 1: no such model"),
    ],
)
def test_what_a_program_prints_is_checked(files, tmp_path, capsys, code, message):
    script = write(tmp_path / "script", [code])
    sentence = refuse(capsys, "--sys", files[1], "--ref", files[0], "--scorer", f"a=sh {script} {{hypothesis}}")
    assert f"fairseq-rope score: --scorer a: sh {message}" in sentence


def test_the_table_shows_the_values_of_the_json(tmp_path, capsys):
    ref, *systems = corpus(tmp_path, {1: 0.3, 2: 0.1}, size=30)
    src = write(tmp_path / "src", ["a few words"] * 30)
    flags = ["--sys", *systems, "--ref", ref, "--names", "base", "rope", "--src", src]
    actual = report(capsys, *flags)
    main(["--target-lang", "de", *flags])
    table = capsys.readouterr().out
    for system in actual["systems"]:
        for metric in system["metrics"]:
            row = rf"(?s)\n{re.escape(metric['name'])} – .*?\n  {system['name']} +{metric['score']:.2f} "
            assert re.search(row, table) and metric["signature"] in table
    assert "1000 resamples, seed 12345" in table and "baseline" in table and "p = 0.00" in table
    assert re.search(r"\n +0-10 +30 ", table)


# fairseq-generate's output


def generated(order, lines, n_best=1, kinds="DH"):
    """The output of fairseq-generate for sentences in *order*, each with *n_best* translations, the right one first."""
    out = ["INFO | fairseq_cli.generate | D-1 loading model", "D-7"]
    for n in order:
        source, raw, plain = lines[n]
        out += [f"S-{n}\t{source}", f"T-{n}\tnot used"]
        for rank in range(n_best):
            for kind, text in (("H", raw), ("D", plain)):
                if kind in kinds:
                    out.append(f"{kind}-{n}\t-0.{rank}5\t" + (text if rank == 0 else "falsch"))
            out.append(f"P-{n}\t-0.1 -0.2")
    return [*out, "Generate test with beam=4: BLEU4 = 1.00"]


LINES = [
    ("a", "Die Nord-Süd-B@@ ahn fährt , sagt er .", "Die Nord-Süd-Bahn fährt, sagt er."),
    ("a b@@ c d", "Zwei Hun@@ de lau@@ fen über die Wiese !", "Zwei Hunde laufen über die Wiese!"),
    ("a@@ b", "Er sagt &quot; ja &quot; .", 'Er sagt "ja".'),
    ("a", "", ""),
    *[(" ".join("b" * n), "Es ist gu@@ t .", "Es ist gut.") for n in range(10, 14)],
]  # fmt: skip


@pytest.fixture
def generate(tmp_path):
    """The paths of the output of fairseq-generate and of the reference for LINES."""
    out = tmp_path / "generate.txt.gz"
    out.write_bytes(gzip.compress("\n".join(generated(range(8), LINES)).encode()))
    return str(out), write(tmp_path / "generate.ref", [line[2] or "Leer." for line in LINES])


@pytest.mark.parametrize(
    "rewrite, kinds, undone",
    [
        (lambda raw, plain: (raw, plain), "DH", []),  # --bpe and --tokenizer given
        (lambda raw, plain: (raw, raw.replace("@@ ", "")), "DH", ["Moses tokens"]),  # --bpe alone
        (lambda raw, plain: (raw, raw), "DH", ["BPE", "Moses tokens"]),  # neither
        (lambda raw, plain: (raw, plain), "H", ["BPE", "Moses tokens"]),  # fairseq before 0.10
        (
            lambda raw, plain: (re.sub(r"(^|(?<= ))(?=\S)", "▁", plain).replace("ahn", " ahn"),) * 2,
            "DH", ["SentencePiece"],
        ),
    ],
)  # fmt: skip
def test_generated_translations_are_sorted_and_detokenised(tmp_path, capsys, rewrite, kinds, undone):
    plain = [line[2] for line in LINES]
    ref = write(tmp_path / "ref", [*plain[:3], "Leer.", *plain[4:]])
    by_hand = report(capsys, "--sys", write(tmp_path / "sys", plain), "--ref", ref, "--names", "x")
    lines = [(source, *rewrite(raw, text)) for source, raw, text in LINES]
    out = write(tmp_path / "generate.txt", generated([6, 2, 0, 7, 5, 1, 3, 4], lines, 2, kinds))
    actual = report(capsys, "--generate-output", out, "--ref", ref, "--names", "x")
    assert actual["systems"][0]["undone"] == undone
    assert metrics(actual["systems"][0]) == metrics(by_hand["systems"][0])


def test_bleu_by_source_length_counts_words_of_the_plain_source(generate, capsys):
    actual = report(capsys, "--generate-output", generate[0], "--ref", generate[1])["systems"][0]
    rows = actual["sacreBLEU_by_source_length"]
    expected = [("0-10", 5, 7 + 7 + 6 + 2 + 4), ("11-20", 3, 4 * 3)]
    assert [(row["words"], row["sentences"], row["reference_tokens"]) for row in rows] == expected


def test_bleu_by_source_length_equals_the_bleu_of_those_sentences(files, tmp_path, capsys):
    src = write(tmp_path / "src", [" ".join("w" * length) for length in (61, 60, 200, 0)])
    actual = report(capsys, "--sys", files[1], "--ref", files[0], "--src", src)
    rows = actual["systems"][0]["sacreBLEU_by_source_length"]
    assert [(row["words"], row["sentences"]) for row in rows] == [("0-10", 1), ("41-60", 1), ("61+", 2)]
    tokens = [[line.split() for line in side.values()] for side in (TRANSLATION, REFERENCE)]
    for row, chosen in zip(rows[1:], ([1], [0, 2]), strict=True):
        assert row["score"] == pytest.approx(bleu(*([side[n] for n in chosen] for side in tokens)))
    actual = report(capsys, "--sys", files[1], "--ref", files[0])
    assert "sacreBLEU_by_source_length" not in actual["systems"][0]


# refused input


def refuse(capsys, *flags):
    """The one-sentence error of main(), which must print nothing to standard output."""
    with pytest.raises(SystemExit) as refused:
        main(["--target-lang", "de", *map(str, flags)])
    message = refused.value.code
    assert isinstance(message, str) and message.startswith("fairseq-rope score: ") and "\n" not in message
    assert capsys.readouterr().out == ""
    return message


PLAIN = ["Ein Mann, der lacht.", "Sie sagt: „Ja“.", "Nord-Süd", "Er geht."]


@pytest.mark.parametrize(
    "reference, translation, message",
    [
        (PLAIN, PLAIN[:3], "{sys} has 3 lines, and the reference {ref} has 4"),
        ([""] * 4, PLAIN, "{ref}: is empty"),
        (PLAIN, [], "{sys}: is empty"),
        (["Ja", "Ein Mann , der lacht ."], PLAIN[:2], "{ref}, line 2: "),
        (["▁Ja", "▁Ein ▁M ann"], PLAIN[:2], "{ref}, line 1: "),
        (PLAIN[:2], ["Ja", "Ein M@@ ann"], "{sys}, line 2: "),
    ],
)
def test_files_that_cannot_be_scored_are_refused(tmp_path, capsys, reference, translation, message):
    paths = {"ref": write(tmp_path / "ref", reference), "sys": write(tmp_path / "sys", translation)}
    assert message.format(**paths) in refuse(capsys, "--sys", paths["sys"], "--ref", paths["ref"])


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--sys", "{sys}", "--names", "a", "b"], "--names a b: "),
        (["--sys", "{sys}", "{ref}", "--names", "a", "a"], "a: "),
        ([], "--sys or --generate-output"),
        (["--sys", "{sys}.missing"], "{sys}.missing: "),
        (["--sys", "{sys}", "--src", "{short}"], "{short} has 1 lines, and the reference {ref} has 4"),
        (["--sys", "{sys}", "--target-lang", "german"], "--target-lang german: "),
        (["--sys", "{sys}", "--ref", "{ref}", "{short}"], "{short} has 1 lines, and the reference {ref} has 4"),
        (["--sys", "-", "--ref", "-"], "- (standard input)"),
        (["--sys", "{latin}"], "{latin}, line 3: the byte 0xfc "),
        (["--sys", "{cut}"], "{cut}: "),
        (["--generate-output", "{short}"], "{short}: "),
    ],
)
def test_wrong_flags_are_refused_by_name(files, tmp_path, capsys, flags, message):
    paths = {"ref": files[0], "sys": files[1], "short": write(tmp_path / "short", ["eins"])}
    paths |= {name: str(tmp_path / name) for name in ("latin", "cut")}
    Path(paths["latin"]).write_bytes("\ufeffeins\nzwei\n".encode() + "für\n".encode("latin-1"))
    Path(paths["cut"]).write_bytes(gzip.compress("\n".join(TRANSLATION).encode())[:60])
    sentence = refuse(capsys, "--ref", files[0], *(flag.format(**paths) for flag in flags))
    assert message.format(**paths) in sentence


@pytest.mark.parametrize("seed", ["none", "0"])
def test_a_seed_that_gives_random_results_is_refused(files, capsys, monkeypatch, seed):
    monkeypatch.setenv("SACREBLEU_SEED", seed)
    message = refuse(capsys, "--sys", *files, "--ref", files[0])
    assert f"SACREBLEU_SEED={seed}: " in message


def test_another_seed_resamples_as_sacrebleu_does_with_it(files, capsys, monkeypatch):
    expected = {}
    for seed in ("7", "12345"):
        monkeypatch.setenv("SACREBLEU_SEED", seed)
        printed = report(capsys, "--sys", files[1], files[1], "--ref", files[0], "--names", "x", "y")
        expected[seed] = printed
        assert f'"seed": {seed}' in json.dumps(printed) and bootstrap_seed() == int(seed)
    assert expected["7"] != expected["12345"]


def test_warnings_go_to_standard_error_and_scores_to_standard_output(tmp_path, capsys):
    ref = write(tmp_path / "ref", [*PLAIN * 10, "Fisch &amp; Co."])
    hyp = write(tmp_path / "sys", ["Ein Mann , der lacht .", "", *PLAIN[2:], *PLAIN * 9, "Fisch & C@@ o <0xC3><0x9F>"])
    main(["--target-lang", "de", "--json", "--sys", hyp, "--ref", ref])
    out, err = capsys.readouterr()
    json.loads(out)
    for path, what, line in ((ref, "&amp;", 41), (hyp, "empty", 2), (hyp, "@@", 41), (hyp, "<0xE2>", 41)):
        assert re.search(f"{path}: .*{what}.*: 1 of 41, .* {line}\n", err)
