"""fairseq_rope/translate.py: what fairseq-interactive translates, without fairseq."""

import random
import subprocess
import sys
import time

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from fairseq_rope import translate
from fairseq_rope.export import main as export_main
from fairseq_rope.export import to_spec, write_beside
from fairseq_rope.translate import Translator

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


@pytest.mark.parametrize("lenpen", [0.0, 0.6, 1.0])
def test_its_search_ends_and_ranks_as_fairseqs(build, task, tmp_path, lenpen):
    """Of a model that is sure of little and may end anywhere, where hypotheses of all lengths compete."""
    dictionary, draw = task.source_dictionary, random.Random(5)
    sources = [[draw.randrange(4, 44) for _ in range(draw.randint(1, 12))] for _ in range(60)]
    model = build()
    with torch.no_grad():
        some = torch.randint(4, 44, (50, 8))
        out, _ = model(some, torch.full((50,), 8), some.flip(0), features_only=True)
        usual = out.reshape(-1, out.size(-1)).mean(0)
        model.decoder.output_projection.weight.mul_(6.0)
        for word, likely in ((dictionary.eos(), 16.0), (dictionary.pad(), -16.0)):
            model.decoder.output_projection.weight[word] = likely * usual / usual.norm() ** 2
        generator = SequenceGenerator(
            [model], dictionary, beam_size=4, len_penalty=lenpen, max_len_a=1, max_len_b=50
        )
        expected = []
        for source in sources:
            tokens = torch.tensor([[*source, dictionary.eos()]])
            net_input = {"src_tokens": tokens, "src_lengths": torch.tensor([tokens.size(1)])}
            nbest = [h["tokens"].tolist() for h in generator.generate([model], {"net_input": net_input})[0]]
            expected.append([[dictionary[n] for n in tokens[:-1]] for tokens in nbest])
    spec = to_spec(model, dictionary, dictionary)
    spec.validate()
    spec.optimize()
    text = {"moses": None, "subwords": None, "quantization": "float32", "positions": None}
    origin = {"source": "en", "target": "de", "version": "", "checkpoint": "", "max_len_b": 50}
    write_beside(str(tmp_path), spec, {**text, **origin}, None)
    found = Translator(str(tmp_path)).translate([dictionary.string(source) for source in sources], 4, lenpen)
    # What the limit cuts displaces what has ended in CTranslate2, and not in fairseq.
    ended = [n for n, source in enumerate(sources) if max(map(len, expected[n])) < len(source) + 51]
    assert len(ended) > 20 and len({len(expected[n][0]) for n in ended}) > 4
    found = list(found)
    assert [found[n] for n in ended] == [" ".join(expected[n][0]) for n in ended]


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


def test_a_long_line_is_not_cut_and_is_told(model, capsys):
    (found,) = Translator(str(model)).translate([" ".join(["the dog"] * 600)], beam=1)
    assert "a line of 1200 tokens" in capsys.readouterr().err
    assert len(found.split()) > 0


def test_a_line_beyond_the_absolute_positions_is_refused(model):
    translator = Translator(str(model))
    translator.settings["positions"] = 1200
    with pytest.raises(
        translate.TranslateError, match="1200 tokens, and the absolute .* end at 1200; divide"
    ):
        list(translator.translate([" ".join(["the dog"] * 600)], beam=1))
    translator.settings["positions"] = 1201
    assert len(list(translator.translate([" ".join(["the dog"] * 600)], beam=1))) == 1


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
        ([], b"caf\xe9\n", "the input is not UTF-8"),
    ],
)
def test_what_cannot_be_read_ends_in_one_sentence(model, flags, given, said):
    process = command(model, *flags, encoding=None)
    _, err = process.communicate(given)
    assert process.returncode == 1
    last = err.decode().splitlines()[-1]
    assert said in last and last.startswith("fairseq_rope.translate: ") and b"Traceback" not in err


@pytest.mark.parametrize("flag", ["--beam", "--threads"])
def test_numbers_below_one_are_refused(capsys, flag):
    with pytest.raises(SystemExit) as stopped:
        translate.main(["--model", ".", flag, "0"])
    assert stopped.value.code == 2 and f"{flag} 0: must be 1 or more" in capsys.readouterr().err
