"""recipes/text/fetch.py with a local server that behaves and fails like servers of the internet."""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.text import fetch as module
from tests.commands import LIMIT, default_signals
from tests.recipes.site import GOOD, Reply, Site

ROOT = Path(__file__).resolve().parents[2]
BAD = GOOD[:-1] + bytes([GOOD[-1] ^ 1])
SIZE = len(GOOD)
SHA256 = "sha256:" + hashlib.sha256(GOOD).hexdigest()
HEADER = "file\tbytes\tchecksum\turl"


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with Site() as server:
        yield server


def refused_address():
    """An address whose port has no server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/f.tgz"


def manifest(folder, addresses, size=SIZE, checksum=SHA256):
    path = folder / "manifest.tsv"
    path.write_text(f"{HEADER}\nf.tgz\t{size}\t{checksum}\t{addresses}\n")
    return path


def leave(folder, name, content):
    """Write *content* into the output folder, as an earlier run would."""
    (folder / "out").mkdir(exist_ok=True)
    (folder / "out" / name).write_bytes(content)


def words(folder, *more):
    where = ["--manifest", str(folder / "manifest.tsv"), "--output", str(folder / "out")]
    return [*where, "--wait", "0.01", *map(str, more), "f.tgz"]


def fetch(folder, *more):
    """Run the tool. Its output folder must then have only the complete file."""
    module.main(words(folder, *more))
    assert (folder / "out" / "f.tgz").read_bytes() == GOOD
    assert os.listdir(folder / "out") == ["f.tgz"]


def refuse(folder, *more, part_size=None):
    """The one sentence of an error. It must leave no file, except a part with *part_size* bytes of the right file."""
    with pytest.raises(SystemExit) as refused:
        module.main(words(folder, *more))
    message = refused.value.code
    assert isinstance(message, str) and "\n" not in message and message.startswith("recipes.text.fetch: ")
    names = os.listdir(folder / "out") if (folder / "out").exists() else []
    assert names == ([] if part_size is None else ["f.tgz.part"])
    if part_size is not None:
        assert (folder / "out" / "f.tgz.part").read_bytes() == GOOD[:part_size]
    return message


def test_a_file_is_downloaded_once_and_checked_at_the_next_run(site, tmp_path, capsys):
    address = site.put("f.tgz", Reply())
    manifest(tmp_path, address)
    fetch(tmp_path)
    printed, shown = capsys.readouterr()
    assert printed == f"f.tgz: downloaded from {address}, size and checksum are right\n"
    assert "f.tgz: 100%" in shown and "300k/300k" in shown and "B/s]" in shown
    fetch(tmp_path)
    assert f"f.tgz: in {tmp_path / 'out'}, size and checksum are right" in capsys.readouterr().out
    assert site.seen["f.tgz"] == [None]


@pytest.mark.parametrize("size", ["-", SIZE])
def test_a_file_without_a_known_checksum_is_downloaded_and_described(site, tmp_path, capsys, size):
    address = site.put("f.tgz", CUT, Reply())
    manifest(tmp_path, address, size, "-")
    for where in (f"downloaded from {address}", f"in {tmp_path / 'out'}"):
        fetch(tmp_path)
        printed = capsys.readouterr().out
        described = f"not compared with a checksum, which the manifest lacks; it has {SIZE} bytes, {SHA256}"
        assert printed == f"f.tgz: {where}, {described}\n"
    assert (tmp_path / "out" / "f.tgz").read_bytes() == GOOD
    assert len(site.seen["f.tgz"]) == 2, "the second run downloads nothing"


CUT = Reply(cut=100_000)
VARYING = [Reply(ranges=False, cut=cut) for cut in (20_000, *(30_000, 20_000) * 20)]


@pytest.mark.parametrize("size, checksum", [(SIZE, SHA256.upper()), ("-", "md5:" + hashlib.md5(GOOD).hexdigest())])
@pytest.mark.parametrize(
    "part, replies, asked",
    [
        (b"", [CUT, CUT, Reply()], [0, 100_000, 200_000]),
        (b"", [Reply(cut=-100_000), Reply(cut=-100_000), Reply()], [0, 100_000, 200_000]),  # by a reset
        (b"", [Reply(cut=30_000)], range(0, SIZE, 30_000)),  # every attempt brings new bytes
        (b"", [Reply(b"", 302, location="/f.tgz"), CUT, Reply()], [0, 0, 100_000]),
        (b"", [CUT, Reply(ranges=False)], [0, 100_000, 0]),
        # another range than the requested one
        (b"", [CUT, Reply(content_range="bytes 0-299999/300000")], [0, 100_000, 0]),
        (b"", [CUT, Reply(content_range="bytes 99999-299999/300000")], [0, 100_000, 0]),
        (b"", [Reply(BAD), Reply()], [0, 0]),
        (GOOD, [Reply(BAD)], [SIZE]),  # the server answers 416, because nothing is left to send
        (BAD, [Reply()], [SIZE, 0]),
        (GOOD + b"more", [Reply()], [SIZE + 4, 0]),
        (b"x" * 1000, [Reply()], [1000, 0]),  # the complete file has the wrong checksum
    ],
)
def test_a_part_is_continued_and_downloaded_again_if_that_fails(site, tmp_path, size, checksum, part, replies, asked):
    if part:
        leave(tmp_path, "f.tgz.part", part)
    manifest(tmp_path, site.put("f.tgz", *replies), size, checksum)
    fetch(tmp_path, "--retries", 1)
    if size != "-" and len(part) >= SIZE:
        asked = asked[1:]  # a part of the full size is checked before any request
    assert site.seen["f.tgz"] == [f"bytes={start}-" if start else None for start in asked]


@pytest.mark.parametrize(
    "reply, requests, part_size, message",
    [
        (Reply(b"gone", 404), 1, None, "answered 404"),
        (Reply(b"", 503), 3, None, "answered 503"),
        (Reply(ranges=False, cut=100_000), 5, 100_000, "100000 bytes; FOLDER/f.tgz.part keeps 100000 b"),
        (Reply(GOOD * 2), 1, None, "Maximum file size exceeded"),
        (Reply(GOOD * 30, has_length=False), 1, None, "sends more than 300000 bytes"),
        (Reply(GOOD[:9]), 3, 9, "connection ended after 9 of 300000 bytes"),
        (Reply(GOOD[:9], has_length=False), 3, 9, "connection ended after 9 of 300000 bytes"),
        (Reply(b""), 3, None, "connection ended after 0 of 300000 bytes"),
        (Reply(BAD), 2, None, f"has the checksum sha256:{hashlib.sha256(BAD).hexdigest()}, and must have {SHA256}"),
        (Reply(b"", 302, location=f"file://{__file__}"), 1, None, "rotocol"),
        (Reply(b"", 302, location="/f.tgz"), 51, None, "redirects"),
        (VARYING, range(3, 10), 20_000, "20000 bytes"),
    ],
)
def test_an_address_without_the_file_is_given_up(site, tmp_path, reply, requests, part_size, message):
    address = site.put("f.tgz", *(reply if isinstance(reply, list) else [reply]))
    manifest(tmp_path, address)
    refused = refuse(tmp_path, "--retries", 2, part_size=part_size)
    assert f"f.tgz could not be downloaded: {address}: " in refused
    assert message.replace("FOLDER", f"{tmp_path}/out") in refused
    assert len(site.seen["f.tgz"]) in (requests if isinstance(requests, range) else [requests])


def test_without_a_checksum_parts_of_two_addresses_are_not_joined(site, tmp_path):
    leave(tmp_path, "f.tgz.part", b"of another address")
    first, second = site.put("f.tgz", Reply(BAD, cut=100_000, ranges=False)), site.put("other.tgz", Reply())
    manifest(tmp_path, f"{first} {second}", "-", "-")
    fetch(tmp_path, "--retries", 0)
    assert (tmp_path / "out" / "f.tgz").read_bytes() == GOOD
    assert (site.seen["f.tgz"], site.seen["other.tgz"]) == ([None], [None])


def test_an_empty_file_of_unknown_size_is_refused(site, tmp_path):
    manifest(tmp_path, site.put("f.tgz", Reply(b"")), "-", "-")
    assert "sends an empty file" in refuse(tmp_path, "--retries", 0, part_size=None)


def test_a_transfer_of_unknown_length_that_ends_early_is_continued(site, tmp_path):
    manifest(tmp_path, site.put("f.tgz", Reply(GOOD[:100_000], has_length=False), Reply()))
    fetch(tmp_path, "--retries", 1)
    assert site.seen["f.tgz"] == [None, "bytes=100000-"]


def test_a_complete_part_needs_no_server(tmp_path):
    leave(tmp_path, "f.tgz.part", GOOD)
    manifest(tmp_path, refused_address())
    fetch(tmp_path, "--retries", 0)


def test_a_silent_or_missing_server_is_given_up(site, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", 1)
    gone, silent = refused_address(), site.put("f.tgz", Reply(cut=1000, hang=True))
    manifest(tmp_path, f"{gone} {silent}")
    message = refuse(tmp_path, "--retries", 0, part_size=1000)
    assert f"{gone}: Failed to connect " in message and f"{silent}: Operation too slow" in message


def test_waiting_times_after_server_errors_double_up_to_two_minutes(site, tmp_path, capsys, monkeypatch):
    waits = []
    monkeypatch.setattr(module.time, "sleep", waits.append)
    codes = (500, 503, 429, 408)
    manifest(tmp_path, site.put("f.tgz", *(Reply(b"", code) for code in codes), Reply()))
    fetch(tmp_path, "--wait", 20)
    message = capsys.readouterr().err
    assert waits == [20, 40, 80, 120] and all(f"answered {code}; attempt " in message for code in codes)


def test_mirrors_are_tried_in_order_and_continue_the_part(site, tmp_path, capsys):
    addresses = [
        site.url + "missing",
        site.put("wrong", Reply(BAD)),
        site.put("cuts", CUT, Reply(b"", 503)),
        site.put("good", Reply()),
        site.put("never", Reply()),
    ]
    manifest(tmp_path, " ".join(addresses))
    fetch(tmp_path, "--retries", 1)
    cuts = [None, "bytes=100000-"]
    assert dict(site.seen) == {"missing": [None], "wrong": [None], "cuts": cuts, "good": cuts[1:]}
    assert f"downloaded from {addresses[3]}" in capsys.readouterr().out
    manifest(tmp_path, " ".join(addresses[:3]))
    (tmp_path / "out" / "f.tgz").unlink()
    message = refuse(tmp_path, "--retries", 0)
    assert all(f"{address}: " in message for address in addresses[:3])


def test_a_stopped_download_is_continued(site, tmp_path):
    sizes = {signal.SIGKILL: 100_000, signal.SIGINT: 200_000, signal.SIGTERM: 250_000}
    stops = [Reply(cut=cut, hang=True) for cut in (100_000, 100_000, 50_000)]
    manifest(tmp_path, site.put("f.tgz", *stops, Reply()))
    part = tmp_path / "out" / "f.tgz.part"
    for number, size in sizes.items():
        process = subprocess.Popen(
            [sys.executable, "-m", "recipes.text.fetch", *words(tmp_path)],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, stderr=subprocess.PIPE,
            preexec_fn=default_signals,
        )  # fmt: skip
        deadline = time.time() + 60
        while not part.exists() or part.stat().st_size < size:
            assert process.poll() is None and time.time() < deadline, process.communicate(timeout=LIMIT)
            time.sleep(0.01)
        process.send_signal(number)
        _, message = process.communicate(timeout=LIMIT)
        assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number) and "Traceback" not in message
        assert os.listdir(tmp_path / "out") == ["f.tgz.part"]
    fetch(tmp_path)
    assert site.seen["f.tgz"] == [None, *(f"bytes={size}-" for size in sizes.values())]


def test_without_curl_a_download_is_refused_and_a_check_is_not(site, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    manifest(tmp_path, site.put("f.tgz", Reply()))
    assert "f.tgz must be downloaded, and the program curl is not installed" in refuse(tmp_path)
    leave(tmp_path, "f.tgz", GOOD)
    fetch(tmp_path)


def test_the_disk_must_have_room_for_the_missing_bytes(site, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: usage._replace(free=200_000))
    manifest(tmp_path, site.put("f.tgz", Reply()))
    assert f"--output {tmp_path}/out: the downloads need 0.000 GB, and 0.000 GB are free" in refuse(tmp_path)
    assert not site.seen
    manifest(tmp_path, site.url + "f.tgz", size="-")
    assert "Maximum file size exceeded" in refuse(tmp_path)
    leave(tmp_path, "f.tgz.part", GOOD[:100_000])
    fetch(tmp_path)


def test_a_disk_that_fills_up_ends_the_download(site, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "f.tgz.part").symlink_to("/dev/full")
    manifest(tmp_path, site.put("f.tgz", Reply()))
    with pytest.raises(SystemExit, match=r"out/f.tgz.part: No space left on device$"):
        module.main(words(tmp_path))
    assert len(site.seen["f.tgz"]) == 1 and not (tmp_path / "out" / "f.tgz").exists()


WRONG = [(BAD, f"has the checksum sha256:{hashlib.sha256(BAD).hexdigest()}, and must have {SHA256}")]
WRONG += [(GOOD[:count], f"has {count} bytes, and must have 300000") for count in (0, 299_995)]


@pytest.mark.parametrize("wrong, message", WRONG)
def test_a_broken_file_is_reported_and_downloaded_again(site, tmp_path, capsys, wrong, message):
    leave(tmp_path, "f.tgz", wrong)
    manifest(tmp_path, site.url + "f.tgz")
    refuse(tmp_path)  # the server answers 404; the broken file is removed
    assert f"{tmp_path}/out/f.tgz is broken and will be downloaded again: it {message}" in capsys.readouterr().out
    leave(tmp_path, "f.tgz", wrong)
    site.put("f.tgz", Reply())
    fetch(tmp_path)


@pytest.fixture
def data(tmp_path):
    """A folder for --data-dir with the right file. No test may change it."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "f.tgz").write_bytes(GOOD)
    folder.chmod(0o555)
    yield folder
    assert os.listdir(folder) == ["f.tgz"]
    folder.chmod(0o755)


