"""fairseq_rope/tools/translate.py: the translations of fairseq-interactive, without fairseq."""

import functools
import gzip
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece as spm
import torch
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig
from fairseq.sequence_generator import SequenceGenerator

from fairseq_rope.serving import translator as translator_module
from fairseq_rope.serving.ctranslate2_model import to_spec
from fairseq_rope.serving.ctranslate2_search import with_copies
from fairseq_rope.serving.exported_folder import TranslateError, write_settings
from fairseq_rope.serving.translator import Translator
from fairseq_rope.text.tokens import Tokeniser
from fairseq_rope.tools import export, translate
from tests.commands import ENVIRONMENT, LIMIT, PLUGIN, ROOT, call

SEARCH = ["--beam", "4", "--lenpen", "0.6", "--max-len-a", "1", "--max-len-b", "50", "--buffer-size", "100"]
MOSES = ("--tokenizer", "moses", "--moses-no-dash-splits")


@pytest.fixture(scope="module")
def sources(data_bin):
    lines = (data_bin.parent / "text" / "test.en").read_text().splitlines()
    return [*lines, 'The dog, who sees "it", isn\'t here.', "unknown words & <tags>", "house"]


@pytest.fixture(scope="module")
def interactive(trained, data_bin):
    """A function that returns the output of fairseq-interactive: line number from 0, score and text."""

    @functools.cache
    def run(sources, *flags, tokenizer=MOSES):
        printed = call(
            "fairseq-interactive", data_bin, "--user-dir", PLUGIN, "--path", trained / "checkpoint_last.pt",
            "--cpu", "--source-lang", "en", "--target-lang", "de", *tokenizer, *SEARCH, *flags,
            stdin="".join(f"{line}\n" for line in sources),
        )  # fmt: skip
        rows = [line[2:].split("\t") for line in printed.splitlines() if line.startswith("D-")]
        return [(int(number), float(score), text) for number, score, text in rows]

    return run


def edited(model, folder, **settings):
    """A copy of *model* in *folder*, with changed settings."""
    shutil.copytree(model, folder)
    present = json.loads((folder / "fairseq_rope.json").read_text())
    (folder / "fairseq_rope.json").write_text(json.dumps({**present, **settings}))
    return folder


def command(model, *more, **kwargs):
    words = [sys.executable, "-m", "fairseq_rope", "translate", "--model", str(model), *map(str, more)]
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    return subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, **{**pipes, "encoding": "utf-8", **kwargs})


@pytest.fixture
def translated(model, tmp_path, monkeypatch, capsys):
    """A function that runs the command in this process, with a text as standard input.

    It returns the lines on standard output, and the command's error or None.
    """
    monkeypatch.delattr(signal, "SIGPIPE")  # the tests' process must not end when the reader of its output ends

    def run(text, *flags):
        (tmp_path / "stdin").write_bytes(text if isinstance(text, bytes) else text.encode())
        with open(tmp_path / "stdin") as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            try:
                sentence = translate.main([str(word) for word in ("--model", model, *flags)])
            except SystemExit as stopped:
                sentence = stopped.code
                assert sentence.startswith("fairseq-rope translate: ") and "\n" not in sentence
        return capsys.readouterr().out.splitlines(), sentence

    return run


def test_unknown_words_are_replaced_as_by_fairseq_interactive(trained, data_bin, tmp_path):
    state = torch.load(trained / "checkpoint_last.pt", weights_only=False)
    words = (data_bin / "dict.de.txt").read_text().split()[::2]
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "decoder.output_projection.weight"):
        table = state["model"][name]
        table[3] = 1.5 * table[4 + words.index("DOG")]  # where the model would write DOG, it writes <unk>
    torch.save(state, tmp_path / "model.pt")
    export.main(["--path", str(tmp_path / "model.pt"), "--data", str(data_bin), "--output", str(tmp_path / "served")])
    lines = ["the dog sees", "a flub takes the dog", "zyz the red dog", "the cat"]
    printed = call(
        "fairseq-interactive", data_bin, "-s", "en", "-t", "de", "--user-dir", PLUGIN, "--path", tmp_path / "model.pt",
        "--cpu", *SEARCH, "--nbest", 3, "--replace-unk", *MOSES, stdin="".join(f"{line}\n" for line in lines),
    )  # fmt: skip
    expected = [line.split("\t")[2] for line in printed.splitlines() if line.startswith("D-")]
    assert "<unk>" not in " ".join(expected)
    with Translator(str(tmp_path / "served"), replace_unk=True) as translator:
        nbest = translator.translate_n_best(lines, 3)
        assert [text for hypotheses in nbest for text, _ in hypotheses] == expected
    with Translator(str(tmp_path / "served")) as translator:
        assert sum("unk" in line for line in translator.translate(lines)) >= 2


