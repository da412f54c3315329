"""recipes/text/extract.py: what it takes out of corpora, and what it refuses."""

import bz2
import gzip
import lzma
import os
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from recipes.text import extract as module
from tests.recipes.wmt14_lookalike import DIRT, TEST, TRAINING, VALID, tarball, write_lookalike

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
COMPRESS = {".gz": gzip.compress, ".tgz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
COMPRESS |= {".tar": bytes, "": bytes}
EN, DE = b"One.\nTwo.\n", "Eins.\nZwei ä.\n".encode()


def words(folder, *templates):
    output = str(folder / "raw" / "train")
    return ["--source-lang", "en", "--target-lang", "de", "--output", output, *map(str, templates)]


def extract(folder, *templates):
    """Run the tool; returns the bytes of both sides, which must be all that it left."""
    module.main(words(folder, *templates))
    assert sorted(os.listdir(folder / "raw")) == ["train.de", "train.en"]
    return tuple((folder / "raw" / f"train.{lang}").read_bytes() for lang in ("en", "de"))


def refuse(folder, *templates, words=words):
    """The one sentence with which it refuses; it leaves nothing."""
    with pytest.raises(SystemExit) as refused:
        module.main(words(folder, *templates))
    said = refused.value.code
    assert isinstance(said, str) and "\n" not in said and said.startswith("recipes.text.extract: ")
    assert not (folder / "raw").exists() or os.listdir(folder / "raw") == []
    return said


def pair_of_files(folder, en=EN, de=DE, suffix=""):
    """Write a corpus; returns its template."""
    for lang, content in (("en", en), ("de", de)):
        (folder / f"c.{lang}{suffix}").write_bytes(content)
    return f"{folder}/c.{{lang}}{suffix}"


def archive(folder, members, name="a.tgz"):
    """Write a tarball of *members*; returns the template of its members t.en and t.de."""
    (folder / name).write_bytes(tarball(members))
    return f"{folder / name}:t.{{lang}}"


def lines(column, pairs):
    return "".join(pair[column] + "\n" for pair in pairs).encode()


# -- what it takes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("corpora, part", [(TRAINING, "train"), (VALID, "valid"), (TEST, "test")])
def test_tarballs_of_wmt14_give_all_their_pairs_in_order(tmp_path, capsys, corpora, part):
    lookalike = write_lookalike(tmp_path / "data", pairs=301)
    pairs = getattr(lookalike, part)
    templates = lookalike.templates(corpora)
    assert extract(tmp_path, *templates) == (lines(0, pairs), lines(1, pairs))
    said = capsys.readouterr().out.splitlines()
    assert len(said) == len(templates) + 1
    assert [line.rsplit(": ", 1)[0] for line in said[:-1]] == templates
    counts = [int(line.split()[-2]) for line in said]
    assert sum(counts[:-1]) == counts[-1] == len(pairs)


def test_the_lookalike_is_the_same_for_the_same_seed_and_dirty_where_it_says(tmp_path):
    one, same = (write_lookalike(tmp_path / name, pairs=100, seed=3) for name in "ab")
    other = write_lookalike(tmp_path / "c", pairs=100, seed=4)
    manifests = [(each.folder / "manifest.tsv").read_text() for each in (one, same, other)]
    assert manifests[0] == manifests[1] != manifests[2]
    assert len(one.train) == 100 and set(one.dirty) == set(DIRT)
    assert {len(at) for at in one.dirty.values()} == {3}
    for at in one.dirty["12:1"]:
        en, de = (len(text.split(" ")) for text in one.train[at])
        assert en >= 12 * de
    assert all(one.train[at][0] == "" for at in one.dirty["empty source"])
    assert all("\u2028" in one.train[at][1] for at in one.dirty["U+2028"])


def test_only_a_newline_ends_a_line(tmp_path):
    odd = "a\rb\r\nc\u0085d\u2028e\u2029f\x0bg\x0ch\x1ci\u200bj\n\n \nlast".encode()
    assert extract(tmp_path, pair_of_files(tmp_path, odd, b"1\n2\n3\n4\n5\n"))[0] == odd + b"\n"


def test_a_last_line_without_a_newline_gets_one_before_the_next_corpus(tmp_path):
    first = pair_of_files(tmp_path, b"One.\nTwo.", DE[:-1])
    second = archive(tmp_path, {"t.en": b"Three.", "t.de": b"Drei."})
    assert extract(tmp_path, first, second) == (EN + b"Three.\n", DE + b"Drei.\n")


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ""])
def test_compressed_files_and_members_are_decompressed(tmp_path, suffix):
    compress = COMPRESS[suffix]
    template = pair_of_files(tmp_path, compress(EN), compress(DE), suffix)
    assert extract(tmp_path, template) == (EN, DE)
    members = {f"t.en{suffix}": compress(EN), f"t.de{suffix}": compress(DE)}
    assert extract(tmp_path, archive(tmp_path, members) + suffix) == (EN, DE)


