"""Check the files of a corpus, and download those that are missing, with curl.

    python -m recipes.text.fetch --manifest FILE.tsv|none --output DIR [--data-dir DIR] FILE …

The manifest has the names, sizes, checksums and URLs. If a checksum in it is ``-``, for unknown, the size and checksum
of the file are printed. Files in ``--data-dir`` are checked and never written to. All other files are downloaded into
``--output`` as ``NAME.part``, which the next attempt or run continues. A file gets its name when its size and checksum
are right.
"""

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, Popen
from typing import NamedTuple

from fairseq_rope import __version__
from fairseq_rope.errors import InputError, ending_in_one_sentence
from fairseq_rope.files import checksum
from fairseq_rope.lines import lines_of
from recipes.text.lines import progress

COLUMNS = {  # for each column of a manifest: the pattern of a value, and its description in messages
    "file": (r"(?!\.\.?$)[^/\\]+", "a file's name without a folder"),
    "bytes": ("-|[1-9][0-9]*", "a number greater than 0, or - where it is unknown"),
    "checksum": ("-|sha256:[0-9a-f]{64}|md5:[0-9a-f]{32}", "sha256: and 64 hexadecimal digits, md5: and 32, or -"),
    "url": (" *https?://[!-~]+( +https?://[!-~]+)* *", "addresses, http:// or https://, separated by blanks"),
}
# Needs curl 7.63 (2018) or later. With curl's own --retry (7.88), each attempt starts where the first one started, so
# that a server which cuts every connection never gives the whole file.
CURL = (
    "curl --disable --fail --location --proto =http,https --proto-redir =http,https --globoff --silent --show-error "
    f"--no-buffer --user-agent fairseq-rope/{__version__} --write-out %{{stderr}}\\n%{{http_code}} --speed-limit 1"
).split()
HTTP_ERROR, RANGE_ERROR = 22, 33  # exit statuses of curl
FINAL = (1, 3, 47, 63)  # statuses that another attempt cannot change: protocol, URL, redirections, size
TIMEOUT = 60  # seconds without a byte after which a connection counts as lost


class Entry(NamedTuple):
    """A line of a manifest. *size* and *checksum* are None for ``-``; *checksum* is ``sha256:…`` or ``md5:…``."""

    name: str
    size: int | None
    checksum: str | None
    addresses: tuple[str, ...]  # in the order in which they are tried


def read_manifest(path: Path) -> dict[str, Entry]:
    """The entries of a manifest by file name. Raises an InputError that names the wrong line."""
    try:
        header, *rows = [line.rstrip("\r").split("\t") for line in lines_of(str(path))]
    except InputError as error:
        raise InputError(f"--manifest {error}") from None
    form = f"{', '.join(COLUMNS)}, separated by tabs"
    if header != list(COLUMNS):
        raise InputError(f"--manifest {path}, line 1: must be {form}")
    entries: dict[str, Entry] = {}
    for number, row in enumerate(rows, 2):
        where = f"--manifest {path}, line {number}: "
        if row == [""]:
            continue
        if len(row) != len(COLUMNS):
            raise InputError(f"{where}has {len(row)} columns, and must have {form}")
        for column, value in zip(COLUMNS, row, strict=True):
            _check(column, value, where)
        name, size, expected, url = row
        if name in entries:
            raise InputError(f"{where}{name} is listed twice")
        known = None if size == "-" else int(size), None if expected == "-" else expected.lower()
        entries[name] = Entry(name, *known, tuple(url.split()))
    return entries


def _check(column: str, value: str, where: str = "") -> None:
    form, allowed = COLUMNS[column]
    if not re.fullmatch(form, value, re.IGNORECASE) or not value.isprintable():
        raise InputError(f"{where}{column} is {value!r}, and must be {allowed}")


def what_is_wrong(path: Path, entry: Entry) -> str:
    """How *path* differs from its manifest *entry*; "" if it does not."""
    size = path.stat().st_size
    if entry.size is not None and size != entry.size:
        return f"has {size} bytes, and must have {entry.size}"
    if entry.checksum is None:
        return ""
    actual = checksum_of(path, entry.checksum.partition(":")[0])
    return "" if actual == entry.checksum else f"has the checksum {actual}, and must have {entry.checksum}"


def checksum_of(path: Path, kind: str) -> str:
    """The checksum of a file as a manifest has it; *kind* is sha256 or md5."""
    return f"{kind}:{checksum(path, kind)}"


