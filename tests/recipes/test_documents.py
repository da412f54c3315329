"""Texts with documents: segments in training, the way back to sentences and documents, and old models made long."""

import functools
import gzip
import json
import re
import shutil
import unicodedata

import pytest
import sacrebleu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_rope.checkpoints import load_checkpoint
from fairseq_rope.errors import InputError
from recipes.compare import __main__ as compare
from recipes.pipeline import __main__ as pipeline
from recipes.pipeline.settings import check_values, read_settings
from recipes.pipeline.stage06_binarise import BinariseTest
from recipes.pipeline.stages import STAGES, needed
from recipes.run.run import StageError
from recipes.run.runner import Runner
from recipes.run.shell import Shell
from recipes.run.yaml_file import SettingsError
from recipes.text import segments as module
from recipes.text.old_model import with_rows, with_separator
from tests.commands import PLUGIN, ROOT, call
from tests.recipes.small_demo import describe, run_here, setting_flags, small_corpus, usage_error
from tests.recipes.texts import read_lines, write_lines
from tests.recipes.wmt14_lookalike import sgm, tarball

TOKENS = 120
# A model that trains in seconds. All other settings are the recipe's own.
SETTINGS = [
    *(f"segment_tokens={TOKENS}", "vocab_size=250", "layers=1", "width=32", "ffn_width=32", "heads=2", "dropout=0.1"),
    *("max_updates=6", "save_every_updates=3", "average_checkpoints=2", "tokens_per_update=1000", "disk_gb=0.1"),
    *("max_len_b=5", "fairseq_generate_flags=--max-len-a=0"),
]
MANIFEST = ROOT / "recipes" / "documents_en_de" / "manifest.tsv"


def documents_of(lines):
    """The documents of a text with blank lines between them."""
    return [block.strip("\n").split("\n") for block in re.split(r"\n(?:\s*\n)+", "\n".join(lines).strip("\n"))]


def in_documents(pairs):
    """*pairs* in documents of 1 to 6 pairs."""
    documents, size = [], 1
    while pairs:
        documents.append(pairs[:size])
        pairs, size = pairs[size:], size % 6 + 1
    return documents


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with small files that have the names of the recipe's."""
    folder, corpus = tmp_path_factory.mktemp("published"), small_corpus(train=200, heldout=30)
    documents = {}
    for name in ("train", "valid", "test"):
        sides = [gzip.decompress((corpus / f"{name}.{lang}.gz").read_bytes()).decode() for lang in ("en", "de")]
        documents[name] = in_documents(list(zip(*(side.splitlines() for side in sides), strict=True)))
    # German is the first column. Some boundaries have one line, some have two.
    blocks = ("\n".join(f"{de}\t{en}" for en, de in one) + "\n\t\n" * (len(one) % 2) for one in documents["train"])
    text = "\n\u200b\t \n".join(["\t", *blocks])
    (folder / "news-commentary-v18.de-en.tsv.gz").write_bytes(gzip.compress(text.encode()))
    for archive, name, start in (
        ("dev.tgz", "valid", "dev/newstest2013-"),
        ("test-full.tgz", "test", "test-full/newstest2014-deen-"),
    ):
        sides = [("src", "en"), ("ref", "de")]
        members = {f"{start}{s}.{lang}.sgm": sgm(documents[name], n, lang) for n, (s, lang) in enumerate(sides)}
        (folder / archive).write_bytes(tarball(members))
    return folder


def words(published, work, *flags):
    where = ["--data-dir", str(published), "--manifest", "none", "--work-dir", str(work), "--gpus", "0"]
    return ["documents_en_de", *where, *setting_flags(*SETTINGS), *flags]


@pytest.fixture(scope="module")
def finished(published, tmp_path_factory):
    """The work folder in which the recipe has run, the model's folder, and the output. Tests must not write to them."""
    work = tmp_path_factory.mktemp("work")
    printed = run_here(words(published, work, "--name", "m"))
    return work, work / "transformer_rope.seed1.m", printed


# -- all stages --------------------------------------------------------------------------------------


