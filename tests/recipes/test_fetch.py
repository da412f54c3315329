"""recipes/text/fetch.py with a local server that fails like servers of the internet."""

import hashlib
import os

import pytest

from recipes.text import fetch as module
from tests.recipes.site import GOOD, Reply, Site

BAD = GOOD[:-1] + bytes([GOOD[-1] ^ 1])
SIZE, SHA256 = len(GOOD), "sha256:" + hashlib.sha256(GOOD).hexdigest()
MD5 = "md5:" + hashlib.md5(GOOD).hexdigest()
HEADER = "file\tbytes\tchecksum\turl"
LINE = f"f.tgz\t1\t{SHA256}\thttp://h/f"


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with Site() as server:
        yield server


def fetch(folder, address, size=SIZE, checksum=SHA256, names=("f.tgz",)):
    """Run the tool. Returns the names in its output folder."""
    path = folder / "manifest.tsv"
    path.write_text(f"{HEADER}\nf.tgz\t{size}\t{checksum}\t{address}\n")
    module.main(["--manifest", str(path), "--output", str(folder / "out"), *names])
    return os.listdir(folder / "out")


def leave(folder, name, content):
    """Write *content* into the output folder, as an earlier run would."""
    (folder / "out").mkdir(exist_ok=True)
    (folder / "out" / name).write_bytes(content)


@pytest.mark.parametrize("size, checksum", [(SIZE, SHA256), ("-", MD5), ("-", "-")])
def test_a_file_is_downloaded_once_and_its_size_and_checksum_are_printed(site, tmp_path, capsys, size, checksum):
    for _ in range(2):
        assert fetch(tmp_path, site.put("f.tgz", Reply()), size, checksum) == ["f.tgz"]
        assert capsys.readouterr().out == f"{tmp_path}/out/f.tgz: {SIZE} bytes, {SHA256}\n"
    assert (tmp_path / "out" / "f.tgz").read_bytes() == GOOD and site.seen["f.tgz"] == [None]


@pytest.mark.parametrize(
    "part, replies, asked",
    [
        (GOOD[:1000], [Reply()], [1000]),
        (GOOD, [Reply()], [SIZE]),  # the server answers 416
        (GOOD[:1000], [Reply(ranges=False)], [1000, 0]),
        (b"", [Reply(b"", 302, location="/f.tgz"), Reply()], [0, 0]),
        (b"", [Reply(b"", 503), Reply()], [0, 0]),
    ],
)
def test_curl_continues_a_part_and_retries(site, tmp_path, part, replies, asked):
    if part:
        leave(tmp_path, "f.tgz.part", part)
    assert fetch(tmp_path, site.put("f.tgz", *replies)) == ["f.tgz"]
    assert (tmp_path / "out" / "f.tgz").read_bytes() == GOOD
    assert site.seen["f.tgz"] == [f"bytes={start}-" if start else None for start in asked]


def test_an_interrupted_transfer_is_continued_by_the_next_run(site, tmp_path):
    address = site.put("f.tgz", Reply(cut=100_000), Reply())
    with pytest.raises(SystemExit, match=r"status 18; .*f\.tgz\.part"):
        fetch(tmp_path, address)
    assert (tmp_path / "out" / "f.tgz.part").stat().st_size == 100_000
    assert fetch(tmp_path, address) == ["f.tgz"] and site.seen["f.tgz"] == [None, "bytes=100000-"]


@pytest.mark.parametrize(
    "reply, message",
    [
        (Reply(b"gone", 404), "curl ended with status 22$"),
        (Reply(b"", 302, location=f"file://{__file__}"), "curl ended with status 1$"),
        (Reply(BAD), f"has the checksum sha256:{hashlib.sha256(BAD).hexdigest()}, and must have {SHA256}"),
        (Reply(GOOD[:9]), f"has 9 bytes, and must have {SIZE}"),
    ],
)
def test_a_wrong_answer_leaves_no_file(site, tmp_path, reply, message):
    with pytest.raises(SystemExit, match=f"^recipes.text.fetch: .*{message}"):
        fetch(tmp_path, site.put("f.tgz", reply))
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("wrong", [BAD, b"", GOOD[:-5]])
def test_a_broken_file_is_reported_and_downloaded_again(site, tmp_path, capsys, wrong):
    leave(tmp_path, "f.tgz", wrong)
    assert fetch(tmp_path, site.put("f.tgz", Reply())) == ["f.tgz"]
    assert (tmp_path / "out" / "f.tgz").read_bytes() == GOOD and f"{tmp_path}/out/f.tgz has " in capsys.readouterr().err


def test_an_unknown_name_is_refused_before_any_download(site, tmp_path):
    with pytest.raises(SystemExit, match="manifest.tsv: has no g.tgz; it has f.tgz"):
        fetch(tmp_path, site.put("f.tgz", Reply()), names=["f.tgz", "g.tgz"])
    assert not site.seen


BAD_VALUES = {
    "file": ["", ".", "..", "../f", "/etc/f", "a/f", "a\\f", "f\x00"],
    "bytes": ["", "0", "-1", "1e3", "1,000", "1.5", "much", "²", "٣"],
    "checksum": ["", "--", "sha256", SHA256[:-1], SHA256 + "0", SHA256[7:], f"sha1:{0:040}", "md5:xyz"],
    "url": ["", "h/f", "file:///etc/passwd", "ftp://h/f", "http://ü/f", "http://h/f http://i/f"],
}
RIGHT = dict(zip(BAD_VALUES, LINE.replace("f.tgz", "g.tgz").split("\t"), strict=True))
BAD_LINES = [
    *(("\t".join((RIGHT | {name: bad}).values()), f"{name} is ") for name in BAD_VALUES for bad in BAD_VALUES[name]),
    ("f.tgz\t1", "must be file, bytes, checksum, url"), (f"{LINE}\tmore", "must be file, bytes"), (LINE, "f.tgz"),
]  # fmt: skip


@pytest.mark.parametrize("line, message", BAD_LINES)
def test_a_bad_manifest_is_refused_by_line(tmp_path, line, message):
    path = tmp_path / "manifest.tsv"
    path.write_text(f"{HEADER}\n{LINE}\n{line}\n")
    with pytest.raises(module.InputError) as refused:
        module.read_manifest(path)
    assert str(refused.value).startswith(f"{path}, line 3: {message}")


def test_a_manifest_from_windows_with_empty_lines_is_read_and_one_without_a_header_is_not(tmp_path):
    path = tmp_path / "manifest.tsv"
    path.write_bytes(f"{HEADER}\r\n\r\n{LINE}\r\n".encode())
    assert module.read_manifest(path) == {"f.tgz": module.Entry("f.tgz", 1, SHA256, "http://h/f")}
    path.write_text(LINE)
    with pytest.raises(module.InputError, match="line 1: must be file, bytes, checksum, url"):
        module.read_manifest(path)