def test_the_separator_of_segments_is_never_copied():
    weights = [[0.1, 0.6, 0.2], [0.2, 0.5, 0.1], [0.1, 0.1, 0.7]]  # to a, <sep> and b
    assert with_copies(["<unk>", "<sep>", "<unk>"], ["a", "<sep>", "b"], weights, "<sep>") == ["b", "<sep>", "b"]
    assert with_copies(["<unk>"], ["<sep>"], [[1.0]], "<sep>") == ["<unk>"]


@pytest.fixture
def refused(model, tmp_path):
    """A function that returns the one-sentence error of a Translator for a folder."""

    def load(folder):
        with pytest.raises(TranslateError, match=f"--model {folder}") as error:
            Translator(str(folder))
        assert "\n" not in str(error.value) and len(str(error.value)) < 500
        return str(error.value)

    return load


@pytest.mark.parametrize("beam, lenpen", [(4, 0.6), (1, 0.0)])
def test_translations_equal_those_of_fairseq_interactive(model, interactive, sources, beam, lenpen):
    flags = ("--nbest", 3) if beam == 4 else ("--beam", beam, "--lenpen", lenpen)
    expected = interactive(tuple(sources), *flags)
    best = [next(rows)[2] for _, rows in itertools.groupby(expected, key=lambda row: row[0])]
    assert Translator(str(model), beam=beam, lenpen=lenpen).translate(sources) == best


MARKED = [
    "</s>", "the dog </s>", "</s> dog", "<s>", "<s> </s>", "<s> </s> dog", "the <s> dog", "</s> </s>",
    "the <blank> cat", "<blank>", "<pad>", "<pad> <pad> the dog", "<pad> </s>", "<unk> dog", "the dog",
]  # fmt: skip


def test_special_symbols_in_text_are_treated_as_in_fairseq_interactive(model, interactive, tmp_path):
    translator = Translator(str(edited(model, tmp_path / "words", moses=None)))
    expected = interactive(tuple(MARKED), "--nbest", 1, "--buffer-size", 1, tokenizer=())
    actual = [best for (best,) in translator.translate_n_best(MARKED, 1)]
    assert [text for text, _ in actual] == [text for _, _, text in expected]
    assert [score for _, score in actual] == pytest.approx([score for _, score, _ in expected], abs=1e-4)


@pytest.mark.parametrize("nbest", [1, 3])
def test_n_best_and_scores_equal_fairseqs(model, interactive, translated, sources, nbest):
    three = interactive(tuple(sources), "--nbest", 3)
    expected = [three[n] for n in range(len(three)) if n % 3 < nbest]
    lines = [sources[0], "", *sources[1:]]
    out, _ = translated("".join(f"{line}\n" for line in lines), "--nbest", nbest)
    from_python = enumerate(Translator(str(model)).translate_n_best(iter(lines), nbest), start=1)
    assert out == [f"{number}\t{score:.4f}\t{text}" for number, best in from_python for text, score in best]
    rows = [line.split("\t") for line in out]
    assert ["2", "0.0000", ""] in rows
    actual = [(int(number), float(score), text) for number, score, text in rows if number != "2"]
    assert [n for n, _, _ in actual] == [1 + n + (n > 0) for n, _, _ in expected]
    # The last of n may differ, because CTranslate2's search ends at another step.
    assert [text for _, _, text in actual[::nbest]] == [text for _, _, text in expected[::nbest]]
    same = [n for n in range(len(actual)) if actual[n][2] == expected[n][2]]
    assert len(same) >= 0.9 * len(actual)
    assert [actual[n][1] for n in same] == pytest.approx([expected[n][1] for n in same], abs=2e-4)


def served(model, dictionary, folder, **settings):
    """A Translator of *model*, exported without a tokeniser or subwords."""
    spec = to_spec(model, dictionary, dictionary)
    spec.validate()
    spec.optimize()
    spec.save(str(folder))
    text = {"moses": None, "subwords": None, "source": "en", "target": "de", "version": "", "checkpoint": ""}
    search = {"quantization": "float32", "beam": 4, "lenpen": 0.6, "max_len_b": 50}
    positions = {"positions": {"source": None, "target": None}}
    write_settings(str(folder), {**text, **search, **positions, **settings})
    return Translator(str(folder))


