"""recipes/text/extract.py: extraction from all kinds of corpora, and refusals of broken ones."""

import bz2
import codecs
import gzip
import lzma
import os
import shutil
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from recipes.text import extract as module
from tests.commands import LIMIT
from tests.recipes.texts import start_tool
from tests.recipes.wmt14_lookalike import TEST, TRAINING, VALID, tarball, write_lookalike

DENSE = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
COMPRESS = {**DENSE, "": bytes}
EN, DE = b"One.\nTwo.\n", "Eins.\nZwei ä.\n".encode()


def write(folder, files):
    """Write *files*, contents by name. A dictionary becomes an archive of its members."""
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(tarball(content) if isinstance(content, dict) else content)


def words(folder, *templates):
    output = ["--output", str(folder / "raw" / "train")]
    return ["--source-lang", "en", "--target-lang", "de", *output, *(f"{folder}/{name}" for name in templates)]


def extract(folder, *templates, flags=()):
    """Run the tool, which must leave only its two outputs. Returns their bytes."""
    module.main([*words(folder, *templates), *flags])
    assert sorted(os.listdir(folder / "raw")) == ["train.de", "train.en"]
    return tuple((folder / "raw" / f"train.{lang}").read_bytes() for lang in ("en", "de"))


def refuse(folder, *templates, flags=()):
    """The one sentence of an error, which must leave no files."""
    with pytest.raises(SystemExit) as refused:
        module.main([*words(folder, *templates), *flags])
    message = refused.value.code
    assert isinstance(message, str) and "\n" not in message and message.startswith("recipes.text.extract: ")
    assert not (folder / "raw").exists() or os.listdir(folder / "raw") == []
    return message


def lines(column, pairs):
    return "".join(pair[column] + "\n" for pair in pairs).encode()


@pytest.mark.parametrize("corpora, part", [(TRAINING, "train"), (VALID, "valid"), (TEST, "test")])
def test_all_pairs_are_extracted_from_tarballs_in_order(tmp_path, capsys, corpora, part):
    lookalike = write_lookalike(tmp_path / "data", pairs=301)
    pairs = getattr(lookalike, part)
    templates = lookalike.templates(corpora)
    extracted = extract(tmp_path, *(os.path.relpath(each, tmp_path) for each in templates))
    assert extracted == (lines(0, pairs), lines(1, pairs))
    message = capsys.readouterr().out.splitlines()
    assert len(message) == len(templates) + 1
    assert [line.rsplit(": ", 1)[0] for line in message[:-1]] == templates
    counts = [int(line.split()[-2]) for line in message]
    assert sum(counts[:-1]) == counts[-1] == len(pairs)


MEMBERS = {"t.en": EN, "t.de": DE}
TAR = gzip.decompress(tarball({"other": b"\xff" * 5000, **MEMBERS}))
NAMES = {"a.tar": bytes, "a.tar.gz": gzip.compress, "a.tar.bz2": bz2.compress, "a.txz": lzma.compress}


@pytest.mark.parametrize(
    "files, template",
    [
        *(({f"c.en{s}": f(EN), f"c.de{s}": f(DE)}, f"c.{{lang}}{s}") for s, f in COMPRESS.items()),
        *(({"a.tgz": {f"t.en{s}": f(EN), f"t.de{s}": f(DE)}}, f"a.tgz:t.{{lang}}{s}") for s, f in COMPRESS.items()),
        *(({name: compress(TAR)}, f"{name}:t.{{lang}}") for name, compress in NAMES.items()),
        ({"a.tgz": lzma.compress(TAR)}, "a.tgz:t.{lang}"),  # the contents decide, not the name
        ({"c.en.gz": gzip.compress(EN[:7]) + gzip.compress(EN[7:]), "c.de.gz": gzip.compress(DE)}, "c.{lang}.gz"),
        ({"a.tgz": gzip.compress(TAR[:700]) + gzip.compress(TAR[700:])}, "a.tgz:t.{lang}"),
        ({"a.tgz": {"./t.de": DE, "././t.en": EN}}, "a.tgz:t.{lang}"),
        ({"a.tgz": MEMBERS}, "a.tgz:./t.{lang}"),
        ({"en.tar.gz": {"text": EN}, "de.tar.gz": {"text": DE}}, "{lang}.tar.gz:text"),
        ({"a:b/c.en": EN, "a:b/c.de": DE}, "a:b/c.{lang}"),
        ({"a:b/a.tgz": {"x:en": EN, "x:de": DE}}, "a:b/a.tgz:x:{lang}"),
    ],
)
def test_files_and_members_are_found_and_decompressed(tmp_path, files, template):
    write(tmp_path, files)
    assert extract(tmp_path, template) == (EN, DE)