def test_files_in_data_dir_are_not_downloaded(site, tmp_path, data, capsys):
    path = manifest(tmp_path, site.url + "f.tgz")
    module.main(words(tmp_path, "--data-dir", data))
    assert capsys.readouterr().out == f"f.tgz: in {data}, size and checksum are right\n"
    assert not site.seen and not (tmp_path / "out").exists()
    path.write_text(path.read_text().replace("f.tgz", "g.tgz"))  # not in the data folder
    site.put("g.tgz", Reply())
    module.main(words(tmp_path, "--data-dir", data)[:-1] + ["g.tgz"])
    assert os.listdir(tmp_path / "out") == ["g.tgz"]


@pytest.mark.parametrize("wrong, message", WRONG)
def test_a_wrong_file_in_data_dir_is_refused_before_any_download(site, tmp_path, data, wrong, message):
    (data / "f.tgz").write_bytes(wrong)
    path = manifest(tmp_path, site.url + "f.tgz")
    path.write_text(f"{path.read_text()}a.tgz\t{SIZE}\t{SHA256}\t{site.put('a.tgz', Reply())}\n")
    assert f"--data-dir: {data}/f.tgz {message}" in refuse(tmp_path, "--data-dir", data, "a.tgz")
    assert not site.seen and (data / "f.tgz").read_bytes() == wrong