def test_a_gzip_file_in_several_pieces_is_read_whole(tmp_path):
    pieces = gzip.compress(EN[:7]) + gzip.compress(EN[7:])
    assert extract(tmp_path, pair_of_files(tmp_path, pieces, gzip.compress(DE), ".gz")) == (EN, DE)
    content = gzip.decompress(tarball({"t.en": EN, "t.de": DE}))
    (tmp_path / "a.tgz").write_bytes(gzip.compress(content[:700]) + gzip.compress(content[700:]))
    assert extract(tmp_path, f"{tmp_path}/a.tgz:t.{{lang}}") == (EN, DE)


@pytest.mark.parametrize("name, compress", [
    ("a.tar", bytes), ("a.tar.gz", gzip.compress), ("a.tar.bz2", bz2.compress), ("a.txz", lzma.compress),
    ("a.tgz", lzma.compress),
])  # fmt: skip
def test_archives_are_read_by_what_they_are(tmp_path, name, compress):
    content = gzip.decompress(tarball({"other": b"\xff" * 5000, "t.en": EN, "t.de": DE}))
    (tmp_path / name).write_bytes(compress(content))
    assert extract(tmp_path, f"{tmp_path / name}:t.{{lang}}") == (EN, DE)


@pytest.mark.parametrize("stored, asked", [("./t.{}", "t.{lang}"), ("t.{}", "./t.{lang}"), ("././t.{}", "t.{lang}")])
def test_a_leading_dot_in_a_members_name_is_of_no_account(tmp_path, stored, asked):
    archive(tmp_path, {stored.format("de"): DE, stored.format("en"): EN})
    assert extract(tmp_path, f"{tmp_path}/a.tgz:{asked}") == (EN, DE)


def test_an_archive_is_read_once_for_both_languages_with_progress(tmp_path, capsys, monkeypatch):
    template = archive(tmp_path, {"t.en": EN, "t.de": DE})
    opened = []
    original = tarfile.open
    monkeypatch.setattr(module.tarfile, "open", lambda **how: opened.append(how) or original(**how))
    extract(tmp_path, template)
    size, shown = (tmp_path / "a.tgz").stat().st_size, capsys.readouterr().err
    assert len(opened) == 1 and "read: 100%" in shown and f"{size}/{size}" in shown and "B/s]" in shown


def test_each_language_may_have_its_own_archive(tmp_path):
    for lang, content in (("en", EN), ("de", DE)):
        (tmp_path / f"{lang}.tar.gz").write_bytes(tarball({"text": content}))
    assert extract(tmp_path, f"{tmp_path}/{{lang}}.tar.gz:text") == (EN, DE)


def test_colons_are_allowed_in_folders_and_members(tmp_path):
    folder = tmp_path / "a:b"
    folder.mkdir()
    assert extract(tmp_path, pair_of_files(folder)) == (EN, DE)
    (folder / "a.tgz").write_bytes(tarball({"x:en": EN, "x:de": DE}))
    assert extract(tmp_path, f"{folder}/a.tgz:x:{{lang}}") == (EN, DE)


SGM = """<refset>\n<doc sysid="ref"><hl>
<seg id="1"> R&amp;D &lt;b&gt; &amp;quot; &#228;&nbsp;</seg>
</hl><p>
<SEG id='2'>over
two\rlines</SEG> <seg>on one&#10;line</seg ></p></doc></refset>
"""


@pytest.mark.parametrize("suffix, chunk", [(".sgm", 2**20), (".sgml", 1), (".sgm", 7), (".sgm.gz", 64)])
def test_sgm_gives_the_text_of_its_segments(tmp_path, monkeypatch, suffix, chunk):
    monkeypatch.setattr(module, "CHUNK", chunk)
    en = SGM.encode()
    de = b"<seg>1</seg><seg>2</seg><seg id=3></seg>"
    if suffix.endswith(".gz"):
        en, de = gzip.compress(en), gzip.compress(de)
    template = pair_of_files(tmp_path, en, de, suffix)
    assert extract(tmp_path, template) == ("R&D <b> &quot; ä\nover two\rlines\non one line\n".encode(), b"1\n2\n\n")


