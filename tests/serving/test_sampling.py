"""fairseq-rope translate --sampling: the probabilities of fairseq's model, and the same draws at every start."""

import collections
import json
import random
import shutil
import signal
import threading

import pytest
import torch

from fairseq_rope.files import checksum
from fairseq_rope.serving.ctranslate2_search import Sampling
from fairseq_rope.serving.exported_folder import SETTINGS, SHORTLIST, TranslateError, vocabulary
from fairseq_rope.serving.shortlist import Shortlist
from fairseq_rope.serving.translator import LINES, Translator
from fairseq_rope.tools import translate
from tests.commands import call

DRAWS = 4000
WORDS = "the a dog cat sees takes red blue big old house book under over".split()
SOURCE = ["the", "dog", "sees", "a", "cat"]


def sentences(count):
    draw = random.Random(1)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 8))) for _ in range(count)]


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def probabilities(loaded, prefix):
    """The probability of each word after the words *prefix*, by fairseq's model and the rules of its search."""
    model, task = loaded
    source, target = task.source_dictionary, task.target_dictionary
    tokens = torch.tensor([[*map(source.index, SOURCE), source.eos()]])
    before = torch.tensor([[target.eos(), *map(target.index, prefix)]])
    logits, _ = model(tokens, torch.tensor([tokens.size(1)]), before)
    log_probs = torch.log_softmax(logits[0, -1].double(), -1)
    log_probs[target.pad()] = -torch.inf
    if not prefix:
        log_probs[target.eos()] = -torch.inf  # --min-len 1
    return {target[n]: p for n, p in enumerate(torch.softmax(log_probs, -1).tolist())}


def refuse_other_frequencies(words, probabilities):
    """Fail if a chi-squared test of *words*, which were drawn with *probabilities*, is above its mean by 5 sigmas."""
    counts, total = collections.Counter(words), len(words)
    usual = [word for word, p in probabilities.items() if p * total >= 5]
    classes = [(counts[word], probabilities[word] * total) for word in usual]
    rest = total - sum(expected for _, expected in classes)
    classes.append((total - sum(count for count, _ in classes), max(rest, 1.0)))
    chi_squared = sum((count - expected) ** 2 / expected for count, expected in classes)
    freedom = len(classes) - 1
    assert freedom >= 2 and chi_squared < freedom + 5 * (2 * freedom) ** 0.5


def drawn(model, count=DRAWS, **options):
    with Translator(str(model), sampling=Sampling(**options)) as translator:
        translator.settings["max_len_b"] = 0
        return [words for [(words, _)] in translator.search([SOURCE] * count)]


@torch.no_grad()
def test_words_are_drawn_with_the_probabilities_of_fairseqs_model(model, loaded):
    hypotheses = drawn(model)
    firsts = [words[0] for words in hypotheses]
    refuse_other_frequencies(firsts, probabilities(loaded, []))
    for first, _ in collections.Counter(firsts).most_common(2):
        seconds = [words[1] if len(words) > 1 else "</s>" for words in hypotheses if words[0] == first]
        refuse_other_frequencies(seconds, probabilities(loaded, [first]))
    assert max(map(len, hypotheses)) == len(SOURCE) + 1


@torch.no_grad()
@pytest.mark.parametrize("topk", [2, 5])
def test_only_the_most_probable_words_are_drawn_with_topk(model, loaded, topk):
    hypotheses = drawn(model, topk=topk)
    first = probabilities(loaded, [])
    best = sorted(first, key=lambda word: -first[word])[:topk]
    assert {words[0] for words in hypotheses} == {*best}
    counts = collections.Counter(words[0] for words in hypotheses)
    for word in best:
        p = first[word] / sum(map(first.get, best))
        assert abs(counts[word] - DRAWS * p) < 5 * (DRAWS * p * (1 - p)) ** 0.5
    for prefix in {tuple(words[:2]) for words in hypotheses[:20] if len(words) > 1}:
        following = probabilities(loaded, prefix)
        best = sorted(following, key=lambda word: -following[word])[:topk]
        assert {words[2] for words in hypotheses if words[:2] == [*prefix] and len(words) > 2} <= {*best}


def test_the_most_probable_word_alone_is_greedy_search_as_in_fairseq(model, trained, data_bin):
    lines = sentences(40)
    with Translator(str(model), sampling=Sampling(topk=1)) as translator:
        drawn = translator.translate(lines)
    flags = ["--sampling", "--sampling-topk", 1, "--beam", 1, "--max-len-a", 1, "--max-len-b", 50, "--buffer-size", 100]
    printed = call(
        "fairseq-interactive", data_bin, "-s", "en", "-t", "de", "--path", trained / "checkpoint_last.pt", "--cpu",
        "--tokenizer", "moses", "--moses-no-dash-splits", *flags, stdin="".join(f"{line}\n" for line in lines),
    )  # fmt: skip
    assert drawn == [line.split("\t")[2] for line in printed.splitlines() if line.startswith("D-")]
    with Translator(str(model)) as translator:
        assert drawn == translator.translate(lines, beam=1)


