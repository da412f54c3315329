"""Check the files of a corpus, and download those that are missing.

    python -m recipes.text.fetch --manifest FILE.tsv|none --output DIR [--data-dir DIR] FILE …

Names, sizes, checksums and addresses stand in the manifest. What lies in ``--data-dir`` was fetched
elsewhere: it is checked and never written to. Everything else is downloaded into ``--output``: into
``NAME.part``, which the next attempt or the next run goes on with, and which gets its name when size and
checksum are right.
"""

import argparse
import hashlib
import http.client
import io
import os
import re
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from fairseq_rope import __version__
from fairseq_rope.errors import InputError, ending_in_one_sentence

HEADER = ("file", "bytes", "checksum", "url")
DIGITS = {"sha256": 64, "md5": 32}  # the kinds of checksum, and how many hexadecimal digits each has
CHUNK = 2**18
TIMEOUT = 60.0  # seconds without a byte after which a connection counts as lost
LONGEST_WAIT = 120.0  # seconds between two attempts
PASSING = (408, 429)  # of the answers 4xx, those that another attempt can change


class FetchError(InputError):
    """A file is not there and cannot be had, or is wrong; the message names it, with both values."""


class _AttemptFailed(Exception):
    """An attempt at an address failed; another one may succeed."""


class _RangeFailed(_AttemptFailed):
    """The server did not give the rest of the file; it may give the whole."""


class _AddressRefused(Exception):
    """What an address has is not the file, and asking again would not change that."""


@dataclass(frozen=True)
class Entry:
    """A line of a manifest.

    Attributes:
        name: the file's name, without a folder
        size: in bytes; None where the manifest has ``-``
        checksum: ``sha256:…`` or ``md5:…``, in lower case
        addresses: where the file can be had, in the order in which they are tried
    """

    name: str
    size: int | None
    checksum: str
    addresses: tuple[str, ...]


def read_manifest(path: Path) -> dict[str, Entry]:
    """The entries of a manifest by file name: columns file, bytes, checksum and url, separated by tabs.

    Raises:
        FetchError: a line is not as it must be; the message names it, and what is allowed
        OSError: the file cannot be read
    """
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise FetchError(f"--manifest {path}: is not UTF-8 at byte {error.start}") from None
    if tuple(lines[0].rstrip("\r").split("\t")) != HEADER:
        raise FetchError(
            f"--manifest {path}, line 1: is {lines[0]!r}, and must be {', '.join(HEADER)}, separated by tabs"
        )
    entries: dict[str, Entry] = {}
    for number, line in enumerate(lines[1:], 2):
        line = line.rstrip("\r")
        if line:
            try:
                entry = _entry(line.split("\t"))
                if entry.name in entries:
                    raise FetchError(f"{entry.name} stands there a second time")
            except FetchError as error:
                raise FetchError(f"--manifest {path}, line {number}: {error}") from None
            entries[entry.name] = entry
    return entries


def _entry(columns: list[str]) -> Entry:
    if len(columns) != len(HEADER):
        raise FetchError(
            f"has {len(columns)} columns, and must have {len(HEADER)}, separated by tabs: {', '.join(HEADER)}"
        )
    name, size, checksum, url = columns
    _check_name(name)
    if size != "-" and not re.fullmatch("[1-9][0-9]*", size, re.ASCII):
        raise FetchError(f"bytes is {size!r}, and must be a number greater than 0, or - where it is unknown")
    kind, _, digits = checksum.lower().partition(":")
    if not re.fullmatch(f"[0-9a-f]{{{DIGITS.get(kind, 0)}}}", digits) or kind not in DIGITS:
        allowed = " or ".join(f"{kind}: and {count} hexadecimal digits" for kind, count in DIGITS.items())
        raise FetchError(f"checksum is {checksum!r}, and must be {allowed}")
    addresses = tuple(url.split())
    for address in addresses or ("",):
        if not re.fullmatch(r"https?://[!-~]+", address):
            raise FetchError(
                f"url is {address!r}, and must be addresses in ASCII that begin with http:// or https://, "
                f"separated by blanks"
            )
    return Entry(name, None if size == "-" else int(size), checksum.lower(), addresses)


def _check_name(name: str) -> None:
    if name in ("", ".", "..") or not name.isprintable() or re.search(r"[/\\]", name):
        raise FetchError(f"file is {name!r}, and must be a file's name without a folder")