def described(path: Path, entry: Entry) -> str:
    """Words for a message: what was checked of *path*; or its size and checksum if the manifest has no checksum."""
    if entry.checksum is not None:
        return "size and checksum are right"
    has = f"{path.stat().st_size} bytes, {checksum_of(path, 'sha256')}"
    return f"not compared with a checksum, which the manifest lacks; it has {has}"


def download(entry: Entry, folder: Path, retries: int, wait: float) -> str:
    """Download *entry* into *folder*. Returns the address that sent it. Raises an InputError that names every address.

    A complete file with a wrong checksum is removed and downloaded again from the next address. The last address gets
    a second attempt, because the part that an earlier run left may have been wrong.
    """
    part = folder / f"{entry.name}.part"
    if entry.size is not None and _size(part) >= entry.size:  # an earlier run was stopped before it could check
        if not what_is_wrong(part, entry):
            return _finish(part, folder / entry.name, "an earlier run's download")
        part.unlink()
    # Without a checksum, a part can be one of another address's file.
    may_be_another = entry.checksum is None and len(entry.addresses) > 1
    problems: list[str] = []
    addresses = list(entry.addresses)
    for address in addresses:
        if may_be_another:
            part.unlink(missing_ok=True)
        problem, is_final, failures, largest_size = "", False, 0, _size(part)
        while not is_final and failures <= retries:
            if failures:
                pause = min(wait * 2 ** (failures - 1), 120)
                print(f"  {address}: {problem}; attempt {failures + 1} in {pause:g} s", file=sys.stderr)
                time.sleep(pause)
            problem, is_final = _run_curl(part, entry, address)
            # A server that cuts the connection every few megabytes gives the whole file in the end.
            failures = 1 if _size(part) > largest_size else failures + 1
            largest_size = max(largest_size, _size(part))
        if not problem:
            problem = what_is_wrong(part, entry)
            if not problem:
                return _finish(part, folder / entry.name, address)
            part.unlink()
            if len(problems) == len(entry.addresses) - 1:
                addresses.append(address)
        problems.append(f"{address}: {problem}")
        print(f"  {problems[-1]}", file=sys.stderr)
    note = f"; {part} keeps {_size(part)} bytes for the next run" if part.exists() and not may_be_another else ""
    raise InputError(f"{entry.name} could not be downloaded: {'; '.join(problems)}{note}")


