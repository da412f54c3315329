"""recipes/text/fetch.py against a server on this machine that does what servers do."""

import hashlib
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from recipes.text import fetch as module

ROOT = Path(__file__).resolve().parents[2]
GOOD = random.Random(5).randbytes(300_000)
BAD = GOOD[:-1] + bytes([GOOD[-1] ^ 1])
SIZE = len(GOOD)
SHA256 = "sha256:" + hashlib.sha256(GOOD).hexdigest()


@dataclass
class Reply:
    """What the server does with one request.

    Attributes:
        ranges: whether it heeds a Range header
        length: the Content-Length, if not the true one; None for no such header
        cut: ends the connection after so many bytes of the body; negative: by a reset
        hang: then keeps it open, and silent, until the test is over
        content_range: what it answers instead of the right Content-Range
    """

    content: bytes = GOOD
    status: int = 200
    ranges: bool = True
    length: int | None = -1
    cut: int | None = None
    hang: bool = False
    content_range: str | None = None
    location: str | None = None


@dataclass
class Site:
    url: str
    replies: dict = field(default_factory=dict)  # path -> replies, the last of which is given again and again
    seen: dict = field(default_factory=lambda: defaultdict(list))  # path -> Range headers of its requests
    over: threading.Event = field(default_factory=threading.Event)

    def put(self, name, *replies):
        """Returns the address of *name*."""
        self.replies["/" + name] = list(replies)
        return self.url + name


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        site = self.server.site
        site.seen[self.path.lstrip("/")].append(self.headers.get("Range"))
        replies = site.replies.get(self.path, [Reply(b"gone", 404)])
        reply = replies.pop(0) if len(replies) > 1 else replies[0]
        content, status, start = reply.content, reply.status, 0
        asked = self.headers.get("Range")
        if asked and reply.ranges and status == 200:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            status = 206 if start < len(content) else 416
        self.send_response(status)
        if status == 206:
            right = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.send_header("Content-Range", reply.content_range or right)
        if reply.location:
            self.send_header("Location", reply.location)
        body = b"" if status == 416 else content[start:]
        if reply.length is not None:
            self.send_header("Content-Length", str(len(body) if reply.length < 0 else reply.length))
        self.end_headers()
        self.wfile.write(body if reply.cut is None else body[: abs(reply.cut)])
        if reply.hang:
            self.wfile.flush()
            site.over.wait(60)
        if reply.cut is not None and reply.cut < 0:
            time.sleep(0.05)  # so that what was sent is read before the reset
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def leave_part(folder, content):
    """Leave *content* as an earlier run would."""
    (folder / "out").mkdir()
    (folder / "out" / "f.tgz.part").write_bytes(content)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *args):
        """The tool ends some connections itself; socketserver would print that."""


