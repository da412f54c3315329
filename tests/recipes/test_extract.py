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


def test_only_a_newline_ends_a_line_and_the_last_newline_is_optional(tmp_path):
    odd = "a\rb\r\nc\u0085d\u2028e\u2029f\x0bg\x0ch\x1ci\u200bj€\U0001f600\n\n \nlast".encode()
    write(tmp_path, {"c.en": odd, "c.de": b"1\n2\n3\n4\n5\n", "a.tgz": MEMBERS})
    assert extract(tmp_path, "c.{lang}", "a.tgz:t.{lang}") == (odd + b"\n" + EN, b"1\n2\n3\n4\n5\n" + DE)


def test_a_further_reference_takes_the_place_of_the_target(tmp_path):
    write(tmp_path, {"c.en": EN, "c.de": DE, "a.tgz": MEMBERS, "second.de": b"One\nTwo\n", "short.de": b"One\n"})
    write(tmp_path, {"both.en-de.tsv": b"a\tb\nc\td\n"})
    second, short, table = (
        ["--reference", f"{tmp_path}/{name}"] for name in ("second.de", "short.{lang}", "both.en-de.tsv")
    )
    assert extract(tmp_path, "c.{lang}", flags=second) == (EN, b"One\nTwo\n")
    assert extract(tmp_path, "c.{lang}", "a.tgz:t.{lang}", flags=2 * second) == (2 * EN, 2 * b"One\nTwo\n")
    assert extract(tmp_path, "c.{lang}", flags=table) == (EN, b"b\nd\n")
    shutil.rmtree(tmp_path / "raw")
    assert "c.en has 2 lines and " in refuse(tmp_path, "c.{lang}", flags=short)
    assert "--reference" in refuse(tmp_path, "c.{lang}", flags=2 * second)
    assert "--target-lang en" in refuse(tmp_path, "c.{lang}", flags=["--target-lang", "en"])


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


@pytest.mark.parametrize("suffix", [".SGM", ".sgml", ".sgm.gz"])
def test_sgm_gives_the_text_of_its_segments(tmp_path, suffix):
    en = SGM.encode()
    de = b"<seg>1</seg><seg>2</seg><seg id=3></seg>"
    if suffix.endswith(".gz"):
        en, de = gzip.compress(en), gzip.compress(de)
    write(tmp_path, {f"c.en{suffix}": en, f"c.de{suffix}": de})
    expected = "R&D <b> &quot; ä\nover two\rlines\non one line\n".encode(), b"1\n2\n\n"
    assert extract(tmp_path, f"c.{{lang}}{suffix}") == expected


def test_documents_are_separated_by_blank_lines_between_files_and_between_docs_of_sgm(tmp_path):
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
    (EN, DE + b"Drei.\n", "FOLDER/c.en has 2 lines and FOLDER/c.de has 3 lines"),
    (EN, DE[:-1] + b"\n\n", "c.en has 2 lines and FOLDER/c.de has 3 lines"),
    (b"", b"", "FOLDER/c.en: is empty"),
    (EN, b"", "FOLDER/c.de: is empty"),
    (EN, b"Eins.\nZw\xe4i.\n", "FOLDER/c.de, line 2: the byte 0xe4 is not UTF-8"),
    (b"\n" * 5000 + b"\xed\xa0\x80", DE, "FOLDER/c.en, line 5001: the byte 0xed is not UTF-8"),
    (EN + b"\xe2\x80", DE, "FOLDER/c.en, line 3: the byte 0xe2 is not UTF-8"),
    ("Ä\n".encode("utf-16"), DE, "FOLDER/c.en, line 1: the byte 0xff is not UTF-8"),
]
MARKUP = [
    (b"<refset></refset>", "c.en.sgm: has 0 <seg>, and 0 "),
    (b"<seg>1</seg><seg>2", "c.en.sgm: has 2 <seg>, and 1 "),
    (b"<seg id=1>1\n<seg id=2>2</seg>", "c.en.sgm: has 2 <seg>, and 1 "),
]
OTHERS = (".xml", ".tar", ".ZIP", ".tmx")
NEAREST = "FOLDER/a.tgz has no member traim/t.en; the nearest one is train/t.en"
ONE = "FOLDER/a.tgz:t.en must be one regular file"