def what_is_wrong(path: Path, entry: Entry) -> str:
    """How *path* differs from what the manifest says of it, both values named; "" if it does not."""
    size = path.stat().st_size
    if entry.size is not None and size != entry.size:
        return f"has {size} bytes, and must have {entry.size}"
    kind = entry.checksum.partition(":")[0]
    digest = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as file, _bar(f"checking {entry.name}", size, delay=2) as bar:
        while chunk := file.read(2**20):
            digest.update(chunk)
            bar.update(len(chunk))
    found = f"{kind}:{digest.hexdigest()}"
    return "" if found == entry.checksum else f"has the checksum {found}, and must have {entry.checksum}"


def _bar(title: str, total: int | None, initial: int = 0, delay: float = 0) -> tqdm:
    style = {"unit": "B", "unit_scale": True, "mininterval": 0.5}
    return tqdm(desc=f"  {title}", total=total, initial=initial, delay=delay, **style)


def download(entry: Entry, folder: Path, retries: int = 4, wait: float = 2.0) -> str:
    """Fetch *entry* into *folder*, from the first of its addresses that has it.

    An address is given up for the next one where it says that it does not have the file, where it has
    another one, and where *retries* further attempts in a row brought no new bytes. A file that is complete
    and wrong is removed, and fetched anew from the next address; once from the same one if it was the last,
    since what an earlier run had left may have been the wrong part of it.

    Args:
        retries: attempts at an address after the first one
        wait: seconds before the second attempt, doubled for each further one

    Returns: the address; "" if an earlier run had fetched all of it

    Raises:
        FetchError: no address gave the file; what came of each is named, and what is kept
    """
    part = folder / f"{entry.name}.part"
    had = _size(part)
    if had and (entry.size is None or had >= entry.size):
        if not what_is_wrong(part, entry):
            _finish(part, folder / entry.name)
            return ""
        if entry.size is not None:
            part.unlink()
    problems = []
    addresses = list(entry.addresses)
    once_wrong = False
    while addresses:
        address = addresses.pop(0)
        problem = _fill(part, entry, address, retries, wait)
        if not problem:
            problem = what_is_wrong(part, entry)
            if not problem:
                _finish(part, folder / entry.name)
                return address
            part.unlink()
            if not once_wrong and not addresses:
                addresses.append(address)
            once_wrong = True
        problems.append(f"{address}: {problem}")
        if addresses:
            _say(f"{problems[-1]}; going on with {addresses[0]}")
    kept = f"; {part} keeps {_size(part)} bytes for the next run" if _size(part) else ""
    raise FetchError(f"{entry.name} could not be fetched: {'; '.join(problems)}{kept}")


def _fill(part: Path, entry: Entry, address: str, retries: int, wait: float) -> str:
    """Attempt to complete *part* from *address*. Returns why the address was given up; "" if it was not."""
    failures = 0
    ranges = True
    most = _size(part)
    while True:
        try:
            _transfer(part, entry, address, ranges)
            return ""
        except _AddressRefused as refusal:
            return str(refusal)
        except _AttemptFailed as failure:
            problem = str(failure)
            ranges = ranges and not isinstance(failure, _RangeFailed)
        # A server that cuts the connection every few megabytes gives the whole file in the end.
        failures = 1 if _size(part) > most else failures + 1
        most = max(most, _size(part))
        if failures > retries:
            return f"{problem} (attempt {failures} of {failures})"
        pause = min(wait * 2 ** (failures - 1), LONGEST_WAIT)
        _say(f"{address}: {problem}; attempt {failures + 1} of {retries + 1} in {pause:g} s")
        time.sleep(pause)


