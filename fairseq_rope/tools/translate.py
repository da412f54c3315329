"""Translate plain text with an exported model: ``fairseq-rope translate``."""

import argparse
import codecs
import contextlib
import gzip
import itertools
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import IO, Any

from ..errors import ending_in_one_sentence, refuse_output
from ..files import checksum, written_whole
from ..lines import GZIP, naming_damage
from ..serving.ctranslate2_search import Sampling
from ..serving.exported_folder import CHARACTERS, SETTINGS, TranslateError, exported_settings, refuse_out_of_range
from ..serving.parts import Settings, divide, lines_of, translate_files
from ..serving.translator import LINES, Translator, available_cores, decoded, in_chunks
from . import FILE, INTEGER, NUMBER, REQUIRED, SWITCH, add_flags, command_parser

SEARCH = ("beam", "lenpen", "max_len_b")  # settings of the search that flags change
WAIT = 0.1  # seconds that the first line of a chunk waits for others


@contextlib.contextmanager
def opened(path: str | None) -> Iterator[tuple[Callable[[int], bytes], str]]:
    """Yield a function that reads bytes from *path* or standard input, and the name of the input in messages."""
    if path is None or path == "-":
        # Not sys.stdin.buffer: it holds a lock while it waits for input, and Python aborts if it exits then.
        yield partial(os.read, sys.stdin.fileno()), "standard input"
        return
    with open(path, "rb", buffering=0) as file:
        if not path.endswith(".gz") and file.seekable():
            if file.read(len(GZIP)) == GZIP:
                raise TranslateError(f"--input {path}: is compressed with gzip; its name must end in .gz")
            file.seek(0)
        yield gzip.GzipFile(fileobj=file).read1 if path.endswith(".gz") else file.read, path