def test_without_a_manifest_files_are_neither_checked_nor_downloaded(tmp_path, data, capsys):
    module.main(words(tmp_path, "--manifest", "none", "--data-dir", data))
    assert capsys.readouterr().out == f"f.tgz: in {data}, not checked (--manifest none)\n"
    message = refuse(tmp_path, "--manifest", "none", "--data-dir", data, "g.tgz")
    assert f"g.tgz is not in --data-dir {data}, and a download needs a manifest" in message
    assert "f.tgz is not in --data-dir, which is not given" in refuse(tmp_path, "--manifest", "none")


@pytest.mark.parametrize(
    "more, message",
    [
        (["--data-dir", "no/such"], "--data-dir no/such: must be a folder that exists"),
        (["--retries", "-1"], "--retries -1: must be 0 or more"),
        (["--wait", "nan"], "--wait nan: must be 0 or more"),
        (["../f.tgz"], "file is '../f.tgz', and must be a file's name without a folder"),
        (["g.tgz"], "manifest.tsv: has no g.tgz; it has f.tgz"),
        (["--manifest", "no/such.tsv"], "no/such.tsv: No such file or directory"),
        (["--output", "DATA", "--data-dir", "DATA"], "DATA: must differ from --data-dir, which is never written to"),
        (["--output", "DATA/f.tgz"], "DATA/f.tgz: File exists"),
    ],
)
def test_bad_flags_are_refused_by_name(site, tmp_path, data, more, message):
    manifest(tmp_path, site.put("f.tgz", Reply()))
    (data / "f.tgz").write_bytes(b"not looked at")
    assert message.replace("DATA", str(data)) in refuse(tmp_path, *(word.replace("DATA", str(data)) for word in more))
    assert not site.seen