def _transfer(part: Path, entry: Entry, address: str, ranges: bool) -> None:
    """Ask *address* once for what *part* lacks, or for the whole if not *ranges*; returns with it complete.

    Raises:
        _AttemptFailed, _AddressRefused: it is not complete
        FetchError: it cannot be written
    """
    had = _size(part)
    offset = had if ranges else 0
    headers = {"User-Agent": f"fairseq-rope/{__version__}"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    try:
        reply = urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        answer = f"answered {error.code} {error.reason}"
        if error.code == 416 and offset:
            raise _RangeFailed(f"{answer} to a request for what follows byte {offset}") from None
        if error.code >= 500 or error.code in PASSING:
            raise _AttemptFailed(answer) from None
        raise _AddressRefused(answer) from None
    except (ValueError, http.client.InvalidURL) as error:  # a host or port that cannot be one
        raise _AddressRefused(str(error)) from None
    except (OSError, http.client.HTTPException) as error:
        raise _AttemptFailed(_reason(error)) from None
    with reply:
        if reply.status == 206 and offset:
            total = _total_of_range(reply, offset)
        elif reply.status == 200:
            if offset:
                _say(f"{address}: gives no part of a file; starting anew")
            offset = 0
            total = reply.length
        else:
            raise _AttemptFailed(f"answered {reply.status} {reply.reason}")
        if total is not None and entry.size is not None and total != entry.size:
            raise _AddressRefused(f"has a file of {total} bytes, and {entry.size} are expected")
        whole = entry.size if entry.size is not None else total
        if whole is not None:
            refuse_full_disk(part.parent, whole - had)
        _copy(reply, part, offset, entry, whole)


def _total_of_range(reply: http.client.HTTPResponse, offset: int) -> int | None:
    """The size of the whole file by the Content-Range of *reply*, which must begin at *offset*."""
    found = reply.headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", found.strip())
    if match is None or int(match.group(1)) != offset:
        raise _RangeFailed(f"answered with {found!r} to a request for what follows byte {offset}")
    return None if match.group(2) == "*" else int(match.group(2))


def _copy(reply: http.client.HTTPResponse, part: Path, offset: int, entry: Entry, whole: int | None) -> None:
    """Write the body of *reply* to *part* from *offset* on.

    Args:
        whole: the bytes that the file has in the end, if anything tells
    """
    position = offset
    end = None if reply.length is None else offset + reply.length
    with _open(part, "ab" if offset else "wb") as file, _bar(entry.name, whole, offset) as bar:
        while end is None or position < end:
            try:
                # Before Python 3.13, read1 does not stop by itself at the length that was announced.
                chunk = reply.read1(CHUNK if end is None else min(CHUNK, end - position))
            except (OSError, http.client.HTTPException) as error:
                raise _AttemptFailed(f"{_reason(error)} after {_of(position, whole)} bytes") from None
            if not chunk:
                break
            position += len(chunk)
            if whole is not None and position > whole:
                part.unlink()
                raise _AddressRefused(f"sends more bytes than the {whole} expected")
            try:
                while chunk:  # a disk that is nearly full takes a part of it
                    chunk = chunk[file.write(chunk) :]
            except OSError as error:
                raise FetchError(f"{part}: {error.strerror}") from None
            bar.update(position - bar.n)
    if position < max(end or 0, whole or 0):
        raise _AttemptFailed(f"connection ended after {_of(position, whole)} bytes")


def _open(path: Path, mode: str) -> io.FileIO:
    try:
        return io.FileIO(path, mode)  # unbuffered: what has come is in the file, however this ends
    except OSError as error:
        raise FetchError(f"{path}: {error.strerror}") from None


def _of(position: int, whole: int | None) -> str:
    return str(position) if whole is None else f"{position} of {whole}"


def _reason(error: Exception) -> str:
    """What went wrong with a connection, in a few words."""
    cause = getattr(error, "reason", error)  # of an URLError
    if isinstance(cause, TimeoutError):
        return f"no answer for {TIMEOUT:g} s"
    if isinstance(cause, http.client.IncompleteRead):
        return "connection ended"
    return (getattr(cause, "strerror", None) or str(cause) or type(cause).__name__).lower()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _finish(part: Path, path: Path) -> None:
    """Give a checked *part* its name, once it is on the disk."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(part, path)


def _say(sentence: str) -> None:
    print(f"  {sentence}", file=sys.stderr, flush=True)


def refuse_full_disk(folder: Path, needed: int) -> None:
    """Raise a FetchError if *folder* has no room for *needed* more bytes."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise FetchError(
            f"--output {folder}: {needed / 1e9:.3f} GB are still to be downloaded, and {free / 1e9:.3f} GB are free"
        )