def test_characters_may_stand_across_two_pieces_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 3)
    en = "aä€\U0001f600\n\u2028\n".encode() * 5
    assert extract(tmp_path, pair_of_files(tmp_path, en, b"x\n" * 10))[0] == en


def test_a_corpus_is_never_all_in_memory(tmp_path):
    size = 32 * 2**20
    line = b"word " * 99 + b"\n"
    content = line * (size // len(line))
    template = archive(tmp_path, {"t.en": content, "t.de": content})
    tracemalloc.start()
    try:
        module.main(words(tmp_path, template))
        assert tracemalloc.get_traced_memory()[1] < size / 4
    finally:
        tracemalloc.stop()


# -- what it refuses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "en, de, said",
    [
        (EN, DE + b"Drei.\n", "c.{lang}: FOLDER/c.en has 2 lines and FOLDER/c.de has 3 lines, and both must"),
        (EN, DE[:-1] + b"\n\n", "c.en has 2 lines and FOLDER/c.de has 3 lines"),
        (b"", b"", "FOLDER/c.en: is empty"),
        (EN, b"", "FOLDER/c.de: is empty"),
        (EN, b"Eins.\nZw\xe4i.\n", "FOLDER/c.de, line 2: the byte 0xe4 is not UTF-8"),
        (b"\n" * 5000 + b"\xed\xa0\x80", DE, "FOLDER/c.en, line 5001: the byte 0xed is not UTF-8"),
        (EN + b"\xe2\x80", DE, "FOLDER/c.en, line 3: the byte 0xe2 is not UTF-8"),
        ("Ä\n".encode("utf-16"), DE, "FOLDER/c.en, line 1: the byte 0xff is not UTF-8"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("chunk", [2**20, 5])
def test_bad_text_is_refused_by_file_and_line(tmp_path, monkeypatch, en, de, said, chunk):
    monkeypatch.setattr(module, "CHUNK", chunk)
    assert said.replace("FOLDER", str(tmp_path)) in refuse(tmp_path, pair_of_files(tmp_path, en, de))


def test_bad_text_in_an_archive_is_refused_by_member(tmp_path):
    template = archive(tmp_path, {"t.en": EN, "t.de": b"\n\xff"})
    assert f"{tmp_path}/a.tgz:t.de, line 2: the byte 0xff is not UTF-8" in refuse(tmp_path, template)
    template = archive(tmp_path, {"t.en": EN, "t.de": b"Eins.\n"})
    assert f"{tmp_path}/a.tgz:t.en has 2 lines and {tmp_path}/a.tgz:t.de has 1 line" in refuse(tmp_path, template)
    template = archive(tmp_path, {"t.en": EN, "t.de": b""})
    assert f"{tmp_path}/a.tgz:t.de: is empty" in refuse(tmp_path, template)


def test_each_corpus_is_counted_by_itself(tmp_path):
    """One line too many here and one too few there would give equal totals."""
    first = pair_of_files(tmp_path, EN, DE + b"Drei.\n")
    second = archive(tmp_path, {"t.en": EN + b"Three.\n", "t.de": DE})
    assert f"{first}: " in refuse(tmp_path, first, second)


@pytest.mark.parametrize(
    "text, said",
    [
        ("<refset></refset>", "c.en.sgm has no <seg>"),
        ("<seg>1</seg><seg>2", "c.en.sgm: <seg> number 2 is not closed by </seg>"),
        ("<seg id=1>1\n<seg id=2>2</seg>", "c.en.sgm: <seg> number 1 is not closed by </seg>"),
    ],
)
def test_bad_markup_is_refused(tmp_path, text, said):
    template = pair_of_files(tmp_path, text.encode(), b"<seg>1</seg>", ".sgm")
    assert said in refuse(tmp_path, template)


def test_a_missing_file_or_member_is_named_with_the_nearest(tmp_path):
    template = archive(tmp_path, {"training/t.de-en.en": EN, "training/t.de-en.de": DE, "README": b""})
    said = refuse(tmp_path, template.replace("t.{lang}", "t.de-en.{lang}"))
    assert f"{tmp_path}/a.tgz has no member t.de-en.en; the nearest that it has is training/t.de-en.en" in said
    said = refuse(tmp_path, template.replace("a.tgz", "aa.tgz"))
    assert f"there is no such file in {tmp_path}; the nearest that it has is a.tgz" in said
    assert f"there is no folder {tmp_path}/no" in refuse(tmp_path, f"{tmp_path}/no/c.{{lang}}")
    (tmp_path / "d.en").mkdir()
    assert f"{tmp_path}/d.en: is not a file" in refuse(tmp_path, f"{tmp_path}/d.{{lang}}")


def test_an_archive_with_nothing_in_it_says_so(tmp_path):
    assert "has no member t.en; it has none at all" in refuse(tmp_path, archive(tmp_path, {}))


@pytest.mark.parametrize("name", ["a.tgz", "a.tar", "a.tar.bz2", "a.tar.xz"])
@pytest.mark.parametrize("how", ["cut", "cut a little", "changed", "no archive", "empty"])
def test_a_damaged_archive_is_refused(tmp_path, name, how):
    compress = COMPRESS[Path(name).suffix]
    text = os.urandom(3000).hex().encode() + b"\n"
    content = compress(gzip.decompress(tarball({"t.en": text, "t.de": text})))
    if how == "cut":
        content = content[: len(content) // 2]
    elif how == "cut a little":
        content = content[:-5] if name != "a.tar" else content[:9000]
    elif how == "changed":
        at = len(content) // 2 if name != "a.tar" else 6656 + 100  # the header of the second member
        content = content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :]
    else:
        content = b"<html>not found</html>" * 100 if how == "no archive" else b""
    (tmp_path / name).write_bytes(content)
    said = refuse(tmp_path, f"{tmp_path / name}:t.{{lang}}")
    assert f"{tmp_path / name} is damaged, or is not what its name says: " in said


def test_damage_behind_the_last_member_is_found(tmp_path):
    content = gzip.decompress(tarball({"t.en": EN, "t.de": DE})) + bytes(3 * module.CHUNK)
    (tmp_path / "a.tgz").write_bytes(gzip.compress(content)[:-5])
    assert f"{tmp_path}/a.tgz is damaged" in refuse(tmp_path, f"{tmp_path}/a.tgz:t.{{lang}}")


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("damage", [lambda content: content[:-4], lambda content: EN])
def test_a_damaged_file_is_refused(tmp_path, suffix, damage):
    compress = COMPRESS[suffix]
    template = pair_of_files(tmp_path, compress(EN), damage(compress(DE)), suffix)
    assert f"{tmp_path}/c.de{suffix} is damaged, or is not what its name says: " in refuse(tmp_path, template)


@pytest.mark.parametrize(
    "templates, said",
    [
        (["c.en"], "c.en: must have {lang} or {side} in it"),
        (["c.{language}"], "c.{language}: must have {lang} or {side} in it"),
        (["a.tgz:t.en"], "a.tgz:t.en: must have {lang} or {side} in it"),
    ],
)
def test_a_template_must_tell_the_sides_apart(tmp_path, templates, said):
    assert said in refuse(tmp_path, *templates)


@pytest.mark.parametrize(
    "languages, said",
    [
        (("en", "en"), "--target-lang en: must not be --source-lang"),
        (("../en", "de"), "--source-lang ../en: must be a language's code"),
        (("en", ""), "--target-lang : must be a language's code"),
    ],
)
def test_bad_languages_are_refused(tmp_path, languages, said):
    def flags(folder, *templates):
        return [*words(folder, *templates), "--source-lang", languages[0], "--target-lang", languages[1]]

    assert said in refuse(tmp_path, pair_of_files(tmp_path), words=flags)


def test_the_output_never_overwrites_an_input(tmp_path):
    template = pair_of_files(tmp_path)
    with pytest.raises(SystemExit, match=f"--output: {tmp_path}/c.en would overwrite what .* names"):
        module.main([*words(tmp_path, template), "--output", str(tmp_path / "c")])
    assert (tmp_path / "c.en").read_bytes() == EN


# -- hostile archives --------------------------------------------------------------------------------


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_nothing_is_written_where_an_archive_says(tmp_path, monkeypatch):
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
    template = archive(tmp_path, {**hostile, "t.en": EN, "t.de": DE})
    assert extract(tmp_path, template) == (EN, DE)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert found == "a.tgz here here/below outside outside/there raw raw/train.de raw/train.en".split()
    assert (outside / "there").read_bytes() == b"mine"


@pytest.mark.parametrize(
    "member, said",
    [
        (special("t.en", tarfile.SYMTYPE, "/etc/passwd"), "symbolic link"),
        (special("t.en", tarfile.LNKTYPE, "t.de"), "hard link"),
        (special("t.en", tarfile.CHRTYPE), "device or pipe"),
        (special("t.en", tarfile.FIFOTYPE), "device or pipe"),
        (special("t.en", tarfile.DIRTYPE), "folder"),
    ],
)
def test_a_named_member_must_be_a_regular_file(tmp_path, member, said):
    refused = refuse(tmp_path, archive(tmp_path, {"t.de": DE, member: None}))
    assert f"{tmp_path}/a.tgz:t.en is a {said}, and must be a regular file" in refused


@pytest.mark.parametrize("second", ["t.en", "./t.en"])
def test_a_member_that_comes_twice_is_refused(tmp_path, second):
    template = archive(tmp_path, {"t.en": EN, "t.de": DE, tarfile.TarInfo(second): EN})
    assert f"{tmp_path}/a.tgz has t.en twice" in refuse(tmp_path, template)


# -- whole files only --------------------------------------------------------------------------------


def command(folder, *templates):
    return [sys.executable, "-m", "recipes.text.extract", *words(folder, *templates)]


def test_a_killed_run_leaves_no_file_and_the_next_one_does_not_mind(tmp_path):
    line = b"word " * 1999 + b"\n"
    template = pair_of_files(tmp_path, line * 100, line * 100)
    process = subprocess.Popen(
        command(tmp_path, *[template] * 500),
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout.readline().endswith(b": 100 pairs\n")
    process.kill()
    process.communicate()
    assert sorted(os.listdir(tmp_path / "raw")) == ["train.de.tmp", "train.en.tmp"]
    assert extract(tmp_path, template) == (line * 100, line * 100)


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_copy", interrupt)
    with pytest.raises(SystemExit) as ended:
        module.main(words(tmp_path, pair_of_files(tmp_path)))
    assert ended.value.code == 130 and os.listdir(tmp_path / "raw") == []


def test_a_refused_run_leaves_the_files_of_an_earlier_one(tmp_path):
    template = pair_of_files(tmp_path)
    extract(tmp_path, template)
    with pytest.raises(SystemExit):
        module.main(words(tmp_path, template, pair_of_files(tmp_path, EN, b"\xff")))
    assert sorted(os.listdir(tmp_path / "raw")) == ["train.de", "train.en"]
    assert (tmp_path / "raw" / "train.de").read_bytes() == DE


@pytest.mark.parametrize("disk, size", [("4k", 2500), ("64k", 3_000_000)], ids=["at the end", "in the middle"])
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path, disk, size):
    raw = tmp_path / "raw"
    raw.mkdir()
    small_disk = f"mount -t tmpfs -o size={disk} none {raw}"
    mounting = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    try:
        tried = subprocess.run([*mounting, small_disk], capture_output=True, text=True)
    except FileNotFoundError as missing:
        pytest.skip(f"no small disk can be made here: {missing}")
    if tried.returncode != 0:
        pytest.skip(f"no small disk can be made here: {tried.stderr.strip()}")
    tool = command(tmp_path, pair_of_files(tmp_path, os.urandom(size).hex().encode(), b"x"))
    done = subprocess.run(
        [*mounting, f'{small_disk}; "$@"; status=$?; ls {raw}; exit $status', "sh", *tool],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "train." not in done.stdout
    assert done.stderr.splitlines()[-1] == (f"recipes.text.extract: {raw}/train.en: No space left on device")


# -- real data ---------------------------------------------------------------------------------------


def test_real_tarballs_of_wmt14_have_the_pairs_that_are_known(tmp_path, capsys):
    """newstest2013 and newstest2014 are known; the training corpora are counted."""
    folder = os.environ.get("FAIRSEQ_ROPE_TEST_DATA")
    if not folder:
        pytest.skip("FAIRSEQ_ROPE_TEST_DATA names no folder with WMT14's five tarballs")
    for corpora, expected in ((VALID, 3000), (TEST, 3003), (TRAINING, None)):
        templates = [f"{folder}/{name}:{member}" for name, member in corpora.items()]
        counts = [side.count(b"\n") for side in extract(tmp_path, *templates)]
        said = capsys.readouterr().out.splitlines()
        total = sum(int(line.split()[-2].replace(",", "")) for line in said[:-1])
        assert counts == [total, total] and said[-1].endswith(f": {total:,} pairs")
        assert expected in (None, total)