LINE = f"f.tgz\t1\t{SHA256}\thttp://h/f"
BAD_VALUES = {
    "file": ["", ".", "..", "../f", "/etc/f", "a/f", "a\\f", "f\x00"],
    "bytes": ["", "0", "-1", "1e3", "1,000", "1.5", "much", "²", "٣"],
    "checksum": ["", "--", "sha256", SHA256[:-1], SHA256 + "0", SHA256[7:], f"sha1:{0:040}", "md5:xyz", "x:"],
    "url": ["", "h/f", "file:///etc/passwd", "ftp://h/f", "http://ü/f", "http://h/f g"],
}


@pytest.mark.parametrize("column", BAD_VALUES)
def test_a_bad_value_in_a_manifest_is_refused_by_line_and_column(tmp_path, column):
    path = tmp_path / "manifest.tsv"
    right = dict(zip(BAD_VALUES, LINE.replace("f.tgz", "g.tgz").split("\t"), strict=True))
    for value in BAD_VALUES[column]:
        path.write_text("\n".join([HEADER, LINE, "\t".join((right | {column: value}).values()), ""]))
        assert f"--manifest {path}, line 3: {column} is {value!r}, and must be " in refuse(tmp_path)


@pytest.mark.parametrize(
    "text, line, message",
    [
        ("file bytes checksum url\n", 1, "must be file, bytes, checksum, url, separated by tabs"),
        (f"{LINE}\n", 1, "must be file, bytes"),
        ("HEAD\nf.tgz\t1\n", 2, "has 2 columns, and must have file, bytes, checksum, url, separated by tabs"),
        (f"HEAD\n\n{LINE}\tmore\n", 3, "has 5 columns"),
        (f"HEAD\n{LINE}\n{LINE}\n", 3, "f.tgz is listed twice"),
        ("file\xff", 1, "the byte 0xff is not UTF-8"),
    ],
)
def test_a_bad_manifest_is_refused_by_line(tmp_path, text, line, message):
    path = tmp_path / "manifest.tsv"
    path.write_bytes(text.replace("HEAD", HEADER).encode("latin-1"))
    refused = refuse(tmp_path)
    assert f"--manifest {path}, line {line}: " in refused and message in refused


def test_a_manifest_from_windows_and_with_empty_lines_is_read(tmp_path):
    path = tmp_path / "manifest.tsv"
    path.write_bytes(f"{HEADER}\r\n\r\n{LINE} http://i/f\r\n".encode())
    entry = module.read_manifest(path)["f.tgz"]
    assert entry == module.Entry("f.tgz", 1, SHA256, ("http://h/f", "http://i/f"))
