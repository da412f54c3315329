"""Translate plain text with an exported model: ``fairseq-rope translate``."""

import argparse
import codecs
import contextlib
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from ..errors import ending_in_one_sentence, refuse_output
from ..files import checksum, written_whole
from ..lines import named
from ..serving.ctranslate2_search import Sampling, available_cores
from ..serving.exported_folder import SETTINGS, TranslateError, exported_settings, refuse_options
from ..serving.parts import Settings, lines_of, translate_files
from ..serving.translator import LINES, Translator, decoded
from . import command_parser

WAIT = 0.1  # seconds that the first line of a chunk waits for others


def as_they_come(data: Iterator[bytes], name: str, wait: float | None = WAIT) -> Iterator[list[str]]:
    """Yield lists of up to LINES of the lines in *data*, each with the lines that arrive within *wait* seconds.

    With None, all lists but the last have LINES lines.

    Raises:
        InputError: a line is not UTF-8 or has too many characters, or a compressed file is damaged; the
            lines before it have been yielded
    """
    lines: queue.Queue[Any] = queue.Queue(4 * LINES)

    def put_lines() -> None:
        try:
            for number, line in enumerate(data, start=1):
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
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="a folder that fairseq-rope export wrote")
    inputs = "plain text or .gz; several with --output-dir; default: -, standard input"
    add("--input", nargs="+", action="extend", metavar="FILE", help=inputs)
    outputs = "the file to write, complete or not at all; default: -, standard output"
    add("--output", metavar="FILE", help=outputs)
    add("--beam", type=int, metavar="N", help="beam size; default: the exported setting, usually 4")
    add("--lenpen", type=float, metavar="X", help="length penalty; default: the exported setting, usually 0.6")
    longer = "how many tokens longer than its source an output may be; default: the exported setting, usually 50"
    add("--max-len-b", type=int, metavar="N", help=longer)
    drawn = "draw each word from the N most probable ones (0: all), with one thread"
    add("--sampling-topk", type=int, metavar="N", help=drawn)
    seed = "of the random numbers of --sampling-topk; default: %(default)s"
    add("--seed", type=int, default=Sampling.seed, metavar="N", help=seed)
    threads = "CPU threads, of each process; default: all cores, divided by --jobs"
    add("--threads", type=int, metavar="N", help=threads)
    add("--device", choices=("cpu", "cuda", "auto"), default="cpu", help="default: %(default)s")
    unknown = "in place of an unknown word, copy the source word that it attends to most"
    add("--replace-unk", action="store_true", help=unknown)
    every = "score every target subword, even if the folder has a shortlist"
    add("--no-shortlist", action="store_true", help=every)
    shard = "with --output-dir: divide each input into N shards and translate only number I, from 1"
    add("--shard", metavar="I/N", help=shard)
    jobs = "with --output-dir: how many processes translate at once; default: 1, or the number of GPUs"
    add("--jobs", type=int, metavar="N", help=jobs)
    add = parser.add_mutually_exclusive_group().add_argument
    whole = (
        "write a file into DIR for each --input, with its name without .gz. Files of any size are translated in "
        "parts; the same command continues after the run was killed"
    )
    add("--output-dir", metavar="DIR", help=whole)
    best = (
        "write the N best translations of each line, as NUMBER<tab>SCORE<tab>TRANSLATION: the line number, from 1, and "
        "fairseq's score, the log2 probability divided by length**lenpen"
    )
    add("--nbest", type=int, metavar="N", help=best)
    documents = (
        "blank lines separate documents: translate consecutive sentences of a document together, in segments as long "
        "as those of the training; the output has the same lines; no context crosses segments"
    )
    add("--documents", action="store_true", help=documents)
    return parser


def _progress(beside_the_output: bool = False, **options: Any) -> Any:
    """Return a progress bar on standard error, not beside translations; in a log file, it writes every 30 seconds."""
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    every = {} if terminal else {"mininterval": 30, "delay": 30}
    return tqdm(unit=" lines", disable=terminal and beside_the_output, **every, **options)