@pytest.mark.parametrize("chunk", [2**20, 3])
def test_only_a_newline_ends_a_line_and_the_last_newline_is_optional(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(module, "BLOCK_BYTES", chunk)
    odd = "a\rb\r\nc\u0085d\u2028e\u2029f\x0bg\x0ch\x1ci\u200bj€\U0001f600\n\n \nlast".encode()
    write(tmp_path, {"c.en": odd, "c.de": b"1\n2\n3\n4\n5\n", "a.tgz": MEMBERS})
    assert extract(tmp_path, "c.{lang}", "a.tgz:t.{lang}") == (odd + b"\n" + EN, b"1\n2\n3\n4\n5\n" + DE)


def test_an_archive_is_read_once_for_both_languages_with_progress(tmp_path, capsys, monkeypatch):
    write(tmp_path, {"a.tgz": MEMBERS})
    opened = []
    original = tarfile.open
    monkeypatch.setattr(module.tarfile, "open", lambda **how: opened.append(how) or original(**how))
    extract(tmp_path, "a.tgz:t.{lang}")
    size, shown = (tmp_path / "a.tgz").stat().st_size, capsys.readouterr().err
    assert len(opened) == 1 and "read: 100%" in shown and f"{size}/{size}" in shown and "B/s]" in shown


def test_a_further_reference_takes_the_place_of_the_target(tmp_path):
    write(tmp_path, {"c.en": EN, "c.de": DE, "a.tgz": MEMBERS, "second.de": b"One\nTwo\n", "short.de": b"One\n"})
    write(tmp_path, {"both.en-de.tsv": b"a\tb\n"})
    second, short = (["--reference", f"{tmp_path}/{name}.{{lang}}"] for name in ("second", "short"))
    assert extract(tmp_path, "c.{lang}", flags=second) == (EN, b"One\nTwo\n")
    assert extract(tmp_path, "c.{lang}", "a.tgz:t.{lang}", flags=2 * second) == (2 * EN, 2 * b"One\nTwo\n")
    shutil.rmtree(tmp_path / "raw")
    assert "c.en has 2 lines and " in refuse(tmp_path, "c.{lang}", flags=short)
    assert "--reference" in refuse(tmp_path, "c.{lang}", flags=2 * second)
    table = ["--reference", f"{tmp_path}/both.en-de.tsv"]
    for template, flags in (("both.en-de.tsv", second), ("c.{lang}", table)):
        message = refuse(tmp_path, template, flags=flags)
        assert f"{tmp_path}/both.en-de.tsv: has both languages as columns; for further references" in message


SGM = """<refset>\n<doc sysid="ref"><hl>
<seg id="1"> R&amp;D &lt;b&gt; &amp;quot; &#228;&nbsp;</seg>
</hl><p>
<SEG id='2'>over
two\rlines</SEG> <seg>on one&#10;line</seg ></p></doc></refset>
"""


def test_a_byte_order_mark_at_the_start_of_a_file_is_not_part_of_its_text(tmp_path):
    mark = codecs.BOM_UTF8
    write(tmp_path, {"a.en": mark + EN, "a.de": mark + DE, "b.tgz": {"t.en": mark + EN, "t.de": mark + DE}})
    write(tmp_path, {"c.en-de.tsv": mark + b"a\tb\n"})
    expected = (2 * EN + b"a\n", 2 * DE + b"b\n")
    assert extract(tmp_path, "a.{lang}", "b.tgz:t.{lang}", "c.en-de.tsv") == expected


@pytest.mark.parametrize(
    "suffix, chunk", [(".SGM", 2**20), (".sgm", 2**20), (".sgml", 1), (".sgm", 7), (".sgm.gz", 64)]
)
def test_sgm_gives_the_text_of_its_segments(tmp_path, monkeypatch, suffix, chunk):
    monkeypatch.setattr(module, "BLOCK_BYTES", chunk)
    en = SGM.encode()
    de = b"<seg>1</seg><seg>2</seg><seg id=3></seg>"
    if suffix.endswith(".gz"):
        en, de = gzip.compress(en), gzip.compress(de)
    write(tmp_path, {f"c.en{suffix}": en, f"c.de{suffix}": de})
    expected = "R&D <b> &quot; ä\nover two\rlines\non one line\n".encode(), b"1\n2\n\n"
    assert extract(tmp_path, f"c.{{lang}}{suffix}") == expected


@pytest.mark.parametrize("chunk", [2**20, 1, 7])
def test_documents_are_separated_by_blank_lines_between_files_and_between_docs_of_sgm(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(module, "BLOCK_BYTES", chunk)
    sgm = '<refset>\n<DOC id="1">\n<seg>{0}1</seg>\n</doc>\n<doc\nid="2"><p><seg>{0}2</seg><seg>{0}3</seg></p></doc>'
    write(tmp_path, {f"c.{lang}.sgm": sgm.format(lang).encode() for lang in ("en", "de")})
    write(tmp_path, {"d.en": "one\n\u200b \ttwo\n\u200b\n\u2028 \nthree".encode(), "d.de": b"1\n2\n\n\n3\n"})
    expected = "{0}1\n\n{0}2\n{0}3\n\n{1}\n{2}\n\n\n{3}\n"
    assert extract(tmp_path, "c.{lang}.sgm", "d.{lang}", flags=["--documents"]) == (
        expected.format("en", "one", "\u200b \ttwo", "three").encode(),
        expected.format("de", "1", "2", "3").encode(),
    )
    assert extract(tmp_path, "c.{lang}.sgm") == (b"en1\nen2\nen3\n", b"de1\nde2\nde3\n")


ROWS = "Eins.\tOne.\r\nZwei \u2028ä.\tTwo.\n\t\n\nDrei.\t\n"


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("name, source, target", [("n.v1.de-en.tsv", 1, 0), ("n.en-de.tsv", 0, 1)])
def test_the_columns_of_a_tsv_file_are_the_languages_in_its_name(tmp_path, capsys, suffix, name, source, target):
    write(tmp_path, {name + suffix: COMPRESS[suffix](ROWS.encode())})
    columns = ["Eins.\nZwei \u2028ä.\n{}Drei.\n".encode(), b"One.\nTwo.\n{}\n"]
    for flags, boundary, pairs in ([], b"", 3), (["--documents"], b"\n\n", 3):
        written = [column.replace(b"{}", boundary) for column in columns]
        assert extract(tmp_path, name + suffix, flags=flags) == (written[source], written[target])
        # A pair counts if its source has text.
        text = pairs if source == 0 or not flags else pairs - 1
        assert capsys.readouterr().out.splitlines()[-1].endswith(f": {text} pairs")


def test_a_corpus_is_never_all_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 2**16)
    content = (b"word " * 99 + b"\n") * 20_000
    write(tmp_path, {"a.tgz": {"t.en": content, "t.de": content}})
    tracemalloc.start()
    try:
        module.main(words(tmp_path, "a.tgz:t.{lang}"))
        assert tracemalloc.get_traced_memory()[1] < len(content) / 4
    finally:
        tracemalloc.stop()


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


LINK = special("t.en", tarfile.SYMTYPE, "/etc/passwd")
C, A, SGM_FILES = "c.{lang}", "a.tgz:t.{lang}", "c.{lang}.sgm"
TEXTS = [  # of both languages
    (EN, DE + b"Drei.\n", "c.{lang}: FOLDER/c.en has 2 lines and FOLDER/c.de has 3 lines, and both must have the same"),
    (EN, DE[:-1] + b"\n\n", "c.en has 2 lines and FOLDER/c.de has 3 lines"),
    (b"", b"", "FOLDER/c.en: is empty"),
    (EN, b"", "FOLDER/c.de: is empty"),
    (EN, b"Eins.\nZw\xe4i.\n", "FOLDER/c.de, line 2: the byte 0xe4 is not UTF-8"),
    (b"\n" * 5000 + b"\xed\xa0\x80", DE, "FOLDER/c.en, line 5001: the byte 0xed is not UTF-8"),
    (EN + b"\xe2\x80", DE, "FOLDER/c.en, line 3: the byte 0xe2 is not UTF-8"),
    ("Ä\n".encode("utf-16"), DE, "FOLDER/c.en, line 1: the byte 0xff is not UTF-8"),
]
MARKUP = [
    (b"<refset></refset>", "c.en.sgm has no <seg>"),
    (b"<seg>1</seg><seg>2", "c.en.sgm: <seg> number 2 is not closed by </seg>"),
    (b"<seg id=1>1\n<seg id=2>2</seg>", "c.en.sgm: <seg> number 1 is not closed by </seg>"),
]
OTHERS = (".xml", ".tar", ".ZIP", ".tmx")
NEAREST = "FOLDER/a.tgz has no member t.en; the nearest name is training/t.en"


@pytest.mark.parametrize("chunk", [2**20, 5])
@pytest.mark.parametrize(
    "files, template, message",
    [
        *(({"c.en": en, "c.de": de}, C, message) for en, de, message in TEXTS),
        *(({"c.en.sgm": en, "c.de.sgm": b"<seg>1</seg>"}, SGM_FILES, message) for en, message in MARKUP),
        *(({f"c.en{s}": f(EN), f"c.de{s}": f(DE)[:-4]}, C + s, f"{s} is damaged, or is not") for s, f in DENSE.items()),
        *(({f"c.en{s}": f(EN), f"c.de{s}": EN}, C + s, f"FOLDER/c.de{s} is damaged, or is") for s, f in DENSE.items()),
        ({"a.tgz": {"t.en": EN, "t.de": b"\n\xff"}}, A, "FOLDER/a.tgz:t.de, line 2: the byte 0xff is not UTF-8"),
        ({"a.tgz": {"t.en": EN, "t.de": b"1\n"}}, A, "FOLDER/a.tgz:t.en has 2 lines and FOLDER/a.tgz:t.de has 1 line"),
        ({"a.tgz": {"t.en": EN, "t.de": b""}}, A, "FOLDER/a.tgz:t.de: is empty"),
        ({"a.tgz": {"training/t.en": EN, "training/t.de": DE, "README": b""}}, A, NEAREST),
        ({"a.tgz": {}}, A, "has no member t.en; it is empty"),
        ({"a.tgz": {**MEMBERS, tarfile.TarInfo("t.en"): EN}}, A, "FOLDER/a.tgz has t.en twice"),
        ({"a.tgz": {**MEMBERS, "./t.en": EN}}, A, "FOLDER/a.tgz has t.en twice"),
        ({"a.tgz": {LINK: None}}, A, "FOLDER/a.tgz:t.en is a symbolic link, and must be a regular file"),
        ({"a.tgz": {special("t.en", tarfile.LNKTYPE, "t.de"): None}}, A, "t.en is a hard link"),
        ({"a.tgz": {special("t.en", tarfile.CHRTYPE): None}}, A, "t.en is a device or pipe"),
        ({"a.tgz": {special("t.en", tarfile.FIFOTYPE): None}}, A, "t.en is a device or pipe"),
        ({"a.tgz": {special("t.en", tarfile.DIRTYPE): None}}, A, "t.en is a folder"),
        ({"a.tgz": {}}, "aa.tgz:t.{lang}", "aa.tgz: does not exist in FOLDER; the nearest name is a.tgz"),
        ({}, "no/c.{lang}", "FOLDER/no/c.en: the folder FOLDER/no does not exist"),
        ({"d.en/x": b""}, "d.{lang}", "FOLDER/d.en: is not a file"),
        *(({f"c.en{s}": EN, f"c.de{s}": DE}, C + s, f"c.en{s}: files with the ending {s.lower()} are") for s in OTHERS),
        ({"c.en.xml.gz": gzip.compress(EN), "c.de.xml.gz": DE}, f"{C}.xml.gz", "with the ending .xml are not read"),
        ({}, "c.en", "c.en: must contain {lang} or {side} to"),
        ({}, "c.{language}", "c.{language}: must contain {lang} or {side} to"),
        ({}, "a.tgz:t.en", "a.tgz:t.en: must contain {lang} or {side} to"),
    ],
)
def test_bad_corpora_are_refused_by_name_and_line(tmp_path, monkeypatch, chunk, files, template, message):
    monkeypatch.setattr(module, "BLOCK_BYTES", chunk)
    write(tmp_path, files)
    assert message.replace("FOLDER", str(tmp_path)) in refuse(tmp_path, template)


@pytest.mark.parametrize(
    "files, template, message",
    [
        ({"c.en": EN + b"\n", "c.de": DE}, C, "FOLDER/c.de: has no blank line; a blank line separates two documents"),
        ({"c.de-en.tsv": b"a\tb\n"}, "c.de-en.tsv", "FOLDER/c.de-en.tsv: has no blank line; a blank line separates"),
        ({"c.de-en.tsv": b"a\tb\n\na\n"}, "c.de-en.tsv", "c.de-en.tsv, line 3: has 1 columns, and must have 2"),
        ({"c.de-en.tsv": b"a\tb\n\na\tb\tc\n"}, "c.de-en.tsv", "tsv, line 3: has 3 columns, and must have 2"),
        ({"c.de-fr.tsv": b"a\tb\n"}, "c.de-fr.tsv", "or have them as columns and a name that ends in .en-de.tsv"),
        ({"c.en.sgm": b"<doc ><seg>1\n<doc ><seg>2</seg>"}, SGM_FILES, "c.en.sgm: <seg> number 1 is not closed"),
        ({"c.en.sgm": b"<doc >\n<seg>1\n<doc >\n"}, SGM_FILES, "c.en.sgm: <seg> number 1 is not closed"),
    ],
)
@pytest.mark.parametrize("chunk", [2**20, 1])
def test_texts_without_documents_and_broken_tables_are_refused(tmp_path, monkeypatch, chunk, files, template, message):
    monkeypatch.setattr(module, "BLOCK_BYTES", chunk)
    write(tmp_path, {"c.de.sgm": b"<seg>1</seg>", **files})
    assert message.replace("FOLDER", str(tmp_path)) in refuse(tmp_path, template, flags=["--documents"])


def test_lines_are_counted_for_each_corpus(tmp_path):
    """An additional line in one corpus and a missing line in another would give equal totals."""
    write(tmp_path, {"c.en": EN, "c.de": DE + b"Drei.\n", "a.tgz": {"t.en": EN + b"Three.\n", "t.de": DE}})
    assert f"{tmp_path}/c.{{lang}}: " in refuse(tmp_path, "c.{lang}", "a.tgz:t.{lang}")


@pytest.mark.parametrize("name", ["a.tgz", "a.tar", "a.tar.bz2", "a.tar.xz"])
@pytest.mark.parametrize("how", ["cut", "cut a little", "changed", "no archive", "empty"])
def test_a_damaged_archive_is_refused(tmp_path, name, how):
    compress = {".tgz": gzip.compress, ".tar": bytes, **COMPRESS}[Path(name).suffix]
    text = os.urandom(3000).hex().encode() + b"\n"
    content = compress(gzip.decompress(tarball({"t.en": text, "t.de": text})))
    at = len(content) // 2 if name != "a.tar" else 6656 + 100  # the header of the second member
    damaged = {
        "cut": content[: len(content) // 2],
        "cut a little": content[:-5] if name != "a.tar" else content[:9000],
        "changed": content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :],
        "no archive": b"<html>not found</html>" * 100,
        "empty": b"",
    }
    write(tmp_path, {name: damaged[how]})
    assert f"{tmp_path / name} is damaged, or is not what its name says: " in refuse(tmp_path, f"{name}:t.{{lang}}")


def test_damage_after_the_last_member_is_found(tmp_path):
    write(tmp_path, {"a.tgz": gzip.compress(TAR + bytes(3 * module.BLOCK_BYTES))[:-5]})
    assert f"{tmp_path}/a.tgz is damaged" in refuse(tmp_path, "a.tgz:t.{lang}")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--target-lang", "en"], "--target-lang en: must differ from --source-lang"),
        (["--source-lang", "../en"], "--source-lang ../en: must be a language's code"),
        (["--target-lang", ""], "--target-lang : must be a language's code"),
        (["--output", "FOLDER/c"], "--output: FOLDER/c.en would overwrite a file of FOLDER/c.{lang}"),
    ],
)
def test_bad_flags_are_refused(tmp_path, flags, message):
    write(tmp_path, {"c.en": EN, "c.de": DE})
    flags, message = ([each.replace("FOLDER", str(tmp_path)) for each in texts] for texts in (flags, [message]))
    assert message[0] in refuse(tmp_path, "c.{lang}", flags=flags)
    assert (tmp_path / "c.en").read_bytes() == EN