def test_the_manifest_has_the_recipes_files_and_wmt14s_newstest():
    own = [line.split("\t") for line in MANIFEST.read_text().splitlines()]
    assert [entry[0] for entry in own[1:]] == describe("documents_en_de").files()
    wmt14 = (MANIFEST.parent.parent / "wmt14_en_de" / "manifest.tsv").read_text().splitlines()
    assert {"\t".join(entry) for entry in own[2:]} <= set(wmt14)
    assert own[1][1:3] == ["-", "-"] and own[1][3].endswith("/v18.1/training/news-commentary-v18.de-en.tsv.gz")


def longest_segments(work, name, tokens):
    """The lines of both sides with the longest segments of the set *name*, without the tool's own functions."""
    sides = [documents_of(read_lines(work / "bpe" / f"{name}.{lang}")) for lang in ("en", "de")]
    expected = []
    for document in zip(*sides, strict=True):
        line = None
        for pair in zip(*document, strict=True):
            size = max(len(side.split()) for side in pair)  # a sentence counts with its longer side
            if line is None or line[2] + 1 + size > tokens:
                line = [*pair, size]
                expected.append(line)
            else:
                line[:] = [f"{line[0]} <sep> {pair[0]}", f"{line[1]} <sep> {pair[1]}", line[2] + 1 + size]
    return [[line[side] for line in expected] for side in (0, 1)]


@pytest.mark.slow
def test_validation_and_test_lines_are_the_longest_segments_of_their_documents(finished):
    work, _, _ = finished
    for name in ("valid", "test"):
        segments = [read_lines(work / "segments" / f"{name}.{lang}") for lang in ("en", "de")]
        assert segments == longest_segments(work, name, TOKENS)
        sentences = [line for line in read_lines(work / "bpe" / f"{name}.en") if line]
        assert len(segments[0]) < len(sentences), "some segments have several sentences"


@pytest.mark.slow
def test_training_lines_are_segments_of_all_lengths_and_single_sentences(finished):
    work, _, printed = finished
    sides = [documents_of(read_lines(work / "bpe" / f"train.{lang}")) for lang in ("en", "de")]
    for side, lang in zip(sides, ("en", "de"), strict=True):
        lines = read_lines(work / "segments" / f"train.{lang}")
        assert [part for line in lines for part in line.split(" <sep> ")] == sum(side, [])  # in their order
        joined = [len(line.split()) for line in lines if " <sep> " in line]
        assert joined and max(joined) <= TOKENS and min(joined) < TOKENS / 2
    counts = [
        [line.count(" <sep> ") for line in read_lines(work / "segments" / f"train.{lang}")] for lang in ("en", "de")
    ]
    assert counts[0] == counts[1]
    assert json.loads((work / "data-bin" / "segments.json").read_text()) == {"tokens": TOKENS, "separator": "<sep>"}
    for lang in ("en", "de"):
        entries = dict(line.split() for line in read_lines(work / "data-bin" / f"dict.{lang}.txt"))
        assert int(entries["<sep>"]) == sum(map(sum, counts))
    assert re.search(r"segments/train: .* (4[5-9]|5[0-5])\.\d% of the sentences in segments, and ", printed)


@pytest.mark.slow
def test_translated_segments_become_one_line_for_each_sentence(finished):
    work, model, printed = finished
    sources, hypotheses = read_lines(work / "raw" / "test.sentences.en"), read_lines(model / "hypotheses.de")
    assert sources == [line for line in read_lines(work / "raw" / "test.en") if line]
    assert len(sources) == len(hypotheses) == 30
    generated = (model / "generate.txt").read_text()
    translations = {int(n): text for n, text in re.findall(r"^H-(\d+)\t\S+\t(.*)$", generated, re.MULTILINE)}
    detokenised = {int(n): text for n, text in re.findall(r"^D-(\d+)\t\S+\t(.*)$", generated, re.MULTILINE)}
    differ, alone = 0, 0
    lines = iter(hypotheses)
    for number, segment in enumerate(read_lines(work / "segments" / "test.en")):
        count = segment.split().count("<sep>")
        differ += translations[number].split().count("<sep>") != count
        sentences = [next(lines) for _ in range(count + 1)]
        if count == 0 and "<sep>" not in translations[number]:
            alone += 1
            assert sentences == [detokenised[number]], "as fairseq writes it"
    assert alone > 0
    recorded = {"segments": len(translations), "with_other_separators": differ}
    assert json.loads((model / "separators.json").read_text()) == recorded
    sentence = f"{differ} of {len(translations)} translated segments have another number of separators than their"
    assert printed.count(sentence) == 2, "by stages 9 and 10"