def _refuse_contradictions(args: argparse.Namespace) -> None:
    """Raise an InputError if flags contradict each other."""
    for name in ("beam", "lenpen", "nbest"):
        if args.sampling_topk is not None and (value := getattr(args, name)) is not None:
            raise TranslateError(f"--{name} {value:g}: has no effect with --sampling-topk, which draws one translation")
    if args.output_dir is None:
        for name in ("jobs", "shard"):
            if (value := getattr(args, name)) is not None:
                raise TranslateError(f"--{name} {value}: needs --output-dir, which divides the input")
        if len(args.input) > 1:
            raise TranslateError(f"--input {' '.join(args.input)}: must be one file without --output-dir")
    elif "-" in args.input or args.output:
        raise TranslateError("--output-dir: needs --input with files, and is not supported with --output")


def _shard(shard: str) -> tuple[int, int]:
    """Return the number of the shard, from 1, and the number of shards."""
    numbers = re.fullmatch("([0-9]{1,6})/([0-9]{1,6})", shard)
    if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise TranslateError(f"--shard {shard}: must be I/N, with I from 1 to N")
    return int(numbers[1]), int(numbers[2])


def visible_gpus(number: int) -> list[str]:
    """Return the names of the *number* GPUs that are visible, as in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",")] if visible else [str(gpu) for gpu in range(number)]
    return names[:number]


def _translate_files(args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Translate whole files with ``--output-dir``; *options* are those of the Translator."""
    gpus = []
    if args.device != "cpu":
        import ctranslate2

        gpus = visible_gpus(ctranslate2.get_cuda_device_count())
    jobs = args.jobs or max(1, len(gpus))
    options["threads"] = args.threads or max(1, available_cores() // jobs)
    exported = exported_settings(args.model)
    options |= {name: exported[name] for name in ("beam", "lenpen", "max_len_b") if options[name] is None}
    settings = Settings(**options, checksum=checksum(os.path.join(args.model, SETTINGS)))

    def progress(total: int, finished: int) -> Any:
        return _progress(total=total, initial=finished, smoothing=0, miniters=1)  # shows the mean speed

    translate_files(args.input, args.output_dir, settings, jobs, gpus, _shard(args.shard or "1/1"), progress)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; after an error, exit with status 1 and print one sentence to standard error."""
    args = build_parser().parse_args(argv)
    args.input = args.input or ["-"]
    with ending_in_one_sentence("fairseq-rope translate"):
        refuse_options(**vars(args))
        _refuse_contradictions(args)
        options = {
            name: getattr(args, name) for name in ("threads", "device", "replace_unk", "beam", "lenpen", "max_len_b")
        }
        options |= {"folder": args.model, "shortlist": not args.no_shortlist}
        options["sampling"] = None if args.sampling_topk is None else Sampling(args.sampling_topk, args.seed)
        if args.output_dir is not None:
            _translate_files(args, options)
            return
        path = args.input[0]
        args.output = None if args.output == "-" else args.output
        if args.output is not None:
            refuse_output(args.output)
            if os.path.exists(args.output) and path != "-" and os.path.samefile(args.output, path):
                raise TranslateError(f"--output {args.output}: is the input; give another file")
        translator = Translator(**options)
        if args.nbest is not None:
            translator.refuse_n_best(args.nbest)
        on_terminal = args.output is None and sys.stdout.isatty()
        first = 1
        with output(args.output) as out, _progress(beside_the_output=on_terminal) as bar:
            # The random numbers that a line gets depend on the lines that are translated together.
            chunks = as_they_come(lines_of(path), named(path), WAIT if args.sampling_topk is None else None)
            if args.documents:
                for translated in translator.translate_documents(chunks):
                    out.writelines(f"{line}\n" for line in translated)
                    out.flush()
                    bar.update(len(translated))
                return
            for lines in chunks:
                results = translator.translate_chunk(lines, first, bar.update, args.nbest or 0)
                for number, result in enumerate(results, first):
                    if isinstance(result, TranslateError):
                        raise result
                    for text, score in result:
                        print(text if args.nbest is None else f"{number}\t{score:.4f}\t{text}", file=out)
                out.flush()
                first += len(lines)