def steer(model, likely):
    """Give the words in *likely* about these logits for any source; negative logits make a word unlikely."""
    tokens = torch.randint(4, 44, (50, 8))
    out, _ = model(tokens, torch.full((50,), 8), tokens.flip(0), features_only=True)
    mean = out.reshape(-1, out.size(-1)).mean(0)
    for word, logit in likely.items():
        model.decoder.output_projection.weight[word] = logit * mean / mean.norm() ** 2


def by_fairseq(model, dictionary, sources, **options):
    """The hypotheses of SequenceGenerator for *sources*, as lists of words, the best first."""
    generator = SequenceGenerator([model], dictionary, max_len_a=1, **options)
    actual = {}
    for length in set(map(len, sources)):  # fairseq has one length limit for a batch
        batch = [n for n, source in enumerate(sources) if len(source) == length]
        tokens = torch.tensor([[*sources[n], dictionary.eos()] for n in batch])
        net_input = {"src_tokens": tokens, "src_lengths": torch.full((len(batch),), length + 1)}
        for n, nbest in zip(batch, generator.generate([model], {"net_input": net_input}), strict=True):
            actual[n] = [dictionary.string(h["tokens"]).split() for h in nbest]
    return [actual[n] for n in range(len(sources))]


@pytest.mark.parametrize("lenpen", [0.0, 0.6, 1.0])
def test_the_search_ends_and_ranks_as_in_fairseq(build, task, tmp_path, lenpen):
    """The model is uncertain and may end anywhere, so hypotheses of all lengths compete."""
    dictionary, draw = task.source_dictionary, random.Random(5)
    sources = [[draw.randrange(4, 44) for _ in range(draw.randint(1, 12))] for _ in range(60)]
    model = build()
    with torch.no_grad():
        model.decoder.output_projection.weight.mul_(6.0)
        steer(model, {dictionary.eos(): 16.0, dictionary.bos(): -16.0, dictionary.pad(): -16.0})
        expected = by_fairseq(model, dictionary, sources, beam_size=4, len_penalty=lenpen, max_len_b=50)
    translator = served(model, dictionary, tmp_path, lenpen=lenpen)
    actual = translator.translate([dictionary.string(source) for source in sources])
    # In CTranslate2, unlike fairseq, hypotheses that the length limit cuts displace those that have ended.
    ended = [n for n, source in enumerate(sources) if max(map(len, expected[n])) < len(source) + 51]
    assert len(ended) > 20 and len({len(expected[n][0]) for n in ended}) > 4
    assert [actual[n] for n in ended] == [" ".join(expected[n][0]) for n in ended]


def test_sentences_of_one_batch_have_length_limits_of_their_own(build, task, tmp_path):
    """The model never ends, so every output has the length of its limit: that of the source and max_len_b."""
    dictionary, draw = task.source_dictionary, random.Random(5)
    sources = [[draw.randrange(4, 44) for _ in range(length)] for length in (6, 1, 4, 3, 5)]
    model = build()
    with torch.no_grad():
        norm, weight = model.decoder.layers[-1].final_layer_norm, model.decoder.output_projection.weight
        norm.weight[0], norm.bias[0], weight[:, 0] = 0.0, 10.0, 0.0
        weight[[dictionary.eos(), dictionary.bos(), dictionary.pad()], 0] = -10.0  # a logit of about -100
        expected = by_fairseq(model, dictionary, sources, beam_size=1, max_len_b=4)
    assert [len(best) for best, *_ in expected] == [len(source) + 1 + 4 for source in sources]
    translator = served(model, dictionary, tmp_path, max_len_b=4, beam=1)
    actual = translator.translate([dictionary.string(source) for source in sources])
    assert actual == [" ".join(best) for best, *_ in expected]


@pytest.mark.parametrize("encoding", ["none", "learned", "alibi", "t5", "shaw", "nezha", "kerple"])
def test_its_search_keeps_the_positions_of_the_output(build, task, tmp_path, encoding):
    """A step of the search computes the positions of one word; scores are computed for all words at once."""
    dictionary, draw = task.source_dictionary, random.Random(5)
    sources = [[draw.randrange(4, 44) for _ in range(24)] for _ in range(20)]
    model = build(position_encoding=encoding)
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.self_attn.q_proj.weight.mul_(4.0)
            layer.self_attn.k_proj.weight.mul_(4.0)
        steer(model, {dictionary.bos(): -16.0, dictionary.pad(): -16.0})
        expected = by_fairseq(model, dictionary, sources, beam_size=1, max_len_b=9)
    translator = served(model, dictionary, tmp_path, max_len_b=9, beam=1)
    translations = translator.translate([dictionary.string(source) for source in sources])
    assert len(set(translations)) > 5
    assert translations == [" ".join(best) for best, *_ in expected]