@pytest.mark.slow
def test_documents_are_scored_beside_sentences(finished):
    work, model, printed = finished
    hypotheses, references = read_lines(model / "hypotheses.de"), documents_of(read_lines(work / "raw" / "test.de"))
    assert sum(references, []) == read_lines(work / "raw" / "test.sentences.de")
    lines = iter(hypotheses)
    joined = [" ".join(filter(None, (next(lines) for _ in document))) for document in references]
    assert read_lines(model / "documents.de") == joined
    of_documents = sacrebleu.corpus_bleu(joined, [[" ".join(document) for document in references]]).score
    of_sentences = sacrebleu.corpus_bleu(hypotheses, [sum(references, [])]).score
    assert re.search(rf"^document BLEU: +{of_documents:.2f}$", printed, re.MULTILINE)
    assert printed.splitlines()[-1] == f"sacreBLEU {of_sentences:.2f}"
    assert json.loads((model / "score.documents.json").read_text())["score"] == pytest.approx(of_documents, abs=1e-6)


@pytest.mark.slow
def test_a_model_of_segments_is_exported(finished, published, tmp_path):
    work = shutil.copytree(finished[0], tmp_path / "work")
    segments = read_lines(work / "segments" / "valid.en")
    assert sum("<sep>" in line for line in segments) > len(segments) / 8, "too many to count as tokenised differently"
    flags = ["--name", "m", "--stage", "11", "--set", "export_quantization=float32"]
    printed = run_here(words(published, work, *flags))
    assert re.search(r"(\d+) of \1 sources of the validation set are tokenised from plain text as in the data", printed)


@pytest.mark.slow
@pytest.mark.parametrize("tokens, done", [(TOKENS, 10), (TOKENS + 1, 5), (0, 1)])
def test_other_segments_change_only_the_stages_that_depend_on_them(finished, published, tokens, done):
    experiment = describe(*words(published, finished[0], "--name", "m", "--set", f"segment_tokens={tokens}"))
    stamps = Runner(experiment).stamps
    assert next(stage.number for stage in needed(STAGES, experiment) if not stamps.is_done(stage)) == done + 1


def test_without_documents_no_command_makes_segments(capsys):
    pipeline.main(["demo", "--dry-run", "--stage", "2"])
    assert not re.search(r"\$ .*(segments|documents)", capsys.readouterr().out)


def test_a_test_sentence_without_subwords_is_named_before_the_segments_are_binarised(tmp_path, monkeypatch):
    """Stage 2 counts it among the sentences of its document, so that the sentences after it would be shifted."""
    experiment = describe("documents_en_de", "--work-dir", tmp_path)
    texts = {"raw/test.en": ["a", "", "b"], "raw/test.de": ["A", "", "\u200b"], "bpe/test.en": ["a", "", "b"]}
    for name, lines in {**texts, "bpe/test.de": ["A", "", ""]}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / name, lines)
    monkeypatch.setattr("recipes.run.shell.run_logged", lambda *_: None)
    stage = BinariseTest()
    with pytest.raises(StageError, match=r"raw/test.de, line 3: has only characters that the tokenisation removes$"):
        stage.run(experiment, Shell(stage, tmp_path / "script.sh"))