@pytest.fixture
def site(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    server = Server(("127.0.0.1", 0), Handler)
    server.site = Site(f"http://127.0.0.1:{server.server_port}/")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.site
    server.site.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def refused_address():
    """Of a port at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/f.tgz"


def manifest(folder, *addresses, name="f.tgz", size=SIZE, checksum=SHA256):
    path = folder / "manifest.tsv"
    path.write_text(f"file\tbytes\tchecksum\turl\n{name}\t{size}\t{checksum}\t{' '.join(addresses)}\n")
    return path


def words(folder, *more, name="f.tgz"):
    output = str(folder / "out")
    return ["--manifest", str(folder / "manifest.tsv"), "--output", output, "--wait", "0.01", *more, name]


def fetch(folder, *more):
    """Run the tool; what it fetched must be whole and the only thing there."""
    module.main(words(folder, *more))
    assert (folder / "out" / "f.tgz").read_bytes() == GOOD
    assert os.listdir(folder / "out") == ["f.tgz"]


def refuse(folder, *more, words=words, kept=None):
    """The one sentence with which it refuses; there is nothing but a part, *kept* bytes of the right file."""
    with pytest.raises(SystemExit) as refused:
        module.main(words(folder, *more))
    said = refused.value.code
    assert isinstance(said, str) and "\n" not in said and said.startswith("recipes.text.fetch: ")
    there = os.listdir(folder / "out") if (folder / "out").exists() else []
    assert there == ([] if kept is None else ["f.tgz.part"])
    if kept is not None:
        assert (folder / "out" / "f.tgz.part").read_bytes() == GOOD[:kept]
    return said


# -- downloads ---------------------------------------------------------------------------------------


def test_a_file_is_downloaded_and_found_at_the_next_run(site, tmp_path, capsys):
    address = site.put("f.tgz", Reply())
    manifest(tmp_path, address)
    fetch(tmp_path)
    printed, shown = capsys.readouterr()
    assert printed == f"f.tgz: fetched from {address}, size and checksum are right\n"
    assert "f.tgz: 100%" in shown and "300k/300k" in shown and "B/s]" in shown
    fetch(tmp_path)
    assert f"f.tgz: in {tmp_path / 'out'}, size and checksum are right" in capsys.readouterr().out
    assert site.seen["f.tgz"] == [None]


@pytest.mark.parametrize("cut", [100_000, -100_000], ids=["closed", "reset"])
def test_a_cut_connection_is_gone_on_from_where_it_was_cut(site, tmp_path, capsys, cut):
    manifest(tmp_path, site.put("f.tgz", Reply(cut=cut), Reply(cut=cut), Reply()))
    fetch(tmp_path)
    assert site.seen["f.tgz"] == [None, "bytes=100000-", "bytes=200000-"]
    said = capsys.readouterr().err
    assert "after 100000 of 300000 bytes; attempt 2 of 5 in 0.01 s" in said


def test_a_server_that_cuts_again_and_again_gives_all_of_it_in_the_end(site, tmp_path):
    manifest(tmp_path, site.put("f.tgz", Reply(cut=30_000)))
    fetch(tmp_path, "--retries", "1")
    assert len(site.seen["f.tgz"]) == 10


@pytest.mark.parametrize("size", [SIZE, "-"])
def test_a_server_without_ranges_starts_anew(site, tmp_path, capsys, size):
    manifest(tmp_path, site.put("f.tgz", Reply(cut=100_000), Reply(ranges=False)), size=size)
    fetch(tmp_path)
    assert site.seen["f.tgz"] == [None, "bytes=100000-"]
    assert "gives no part of a file; starting anew" in capsys.readouterr().err


def test_a_server_without_ranges_that_always_cuts_is_given_up(site, tmp_path):
    address = site.put("f.tgz", Reply(ranges=False, cut=100_000))
    manifest(tmp_path, address)
    said = refuse(tmp_path, "--retries", "2", kept=100_000)
    assert len(site.seen["f.tgz"]) == 3
    assert f"f.tgz could not be fetched: {address}: connection ended after 100000 of 300000 bytes" in said
    assert f"{tmp_path}/out/f.tgz.part keeps 100000 bytes for the next run" in said


@pytest.mark.parametrize(
    "content_range", ["bytes 0-299999/300000", "bytes 99999-299999/300000", "nonsense", "bytes 100001-299999/300000"]
)
def test_another_part_than_the_one_asked_for_is_not_appended(site, tmp_path, content_range):
    manifest(tmp_path, site.put("f.tgz", Reply(cut=100_000), Reply(content_range=content_range)))
    fetch(tmp_path)
    assert site.seen["f.tgz"] == [None, "bytes=100000-", None]


@pytest.mark.parametrize("size", [SIZE, "-"])
def test_a_complete_part_is_not_downloaded_again(site, tmp_path, capsys, size):
    leave_part(tmp_path, GOOD)
    manifest(tmp_path, site.put("f.tgz", Reply(BAD)), size=size)
    fetch(tmp_path)
    assert not site.seen and "fetched by an earlier run" in capsys.readouterr().out


@pytest.mark.parametrize(
    "part, size, asked",
    [
        (BAD, SIZE, [None]),
        (GOOD + b"more", SIZE, [None]),
        (BAD + b"and more", "-", ["bytes=300008-", None]),  # answered with 416
        (b"x" * 1000, SIZE, ["bytes=1000-", None]),  # complete, it has the wrong checksum
    ],
)
def test_a_part_that_cannot_become_the_file_is_fetched_anew(site, tmp_path, part, size, asked):
    leave_part(tmp_path, part)
    manifest(tmp_path, site.put("f.tgz", Reply()), size=size)
    fetch(tmp_path)
    assert site.seen["f.tgz"] == asked


def test_errors_of_the_server_are_waited_for_ever_longer_up_to_two_minutes(site, tmp_path, capsys, monkeypatch):
    waits = []
    monkeypatch.setattr(module.time, "sleep", waits.append)
    codes = (500, 503, 429, 408)
    manifest(tmp_path, site.put("f.tgz", *(Reply(b"", code) for code in codes), Reply()))
    fetch(tmp_path, "--wait", "3")
    said = capsys.readouterr().err
    assert waits == [3, 6, 12, 24] and all(f"answered {code} " in said for code in codes)
    (tmp_path / "out" / "f.tgz").unlink()
    address = site.put("f.tgz", Reply(b"", 500))
    waits.clear()
    said = refuse(tmp_path, "--wait", "50")
    assert waits == [50, 100, 120, 120]
    assert f"{address}: answered 500 Internal Server Error (attempt 5 of 5)" in said


def test_a_missing_file_is_asked_for_once(site, tmp_path):
    manifest(tmp_path, site.url + "f.tgz")
    said = refuse(tmp_path)
    assert f"f.tgz could not be fetched: {site.url}f.tgz: answered 404 Not Found" in said
    assert site.seen["f.tgz"] == [None]


def test_a_server_that_is_gone_is_named(tmp_path):
    address = refused_address()
    manifest(tmp_path, address)
    assert f"{address}: connection refused (attempt 3 of 3)" in refuse(tmp_path, "--retries", "2")


def test_a_silent_server_is_given_up(site, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    manifest(tmp_path, site.put("f.tgz", Reply(cut=1000, hang=True)))
    began = time.monotonic()
    said = refuse(tmp_path, "--retries", "0", kept=1000)
    assert time.monotonic() - began < 10
    assert "no answer for 0.2 s after 1000 of 300000 bytes" in said


def test_an_address_with_another_file_is_refused_before_the_download(site, tmp_path):
    leave_part(tmp_path, GOOD[:500])
    for ranges in (True, False):
        address = site.put("f.tgz", Reply(GOOD[:200_000], ranges=ranges))
        manifest(tmp_path, address)
        said = refuse(tmp_path, kept=500)
        assert f"{address}: has a file of 200000 bytes, and 300000 are expected" in said
    assert len(site.seen["f.tgz"]) == 2


def test_a_short_file_without_a_length_is_no_file(site, tmp_path):
    manifest(tmp_path, site.put("f.tgz", Reply(GOOD[:200_000], length=None)))
    said = refuse(tmp_path, "--retries", "1", kept=200_000)
    assert "answered 416" in said or "connection ended after 200000 of 300000 bytes" in said


def test_a_file_of_unknown_size_is_checked_and_gone_on_with(site, tmp_path):
    manifest(tmp_path, site.put("f.tgz", Reply(GOOD[:200_000])), size="-")
    assert f"has the checksum sha256:{hashlib.sha256(GOOD[:200_000]).hexdigest()}" in refuse(tmp_path)
    site.seen.clear()
    site.put("f.tgz", Reply(cut=100_000), Reply())
    fetch(tmp_path)
    assert site.seen["f.tgz"] == [None, "bytes=100000-"]


def test_a_stream_without_end_is_ended_early(site, tmp_path):
    manifest(tmp_path, site.put("f.tgz", Reply(GOOD * 30, length=None)))
    assert "sends more bytes than the 300000 expected" in refuse(tmp_path)


@pytest.mark.parametrize("checksum", [SHA256, "md5:" + hashlib.md5(GOOD).hexdigest(), SHA256.upper()])
def test_wrong_bytes_are_fetched_anew_once_and_then_named(site, tmp_path, checksum):
    address = site.put("f.tgz", Reply(BAD))
    manifest(tmp_path, address, checksum=checksum)
    said = refuse(tmp_path)
    kind, _, digest = checksum.lower().partition(":")
    found = hashlib.new(kind, BAD).hexdigest()
    assert f"{address}: has the checksum {kind}:{found}, and must have {kind}:{digest}" in said
    assert site.seen["f.tgz"] == [None, None]
    site.put("f.tgz", Reply(BAD), Reply())
    fetch(tmp_path)


def test_mirrors_are_tried_in_their_order_and_go_on_with_the_part(site, tmp_path, capsys):
    addresses = [
        refused_address(),
        site.url + "missing",
        site.put("wrong", Reply(BAD)),
        site.put("cuts", Reply(cut=100_000), Reply(b"", 503)),
        site.put("good", Reply()),
        site.put("never", Reply()),
    ]
    manifest(tmp_path, *addresses)
    fetch(tmp_path, "--retries", "1")
    cuts = [None, "bytes=100000-"]
    assert dict(site.seen) == {"missing": [None], "wrong": [None], "cuts": cuts, "good": cuts[1:]}
    said = capsys.readouterr()
    assert f"fetched from {addresses[4]}" in said.out
    assert f"answered 404 Not Found; going on with {addresses[2]}" in said.err


def test_if_no_mirror_has_it_each_is_named(site, tmp_path):
    addresses = [site.url + "missing", site.put("wrong", Reply(BAD)), site.put("down", Reply(b"", 502))]
    manifest(tmp_path, *addresses)
    said = refuse(tmp_path, "--retries", "0")
    assert all(f"{address}: " in said for address in addresses)


def test_a_redirection_is_followed_with_the_range(site, tmp_path):
    site.put("real", Reply(cut=100_000), Reply())
    manifest(tmp_path, site.put("f.tgz", Reply(b"", 302, location="/real")))
    fetch(tmp_path)
    assert site.seen["real"] == [None, "bytes=100000-"]


def test_a_redirection_to_a_file_of_this_machine_is_not_followed(site, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(GOOD)
    manifest(tmp_path, site.put("f.tgz", Reply(b"", 302, location=f"file://{secret}")))
    refuse(tmp_path)


def start(folder, *more):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "recipes.text.fetch", *words(folder, *more)],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # a shell that starts the tests in the background has them ignore Ctrl-C, which is inherited
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


@pytest.mark.parametrize("number, status", [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_download_is_gone_on_with(site, tmp_path, number, status):
    manifest(tmp_path, site.put("f.tgz", Reply(cut=123_456, hang=True)))
    process = start(tmp_path)
    part = tmp_path / "out" / "f.tgz.part"
    deadline = time.time() + 20
    while not part.exists() or part.stat().st_size < 123_456:
        assert process.poll() is None and time.time() < deadline, process.communicate()
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == status and "Traceback" not in said
    assert os.listdir(tmp_path / "out") == ["f.tgz.part"]
    site.put("f.tgz", Reply())
    fetch(tmp_path)
    assert site.seen["f.tgz"] == [None, "bytes=123456-"]


def test_a_stage_loads_neither_torch_nor_fairseq(tmp_path):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "recipes.text.fetch", "--help"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0
    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "fairseq_rope.errors" in loaded and not {"torch", "fairseq", "fairseq_rope.patches"} & loaded


# -- disks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, asked", [(SIZE, []), ("-", [None])])
def test_a_disk_without_room_is_refused_before_the_download(site, tmp_path, monkeypatch, size, asked):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: usage._replace(free=299_999))
    manifest(tmp_path, site.put("f.tgz", Reply()), size=size)
    said = refuse(tmp_path)
    assert f"--output {tmp_path}/out: 0.000 GB are still to be downloaded, and 0.000 GB are free" in said
    assert site.seen["f.tgz"] == asked


def test_what_is_there_needs_no_room(site, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: usage._replace(free=200_000))
    leave_part(tmp_path, GOOD[:100_000])
    manifest(tmp_path, site.put("f.tgz", Reply()))
    fetch(tmp_path)


def test_a_disk_that_fills_up_meanwhile_ends_it_at_once(site, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "f.tgz.part").symlink_to("/dev/full")
    manifest(tmp_path, site.put("f.tgz", Reply()))
    with pytest.raises(SystemExit, match=r"out/f.tgz.part: No space left on device$"):
        module.main(words(tmp_path))
    assert len(site.seen["f.tgz"]) == 1 and not (tmp_path / "out" / "f.tgz").exists()


# -- what is there already ---------------------------------------------------------------------------


@pytest.mark.parametrize("broken, said", [(BAD, "has the checksum sha256:"), (GOOD[:9], "has 9 bytes, and must")])
def test_a_broken_file_under_the_final_name_is_named_and_fetched_again(site, tmp_path, capsys, broken, said):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "f.tgz").write_bytes(broken)
    manifest(tmp_path, site.url + "f.tgz")
    refuse(tmp_path)  # 404: the broken file is not left there
    assert f"f.tgz: {tmp_path}/out/f.tgz is broken, and fetched again: it {said}" in capsys.readouterr().out
    (tmp_path / "out" / "f.tgz").write_bytes(broken)
    site.put("f.tgz", Reply())
    fetch(tmp_path)


@pytest.fixture
def data(tmp_path):
    """A folder for --data-dir with the right file; it must not change."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "f.tgz").write_bytes(GOOD)
    folder.chmod(0o555)
    yield folder
    assert os.listdir(folder) == ["f.tgz"]
    folder.chmod(0o755)


def test_a_file_in_data_dir_is_not_downloaded(site, tmp_path, data, capsys):
    manifest(tmp_path, site.put("f.tgz", Reply()))
    module.main(words(tmp_path, "--data-dir", str(data)))
    assert capsys.readouterr().out == f"f.tgz: in {data}, size and checksum are right\n"
    assert not site.seen and not (tmp_path / "out").exists()


def test_a_file_that_data_dir_lacks_is_downloaded(site, tmp_path):
    (tmp_path / "data").mkdir()
    manifest(tmp_path, site.put("f.tgz", Reply()))
    fetch(tmp_path, "--data-dir", str(tmp_path / "data"))
    assert os.listdir(tmp_path / "data") == []


@pytest.mark.parametrize(
    "wrong, said",
    [
        (BAD, f"has the checksum sha256:{hashlib.sha256(BAD).hexdigest()}, and must have {SHA256}"),
        (GOOD[:-5], "has 299995 bytes, and must have 300000"),
        (b"", "has 0 bytes, and must have 300000"),
    ],
)
def test_a_wrong_file_in_data_dir_is_refused_and_not_replaced(site, tmp_path, data, wrong, said):
    (data / "f.tgz").write_bytes(wrong)
    manifest(tmp_path, site.put("f.tgz", Reply()))
    assert f"--data-dir: {data}/f.tgz {said}" in refuse(tmp_path, "--data-dir", str(data))
    assert not site.seen and (data / "f.tgz").read_bytes() == wrong


def test_data_dir_is_checked_before_anything_is_downloaded(site, tmp_path, data):
    (data / "f.tgz").write_bytes(BAD)
    path = manifest(tmp_path, site.url + "f.tgz")
    other = site.put("a.tgz", Reply())
    path.write_text(f"{path.read_text()}a.tgz\t{len(GOOD)}\t{SHA256}\t{other}\n")
    refuse(tmp_path, "--data-dir", str(data), "a.tgz")
    assert not site.seen


def without_manifest(folder, *more):
    return ["--manifest", "none", "--output", str(folder / "out"), *more]


def test_without_a_manifest_files_are_taken_as_they_are(tmp_path, data, capsys):
    module.main(without_manifest(tmp_path, "--data-dir", str(data), "f.tgz"))
    assert capsys.readouterr().out == f"f.tgz: in {data}, taken as it is (--manifest none)\n"
    assert not (tmp_path / "out").exists()


def test_without_a_manifest_nothing_is_downloaded(tmp_path, data):
    said = refuse(tmp_path, "--data-dir", str(data), "f.tgz", "g.tgz", words=without_manifest)
    assert f"g.tgz is not in --data-dir {data}, and without a manifest nothing is downloaded" in said
    said = refuse(tmp_path, "f.tgz", words=without_manifest)
    assert "f.tgz is not in --data-dir, which is not given" in said


@pytest.mark.parametrize(
    "more, said",
    [
        (["--data-dir", "no/such"], "--data-dir no/such: must be a folder that exists"),
        (["--retries", "-1"], "--retries -1: must be 0 or more"),
        (["--wait", "nan"], "--wait nan: must be 0 or more"),
        (["../f.tgz"], "file is '../f.tgz', and must be a file's name without a folder"),
        (["g.tgz"], "manifest.tsv: has no g.tgz; it has f.tgz"),
        (["--manifest", "no/such.tsv"], "no/such.tsv: No such file or directory"),
    ],
)
def test_bad_flags_are_refused_by_name(site, tmp_path, more, said):
    manifest(tmp_path, site.put("f.tgz", Reply()))
    assert said in refuse(tmp_path, *more)
    assert not site.seen


def test_output_must_be_another_folder_than_data_dir_and_no_file(site, tmp_path, data):
    manifest(tmp_path, site.put("f.tgz", Reply()))
    with pytest.raises(SystemExit, match="must not be --data-dir, which is only ever read"):
        module.main(words(tmp_path, "--data-dir", str(data), "--output", str(data)))
    with pytest.raises(SystemExit, match=r"--output .*manifest.tsv: must be a folder"):
        module.main(words(tmp_path, "--output", str(tmp_path / "manifest.tsv")))


# -- manifests ---------------------------------------------------------------------------------------

LINE = f"f.tgz\t1\t{SHA256}\thttp://h/f"
ALLOWED = {
    "file": "must be a file's name without a folder",
    "bytes": "must be a number greater than 0, or - where it is unknown",
    "checksum": "must be sha256: and 64 hexadecimal digits or md5: and 32 hexadecimal digits",
    "url": "must be addresses in ASCII that begin with http:// or https://, separated by blanks",
}
BAD_VALUES = {
    "file": ["", ".", "..", "../f", "/etc/f", "a/f", "a\\f", "f\x00"],
    "bytes": ["", "0", "-1", "1e3", "1,000", "1.5", "much", "²", "٣"],
    "checksum": ["", "-", "sha256", SHA256[:-1], SHA256 + "0", SHA256[7:], f"sha1:{0:040}", "md5:xyz", "x:"],
    "url": ["", "h/f", "file:///etc/passwd", "ftp://h/f", "http://ü/f"],
}


@pytest.mark.parametrize(
    "column, value", [(column, value) for column, values in BAD_VALUES.items() for value in values]
)
def test_a_bad_value_in_a_manifest_is_refused_by_line_and_column(tmp_path, column, value):
    path = tmp_path / "manifest.tsv"
    columns = dict(zip(ALLOWED, LINE.replace("f.tgz", "g.tgz").split("\t"), strict=True)) | {column: value}
    path.write_text("file\tbytes\tchecksum\turl\n" + LINE + "\n" + "\t".join(columns.values()) + "\n")
    said = refuse(tmp_path)
    assert f"--manifest {path}, line 3: {column} is {value!r}, and {ALLOWED[column]}" in said


@pytest.mark.parametrize(
    "text, line, said",
    [
        ("", 1, "is '', and must be file, bytes, checksum, url"),
        ("file bytes checksum url\n", 1, "is 'file bytes checksum url', and must be"),
        (f"{LINE}\n", 1, "and must be file, bytes"),
        ("HEAD\nf.tgz\t1\n", 2, "has 2 columns, and must have 4, separated by tabs: file, bytes, checksum,"),
        (f"HEAD\n\n{LINE}\tmore\n", 3, "has 5 columns"),
        (f"HEAD\n{LINE}\n{LINE}\n", 3, "f.tgz stands there a second time"),
        (f"HEAD\n{LINE} g\n", 2, "url is 'g'"),
    ],
)
def test_a_bad_manifest_is_refused_by_line(tmp_path, text, line, said):
    path = tmp_path / "manifest.tsv"
    path.write_text(text.replace("HEAD", "file\tbytes\tchecksum\turl"))
    refused = refuse(tmp_path)
    assert f"--manifest {path}, line {line}: " in refused and said in refused


def test_a_manifest_from_windows_and_with_empty_lines_is_read(tmp_path):
    path = tmp_path / "manifest.tsv"
    path.write_bytes(f"file\tbytes\tchecksum\turl\r\n\r\n{LINE} http://i/f\r\n".encode())
    entry = module.read_manifest(path)["f.tgz"]
    assert entry == module.Entry("f.tgz", 1, SHA256, ("http://h/f", "http://i/f"))


def test_a_manifest_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "manifest.tsv").write_bytes(b"file\xff")
    assert "is not UTF-8 at byte 4" in refuse(tmp_path)


def test_the_manifest_of_wmt14_names_its_five_files():
    entries = module.read_manifest(ROOT / "recipes" / "wmt14_en_de" / "manifest.tsv")
    assert {name: entry.size for name, entry in entries.items()} == {
        "training-parallel-europarl-v7.tgz": 657632379,
        "training-parallel-commoncrawl.tgz": 918311367,
        "training-parallel-nc-v9.tgz": 80418416,
        "dev.tgz": None,
        "test-full.tgz": None,
    }
    assert all(address.endswith(name) for name, entry in entries.items() for address in entry.addresses)