def _finish(part: Path, path: Path, origin: str) -> str:
    """Sync a checked *part* to the disk, rename it to *path*, and return *origin*."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
    return origin


def _run_curl(part: Path, entry: Entry, address: str) -> tuple[str, bool]:
    """Ask *address* once for the rest of *part*.

    Returns the problem, or "" if there is none, and whether another attempt would have the same result.
    """
    start = _size(part)
    limit = entry.size or start + shutil.disk_usage(part.parent).free
    flags = ("--connect-timeout", TIMEOUT, "--speed-time", TIMEOUT, "--max-filesize", limit, "--continue-at", start)
    words = [*CURL, *map(str, flags), address]
    bar = progress(None, entry.size, entry.name, "B", initial=start)
    try:
        # curl writes to a pipe, so that it cannot write to *part* after this process was killed.
        with part.open("ab") as file, bar, Popen(words, stdout=PIPE, stderr=PIPE) as curl:
            assert curl.stdout is not None and curl.stderr is not None
            try:
                while chunk := os.read(curl.stdout.fileno(), 2**18):
                    file.write(chunk)
                    file.flush()
                    bar.update(len(chunk))
                    if file.tell() > limit:
                        part.unlink()
                        return f"sends more than {limit} bytes", True
                errors, _, answer = curl.stderr.read().decode(errors="replace").rpartition("\n")
                status = curl.wait()
            finally:
                curl.kill()
    except OSError as error:
        raise InputError(f"{error.filename or part}: {error.strerror}") from None
    if not _size(part):
        part.unlink()
    if start and (status == RANGE_ERROR or (status == HTTP_ERROR and answer == "416")):
        print(f"  {address}: does not send parts of a file; starting again", file=sys.stderr)
        part.unlink()
        return _run_curl(part, entry, address)
    if status == HTTP_ERROR:
        return f"answered {answer}", answer < "500" and answer not in ("408", "429")
    if status == 0 and _size(part) < (entry.size or 0):
        return f"connection ended after {_size(part)} of {entry.size} bytes", False
    if status == 0:
        return ("" if _size(part) else "sends an empty file"), True
    problem = re.sub(r"^curl: \(\d+\) ", "", errors.strip().rpartition("\n")[2]) or f"curl ended with status {status}"
    return f"{problem}, after {_size(part)} bytes", status in FINAL


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_there(path: Path, entry: Entry | None, flag: str) -> bool:
    """Whether *path*, in the folder of *flag*, exists and is right. A wrong file in --output is removed."""
    if not path.exists():
        return False
    if not path.is_file():
        raise InputError(f"{flag}: {path} is not a file")
    problem = "" if entry is None else what_is_wrong(path, entry)
    if problem and flag == "--data-dir":
        raise InputError(f"--data-dir: {path} {problem}")
    if problem:
        print(f"{path.name}: {path} is broken and will be downloaded again: it {problem}", flush=True)
        path.unlink()
        return False
    checked = described(path, entry) if entry else "not checked (--manifest none)"
    print(f"{path.name}: in {path.parent}, {checked}", flush=True)
    return True


def ensure(
    names: Sequence[str], manifest: Path | None, output: Path, data_dir: Path | None, retries: int, wait: float
) -> None:
    """Check the files *names* in *data_dir* and *output*, and download the missing ones. All checks come first."""
    for name in names:
        _check("file", name)
    if data_dir is not None and not data_dir.is_dir():
        raise InputError(f"--data-dir {data_dir}: must be a folder that exists")
    if data_dir is not None and output.exists() and data_dir.samefile(output):
        raise InputError(f"--output {output}: must differ from --data-dir, which is never written to")
    entries = {} if manifest is None else read_manifest(manifest)
    for name in names:
        if manifest is not None and name not in entries:
            raise InputError(f"--manifest {manifest}: has no {name}; it has {', '.join(entries) or 'no file'}")
    missing = [n for n in names if data_dir is None or not _is_there(data_dir / n, entries.get(n), "--data-dir")]
    if manifest is None and missing:
        where = "--data-dir, which is not given" if data_dir is None else f"--data-dir {data_dir}"
        raise InputError(f"{missing[0]} is not in {where}, and a download needs a manifest")
    wanted = [entries[name] for name in missing if not _is_there(output / name, entries[name], "--output")]
    if not wanted:
        return
    if shutil.which("curl") is None:
        raise InputError(f"{wanted[0].name} must be downloaded, and the program curl is not installed")
    output.mkdir(parents=True, exist_ok=True)
    needed = sum(max(0, (entry.size or 0) - _size(output / f"{entry.name}.part")) for entry in wanted)
    free = shutil.disk_usage(output).free
    if needed > free:
        needs = f"the downloads need {needed / 1e9:.3f} GB, and {free / 1e9:.3f} GB are free"
        raise InputError(f"--output {output}: {needs}")
    for entry in wanted:
        address = download(entry, output, retries, wait)
        checked = described(output / entry.name, entry)
        print(f"{entry.name}: downloaded from {address}, {checked}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.text.fetch", description="Check files; download what is missing.")
    flag = parser.add_argument
    flag("--manifest", required=True, metavar="FILE", help="a table of file, bytes, checksum and url, or none")
    flag("--output", required=True, type=Path, metavar="DIR", help="where downloads go")
    flag("--data-dir", type=Path, metavar="DIR", help="folder of existing files; never written to")
    flag("--retries", type=int, default=4, metavar="N", help="further attempts at an address (default: %(default)s)")
    wait = "seconds before the second attempt, then doubled (default: %(default)s)"
    flag("--wait", type=float, default=2.0, metavar="S", help=wait)
    flag("files", nargs="+", metavar="FILE", help="names of files, as in the manifest")
    args = parser.parse_args(argv)
    names, manifest = list(dict.fromkeys(args.files)), None if args.manifest == "none" else Path(args.manifest)
    with ending_in_one_sentence("recipes.text.fetch"):
        for name, value in (("--retries", args.retries), ("--wait", args.wait)):
            if not value >= 0:
                raise InputError(f"{name} {value}: must be 0 or more")
        ensure(names, manifest, args.output, args.data_dir, args.retries, args.wait)


if __name__ == "__main__":
    main()
