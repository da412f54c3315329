"""fairseq_rope/translate.py: what fairseq-interactive translates, without fairseq."""

import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import sentencepiece as spm
import torch
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig
from fairseq.sequence_generator import SequenceGenerator

from fairseq_rope import translate
from fairseq_rope.export import main as export_main
from fairseq_rope.export import to_spec, write_beside
from fairseq_rope.translate import Text, Translator

from .commands import ENVIRONMENT, PLUGIN, ROOT, call

SEARCH = ["--beam", "4", "--lenpen", "0.6", "--max-len-a", "1", "--max-len-b", "50"]


@pytest.fixture(scope="module")
def model(trained, data_bin, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    checkpoint = trained / "checkpoint_last.pt"
    export_main(["--path", str(checkpoint), "--data", str(data_bin), "--output", str(folder)])
    return folder


@pytest.fixture(scope="module")
def sources(data_bin):
    lines = (data_bin.parent / "text" / "test.en").read_text().splitlines()
    return [*lines, 'The dog, who sees "it", isn\'t here.', "unknown words & <tags>", "house"]


def interactive(trained, data_bin, sources, *more):
    printed = call(
        "fairseq-interactive", data_bin, "--user-dir", PLUGIN, "--path", trained / "checkpoint_last.pt",
        "--cpu", "--source-lang", "en", "--target-lang", "de", "--tokenizer", "moses",
        "--moses-no-dash-splits", *SEARCH, *more, stdin="".join(f"{line}\n" for line in sources),
    )  # fmt: skip
    return [line.split("\t")[2] for line in printed.splitlines() if line.startswith("D-")]


def command(model, *more, **kwargs):
    words = [sys.executable, "-m", "fairseq_rope.translate", "--model", str(model), *map(str, more)]
    return subprocess.Popen(
        words, cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, **{"encoding": "utf-8", **kwargs},
    )  # fmt: skip


@pytest.mark.parametrize("search", [(4, 0.6), (1, 0.0), (8, 0.6), (8, 0.0), (4, 1.0)])
def test_it_translates_as_fairseq_interactive(model, trained, data_bin, sources, search):
    beam, lenpen = search
    expected = interactive(trained, data_bin, sources, "--beam", beam, "--lenpen", lenpen)
    assert list(Translator(str(model)).translate(sources, beam, lenpen)) == expected


def served(model, dictionary, folder, **settings):
    """A Translator of *model*, exported with words for text."""
    spec = to_spec(model, dictionary, dictionary)
    spec.validate()
    spec.optimize()
    text = {"moses": None, "subwords": None, "source": "en", "target": "de", "version": "", "checkpoint": ""}
    search = {"quantization": "float32", "beam": 4, "lenpen": 0.6, "max_len_b": 50}
    positions = {"source": None, "target": None}
    write_beside(str(folder), spec, {**text, **search, "positions": positions, **settings}, None)
    return Translator(str(folder))


def steer(model, likely):
    """Have *model* like words (by number) so much, whatever it translates."""
    some = torch.randint(4, 44, (50, 8))
    out, _ = model(some, torch.full((50,), 8), some.flip(0), features_only=True)
    usual = out.reshape(-1, out.size(-1)).mean(0)
    for word, much in likely.items():
        model.decoder.output_projection.weight[word] = much * usual / usual.norm() ** 2


def by_fairseq(model, dictionary, sources, **options):
    """The hypotheses of SequenceGenerator for *sources*, one by one: their words, the best first."""
    generator = SequenceGenerator([model], dictionary, max_len_a=1, **options)
    found = []
    for source in sources:
        tokens = torch.tensor([[*source, dictionary.eos()]])
        net_input = {"src_tokens": tokens, "src_lengths": torch.tensor([tokens.size(1)])}
        nbest = generator.generate([model], {"net_input": net_input})[0]
        found.append([dictionary.string(h["tokens"]).split() for h in nbest])
    return found


@pytest.mark.parametrize("lenpen", [0.0, 0.6, 1.0])
def test_its_search_ends_and_ranks_as_fairseqs(build, task, tmp_path, lenpen):
    """Of a model that is sure of little and may end anywhere, where hypotheses of all lengths compete."""
    dictionary, draw = task.source_dictionary, random.Random(5)
    sources = [[draw.randrange(4, 44) for _ in range(draw.randint(1, 12))] for _ in range(60)]
    model = build()
    with torch.no_grad():
        model.decoder.output_projection.weight.mul_(6.0)
        steer(model, {dictionary.eos(): 16.0, dictionary.bos(): -16.0, dictionary.pad(): -16.0})
        expected = by_fairseq(model, dictionary, sources, beam_size=4, len_penalty=lenpen, max_len_b=50)
    translator = served(model, dictionary, tmp_path)
    found = list(translator.translate([dictionary.string(source) for source in sources], 4, lenpen))
    # What the limit cuts displaces what has ended in CTranslate2, and not in fairseq.
    ended = [n for n, source in enumerate(sources) if max(map(len, expected[n])) < len(source) + 51]
    assert len(ended) > 20 and len({len(expected[n][0]) for n in ended}) > 4
    assert [found[n] for n in ended] == [" ".join(expected[n][0]) for n in ended]


def test_padding_is_never_found_and_what_marks_a_sentence_left_out(build, task, tmp_path):
    dictionary, model = task.source_dictionary, build()
    with torch.no_grad():
        steer(model, {dictionary.pad(): 90.0, dictionary.bos(): 30.0, 9: 30.0})
        ((expected, *_),) = by_fairseq(model, dictionary, [[5, 6, 7]], beam_size=1, max_len_b=20)
    (found,) = served(model, dictionary, tmp_path, max_len_b=20).translate([dictionary.string([5, 6, 7])], 1)
    assert found.split() == expected and expected and len(expected) < 24
    assert not {"<s>", "<blank>", "<pad>"} & set(found.split())


def test_order_and_empty_lines_are_kept_in_chunks_of_any_size(model, sources, monkeypatch):
    translator = Translator(str(model))
    whole = list(translator.translate(sources))
    assert len(set(map(len, whole))) > 3
    monkeypatch.setattr(translate, "CHUNK", 3)
    monkeypatch.setattr(translator, "_tokens", 20)
    with_gaps = [line for source in sources for line in ("", source, "  ")]
    found = list(translator.translate(with_gaps))
    assert found[1::3] == whole and set(found[0::3]) == set(found[2::3]) == {""}


def test_it_imports_neither_torch_nor_fairseq(model):
    code = (
        "import runpy, sys; sys.argv = ['translate', *sys.argv[1:]]\n"
        "sys.orig_argv = ['python', '-m', 'fairseq_rope.translate']\n"
        "argv, sys.argv = sys.argv, ['-m']\n"
        "import fairseq_rope\n"
        "sys.argv = argv\n"
        "from fairseq_rope.translate import main; main()\n"
        "print(sorted({'torch', 'fairseq'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--model", model], cwd=ROOT, env=ENVIRONMENT, input="the dog\n",
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_line_is_translated_while_the_next_is_not_there_yet(model, sources):
    process = command(model)
    try:
        for source in sources[:2]:
            process.stdin.write(source + "\n")
            process.stdin.flush()
            begun = time.time()
            assert process.stdout.readline().endswith("\n")
            assert time.time() - begun < 60
        out, err = process.communicate("\n")
        assert (out, process.returncode) == ("\n", 0)
    finally:
        process.kill()


def test_a_file_is_read_and_lines_end_at_newlines_alone(model, sources, tmp_path):
    path = tmp_path / "in.en"
    path.write_text("\n".join([sources[0], sources[1] + "\u2028" + sources[2], ""]), encoding="utf-8")
    out, _ = command(model, "--input", path, "--threads", 1).communicate()
    expected = list(Translator(str(model)).translate([sources[0], f"{sources[1]}\u2028{sources[2]}"]))
    assert out == "".join(f"{line}\n" for line in expected)


def test_a_long_line_is_not_cut_and_is_told(build, task, tmp_path, capsys):
    model = build()
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.encoder_attn.out_proj.weight.mul_(20.0)
    translator = served(model, task.source_dictionary, tmp_path, max_len_b=-3000)  # it need not go on
    begin = "w1 w2 " * 512
    one, other = translator.translate([f"{begin} {word * 2000}" for word in ("w3 ", "w4 ")], 1)
    assert one != other
    told = capsys.readouterr().err.splitlines()
    assert told == [
        f"fairseq_rope.translate: line {n} has 3024 tokens, more than models are trained on" for n in (1, 2)
    ]


def test_lines_beyond_the_positions_are_refused_when_those_before_are_translated(model, sources):
    translator = Translator(str(model))
    translator.settings["positions"] = {"source": 4, "target": 5}
    found = translator.translate(["the dog house", "the", "red red red red", "big"], beam=1)
    assert len([next(found), next(found)]) == 2
    with pytest.raises(translate.TranslateError, match="line 3 has 4 tokens, .* positions for 4: divide it"):
        next(found)
    limited = list(translator.translate(["the dog house"] * 3, beam=1))
    assert max(len(line.split()) for line in limited) <= 5


def test_its_reader_may_stop_and_it_says_nothing(model, sources):
    with command(model) as process:
        process.stdout.close()
        process.stdin.write(sources[0] + "\n")
        process.stdin.close()
        assert process.stderr.read() == ""
    assert process.returncode != 0


@pytest.mark.parametrize(
    "flags, given, said",
    [
        (["--input", "none.txt"], b"", "none.txt: No such file or directory"),
        (["--model", "."], b"", "--model .: must be a folder that fairseq_rope.export wrote"),
        ([], b"the dog\ncaf\xe9\n", "standard input, line 2: is not UTF-8"),
    ],
)
def test_what_cannot_be_read_ends_in_one_sentence(model, flags, given, said):
    process = command(model, *flags, encoding=None)
    _, err = process.communicate(given)
    assert process.returncode == 1
    last = err.decode().splitlines()[-1]
    assert said in last and last.startswith("fairseq_rope.translate: ") and b"Traceback" not in err


def test_what_came_before_a_bad_line_is_translated(model, tmp_path):
    (tmp_path / "in").write_bytes(b"the dog\n" * 700 + b"\xff\n" + b"the dog\n")
    out, err = command(model, "--input", tmp_path / "in").communicate()
    assert len(out.splitlines()) == 700 and f"{tmp_path / 'in'}, line 701: is not UTF-8" in err


def test_lines_that_keep_coming_are_not_waited_for(model, sources):
    with command(model) as process:
        begun = time.time()
        first = []
        threading.Thread(target=lambda: first.append((process.stdout.readline(), time.time()))).start()
        for n in range(120):  # a line every 50 ms, for at least 6 seconds
            process.stdin.write(sources[n % 20] + "\n")
            process.stdin.flush()
            time.sleep(0.05)
        last = time.time()
        process.stdin.close()
        rest = process.stdout.read()
    (line, at) = first[0]
    assert line and len(rest.splitlines()) == 119 and begun < at < last


def test_ctrl_c_ends_it_without_a_traceback(model, sources):
    with command(model) as process:
        process.stdin.write(sources[0] + "\n")
        process.stdin.flush()
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130 and process.stderr.read() == ""


def test_the_commands_search_is_the_one_asked_for(model, sources):
    search = ["--beam", 2, "--lenpen", 3.0, "--threads", 1]
    out, _ = command(model, *search).communicate("".join(f"{source}\n" for source in sources))
    translator = Translator(str(model))
    assert (
        out.splitlines()
        == list(translator.translate(sources, 2, 3.0))
        != list(translator.translate(sources, 2, 0.0))
    )


@pytest.mark.parametrize("broken", ["model.bin", "fairseq_rope.json", "shared_vocabulary.json"])
def test_a_broken_folder_is_one_sentence(model, tmp_path, broken):
    shutil.copytree(model, tmp_path / "broken")
    (tmp_path / "broken" / broken).write_text("{}")
    with pytest.raises(translate.TranslateError, match=f"--model {tmp_path / 'broken'}"):
        list(Translator(str(tmp_path / "broken")).translate(["the dog"]))


def test_sentencepiece_as_fairseq_has_it(data_bin, tmp_path):
    lines = (data_bin.parent / "text" / "train.en").read_text().splitlines()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(tmp_path / "sp"), vocab_size=30, minloglevel=2
    )
    (tmp_path / "sp.model").rename(tmp_path / "sentencepiece.bpe.model")
    path = tmp_path / "sentencepiece.bpe.model"
    subwords = {"kind": "sentencepiece", "file": path.name}
    text = Text(str(tmp_path), {"moses": None, "subwords": subwords})
    bpe = SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(path)))
    for line in [*lines[:20], "an  unseen\tword \u3000 here", ""]:
        assert text.tokens(line) == bpe.encode(line).split()
        assert text.plain(text.tokens(line)) == bpe.decode(bpe.encode(line))


@pytest.mark.parametrize("flag", ["--beam", "--threads"])
def test_numbers_below_one_are_refused(capsys, flag):
    with pytest.raises(SystemExit) as stopped:
        translate.main(["--model", ".", flag, "0"])
    assert stopped.value.code == 2 and f"{flag} 0: must be 1 or more" in capsys.readouterr().err


def test_a_penalty_that_is_no_number_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        translate.main(["--model", ".", "--lenpen", "nan"])
    assert stopped.value.code == 2 and "--lenpen nan: must be a number" in capsys.readouterr().err