@pytest.mark.parametrize(("beam", "nbest"), [(1, 0), (4, 0), (4, 4)])
def test_an_output_ends_where_the_positions_end_as_in_fairseq(build, task, tmp_path, beam, nbest):
    dictionary, draw = task.source_dictionary, random.Random(5)
    sources = [[draw.randrange(4, 44) for _ in range(draw.randint(1, 6))] for _ in range(8)]
    model = build(position_encoding="learned", max_source_positions=12, max_target_positions=12)
    with torch.no_grad():
        steer(model, {dictionary.eos(): -8.0, dictionary.bos(): -16.0, dictionary.pad(): -16.0})
        expected = by_fairseq(model, dictionary, sources, beam_size=beam, len_penalty=0.6, max_len_b=50)
    lengths = [len(best) for best, *_ in expected]
    assert max(lengths) == 11 and lengths.count(11) > 4, "the end has the last position"
    positions = {"source": 12, "target": 12}
    translator = served(model, dictionary, tmp_path, positions=positions, beam=beam)
    actual = translator._search([dictionary.string(source).split() for source in sources], nbest=nbest)
    assert [[word for word in best[0][0] if word != "<s>"] for best in actual] == [best for best, *_ in expected]


def test_outputs_have_no_padding_and_no_sentence_marks(build, task, tmp_path):
    dictionary, model = task.source_dictionary, build()
    with torch.no_grad():
        steer(model, {dictionary.pad(): 90.0, dictionary.bos(): 30.0, 9: 30.0})
        ((expected, *_),) = by_fairseq(model, dictionary, [[5, 6, 7]], beam_size=1, max_len_b=20)
    (actual,) = served(model, dictionary, tmp_path, max_len_b=20, beam=1).translate([dictionary.string([5, 6, 7])])
    assert actual.split() == expected and expected and len(expected) < 24
    assert not {"<s>", "<blank>", "<pad>"} & set(actual.split())


def test_chunks_of_any_size_keep_order_and_empty_lines(model, sources, monkeypatch):
    translator = Translator(str(model))
    whole = translator.translate(sources)
    assert len(set(map(len, whole))) > 3
    monkeypatch.setattr(translator_module, "LINES", 3)
    monkeypatch.setattr(translator._search, "batch_tokens", 20)
    with_gaps = [line for source in sources for line in ("", source, "  ")]
    actual = translator.translate(with_gaps)
    assert actual[1::3] == whole and set(actual[0::3]) == set(actual[2::3]) == {""}


def test_only_newlines_end_lines(model, sources, translated):
    lines = [sources[0], f"{sources[1]}\u2028{sources[2]}"]
    expected = Translator(str(model)).translate(lines)
    assert translated("\n".join([*lines, ""]), "--threads", 1) == (expected, None)
    assert translated("\ufeff" + "\n".join([*lines, ""]), "--threads", 1) == (expected, None), "a byte order mark"


def test_a_long_line_is_not_truncated(build, task, tmp_path):
    model = build()
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.encoder_attn.out_proj.weight.mul_(20.0)
    translator = served(model, task.source_dictionary, tmp_path, beam=1)
    translator.settings["max_len_b"] = -3000  # end the translation early
    begin = "w1 w2 " * 512
    one, other = translator.translate([f"{begin} {word * 2000}" for word in ("w3 ", "w4 ")])
    assert one != other