def test_names_and_links_in_an_archive_write_nothing(tmp_path, monkeypatch):
    outside, inside = tmp_path / "outside", tmp_path / "here" / "below"
    outside.mkdir()
    inside.mkdir(parents=True)
    (outside / "there").write_bytes(b"mine")
    monkeypatch.chdir(inside)
    hostile = {
        **{name: b"x" for name in (f"{outside}/absolute", "../../above", "a/../../../above")},
        special("link", tarfile.SYMTYPE, str(outside)): None,
        "link/through": b"x",
        special("hard", tarfile.LNKTYPE, str(outside / "there")): None,
        special("device", tarfile.CHRTYPE): None,
        special("pipe", tarfile.FIFOTYPE): None,
    }
    write(tmp_path, {"a.tgz": {**hostile, **MEMBERS}})
    assert extract(tmp_path, "a.tgz:t.{lang}") == (EN, DE)
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert names == "a.tgz here here/below outside outside/there raw raw/train.de raw/train.en".split()
    assert (outside / "there").read_bytes() == b"mine"


def test_a_killed_run_leaves_only_temporary_files_which_the_next_run_overwrites(tmp_path):
    text = (b"word " * 1999 + b"\n") * 100
    write(tmp_path, {"c.en": text, "c.de": text})
    process = start_tool(*words(tmp_path, *["c.{lang}"] * 500), module="extract")
    assert process.stdout.readline().endswith(": 100 pairs\n")
    process.kill()
    process.communicate(timeout=LIMIT)
    assert sorted(os.listdir(tmp_path / "raw")) == ["train.de.tmp", "train.en.tmp"]
    assert extract(tmp_path, "c.{lang}") == (text, text)