def test_with_one_token_a_segment_no_sentences_are_joined(tmp_path):
    for name in ("in.en", "in.de"):
        (tmp_path / name).write_text("a\nb\n\nc\n")
    printed = module.join(
        [str(tmp_path / "in.en"), str(tmp_path / "in.de")], [str(tmp_path / "x"), str(tmp_path / "y")], 1, 0.5
    )
    assert printed == "2 documents, 3 sentences, 3 lines of up to 1 subwords"
    assert read_lines(tmp_path / "x") == ["a", "b", "c"]


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["valid", "test"])
def test_a_line_that_is_blank_on_one_side_only_is_refused_by_file_and_line(tmp_path, name):
    files = setting_flags("segment_tokens=9", *(f"{name}_files={name}.{{lang}}" for name in ("train", "valid", "test")))
    for text in ("train", "valid", "test"):
        write_lines(tmp_path / f"{text}.en", ["one", "", "two", "three"])
        write_lines(tmp_path / f"{text}.de", ["eins", "", "zwei", "\u200b " if text in ("train", name) else "drei"])
    where = ["--data-dir", str(tmp_path), "--work-dir", str(tmp_path / "work")]
    raw = f"{tmp_path}/work/raw/{name}"
    message = f"stage 2 .*: {raw}.de, line 4: is blank, and the same line of {raw}.en is not"
    with pytest.raises(SystemExit, match=message):
        run_here(["demo", *where, *files, "--stop-stage", "2"])


def test_segments_that_training_lacks_or_that_are_too_long_are_refused(capsys):
    demo = ROOT / "recipes" / "demo" / "settings.yaml"
    with pytest.raises(SettingsError, match="segment_share=0 segment_tokens=9: a model without segments in training"):
        check_values(read_settings(demo, ["segment_tokens=9", "segment_share=0"]))
    check_values(read_settings(demo, ["segment_tokens=1", "segment_share=0"]))
    long = ["demo", *setting_flags("segment_tokens=1024")]
    assert "segment_tokens=1024: must be below the 1024 tokens" in usage_error(capsys, pipeline.main, long)
    positions = "--max-source-positions 2000 --max-target-positions 2000"
    describe(*long, *setting_flags(f"fairseq_train_flags={positions}", f"fairseq_generate_flags={positions}"))


@pytest.mark.parametrize(
    "source, target, message",
    [
        (["a", "<sep> b"], ["A", "B"], "in.en, line 2: contains <sep> as a token"),
        (["a", "b"], ["A", "B <sep>"], "in.de, line 2: contains <sep> as a token"),
        (["a", ""], ["A", "B"], "in.en, line 2: is blank on this side only"),
        (["a", "b"], [" ", "B"], "in.de, line 1: is blank on this side only"),
        (["", " "], ["", ""], "in.en and .*in.de: all lines are blank"),
        (["a"], ["A", "B"], "in.en has 1 lines and .*in.de has 2: both must have the same number"),
    ],
)
def test_lines_that_cannot_be_joined_are_refused_by_file_and_line(tmp_path, source, target, message):
    with pytest.raises(SystemExit, match=f"^recipes.text.segments: .*{message}"):
        join(tmp_path, source, target, 9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.de", "in.en"]


@pytest.mark.parametrize(
    "tokens, share, message",
    [
        (0, 0.5, "--tokens 0: must be 1 or more"),
        (-3, None, "--tokens -3: must"),
        (9, 7, "--share 7.0: must be from 0 to"),
    ]
    + [(9, "nan", "--share nan: must be from 0 to 1")],
)
def test_sizes_that_no_segment_can_have_are_refused(tmp_path, tokens, share, message):
    with pytest.raises(SystemExit, match=f"^recipes.text.segments: {message}"):
        join(tmp_path, ["a"], ["A"], tokens, share)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.de", "in.en"]


def test_training_leaves_out_pairs_of_which_a_side_has_no_subwords(tmp_path):
    assert join(tmp_path, ["a", "", "b", "", "c"], ["A", "B", "", "", "C"], 9, share=1) == [("a", "A"), ("c", "C")]


def join(folder, source, target, tokens, share=None):
    """The lines that the tool makes of *source* and *target*, as pairs."""
    write_lines(folder / "in.en", source)
    write_lines(folder / "in.de", target)
    flags = [] if share is None else ["--share", share]
    languages = ["--source-lang", "en", "--target-lang", "de"]
    main_words = [*languages, "--input", folder / "in", "--output", folder / "out", "--tokens", tokens, *flags]
    module.main(["join", *map(str, main_words)])
    return list(zip(read_lines(folder / "out.en"), read_lines(folder / "out.de"), strict=True))


# -- the tool ----------------------------------------------------------------------------------------


def test_the_lengths_of_training_segments_are_drawn_in_the_same_way_each_time(tmp_path):
    texts = [*"abcdefgh"] * 20, [*"ABCDEFGH"] * 20
    first = join(tmp_path, *texts, 9, share=1)
    assert join(tmp_path, *texts, 9, share=1) == first and len({len(source.split()) for source, _ in first}) > 2


def test_a_segment_fits_on_both_sides_and_ends_with_its_document(tmp_path):
    source = ["a a", "b", "c c c", "", "d", "", "", "e e", "f"]
    target = ["A", "B B", "C C C", "", "D", "", "", "E", "F"]
    segments = [("a a <sep> b", "A <sep> B B"), ("c c c", "C C C"), ("d", "D"), ("e e <sep> f", "E <sep> F")]
    assert join(tmp_path, source, target, 5) == segments
    assert join(tmp_path, source, target, 1) == [(s, t) for s, t in zip(source, target, strict=True) if s]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40), st.sampled_from([0, 0.2, 0.5, 0.8, 1]), st.integers(5, 60)
)  # fmt: skip
def test_the_share_of_sentences_in_segments_is_met_up_to_half_a_document(sizes, share, tokens):
    mixture = module.Mixture(tokens, share)
    for size in sizes:
        document = [(["a"], ["b"])] * size
        divisions = mixture(document)
        assert [n for segment in divisions for n in segment] == list(range(size))
        assert all(2 * len(segment) - 1 <= tokens for segment in divisions)
        assert abs(mixture.in_segments - share * mixture.sentences) <= max(sizes) / 2 + 1e-9
    assert share < 1 or mixture.in_segments == sum(sizes)