@pytest.mark.slow
def test_the_command_ends_quietly_when_the_reader_of_its_output_stops(model, sources):
    with command(model) as process:
        process.stdout.close()
        process.stdin.write(sources[0] + "\n")
        process.stdin.close()
        assert process.stderr.read() == ""
    assert process.returncode != 0


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--input", "none.txt"], "none.txt: "),
        (["--model", "."], "--model .: "),
        (["--nbest", "5"], "nbest 5: "),
        (["--input", "text"], "--input text: "),
        (["--input", "in", "--output", "in"], "--output in: "),
        (["--input", "in", "text"], "--input in text: "),
        (["--jobs", "2"], "--jobs 2: "),
        (["--shard", "1/2"], "--shard 1/2: "),
        (["--sampling-topk", "1", "--beam", "2"], "--beam 2: "),
        (["--seed", "-1"], "seed -1: "),
        (["--input", "cut.gz"], "cut.gz: "),
    ],
)
def test_unreadable_input_is_refused_in_one_sentence(translated, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(gzip.compress(b"the dog\n" * 20))
    Path("cut.gz").write_bytes(Path("text").read_bytes()[:-9])
    Path("in").write_text("the dog")
    assert message in translated("", *flags)[1]


@pytest.mark.parametrize(
    "name, bad, message",
    [
        ("in.gz", b"\xff", "{}, line 21: the byte 0xff "),
        ("-", b"\xff", "{}, line 21: the byte 0xff "),
        ("-", b"x" * 100_000, "line 21 has 100000 characters, more than the limit of 32768"),
    ],
)
def test_the_lines_before_a_bad_line_are_translated(translated, tmp_path, monkeypatch, name, bad, message):
    monkeypatch.setattr(translate, "LINES", 8)
    text = b"the dog\n" * 20 + bad + b"\nthe dog\n"
    (tmp_path / "in.gz").write_bytes(gzip.compress(text))
    path = name if name == "-" else tmp_path / name
    lines, sentence = translated(text, "--input", path)
    assert len(lines) == 20 and message.format("standard input" if name == "-" else path) in sentence


@pytest.fixture
def pipe():
    """The chunks of lines from a pipe, and a function that writes bytes to it."""
    reading, writing = os.pipe()
    with open(writing, "wb", buffering=0) as file:
        yield translate.as_they_come(open(reading, "rb"), "pipe"), file.write


@pytest.mark.parametrize(
    "sent, status", [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_signal_ends_the_command_without_a_traceback_or_an_output(model, sources, tmp_path, sent, status):
    with command(model, "--output", tmp_path / "out", "--nbest", 1) as process:
        process.stdin.write(sources[0] + "\n")
        process.stdin.flush()
        until = time.time() + 60
        while not any(path.stat().st_size for path in tmp_path.iterdir()) and time.time() < until:
            time.sleep(0.05)
        assert [path.name for path in tmp_path.iterdir()] != ["out"]
        process.send_signal(sent)
        assert process.wait(LIMIT) == status and process.stderr.read() == ""
    assert list(tmp_path.iterdir()) == []


def test_translate_returns_a_string_for_a_string_and_a_list_for_a_list(model, sources, monkeypatch):
    translator = Translator(str(model))
    one, two = translator.translate(sources[0]), translator.translate(sources[1])
    assert isinstance(one, str) and one != two
    assert translator.translate(sources[:2]) == translator.translate(iter(sources[:2])) == [one, two]
    assert translator.translate([]) == []
    monkeypatch.setattr(translator_module, "LINES", 1)
    lines = iter(sources[:3])
    assert next(translator.translate_lines(lines)) == one
    assert len(list(lines)) == 2  # lines are read only when translations are requested


@pytest.mark.parametrize("content", ["{}", "[]", ""])
def test_a_broken_settings_file_is_refused_in_one_sentence(model, tmp_path, refused, content):
    folder = edited(model, tmp_path / "broken")
    (folder / "fairseq_rope.json").write_text(content)
    assert "fairseq_rope.json" in refused(folder)


def test_files_that_changed_since_the_export_are_named(model, tmp_path, refused):
    folder = edited(model, tmp_path / "model")
    flipped = bytearray((folder / "model.bin").read_bytes())
    flipped[random.randrange(len(flipped))] ^= 1
    (folder / "model.bin").write_bytes(flipped)
    assert "model.bin is not the file that was exported" in refused(folder)
    (folder / "model.bin").unlink()
    assert "model.bin cannot be read (No such file" in refused(folder)


@pytest.mark.parametrize("name", ["vmap.txt", "target_vocabulary.json", "bpecodes"])
def test_files_that_were_not_exported_are_refused_before_they_are_read(model, tmp_path, refused, name):
    folder = edited(model, tmp_path / "model")
    (folder / "LICENSE").touch()
    Translator(str(folder))  # others may be added
    (folder / name).write_text("")
    assert f": {name} was not exported" in refused(folder)


@pytest.mark.parametrize(
    "name, value",
    [
        ("beam", 0), ("lenpen", math.nan), ("max_len_b", -1), ("quantization", ["int8"]),
        ("positions", {"target": None}), ("positions", {"source": 0, "target": None}),
        ("sha256", ["model.bin"]), ("sha256", {"../model.bin": ""}), ("sha256", {"/etc/passwd": ""}),
        ("moses", {}), ("subwords", {}), ("subwords", {"kind": "subword_nmt", "file": "../bpecodes"}),
        ("segments", {"tokens": 128}), ("segments", {"tokens": 4097, "separator": "<sep>"}),
    ],
)  # fmt: skip
def test_settings_that_export_does_not_write_are_refused(model, tmp_path, refused, name, value):
    sentence = refused(edited(model, tmp_path / "model", **{name: value}))
    assert f": in fairseq_rope.json, {name} is {json.dumps(value)[:20]}" in sentence


@pytest.mark.parametrize("tokens, together", [(4000, 1), (1500, 4), (20, 40)])
def test_few_long_lines_are_searched_at_the_same_time(model, tokens, together):
    """Memory grows with the square of a line's length, so few long lines may run at the same time."""
    running, most = set(), []

    class Result:
        def __init__(self):
            running.add(self)
            most.append(len(running))

        def result(self):
            running.discard(self)
            return SimpleNamespace(hypotheses=[["DOG"]], scores=[-1.0])

    translator = Translator(str(model), threads=64)
    translator._search.model = SimpleNamespace(translate_batch=lambda sources, **_: [Result() for _ in sources])
    translator._search.batch_tokens = 1  # a batch for each line
    assert translator.translate(["dog " * tokens] * 40) == ["DOG"] * 40
    assert max(most) == together


@pytest.mark.parametrize("name", ["in.gz", "-"])
def test_input_may_be_compressed_or_standard_input(model, sources, tmp_path, translated, name):
    text = "".join(f"{line}\n" for line in sources)
    parts = [gzip.compress(part.encode()) for part in (text[:100], text[100:])]
    (tmp_path / "in.gz").write_bytes(b"".join(parts))
    path = tmp_path / name if name == "in.gz" else name
    assert translated(text, "--input", path) == (Translator(str(model)).translate(sources), None)


def test_the_output_is_written_atomically(model, sources, tmp_path, translated):
    (tmp_path / "out").write_text("old")
    (tmp_path / "link").symlink_to("out")
    assert "line 2" in translated(b"the dog\n\xff\n", "--output", tmp_path / "link")[1]
    assert (tmp_path / "out").read_text() == "old" and len(list(tmp_path.iterdir())) == 3  # and the input
    assert translated("\n".join(sources), "--output", tmp_path / "link") == ([], None)
    assert (tmp_path / "out").read_text().splitlines() == Translator(str(model)).translate(sources)
    assert (tmp_path / "link").is_symlink() and len(list(tmp_path.iterdir())) == 3


@pytest.mark.slow
def test_the_class_needs_neither_torch_nor_fairseq(model):
    code = (
        "import sys; sys.modules.update(torch=None, fairseq=None)\n"
        "from fairseq_rope.serving.translator import Translator; print(Translator(sys.argv[1]).translate('the dog'))"
    )
    command = [sys.executable, "-c", code, model]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout == f"{Translator(str(model)).translate('the dog')}\n", done.stderr


def test_sentencepiece_splits_and_joins_as_in_fairseq(data_bin, tmp_path):
    lines = (data_bin.parent / "text" / "train.en").read_text().splitlines()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(tmp_path / "sp"), vocab_size=30, minloglevel=2
    )
    (tmp_path / "sp.model").rename(tmp_path / "sentencepiece.bpe.model")
    path = tmp_path / "sentencepiece.bpe.model"
    subwords = {"kind": "sentencepiece", "file": path.name}
    text = Tokeniser(str(tmp_path), {"moses": None, "subwords": subwords})
    bpe = SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(path)))
    for line in [*lines[:20], "an  unseen\tword \u3000 here", ""]:
        assert text.tokens(line) == bpe.encode(line).split()
        assert text.plain(text.tokens(line)) == bpe.decode(bpe.encode(line))