def _lines(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """Yield the lines that *read* reads, without line ends, up to one that has too many characters."""
    rest = b""
    while True:
        block = read(1 << 16)
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
        if not block or len(rest) > 4 * CHARACTERS:
            if rest:
                yield rest
            return


def as_they_come(read: Callable[[int], bytes], name: str, wait: float | None = WAIT) -> Iterator[list[str]]:
    """Yield lists of up to LINES lines of a file, each with the lines that arrive within *wait* seconds.

    With None, all lists but the last have LINES lines.

    Raises:
        InputError: a line is not UTF-8 or has too many characters, or a compressed file is damaged; the
            lines before it have been yielded
    """
    lines: queue.Queue[Any] = queue.Queue(4 * LINES)

    def put_lines() -> None:
        try:
            with naming_damage(name):
                for number, line in enumerate(_lines(read), start=1):
                    lines.put(decoded(line, name, number))
            lines.put(None)
        except Exception as error:
            lines.put(error)

    threading.Thread(target=put_lines, daemon=True).start()
    while True:
        last = lines.get()
        until = None if wait is None else time.monotonic() + wait
        chunk = []
        while isinstance(last, str):
            chunk.append(last)
            if len(chunk) == LINES:
                break
            try:
                last = lines.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
        if chunk:
            yield chunk
        if isinstance(last, Exception):
            raise last
        if last is None:
            return


@contextlib.contextmanager
def output(path: str | None) -> Iterator[IO[str]]:
    """Yield standard output, or a file that appears as *path* when the block ends without an error."""
    if path is None:
        if hasattr(signal, "SIGPIPE"):  # the reader of the output may stop early, as head does
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
        yield sys.stdout
        return
    with written_whole(os.path.realpath(path), suffix=f".{os.getpid()}.tmp") as (file,):
        yield codecs.getwriter("utf-8")(file)  # type: ignore[misc]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    description = "Translate plain text, one sentence per line, with an exported model."
    parser = command_parser("translate", description, "--model served < raw.en > translated.de")
    devices = {"choices": ("cpu", "cuda", "auto"), "default": "cpu"}
    longer = "how many tokens longer than its source an output may be; default: the exported setting, usually 50"
    best = (
        "write the N best translations of each line, as NUMBER<tab>SCORE<tab>TRANSLATION: the line number, from 1, and "
        "fairseq's score, the log2 probability divided by length**lenpen"
    )
    documents = (
        "blank lines separate documents: translate consecutive sentences of a document together, in segments as long "
        "as those of the training; the output has the same lines; no context crosses segments"
    )
    threads = "CPU threads, of each process; default: all cores, divided by --jobs"
    shard = "divide the input into N shards and translate only number I, from 1; cat joins their outputs"
    rows = [
        ("--model", {**REQUIRED, "metavar": "DIR"}, "a folder that fairseq-rope export wrote"),
        ("--input", {**FILE, "nargs": "+", "action": "extend"}, "plain text or .gz; default: -, standard input"),
        ("--output", FILE, "the file to write, complete or not at all; default: -, standard output"),
        ("--beam", INTEGER, "beam size; default: the exported setting, usually 4"),
        ("--lenpen", NUMBER, "length penalty; default: the exported setting, usually 0.6"),
        ("--max-len-b", INTEGER, longer),
        ("--sampling-topk", INTEGER, "draw each word from the N most probable ones (0: all), with one thread"),
        ("--seed", INTEGER, f"of the random numbers of --sampling-topk; default: {Sampling.seed}"),
        ("--threads", INTEGER, threads),
        ("--device", devices, "default: %(default)s"),
        ("--replace-unk", SWITCH, "in place of an unknown word, copy the source word that it attends to most"),
        ("--no-shortlist", SWITCH, "score every target subword, even if the folder has a shortlist"),
        ("--shard", {"metavar": "I/N"}, shard),
    ]
    add_flags(parser, rows)
    group = parser.add_argument_group(
        "whole files", "files of any size, in parts; the same command continues after the run was killed"
    )
    rows = [
        ("--output-dir", {"metavar": "DIR"}, "gets a file for each --input, with its name without .gz"),
        ("--jobs", INTEGER, "how many processes translate at once; default: 1, or the number of GPUs"),
    ]
    add_flags(group, rows)
    rows = [("--nbest", INTEGER, best), ("--documents", SWITCH, documents)]
    add_flags(parser.add_mutually_exclusive_group(), rows)
    return parser


def _progress(beside_the_output: bool = False, **options: Any) -> Any:
    """Return a progress bar on standard error, not beside translations; in a log file, it writes every 30 seconds."""
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    every = {} if terminal else {"mininterval": 30, "delay": 30}
    return tqdm(unit=" lines", disable=terminal and beside_the_output, **every, **options)


def _search_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the search that flags change."""
    return {name: value for name in SEARCH if (value := getattr(args, name)) is not None}


def _sampling(args: argparse.Namespace) -> Sampling | None:
    """Return how words are drawn, or None without ``--sampling-topk``."""
    seed = Sampling.seed if args.seed is None else args.seed
    return None if args.sampling_topk is None else Sampling(args.sampling_topk, seed)


def _refuse_contradictions(args: argparse.Namespace) -> None:
    """Raise an InputError if flags contradict each other."""
    if args.seed is not None and args.sampling_topk is None:
        raise TranslateError(f"--seed {args.seed}: needs --sampling-topk")
    for name in ("beam", "lenpen", "nbest"):
        if args.sampling_topk is not None and (value := getattr(args, name)) is not None:
            raise TranslateError(f"--{name} {value:g}: has no effect with --sampling-topk, which draws one translation")
    if args.shard is not None and (args.documents or not args.input or "-" in args.input):
        raise TranslateError(f"--shard {args.shard}: needs --input with a file, and does not support --documents")
    if args.output_dir is None:
        if args.jobs:
            raise TranslateError(f"--jobs {args.jobs}: needs --output-dir, which divides the input among processes")
        if args.input and len(args.input) > 1:
            raise TranslateError(f"--input {' '.join(args.input)}: must be one file without --output-dir")
        return
    if not args.input or "-" in args.input:
        raise TranslateError("--output-dir: needs --input with files, and cannot read standard input")
    for flag, value in (("--output", args.output), ("--nbest", args.nbest), ("--documents", args.documents)):
        if value:
            flag += "" if value is True else f" {value}"
            raise TranslateError(f"{flag}: is not supported with --output-dir, which writes a line for each line")


def _shard(args: argparse.Namespace) -> tuple[int, int]:
    """Return the number of the shard, from 1, and the number of shards."""
    numbers = re.fullmatch("([0-9]{1,6})/([0-9]{1,6})", args.shard or "1/1")
    if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise TranslateError(f"--shard {args.shard}: must be I/N, with I from 1 to N")
    return int(numbers[1]), int(numbers[2])


def visible_gpus(number: int) -> list[str]:
    """Return the names of the *number* GPUs that are visible, as in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",")] if visible else [str(gpu) for gpu in range(number)]
    return names[:number]