def test_segments_of_training_have_all_lengths_equally_often():
    """Of one-token sentences, a segment with the limit 2n - 1 or 2n contains n."""
    mixture = module.Mixture(20, 1)
    lengths = [len(segment) for _ in range(200) for segment in mixture([(["a"], ["b"])] * 100)[:-1]]
    assert set(lengths) == set(range(1, 11))
    assert all(abs(lengths.count(n) / len(lengths) - 0.1) < 0.02 for n in range(1, 11))


def test_a_translation_that_lacks_separators_keeps_the_number_of_lines(tmp_path):
    write_lines(tmp_path / "test.en", ["a <sep> b <sep> c", "d", "e <sep> f"])
    hypotheses = {2: "e@@ ins &amp; <sep> f", 0: "ein Haus . <sep> b c", 1: "d <sep> mehr"}
    lines = ["log", *(f"H-{n}\t-0.5\t{text}" for n, text in hypotheses.items()), "H-1\t-0.9\tsecond of an n-best list"]
    write_lines(tmp_path / "generated", lines)
    (tmp_path / "bpecodes").write_text("#version: 0.2\na b\n")
    flags = ["--segments", "test.en", "--generated", "generated", "--output", "out", "--counts", "counts.json"]
    flags = [word if word.startswith("--") else str(tmp_path / word) for word in flags]
    module.main(["divide", *flags, "--subwords", str(tmp_path / "bpecodes"), "--moses", "en", "de"])
    assert read_lines(tmp_path / "out") == ["ein Haus.", "b c", "", "d mehr", "eins &", "f"]
    assert json.loads((tmp_path / "counts.json").read_text()) == {"segments": 3, "with_other_separators": 2}
    write_lines(tmp_path / "generated", lines[:2])
    message = r"generated: lacks 2 sentences \(0, 1\), and .*test.en has 3 lines, which are sentences 0 to 2"
    with pytest.raises(SystemExit, match=message):
        module.main(["divide", *flags, "--subwords", str(tmp_path / "bpecodes")])


