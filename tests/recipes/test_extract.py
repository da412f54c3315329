"""recipes/text/extract.py: extraction from all kinds of corpora, and refusals of broken ones."""

import bz2
import codecs
import gzip
import lzma
import os
import re
import tarfile
import tracemalloc
import unicodedata

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
    lookalike = write_lookalike(tmp_path / "data", pairs=101)
    pairs = getattr(lookalike, part)
    templates = lookalike.templates(corpora)
    extracted = extract(tmp_path, *(os.path.relpath(each, tmp_path) for each in templates))
    assert extracted == (lines(0, pairs), lines(1, pairs))
    counts = [int(line.split()[-2]) for line in capsys.readouterr().out.splitlines()]
    assert len(counts) == len(templates) + 1 and sum(counts[:-1]) == counts[-1] == len(pairs)


MEMBERS = {"t.en": EN, "t.de": DE}
TAR = gzip.decompress(tarball({"other": b"\xff" * 5000, **MEMBERS}))
NAMES = {"a.tar": bytes, "a.tar.gz": gzip.compress, "a.tar.bz2": bz2.compress, "a.txz": lzma.compress}


@pytest.mark.parametrize(
    "files, template",
    [
        *(({f"c.en{s}": f(EN), f"c.de{s}": f(DE)}, f"c.{{lang}}{s}") for s, f in COMPRESS.items()),
        ({"a.tgz": {"t.en.xz": lzma.compress(EN), "t.de.xz": lzma.compress(DE)}}, "a.tgz:t.{lang}.xz"),
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


def test_only_a_newline_ends_a_line_the_last_is_optional_and_a_byte_order_mark_is_no_text(tmp_path):
    odd, mark = "a\rb\r\nc\u0085d\u2028e\u2029f\x0bg\x0ch\x1ci\u200bj€\U0001f600\n\n \nlast".encode(), codecs.BOM_UTF8
    write(tmp_path, {"c.en": mark + odd, "c.de": b"1\n2\n3\n4\n5\n", "a.tgz": {"t.en": mark + EN, "t.de": mark + DE}})
    write(tmp_path, {"c.en-de.tsv": mark + b"a\tb\n"})
    expected = (odd + b"\n" + EN + b"a\n", b"1\n2\n3\n4\n5\n" + DE + b"b\n")
    assert extract(tmp_path, "c.{lang}", "a.tgz:t.{lang}", "c.en-de.tsv") == expected


def test_text_is_composed(tmp_path):
    text = "Akẹ́kọ̀ọ́ für \u09df\n"
    write(tmp_path, {f"c.{lang}": unicodedata.normalize("NFD", text).encode() for lang in ("en", "de")})
    assert extract(tmp_path, "c.{lang}") == 2 * (unicodedata.normalize("NFC", text).encode(),)


def test_a_further_reference_takes_the_place_of_the_target(tmp_path):
    write(tmp_path, {"c.en": EN, "c.de": DE, "a.tgz": MEMBERS, "second.de": b"One\nTwo\n"})
    write(tmp_path, {"both.en-de.tsv": b"a\tb\nc\td\n"})
    second, table = (["--reference", f"{tmp_path}/{name}"] for name in ("second.de", "both.en-de.tsv"))
    assert extract(tmp_path, "c.{lang}", flags=second) == (EN, b"One\nTwo\n")
    assert extract(tmp_path, "c.{lang}", "a.tgz:t.{lang}", flags=2 * second) == (2 * EN, 2 * b"One\nTwo\n")
    assert extract(tmp_path, "c.{lang}", flags=table) == (EN, b"b\nd\n")


SGM = """<refset>\n<doc sysid="ref"><hl>
<seg id="1"> R&amp;D &lt;b&gt; &amp;quot; &#228;&nbsp;</seg>
</hl><p>
<SEG id='2'>over
two\rlines</SEG> <seg>on one&#10;line</seg ></p></doc></refset>
"""


@pytest.mark.parametrize("suffix", [".SGM", ".sgm.gz"])
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


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name, source, target", [("n.v1.de-en.tsv", 1, 0), ("n.en-de.tsv", 0, 1)])
def test_the_columns_of_a_tsv_file_are_the_languages_in_its_name(tmp_path, suffix, name, source, target):
    write(tmp_path, {name + suffix: COMPRESS[suffix](ROWS.encode())})
    columns = ["Eins.\nZwei \u2028ä.\n{}Drei.\n".encode(), b"One.\nTwo.\n{}\n"]
    for flags, boundary in ([], b""), (["--documents"], b"\n\n"):
        written = [column.replace(b"{}", boundary) for column in columns]
        assert extract(tmp_path, name + suffix, flags=flags) == (written[source], written[target])


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


TEXT, MEMBER, SGM_FILES, TABLE = "c.{lang}", "a.tgz:t.{lang}", "c.{lang}.sgm", "c.de-en.tsv"
REFUSED = [
    ({"c.en": EN, "c.de": DE + b"Drei.\n"}, TEXT, r"/c.en .*2.* \S*/c.de .*3"),
    ({"c.en": EN, "c.de": b""}, TEXT, "/c.de"),
    ({"c.en": EN, "c.de": b"Eins.\nZw\xe4i.\n"}, TEXT, "/c.de, line 2: .*0xe4"),
    ({"c.en": b"\n" * 5000 + b"\xed\xa0\x80", "c.de": DE}, TEXT, "/c.en, line 5001: .*0xed"),
    ({"c.en": "Ä\n".encode("utf-16"), "c.de": DE}, TEXT, "/c.en, line 1: .*0xff"),
    ({"c.en.sgm": b"<refset></refset>", "c.de.sgm": b"<seg>1</seg>"}, SGM_FILES, "/c.en.sgm.* 0 .* 0 "),
    ({"c.en.sgm": b"<seg>1\n<seg>2</seg>", "c.de.sgm": b"<seg>1</seg>"}, SGM_FILES, "/c.en.sgm.* 2 .* 1 "),
    *(({f"c.en{s}": f(EN), f"c.de{s}": f(DE)[:-4]}, TEXT + s, f"/c.de{s}") for s, f in DENSE.items()),
    ({"a.tgz": {"t.en": EN, "t.de": b"\n\xff"}}, MEMBER, "/a.tgz:t.de, line 2: .*0xff"),
    ({"a.tgz": {"train/t.en": EN, "README": b""}}, "a.tgz:traim/t.{lang}", "/a.tgz .*traim/t.en.* train/t.en"),
    ({"a.tgz": {**MEMBERS, "./t.en": EN}}, MEMBER, "/a.tgz:t.en"),
    ({"a.tgz": {special("t.en", tarfile.SYMTYPE, "/etc/passwd"): None}}, MEMBER, "/a.tgz:t.en"),
    ({"a.tgz": {special("t.en", tarfile.LNKTYPE, "t.de"): None}}, MEMBER, "/a.tgz:t.en"),
    ({"a.tgz": {special("t.en", tarfile.DIRTYPE): None}}, MEMBER, "/a.tgz:t.en"),
    ({"a.tgz": {}}, "aa.tgz:t.{lang}", "/aa.tgz: .* a.tgz"),
    ({}, "no/c.{lang}", "/no/c.en"),
    *(({f"c.en{s}": EN, f"c.de{s}": DE}, TEXT + s, f"c.en{s}: {s.lower()} ") for s in (".xml", ".ZIP", ".tmx")),
    ({}, "c.{language}", "c.{language}: .*{lang}"),
    ({"c.en": EN + b"\n", "c.de": DE}, [TEXT, "--documents"], "/c.de"),
    ({TABLE: b"a\tb\n"}, [TABLE, "--documents"], "/c.de-en.tsv"),
    ({TABLE: b"a\tb\n\na\n"}, [TABLE, "--documents"], "/c.de-en.tsv, line 3: .*1 .*2"),
    ({"c.de-fr.tsv": b"a\tb\n"}, ["c.de-fr.tsv"], "/c.de-fr.tsv"),
    ({"c.en": EN, "c.de": DE, "x.de": b"\n"}, [TEXT, "--reference", "FOLDER/x.{lang}"], "/c.en .*2.*/x.de .*1"),
]


@pytest.mark.parametrize("files, words, values", REFUSED)
def test_bad_corpora_are_refused_by_name_and_line(tmp_path, monkeypatch, files, words, values):
    monkeypatch.setattr(module, "BLOCK_BYTES", 5)
    write(tmp_path, files)
    template, *flags = [words] if isinstance(words, str) else words
    flags = [flag.replace("FOLDER", str(tmp_path)) for flag in flags]
    assert re.search(values, refuse(tmp_path, template, flags=flags))


def test_a_damaged_archive_is_refused(tmp_path):
    text = os.urandom(3000).hex().encode() + b"\n"
    content = tarball({"t.en": text, "t.de": text})
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 0x55]) + content[middle + 1 :]
    for damaged in (content[:middle], content[:-5], changed, b"<html>not found</html>" * 100, b""):
        write(tmp_path, {"a.tgz": damaged})
        assert f"{tmp_path}/a.tgz" in refuse(tmp_path, "a.tgz:t.{lang}")


def test_all_letters_can_be_written_in_lower_case(tmp_path):
    write(tmp_path, {"a.en": b"ONE. It's\n", "a.de": "EINS Ä ß.\n".encode()})
    assert extract(tmp_path, "a.{lang}", flags=["--lower-case"]) == (b"one. it's\n", "eins ä ß.\n".encode())
