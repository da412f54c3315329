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


@pytest.mark.parametrize("size, checksum", [(SIZE, SHA256), ("-", MD5), ("-", "-")])
def test_a_file_is_downloaded_once_and_its_size_and_checksum_are_printed(site, tmp_path, capsys, size, checksum):
    for _ in range(2):
        assert fetch(tmp_path, site.put("f.tgz", Reply()), size, checksum) == ["f.tgz"]
        printed = capsys.readouterr().out
        assert f"{tmp_path}/out/f.tgz" in printed and f"{SIZE} " in printed and SHA256 in printed
    assert (tmp_path / "out" / "f.tgz").read_bytes() == GOOD and site.seen["f.tgz"] == [None]


@pytest.mark.parametrize(
    "part, replies, asked",
    [
        (GOOD[:1000], [Reply()], [1000]),
        (GOOD, [Reply()], [SIZE]),  # the server answers 416
        (GOOD[:1000], [Reply(ranges=False)], [1000, 0]),
        (b"", [Reply(b"", 302, location="/f.tgz"), Reply()], [0, 0]),
    ],
)
def test_curl_continues_a_part_and_retries(site, tmp_path, part, replies, asked):
    if part:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "f.tgz.part").write_bytes(part)
    assert fetch(tmp_path, site.put("f.tgz", *replies)) == ["f.tgz"]
    assert (tmp_path / "out" / "f.tgz").read_bytes() == GOOD
    assert site.seen["f.tgz"] == [f"bytes={start}-" if start else None for start in asked]


def test_an_interrupted_transfer_is_continued_by_the_next_run(site, tmp_path):
    address = site.put("f.tgz", Reply(cut=100_000), Reply())
    with pytest.raises(SystemExit, match=r"f\.tgz\.part"):
        fetch(tmp_path, address)
    assert (tmp_path / "out" / "f.tgz.part").stat().st_size == 100_000
    assert fetch(tmp_path, address) == ["f.tgz"] and site.seen["f.tgz"] == [None, "bytes=100000-"]


@pytest.mark.parametrize(
    "reply, values",
    [
        (Reply(b"gone", 404), ["22"]),  # curl's status
        (Reply(b"", 302, location=f"file://{__file__}"), ["1"]),
        (Reply(BAD), [hashlib.sha256(BAD).hexdigest(), SHA256]),
        (Reply(GOOD[:9]), ["9 bytes", str(SIZE)]),
    ],
)
def test_a_wrong_answer_leaves_no_file(site, tmp_path, reply, values):
    with pytest.raises(SystemExit) as refused:
        fetch(tmp_path, site.put("f.tgz", reply))
    assert all(value in str(refused.value) for value in ["f.tgz", *values])
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("wrong", [BAD, GOOD[:-5]])
def test_a_broken_file_is_reported_and_downloaded_again(site, tmp_path, capsys, wrong):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "f.tgz").write_bytes(wrong)
    assert fetch(tmp_path, site.put("f.tgz", Reply())) == ["f.tgz"]
    assert (tmp_path / "out" / "f.tgz").read_bytes() == GOOD and f"{tmp_path}/out/f.tgz" in capsys.readouterr().err


BAD_VALUES = {
    "file": ["", ".", "../f", "/etc/f", "a/f", "a\\f", "f\x00"],
    "bytes": ["", "0", "-1", "1e3", "1.5", "²"],
    "checksum": ["", "sha256", SHA256[:-1], SHA256[7:], f"sha1:{0:040}"],
    "url": ["", "h/f", "file:///etc/passwd", "http://ü/f", "http://h/f http://i/f"],
}
RIGHT = dict(zip(BAD_VALUES, LINE.replace("f.tgz", "g.tgz").split("\t"), strict=True))
BAD_LINES = [
    *(("\t".join((RIGHT | {name: bad}).values()), name) for name in BAD_VALUES for bad in BAD_VALUES[name]),
    *(("f.tgz\t1", "checksum"), (f"{LINE}\tmore", "checksum")),
]


@pytest.mark.parametrize("line, column", BAD_LINES)
def test_a_bad_manifest_is_refused_by_line(tmp_path, line, column):
    path = tmp_path / "manifest.tsv"
    path.write_text(f"{HEADER}\n{LINE}\n{line}\n")
    with pytest.raises(module.InputError, match=rf"^{path}, line 3: .*{column}"):
        module.read_manifest(path)


def test_a_manifest_from_windows_with_empty_lines_is_read_and_one_without_a_header_is_not(site, tmp_path):
    path = tmp_path / "manifest.tsv"
    path.write_bytes(f"{HEADER}\r\n\r\n{LINE}\r\n".encode())
    assert module.read_manifest(path) == {"f.tgz": module.Entry("f.tgz", 1, SHA256, "http://h/f")}
    path.write_text(LINE)
    with pytest.raises(module.InputError, match="line 1: "):
        module.read_manifest(path)
    with pytest.raises(SystemExit, match="g.tgz.* f.tgz"):
        fetch(tmp_path, site.put("f.tgz", Reply()), names=["f.tgz", "g.tgz"])
    assert not site.seen