def _in_data_dir(folder: Path | None, name: str, entry: Entry | None) -> bool:
    """Whether *folder* has the file *name*; one that is not as *entry* says is refused."""
    if folder is None or not (folder / name).exists():
        return False
    path = folder / name
    if not path.is_file():
        raise FetchError(f"--data-dir: {path} is not a file")
    if entry is None:
        print(f"{name}: in {folder}, taken as it is (--manifest none)", flush=True)
        return True
    problem = what_is_wrong(path, entry)
    if problem:
        raise FetchError(f"--data-dir: {path} {problem}")
    print(f"{name}: in {folder}, size and checksum are right", flush=True)
    return True


def _in_output(folder: Path, entry: Entry) -> bool:
    """Whether *folder* has the file already; one that is broken is named."""
    path = folder / entry.name
    if not path.exists():
        return False
    if not path.is_file():
        raise FetchError(f"--output: {path} is not a file")
    problem = what_is_wrong(path, entry)
    if problem:
        print(f"{entry.name}: {path} is broken, and fetched again: it {problem}", flush=True)
        path.unlink()
        return False
    print(f"{entry.name}: in {folder}, size and checksum are right", flush=True)
    return True


def ensure(
    names: Sequence[str],
    manifest: Path | None,
    output: Path,
    data_dir: Path | None = None,
    retries: int = 4,
    wait: float = 2.0,
) -> None:
    """See that each of *names* is in *data_dir* or *output*, as the manifest says; download what is not.

    Everything that can be refused is refused before the first download.

    Raises:
        FetchError: see the message
        OSError: a file or folder cannot be read or written
    """
    for name in names:
        _check_name(name)
    if data_dir is not None and not data_dir.is_dir():
        raise FetchError(f"--data-dir {data_dir}: must be a folder that exists")
    if output.exists() and not output.is_dir():
        raise FetchError(f"--output {output}: must be a folder")
    if data_dir is not None and output.exists() and data_dir.samefile(output):
        raise FetchError(f"--output {output}: must not be --data-dir, which is only ever read")
    if manifest is None:
        missing = [name for name in names if not _in_data_dir(data_dir, name, None)]
        if missing:
            where = "--data-dir, which is not given" if data_dir is None else f"--data-dir {data_dir}"
            raise FetchError(f"{missing[0]} is not in {where}, and without a manifest nothing is downloaded")
        return
    entries = read_manifest(manifest)
    for name in names:
        if name not in entries:
            known = ", ".join(entries) or "no file"
            raise FetchError(f"--manifest {manifest}: has no {name}; it has {known}")
    wanted = [
        entries[name]
        for name in names
        if not _in_data_dir(data_dir, name, entries[name]) and not _in_output(output, entries[name])
    ]
    if not wanted:
        return
    output.mkdir(parents=True, exist_ok=True)
    refuse_full_disk(output, sum(entry.size - _size(output / f"{entry.name}.part") for entry in wanted if entry.size))
    for entry in wanted:
        address = download(entry, output, retries, wait)
        fetched = f"fetched from {address}" if address else "fetched by an earlier run"
        print(f"{entry.name}: {fetched}, size and checksum are right", flush=True)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="recipes.text.fetch", description="See that files are there, whole and right; download those that are not."
    )
    parser.add_argument(
        "--manifest", required=True, metavar="FILE",
        help="a table of file, bytes, checksum and url; none: the files are in --data-dir, unchecked",
    )  # fmt: skip
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="where downloads go")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="files fetched elsewhere; only read")
    parser.add_argument(
        "--retries", type=int, default=4, metavar="N",
        help="further attempts at an address that fails; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--wait", type=float, default=2.0, metavar="SECONDS",
        help="before the second attempt, doubled for each further one; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("files", nargs="+", metavar="FILE", help="names of files, as in the manifest")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; exits with status 1 and one sentence on standard error if it cannot."""
    args = build_parser().parse_args(argv)
    manifest = None if args.manifest == "none" else Path(args.manifest)
    names = list(dict.fromkeys(args.files))
    with ending_in_one_sentence("recipes.text.fetch"):
        for flag, value in (("--retries", args.retries), ("--wait", args.wait)):
            if not value >= 0:
                raise FetchError(f"{flag} {value}: must be 0 or more")
        try:
            ensure(names, manifest, args.output, args.data_dir, args.retries, args.wait)
        except KeyboardInterrupt:
            _say("stopped; what has come is kept as .part, and the next run goes on from there")
            sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
