"""Check the files of a corpus, and download those that are missing, with curl.

    python -m recipes.text.fetch --manifest FILE.tsv --output DIR FILE …

A manifest has one line for each file: its name, size, checksum and address; ``-`` stands for unknown. A download is
written to ``NAME.part``, which the next run continues, and gets its name when its size and checksum are right.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fairseq_rope.errors import InputError, ending_in_one_sentence
from fairseq_rope.files import checksum
from fairseq_rope.lines import lines_of

COLUMNS = {  # for each column of a manifest: the pattern of a value, and its description in messages
    "file": (r"(?!\.\.?$)[^/\\\0]+", "a file's name without a folder"),
    "bytes": ("-|[1-9][0-9]*", "a number greater than 0, or - where it is unknown"),
    "checksum": ("-|sha256:[0-9a-f]{64}|md5:[0-9a-f]{32}", "sha256: and 64 hexadecimal digits, md5: and 32, or -"),
    "url": ("https?://[!-~]+", "an address, http:// or https://"),
}
CURL = "curl --fail --location --proto =http,https --globoff --show-error --speed-time 60 --retry 5 --continue-at -"


class Entry(NamedTuple):
    """A line of a manifest. *size* and *checksum* are None for ``-``; *checksum* is ``sha256:…`` or ``md5:…``."""

    name: str
    size: int | None
    checksum: str | None
    url: str


def read_manifest(path: Path) -> dict[str, Entry]:
    """The entries of a manifest by file name. Raises an InputError that names the wrong line."""
    entries: dict[str, Entry] = {}
    for number, line in enumerate(lines_of(str(path)), 1):
        row = line.rstrip("\r").split("\t")
        if row == [""] or (number == 1 and row == list(COLUMNS)):
            continue
        if number == 1 or len(row) != len(COLUMNS):
            raise InputError(f"{path}, line {number}: must be {', '.join(COLUMNS)}, separated by tabs")
        for (column, (pattern, allowed)), value in zip(COLUMNS.items(), row, strict=True):
            if not re.fullmatch(pattern, value):
                raise InputError(f"{path}, line {number}: {column} is {value!r}, and must be {allowed}")
        name, size, known, url = row
        entries[name] = Entry(name, None if size == "-" else int(size), None if known == "-" else known, url)
    return entries


def check(path: Path, entry: Entry) -> str:
    """How the size or checksum of *path* differs from *entry*; "" if neither does."""
    size = path.stat().st_size
    if entry.size is not None and size != entry.size:
        return f"has {size} bytes, and must have {entry.size}"
    kind = entry.checksum.partition(":")[0] if entry.checksum else ""
    actual = f"{kind}:{checksum(path, kind)}" if kind else None
    return "" if actual == entry.checksum else f"has the checksum {actual}, and must have {entry.checksum}"


def fetch(entry: Entry, folder: Path) -> Path:
    """Return the path of the file *entry* in *folder*. Downloads it unless a file with its checksum is there."""
    path, part = folder / entry.name, folder / f"{entry.name}.part"
    if path.exists():
        if not (problem := check(path, entry)):
            return path
        print(f"{path} {problem}; it is downloaded again", file=sys.stderr)
        path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    meter = "--progress-bar" if sys.stderr.isatty() else "--silent"
    command = [*CURL.split(), meter, "--output", str(part), entry.url]
    status = subprocess.run(command).returncode
    if status == 33:  # the server cannot continue a download
        part.unlink()
        status = subprocess.run(command).returncode
    if status:
        note = f"; the next run continues {part}" if part.exists() else ""
        raise InputError(f"{entry.url}: curl ended with status {status}{note}")
    if problem := check(part, entry):
        part.unlink()
        raise InputError(f"{entry.url}: the download {problem}; it was removed")
    with part.open("rb") as file:
        os.fsync(file.fileno())
    return part.replace(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.text.fetch", description="Check files; download what is missing.")
    parser.add_argument("--manifest", required=True, type=Path, metavar="FILE", help="file, bytes, checksum, url")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder of the files")
    parser.add_argument("files", nargs="+", metavar="FILE", help="names of files, as in the manifest")
    args = parser.parse_args(argv)
    with ending_in_one_sentence("recipes.text.fetch"):
        entries = read_manifest(args.manifest)
        for name in args.files:
            if name not in entries:
                raise InputError(f"{args.manifest}: has no {name}; it has {', '.join(entries) or 'no file'}")
        for path in [fetch(entries[name], args.output) for name in dict.fromkeys(args.files)]:
            print(f"{path}: {path.stat().st_size} bytes, sha256:{checksum(path)}", flush=True)


if __name__ == "__main__":
    main()