def test_a_failed_or_interrupted_run_keeps_the_earlier_outputs(tmp_path, monkeypatch):
    write(tmp_path, {"c.en": EN, "c.de": DE, "d.en": EN, "d.de": b"\xff"})
    extract(tmp_path, "c.{lang}")
    with pytest.raises(SystemExit):
        module.main(words(tmp_path, "c.{lang}", "d.{lang}"))

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "copy", interrupt)
    with pytest.raises(SystemExit) as ended:
        module.main(words(tmp_path, "c.{lang}"))
    assert ended.value.code == 130 and sorted(os.listdir(tmp_path / "raw")) == ["train.de", "train.en"]
    assert (tmp_path / "raw" / "train.de").read_bytes() == DE


def test_real_tarballs_of_wmt14_have_the_known_number_of_pairs(tmp_path, capsys):
    """The sizes of newstest2013 and newstest2014 are known. Both sides of the training corpora must be equal."""
    folder = os.environ.get("FAIRSEQ_ROPE_TEST_DATA")
    if not folder:
        pytest.skip("FAIRSEQ_ROPE_TEST_DATA names no folder with WMT14's five tarballs")
    for corpora, expected in ((VALID, 3000), (TEST, 3003), (TRAINING, None)):
        templates = [os.path.relpath(f"{folder}/{name}:{member}", tmp_path) for name, member in corpora.items()]
        counts = [side.count(b"\n") for side in extract(tmp_path, *templates)]
        message = capsys.readouterr().out.splitlines()
        total = sum(int(line.split()[-2].replace(",", "")) for line in message[:-1])
        assert counts == [total, total] and message[-1].endswith(f": {total:,} pairs")
        assert expected in (None, total)