# -- documents -------------------------------------------------------------------------------------


@pytest.fixture
def documents(model, tmp_path):
    """A Translator for segments of 6 tokens whose translations are the sources in capitals, and what it translated."""
    segments = {"tokens": 6, "separator": "<sep>"}
    translator = Translator(str(edited(model, tmp_path / "model", moses=None, segments=segments)))
    sources = []

    def search(batch, *_):
        sources.extend(" ".join(source) for source in batch if source)
        return [[([word if word == "<sep>" else word.upper() for word in source], 0.0)] for source in batch]

    translator._search = search
    return translator, sources


def lines_of(translator, text):
    return [line for lines in translator.translate_documents([text]) for line in lines]


TEXT = "a b\nc\nd e f\n\ng\n\n\nh i j k l m n\no\n"
SEGMENTS = ["a b <sep> c", "d e f", "g", "h i j k l m n", "o"]


@pytest.mark.parametrize(
    "text, segments",
    [
        (TEXT, SEGMENTS),
        (TEXT[:-1].replace("\n", "\r\n"), SEGMENTS),  # no end of the last line
        ("\n \n" + TEXT + "\t\n\n", SEGMENTS),
        ("a b c d e\nf\n", ["a b c d e", "f"]),  # the separator counts: seven tokens
        ("a b c d\nf\n", ["a b c d <sep> f"]),
        ("\n\n", []),
        ("", []),
    ],
)
@pytest.mark.parametrize("lines_in_a_chunk", [1, 2, 512])
def test_documents_keep_their_lines_and_are_translated_in_segments(
    documents, translated, monkeypatch, text, segments, lines_in_a_chunk
):
    translator, sources = documents
    monkeypatch.setattr(translate, "LINES", lines_in_a_chunk)
    monkeypatch.setattr(translate, "Translator", lambda **_: translator)
    out, sentence = translated(text, "--documents")
    lines = text.split("\n")
    assert sentence is None and out == [line.strip().upper() for line in (lines if lines[-1] else lines[:-1])]
    assert sources == segments