def test_a_document_is_one_line(tmp_path):
    write_lines(tmp_path / "like", ["", "a", "b", "", "\u00a0", "c", ""])
    write_lines(tmp_path / "in", ["A\rA", "", "C"])
    assert module.join_documents(*(str(tmp_path / name) for name in ("like", "in", "out"))) == 2
    assert read_lines(tmp_path / "out") == ["A A", "C"]
    write_lines(tmp_path / "in", ["A", "B"])
    with pytest.raises(InputError, match="in: has 2 lines, and .*like has 3 that are not blank"):
        module.join_documents(*(str(tmp_path / name) for name in ("like", "in", "out")))


@pytest.mark.slow
def test_a_comparison_translates_segments_of_all_lengths_and_a_system_can_have_another_search(
    finished, published, tmp_path
):
    work, systems = tmp_path / "work", tmp_path / "systems.yaml"
    shutil.copytree(finished[0], work, ignore=shutil.ignore_patterns("transformer*"))
    scaling = "{'rope_scaling': {'rope_type': 'linear', 'factor': 4}}"
    linear = {"of": "rope", "generate": f'--model-overrides "{scaling}"'}
    systems.write_text(json.dumps({"linear": linear, "rope": "--arch transformer_rope"}))
    flags = ["--name", "m", "--seeds", "1", "--systems", str(systems)]
    printed = run_here(words(published, work, *flags), main=compare.main)
    assert printed.count("$ fairseq-train ") == 1
    models = {name: work / f"{name}.seed1.m" for name in ("linear", "rope")}
    assert models["linear"].joinpath("averaged.pt").samefile(models["rope"] / "averaged.pt")
    for name in ("stage09_translate", "stage14_translate_joined"):
        flags = {system: (model / "commands" / f"{name}.sh").read_text() for system, model in models.items()}
        assert "rope_scaling" in flags["linear"] and "rope_scaling" not in flags["rope"]
    results = json.loads((work / "compare.m" / "results.json").read_text())
    lengths = (1, 64, 128, 256, 512, 1000)
    assert [joined["tokens"] for joined in results["joined"]] == [TOKENS, *lengths]
    references = read_lines(work / "raw" / "test.sentences.de")
    for joined in results["joined"][1:]:
        tokens = joined["tokens"]
        segments = [read_lines(work / "joined" / f"{tokens}.bpe.{lang}") for lang in ("en", "de")]
        assert segments == longest_segments(work, "test", tokens) and joined["lines"] == len(segments[0])
        for system, model in models.items():
            hypotheses = read_lines(model / "joined" / f"{tokens}.de")
            assert joined["scores"][system] == [pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score)]
            counts = json.loads((model / "joined" / f"{tokens}.separators.json").read_text())
            assert counts["segments"] == len(segments[0])
            generated = model / "joined" / f"{tokens}.generate.txt"
            if generated.exists():
                sources = dict(re.findall(r"^S-(\d+)\t(.*)$", generated.read_text(), re.MULTILINE))
                assert sorted(map(int, sources)) == [*range(len(segments[0]))]
            else:
                assert f"segments of up to {tokens} subwords: the same as in" in printed
    first, second = (read_lines(work / "joined" / f"{tokens}.bpe.en") for tokens in (512, 1000))
    assert first == second and printed.count("segments of up to 1000 subwords: the same as in 512.de") == 2
    assert (work / "compare.m" / "report.html").exists()


@pytest.mark.slow
def test_the_recipe_divides_segments_of_sentencepiece(published, tmp_path):
    printed = run_here(words(published, tmp_path, "--bpe", "sentencepiece", "--name", "m"))
    assert re.fullmatch(r"sacreBLEU \d+\.\d\d", printed.splitlines()[-1])
    assert "--bpe sentencepiece --sentencepiece-model" in printed and "--tokenizer" not in printed
    assert (tmp_path / "data-bin" / "sentencepiece.bpe.model").exists()
    hypotheses = read_lines(tmp_path / "transformer_rope.seed1.m" / "hypotheses.de")
    assert len(hypotheses) == 30 and not any(mark in line for line in hypotheses for mark in ("▁", "<sep>", "@@"))
    pieces = "\n".join(read_lines(tmp_path / "bpe" / "test.de")).replace(" ", "").replace("▁", " ").replace("\n ", "\n")
    normalised = unicodedata.normalize("NFC", (tmp_path / "tokenised" / "test.de").read_text())  # as the model does
    assert pieces.strip() == re.sub(r"[^\S\n]+", " ", normalised).strip()