def test_a_line_has_the_limit_of_its_length_in_a_batch_with_longer_ones(model):
    with Translator(str(model), sampling=Sampling()) as translator:
        translator.settings["max_len_b"] = 0
        results = translator.search([SOURCE, SOURCE * 3, ["dog"]] * 200)
    limits = [len(SOURCE) + 1, 3 * len(SOURCE) + 1, 2]
    for n, limit in enumerate(limits):
        assert max(len(words) for [(words, _)] in results[n::3]) == limit


def test_a_seed_gives_the_same_translations_and_another_seed_others(model, tmp_path, monkeypatch):
    monkeypatch.delattr(signal, "SIGPIPE")
    path = write(tmp_path / "in", sentences(LINES + 9))

    def translations(*flags):
        out = tmp_path / "out"
        translate.main(["--model", str(model), "--input", str(path), "--output", str(out), "--sampling", *flags])
        return out.read_text()

    first = translations()
    assert first == translations("--seed", "1", "--threads", "1") != translations("--seed", "2")
    with Translator(str(model), sampling=Sampling()) as translator:
        assert "".join(f"{line}\n" for line in translator.translate_lines(sentences(LINES + 9))) == first
    with Translator(str(model)) as translator:
        assert "".join(f"{line}\n" for line in translator.translate_lines(sentences(LINES + 9))) != first


def test_lines_that_arrive_one_by_one_have_the_translations_of_a_file(model, tmp_path, monkeypatch):
    calls = []

    def chunk(self, lines, *more, **options):
        calls.append(len(lines))
        return iter([])

    monkeypatch.delattr(signal, "SIGPIPE")
    monkeypatch.setattr(translate, "WAIT", 0.0)
    monkeypatch.setattr(Translator, "chunk", chunk)
    path = write(tmp_path / "in", sentences(2 * LINES + 1))
    translate.main(["--model", str(model), "--input", str(path), "--output", str(tmp_path / "out"), "--sampling"])
    assert calls == [LINES, LINES, 1]
    slow = iter([b"a dog\n", b"a cat\n", b""])
    waited = threading.Event()

    def read(size):
        waited.wait(0.3)
        return next(slow)

    assert list(translate.as_they_come(read, "a pipe", None)) == [["a dog", "a cat"]]


def test_draws_do_not_use_the_shortlist(model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    Shortlist(["CAT"], {}).write(str(folder / SHORTLIST))
    settings = json.loads((folder / SETTINGS).read_text())
    settings["sha256"][SHORTLIST] = checksum(str(folder / SHORTLIST))
    (folder / SETTINGS).write_text(json.dumps(settings))
    drawn = []
    for path in (model, folder):
        with Translator(str(path), sampling=Sampling()) as translator:
            drawn.append(translator.translate(sentences(30)))
    assert drawn[0] == drawn[1]
    with Translator(str(folder)) as translator:
        assert {*" ".join(translator.translate(sentences(30))).split()} == {"CAT"}


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--sampling-topk", 3], "--sampling-topk 3: needs --sampling"),
        (["--seed", 3], "--seed 3: needs --sampling"),
        (["--sampling", "--beam", 2], "--beam 2: is not supported with --sampling, which draws one translation"),
        (["--sampling", "--lenpen", 0.5], "--lenpen 0.5: is not supported with --sampling"),
        (["--sampling", "--nbest", 2], "--nbest 2: is not supported with --sampling"),
        (["--sampling", "--threads", 2], "--threads 2: must be 1 with --sampling"),
        (["--sampling", "--sampling-topk", 5000], "--sampling-topk 5000: must be at most {words}, the number of words"),
    ],
)
@pytest.mark.parametrize("output", ["--output", "--output-dir"])
def test_contradictions_are_refused_before_work_begins(model, tmp_path, flags, message, output):
    path = write(tmp_path / "in", ["the dog"])
    words = ["--model", model, "--input", path, output, tmp_path / "out", *flags]
    with pytest.raises(SystemExit) as stopped:
        translate.main([*map(str, words)])
    assert message.format(words=len(vocabulary(str(model), "target")[1])) in stopped.value.code
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("flag, value", [("--sampling-topk", 0), ("--seed", -1), ("--seed", 2**32 - 1)])
def test_numbers_out_of_their_range_are_refused(capsys, flag, value):
    with pytest.raises(SystemExit, match="^2$"):
        translate.main(["--model", "model", "--sampling", flag, str(value)])
    assert f"{flag} {value}: must be an integer from" in capsys.readouterr().err


def test_a_translator_that_draws_refuses_the_options_of_the_beam_search(model):
    with pytest.raises(TranslateError, match="threads 2: must be 1 with sampling"):
        Translator(str(model), threads=2, sampling=Sampling())
    with Translator(str(model), sampling=Sampling()) as translator:
        for options in ({"beam": 2}, {"lenpen": 1.0}):
            with pytest.raises(TranslateError, match="sampling: draws one translation"):
                translator.translate("the dog", **options)
        with pytest.raises(TranslateError, match="sampling: draws one translation"):
            translator.translate_n_best(["the dog"], 2)
        assert translator.translate("the dog")