@pytest.mark.parametrize(
    "files, template, message",
    [
        *(({"c.en": en, "c.de": de}, C, message) for en, de, message in TEXTS),
        *(({"c.en.sgm": en, "c.de.sgm": b"<seg>1</seg>"}, SGM_FILES, message) for en, message in MARKUP),
        *(({f"c.en{s}": f(EN), f"c.de{s}": f(DE)[:-4]}, C + s, f"{s} is damaged, or not") for s, f in DENSE.items()),
        *(({f"c.en{s}": f(EN), f"c.de{s}": EN}, C + s, f"FOLDER/c.de{s} is damaged, or not") for s, f in DENSE.items()),
        ({"a.tgz": {"t.en": EN, "t.de": b"\n\xff"}}, A, "FOLDER/a.tgz:t.de, line 2: the byte 0xff is not UTF-8"),
        ({"a.tgz": {"t.en": EN, "t.de": b"1\n"}}, A, "FOLDER/a.tgz:t.en has 2 lines and FOLDER/a.tgz:t.de has 1 line"),
        ({"a.tgz": {"t.en": EN, "t.de": b""}}, A, "FOLDER/a.tgz:t.de: is empty"),
        ({"a.tgz": {"train/t.en": EN, "train/t.de": DE, "README": b""}}, "a.tgz:traim/t.{lang}", NEAREST),
        ({"a.tgz": {}}, A, "FOLDER/a.tgz has no member t.en"),
        ({"a.tgz": {**MEMBERS, tarfile.TarInfo("t.en"): EN}}, A, ONE),
        ({"a.tgz": {**MEMBERS, "./t.en": EN}}, A, ONE),
        ({"a.tgz": {LINK: None}}, A, ONE),
        ({"a.tgz": {special("t.en", tarfile.LNKTYPE, "t.de"): None}}, A, ONE),
        ({"a.tgz": {special("t.en", tarfile.DIRTYPE): None}}, A, ONE),
        ({"a.tgz": {}}, "aa.tgz:t.{lang}", "FOLDER/aa.tgz: is not a file; the nearest one is a.tgz"),
        ({}, "no/c.{lang}", "FOLDER/no/c.en: is not a file"),
        ({"d.en/x": b""}, "d.{lang}", "FOLDER/d.en: is not a file"),
        *(({f"c.en{s}": EN, f"c.de{s}": DE}, C + s, f"c.en{s}: {s.lower()} is not read") for s in OTHERS),
        ({"c.en.xml.gz": gzip.compress(EN), "c.de.xml.gz": DE}, f"{C}.xml.gz", "c.en.xml.gz: .xml is not read"),
        ({}, "c.en", "c.en: must have {lang} or {side} in it"),
        ({}, "c.{language}", "c.{language}: must have {lang} or {side} in it"),
        ({}, "a.tgz:t.en", "a.tgz:t.en: must have {lang} or {side} in it"),
    ],
)
def test_bad_corpora_are_refused_by_name_and_line(tmp_path, monkeypatch, files, template, message):
    monkeypatch.setattr(module, "BLOCK_BYTES", 5)
    write(tmp_path, files)
    assert message.replace("FOLDER", str(tmp_path)) in refuse(tmp_path, template)


@pytest.mark.parametrize(
    "files, template, message",
    [
        ({"c.en": EN + b"\n", "c.de": DE}, C, "FOLDER/c.de: has no blank line"),
        ({"c.de-en.tsv": b"a\tb\n"}, "c.de-en.tsv", "FOLDER/c.de-en.tsv: has no blank line"),
        ({"c.de-en.tsv": b"a\tb\n\na\n"}, "c.de-en.tsv", "c.de-en.tsv, line 3: has 1 columns, and must have 2"),
        ({"c.de-fr.tsv": b"a\tb\n"}, "c.de-fr.tsv", "a name that ends in .en-de.tsv"),
        ({"c.en.sgm": b"<doc >\n<seg>1\n<doc >\n", "c.de.sgm": b"<seg>1</seg>"}, SGM_FILES, "c.en.sgm: has 1 <seg>"),
    ],
)
def test_texts_without_documents_and_broken_tables_are_refused(tmp_path, files, template, message):
    write(tmp_path, files)
    assert message.replace("FOLDER", str(tmp_path)) in refuse(tmp_path, template, flags=["--documents"])


@pytest.mark.parametrize("name", ["a.tgz", "a.tar.bz2", "a.tar.xz"])
def test_a_damaged_archive_is_refused(tmp_path, name):
    text = os.urandom(3000).hex().encode() + b"\n"
    content = {".tgz": gzip.compress, **COMPRESS}[Path(name).suffix](
        gzip.decompress(tarball({"t.en": text, "t.de": text}))
    )
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 0x55]) + content[middle + 1 :]
    for damaged in (content[:middle], content[:-5], changed, b"<html>not found</html>" * 100, b""):
        write(tmp_path, {name: damaged})
        assert f"{tmp_path / name} is damaged" in refuse(tmp_path, f"{name}:t.{{lang}}")


def test_damage_after_the_last_member_is_found(tmp_path):
    write(tmp_path, {"a.tgz": gzip.compress(TAR + bytes(3 * module.BLOCK_BYTES))[:-5]})
    assert f"{tmp_path}/a.tgz is damaged" in refuse(tmp_path, "a.tgz:t.{lang}")


def test_a_failed_run_keeps_the_earlier_outputs(tmp_path):
    write(tmp_path, {"c.en": EN, "c.de": DE, "d.en": EN, "d.de": b"\xff"})
    assert extract(tmp_path, "c.{lang}") == (EN, DE)
    with pytest.raises(SystemExit):
        module.main(words(tmp_path, "c.{lang}", "d.{lang}"))
    assert sorted(os.listdir(tmp_path / "raw")) == ["train.de", "train.en"]
    assert (tmp_path / "raw" / "train.de").read_bytes() == DE