# -- from an old model -------------------------------------------------------------------------------


SIZES = "--{0}-layers 1 --{0}-embed-dim 32 --{0}-ffn-embed-dim 32 --{0}-attention-heads 2"
OLD = (
    f"{SIZES.format('encoder')} {SIZES.format('decoder')} --optimizer adam --lr 0.01 --criterion cross_entropy "
    "--max-tokens 1000 --max-update 3 --cpu --seed 3 --num-workers 0"
).split()


@pytest.fixture(scope="module")
def old(finished, tmp_path_factory):
    """old(kind): the checkpoint and the data folder of a sentence-level model with the subwords of :func:`finished`.

    "fairseq" is fairseq's own transformer; its only dictionary has no madeupword. "ours" is a rotary model with two
    dictionaries, which have some.
    """
    work, _, _ = finished

    @functools.cache
    def old(kind):
        folder = tmp_path_factory.mktemp(kind)
        for path in (work / "bpe").iterdir():
            if path.name != "bpecodes":
                write_lines(folder / path.name, [line for line in read_lines(path) if line])
        sets = [word for n in ("train", "valid") for word in (f"--{n}pref", folder / n)]
        joined = ["--joined-dictionary", "--padding-factor", 1] if kind == "fairseq" else ["--padding-factor", 64]
        languages = ["--source-lang", "en", "--target-lang", "de"]
        call("fairseq-preprocess", *languages, *sets, *joined, "--destdir", folder / "data", "--workers", 1)
        shutil.copy(work / "bpe" / "bpecodes", folder / "data")
        model = ["--arch", "transformer", "--share-all-embeddings"]
        if kind == "ours":
            model = ["--user-dir", PLUGIN, "--arch", "transformer_rope", "--share-decoder-input-output-embed"]
        call("fairseq-train", folder / "data", *languages, *model, *OLD, "--save-dir", folder)
        return folder / "checkpoint_last.pt", folder / "data"

    return old


def start_flags(checkpoint, data, *more):
    return setting_flags(f"start_checkpoint={checkpoint}", f"start_data={data}", *more)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fairseq", "ours"])
def test_training_on_segments_starts_with_the_weights_of_an_old_model(finished, published, old, tmp_path, kind):
    checkpoint, data = old(kind)
    work = shutil.copytree(finished[0], tmp_path / "work", ignore=shutil.ignore_patterns("transformer*"))
    flags = start_flags(checkpoint, data, "learning_rate=1e-9", "warmup_init_lr=1e-9")
    printed = run_here(words(published, work, "--name", "m", *flags, "--stop-stage", "7"))
    assert printed.count("done before, skipped") == 8 and "recipes.text.bpe learn" not in printed
    weights = load_checkpoint(str(checkpoint))["model"]
    trained = load_checkpoint(str(work / "transformer_rope.seed1.m" / "checkpoints" / "checkpoint_last.pt"))["model"]
    for side, lang in (("encoder", "en"), ("decoder", "de")):
        before, after = (read_lines(folder / f"dict.{lang}.txt") for folder in (data, work / "data-bin"))
        expected = weights[f"{side}.embed_tokens.weight"]
        if kind == "fairseq":
            assert after == [*before, "<sep> 1"]
            expected = torch.cat([expected, expected.mean(dim=0, keepdim=True)])
        else:
            assert [line.replace("<sep> 1", "madeupword0000 0") for line in after] == before != after
        assert torch.allclose(trained[f"{side}.embed_tokens.weight"], expected, atol=1e-5)
    others = {name for name in weights if "embed" not in name and "output" not in name and "version" not in name}
    assert len(others) > 30 and others <= trained.keys()
    assert all(torch.allclose(trained[name], weights[name], atol=1e-5) for name in others)
    assert not any("embed_positions" in name for name in trained)