@pytest.mark.parametrize(
    "line, message",
    [
        ("f <sep> g", "line 5 contains <sep>"),
        ("x " * 4097, "line 5 has 4097 tokens, more than the limit of this model, 4096"),
    ],
)
def test_the_lines_before_a_refused_line_of_a_document_are_translated(
    documents, translated, monkeypatch, line, message
):
    translator, _ = documents
    monkeypatch.setattr(translate, "Translator", lambda **_: translator)
    out, sentence = translated(f"a\nb\n\nc d\n{line}\ne\n", "--documents")
    assert out == ["A", "B", "", "C D"] and message in sentence


def test_segments_are_not_longer_than_the_positions_of_the_model(documents):
    translator, sources = documents
    translator.settings["positions"]["source"] = 5  # one is for the end
    assert lines_of(translator, ["a b", "c", "d"]) == ["A B", "C", "D"]
    assert sources == ["a b <sep> c", "d"]


def test_a_document_is_translated_before_more_lines_arrive_and_a_long_one_in_parts(documents, pipe):
    translator, sources = documents
    chunks, put = pipe
    translations = translator.translate_documents(chunks)
    put(b"a\nb\n\n")
    lines = []
    while len(lines) < 3:
        lines += next(translations)
    assert lines == ["A", "B", ""]
    read = 0

    def endless():
        nonlocal read
        while True:
            read += 1
            yield ["c d"] * 5

    translations = translator.translate_documents(endless())
    lines = [line for _ in range(20) for line in next(translations)]
    # At most one segment waits for its next line: two sentences of two tokens and a separator.
    assert lines == ["C D"] * len(lines) and read == 20 and len(lines) >= 98


def test_documents_need_a_model_of_segments(model, translated, capsys):
    with pytest.raises(TranslateError, match="--documents: the model in"):
        next(Translator(str(model)).translate_documents([["the dog"]]))
    _, sentence = translated("the dog\n", "--documents")
    named = ("--documents", str(model), "--segment-tokens")
    assert all(word in sentence for word in named)
    with pytest.raises(SystemExit, match="2"):
        translate.main(["--model", str(model), "--documents", "--nbest", "2"])
    assert "--nbest: not allowed with argument --documents" in capsys.readouterr().err


def test_each_sentence_of_a_segment_is_converted_by_itself_and_moses_escapes_a_separator(model, tmp_path):
    segments = {"tokens": 40, "separator": "<sep>"}
    translator = Translator(str(edited(model, tmp_path / "model", segments=segments)))
    sources = []

    def search(batch):
        sources.extend(batch)
        return [[(source, 0.0)] for source in batch]

    translator._search = search
    expected = ['He says "no', 'yes "< sep > (twice).', "'s"]  # the plain text of &lt; sep &gt;
    assert lines_of(translator, ['He says "no', 'yes" <sep> (twice).', "'s"]) == expected
    assert sources[0].count("<sep>") == 2 and "&lt;" in sources[0]