def _translate_files(args: argparse.Namespace) -> None:
    """Translate whole files with ``--output-dir``."""
    gpus = []
    if args.device != "cpu":
        import ctranslate2

        gpus = visible_gpus(ctranslate2.get_cuda_device_count())
    jobs = args.jobs or max(1, len(gpus))
    search = exported_settings(args.model) | _search_flags(args)
    settings = Settings(
        model=args.model,
        described=checksum(os.path.join(args.model, SETTINGS)),
        search=tuple((name, search[name]) for name in SEARCH),
        shortlist=not args.no_shortlist,
        replace_unk=args.replace_unk,
        sampling=_sampling(args),
        threads=args.threads or max(1, available_cores() // jobs),
        device=args.device,
    )

    def progress(total: int, finished: int) -> Any:
        return _progress(total=total, initial=finished, smoothing=0, miniters=1)  # shows the mean speed

    translate_files(args.input, args.output_dir, settings, jobs, gpus, _shard(args), progress)


def _chunks_of_shard(path: str, number: int, shards: int) -> tuple[int, Iterator[list[str]]]:
    """Return the number of the first line in a shard of a file, from 1, and the lines of the shard in chunks."""
    lines = divide(sum(1 for _ in lines_of(path)), shards)[number - 1]
    numbered = enumerate(itertools.islice(lines_of(path), lines.start, lines.stop), lines.start + 1)
    return lines.start + 1, in_chunks(decoded(line, path, number) for number, line in numbered)


def _is_input(status: os.stat_result, path: str | None) -> bool:
    """Return whether the file with this *status* is the input *path*; None and "-" are standard input."""
    with contextlib.suppress(OSError, ValueError):  # there is no such file; a test's standard input is none
        return os.path.samestat(status, os.fstat(sys.stdin.fileno()) if path in (None, "-") else os.stat(path))
    return False


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; after an error, exit with status 1 and print one sentence to standard error."""
    parser = build_parser()
    args = parser.parse_args(argv)
    refuse_out_of_range(parser, args)
    with ending_in_one_sentence("fairseq-rope translate"):
        _refuse_contradictions(args)
        if args.output_dir is not None:
            _translate_files(args)
            return
        path = args.input[0] if args.input else None
        args.output = None if args.output == "-" else args.output
        if args.output is not None:
            refuse_output(args.output)
            if os.path.exists(args.output) and _is_input(os.stat(args.output), path):
                raise TranslateError(f"--output {args.output}: is the input; give another file")
        with opened(path) as (read, name):
            options = (args.model, args.threads, args.device, not args.no_shortlist, args.replace_unk)
            translator = Translator(*options, _sampling(args))
            settings = translator.settings
            settings.update(_search_flags(args))
            if args.nbest is not None and args.nbest > settings["beam"]:
                raise TranslateError(f"--nbest {args.nbest}: must be at most the beam size, {settings['beam']}")
            on_terminal = args.output is None and sys.stdout.isatty()
            first = 1
            with output(args.output) as out, _progress(beside_the_output=on_terminal) as bar:
                # The random numbers that a line gets depend on the lines that are translated together.
                chunks = as_they_come(read, name, WAIT if args.sampling_topk is None else None)
                if args.shard is not None:
                    first, chunks = _chunks_of_shard(name, *_shard(args))
                if args.documents:
                    for translated in translator.document_lines(chunks):
                        out.writelines(f"{line}\n" for line in translated)
                        out.flush()
                        bar.update(len(translated))
                    return
                for lines in chunks:
                    translations = translator.chunk(lines, first=first, done=bar.update, nbest=args.nbest or 0)
                    for number, hypotheses in enumerate(translations, first):
                        for text, score in hypotheses:
                            print(text if args.nbest is None else f"{number}\t{score:.4f}\t{text}", file=out)
                    out.flush()
                    first += len(lines)