def test_the_separator_takes_the_place_of_a_madeupword_or_a_new_row():
    assert with_separator(["a 3", "madeupword0000 0", "madeupword0001 0"]) == ["a 3", "<sep> 1", "madeupword0001 0"]
    assert with_separator(["a 3", "b 1"]) == ["a 3", "b 1", "<sep> 1"]
    assert with_separator(["a 3", "<sep> 7", "madeupword0000 0"]) == ["a 3", "<sep> 7", "madeupword0000 0"]
    weights = {"encoder.embed_tokens.weight": torch.tensor([[1.0, 2.0], [3.0, 6.0]]).half(), "other": torch.zeros(2)}
    changed = with_rows(weights, {"encoder.embed_tokens.weight": 3, "decoder.embed_out": 3})
    assert changed["encoder.embed_tokens.weight"].tolist() == [[1, 2], [3, 6], [2, 4]]
    assert changed["other"] is weights["other"] and len(changed) == 2


@pytest.mark.slow
def test_settings_that_do_not_fit_the_old_model_are_refused_before_the_first_stage(published, old, tmp_path, capsys):
    checkpoint, data = old("fairseq")
    state = load_checkpoint(str(checkpoint))
    state["cfg"]["model"].activation_fn = "gelu"
    torch.save(state, tmp_path / "gelu.pt")
    torch.save({"model": {}}, tmp_path / "none.pt")
    # The contents of all files of the old model are among what the stages depend on.
    started = describe(*words(published, tmp_path / "work", *start_flags(checkpoint, data)))
    inputs = {path for stage in STAGES for path in stage.inputs(started)}
    assert {checkpoint, *(data / name for name in ("bpecodes", "dict.en.txt", "dict.de.txt"))} <= inputs
    other = shutil.copytree(data, tmp_path / "other")
    write_lines(other / "dict.de.txt", [*read_lines(data / "dict.de.txt"), "more 1"])
    twice = shutil.copytree(data, tmp_path / "twice")
    write_lines(twice / "dict.de.txt", 2 * read_lines(data / "dict.de.txt"))
    entries = len(read_lines(data / "dict.de.txt")) + 4
    cases = [
        (checkpoint, data, ["--set", "width=64"], f"--set width=64: start_checkpoint={checkpoint} has 32"),
        (checkpoint, data, ["--set", "heads=4"], f"--set heads=4: start_checkpoint={checkpoint} has 2"),
        (tmp_path / "gelu.pt", data, [], "was trained with --activation-fn gelu, not relu; change fairseq_train_flags"),
        (tmp_path / "none.pt", data, [], "none.pt: has no options of its model"),
        (data / "bpecodes", data, [], f"--set start_checkpoint={data}/bpecodes: {data}/bpecodes was not loaded"),
        (checkpoint, other, [], f"has {entries + 1} entries with fairseq's own, and the checkpoint has {entries}"),
        (checkpoint, twice, [], f"--set start_data={twice}: dict.de.txt: Duplicate word found"),
        (checkpoint, data, ["--arch", "transfomer"], "--arch transfomer: fairseq has no such architecture"),
        (checkpoint, data, ["--", "--alibi-type", "asymmetric"], "--alibi-type asymmetric"),
    ]
    for path, folder, more, message in cases:
        with pytest.raises(SystemExit) as refused:
            run_here(words(published, tmp_path / "work", *start_flags(path, folder), *more))
        assert message in refused.value.code
        assert not (tmp_path / "work" / "raw").exists()
    pieces = tmp_path / "pieces"
    pieces.mkdir()
    for name in ("dict.en.txt", "dict.de.txt", "sentencepiece.bpe.model"):
        (pieces / name).touch()
    for path, folder, message in (
        (tmp_path / "no.pt", data, f"--set start_checkpoint={tmp_path}/no.pt: must be a file that exists"),
        (checkpoint, tmp_path, f"--set start_data={tmp_path}: must have a file dict.en.txt"),
        (
            checkpoint,
            pieces,
            f"start_data={pieces}: must have a file bpecodes; it has the subwords of --bpe sentencepiece",
        ),
        (checkpoint, "", f"--set start_checkpoint={checkpoint} start_data=: both must be given, or neither"),
    ):
        run = words(published, tmp_path / "work", *start_flags(path, folder), "--dry-run")
        assert message in usage_error(capsys, pipeline.main, run)