def test_a_segment_is_searched_like_a_line_with_the_same_tokens(build, task, tmp_path, capsys):
    """The model writes w2, the separator, in some of its translations."""
    dictionary, draw, model = task.source_dictionary, random.Random(5), build()
    with torch.no_grad():
        model.decoder.output_projection.weight.mul_(6.0)
        steer(model, {dictionary.eos(): 16.0, dictionary.bos(): -16.0, dictionary.pad(): -16.0})
    translator = served(model, dictionary, tmp_path, segments={"tokens": 7, "separator": "w2"})
    documents = [[" ".join(f"w{draw.randrange(3, 40)}" for _ in range(3)) for _ in range(2)] for _ in range(60)]
    lines = translator.translate([" w2 ".join(document) for document in documents])
    parts = [" ".join("|" if word == "w2" else word for word in line.split()).split("|") for line in lines]
    counts = [len(sentences) for sentences in parts]
    assert {1, 2} < set(counts)  # too few, as many as the source, and too many
    lines = lines_of(translator, [line for document in documents for line in (*document, "")])
    actual = [lines[n : n + 2] for n in range(0, len(lines), 3)]
    assert [first for first, _ in actual] == [sentences[0].strip() for sentences in parts]
    assert [second.split() for _, second in actual] == [" ".join(sentences[1:]).split() for sentences in parts]
    different = len(counts) - counts.count(2)
    assert f"warning: {different} of 60 segments have a translation with another number" in capsys.readouterr().err


# -- from several threads ------------------------------------------------------------------------------


def test_threads_get_the_translations_that_one_thread_gets_until_it_is_closed(model, sources):
    texts = [*sources[:15], "", "the dog"]
    with Translator(str(model), threads=2) as translator:
        expected = [translator.translate(text) for text in texts]
        assert translator.translate(texts) == expected
        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(translator.translate, texts * 4, timeout=LIMIT)) == expected * 4
    assert not translator._search.model.model_is_loaded
    with pytest.raises(TranslateError, match="CTranslate2 cannot search"):
        translator.translate(["the dog"])


def test_a_forked_process_is_refused_and_does_not_wait_forever(model):
    with Translator(model) as translator:
        assert translator.translate("the dog")
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            try:
                translator.translate("the dog")
            except TranslateError as refused:
                os.write(writing, str(refused).encode())
            finally:
                os._exit(0)
        os.close(writing)
        message = os.read(reading, 1000).decode()
        os.waitpid(child, 0)
        assert message == f"--model {model}: was loaded before os.fork(); load it in the new process"
        assert translator.translate("the dog")


@pytest.mark.parametrize(
    "name, value",
    [
        *(("beam", value) for value in (0, 1001, True, "4")),
        *(("lenpen", value) for value in (math.nan, 101)),
        ("max_len_b", -1),
    ],
)
def test_numbers_that_are_not_allowed_are_refused(model, name, value):
    with pytest.raises(TranslateError, match=f"^{name} {re.escape(repr(value))}: "):
        Translator(model, **{name: value})


def test_n_best_lists_are_not_longer_than_the_beam(model):
    with Translator(model, beam=np.int64(6), lenpen=np.float64(0.6)) as translator:
        (six,) = translator.translate_n_best(["the dog"], 6)
        for n in (0, 7):
            with pytest.raises(TranslateError, match=f"^nbest {n}: "):
                translator.translate_n_best(["the dog"], n)
    scores = [score for _, score in six]
    assert len({text for text, _ in six}) == 6 and scores == sorted(scores, reverse=True)


def test_the_flags_reach_the_translator(translated, monkeypatch):
    given = []

    def noted(**options):
        given.append(options)
        return Translator(**{**options, "device": "cpu"})

    monkeypatch.setattr(translate, "Translator", noted)
    words = "--threads 3 --device auto --replace-unk --no-shortlist --beam 2 --lenpen 0.5 --max-len-b 7".split()
    for flags in ((), words):
        assert translated("the dog\n", *flags)[1] is None
    names = ("threads", "device", "shortlist", "replace_unk", "beam", "lenpen", "max_len_b")
    assert [[options[name] for name in names] for options in given] == [
        [None, "cpu", True, False, None, None, None],
        [3, "auto", False, True, 2, 0.5, 7],
    ]


def test_a_model_with_overrides_translates_as_fairseq_interactive_with_them(
    trained, data_bin, interactive, sources, tmp_path
):
    overrides = "{'rope_scaling': {'rope_type': 'linear', 'factor': 4}}"
    flags = ["--path", trained / "checkpoint_last.pt", "--data", data_bin, "--output", tmp_path / "served"]
    export.main(list(map(str, [*flags, "--model-overrides", overrides])))
    few = tuple(sources[:4])  # with these overrides, the model writes the longest possible translations
    expected = [text for *_, text in interactive(few, "--model-overrides", overrides)]
    with Translator(tmp_path / "served") as translator:
        assert translator.translate(few) == expected
    assert expected != [text for *_, text in interactive(few)]
