"""Translate plain text with an exported model: ``python -m fairseq_rope translate``.

The model is a folder that ``fairseq-rope export`` wrote. Needs CTranslate2 and what divides its text
(sacremoses and subword-nmt, or sentencepiece), and neither torch nor fairseq.
"""

import argparse
import codecs
import contextlib
import gzip
import hashlib
import itertools
import json
import logging
import math
import os
import queue
import signal
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import (
    IO,
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Sequence,
    Tuple,
    Union,
    overload,
)

from .. import __version__
from ..errors import InputError, ending_in_one_sentence, refuse_output
from ..files import written_whole
from ..lines import decode

SETTINGS = "fairseq_rope.json"  # in the folder: how to treat text, and where the model came from
SUBWORDS = {"subword_nmt": "bpecodes", "sentencepiece": "sentencepiece.bpe.model"}  # their files there
CHUNK = 512  # lines that are sorted by length and translated together
WAIT = 0.1  # seconds that the first line of a chunk waits for others
# Tokens of a batch. On CPUs a core takes a batch, and the best sizes of benchmarks/serve.py are smaller for
# 8-bit weights; that of GPUs is not measured.
TOKENS = {"int8": 256, "int8_float32": 256, "cuda": 8192}
OTHERS = 1024
MOST = 1.0  # log of the factor in _ranked up to which calls are close: that of an end at once with p = 0.63
LONG = 1024  # tokens; above, fairseq would not have trained on it
# The longest line. Memory grows with the square of its tokens, and the time of BPE with the square of the
# characters of a word: see README.md for the figures.
LONGEST = 4096  # tokens
CHARACTERS = 8 * LONGEST


class TranslateError(InputError):
    """A folder or file that cannot be used; the message says which."""


def _at_least(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _is_moses(value: Any) -> bool:
    types = {"source": str, "target": str, "dash_splits": bool}
    return value is None or (
        isinstance(value, dict) and all(type(value.get(name)) is kind for name, kind in types.items())
    )


# For each setting: whether a value is allowed, and in words, which values are.
ALLOWED: Dict[str, Tuple[Callable[[Any], bool], str]] = {
    "moses": (_is_moses, "null, or have source, target and dash_splits"),
    # No other file is opened: the folder may be someone else's.
    "subwords": (
        lambda value: value in [None, *({"kind": kind, "file": file} for kind, file in SUBWORDS.items())],
        f"null, or a kind and its file: {', '.join(f'{kind}, {file}' for kind, file in SUBWORDS.items())}",
    ),
    "positions": (
        lambda value: (
            isinstance(value, dict)
            and all(value.get(n, 0) is None or _at_least(1)(value.get(n)) for n in ("source", "target"))
        ),
        "have source and target, each null or an integer of 1 or more",
    ),
    "beam": (_at_least(1), "an integer of 1 or more"),
    "lenpen": (lambda value: type(value) in (int, float) and math.isfinite(value), "a number"),
    "max_len_b": (_at_least(0), "an integer of 0 or more"),
    "quantization": (lambda value: isinstance(value, str), "a text"),
    "sha256": (  # of the other files; the first version wrote none
        lambda value: (
            value is None
            or (isinstance(value, dict) and all(os.path.basename(name) == name for name in value))
        ),
        "the checksums of files in the folder",
    ),
}


def read_settings(folder: str) -> Dict[str, Any]:
    """The settings of an exported *folder*.

    Raises:
        TranslateError: they cannot be read, or one of them is not among ALLOWED
    """
    try:
        with open(os.path.join(folder, SETTINGS), encoding="utf-8") as file:
            settings = json.load(file)
        if not isinstance(settings, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError) as error:
        raise TranslateError(
            f"--model {folder}: must be a folder that fairseq-rope export wrote, and {SETTINGS} cannot "
            f"be read there ({error.strerror if isinstance(error, OSError) else error})"
        ) from None
    for name, (is_allowed, allowed) in ALLOWED.items():
        value = settings.get(name)
        if not is_allowed(value):
            raise TranslateError(
                f"--model {folder}: in {SETTINGS}, {name} is {json.dumps(value)}, and must be {allowed}"
            )
    return settings


def checksum(path: str) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def refuse_changed_files(folder: str, checksums: Optional[Dict[str, str]]) -> None:
    """Raise a TranslateError if a file in *folder* is missing or not the one of *checksums*."""
    for name, expected in (checksums or {}).items():
        try:
            same = checksum(os.path.join(folder, name)) == expected
        except OSError as error:
            raise TranslateError(f"--model {folder}: {name} cannot be read ({error.strerror})") from None
        if not same:
            raise TranslateError(
                f"--model {folder}: {name} is not the file that was exported: its SHA-256 differs from the "
                f"one in {SETTINGS}; copy or export the model again"
            )


class Text:
    """Plain text to tokens and back, as ``fairseq-interactive`` treats it with the recipe's flags.

    ``fairseq/data/encoders``: moses_tokenizer.py, subword_nmt_bpe.py, sentencepiece_bpe.py.

    Args:
        folder: where the file is that *settings* name
        settings: those of ``fairseq_rope.json``

    Raises:
        TranslateError: the file of the subwords is none
    """

    def __init__(self, folder: str, settings: Dict[str, Any]) -> None:
        self._tokeniser = self._detokeniser = self._bpe = self._pieces = None
        moses, subwords = settings["moses"], settings["subwords"]
        if moses:
            from sacremoses import MosesDetokenizer, MosesTokenizer

            self._tokeniser = MosesTokenizer(moses["source"])
            self._detokeniser = MosesDetokenizer(moses["target"])
            self._dash_splits = moses["dash_splits"]
        if subwords:
            path = os.path.join(folder, subwords["file"])
            try:
                self._read(path, subwords["kind"])
            except (RuntimeError, ValueError, SystemExit) as error:  # subword-nmt exits
                kind = "sentencepiece model" if subwords["kind"] == "sentencepiece" else "file of BPE codes"
                raise TranslateError(f"{path}: cannot be read as a {kind} ({error})") from None

    def _read(self, path: str, kind: str) -> None:
        if kind == "sentencepiece":
            from sentencepiece import SentencePieceProcessor

            self._pieces = SentencePieceProcessor(model_file=path)
        else:
            from subword_nmt.apply_bpe import BPE

            with open(path, encoding="utf-8") as codes:
                self._bpe = BPE(codes)

    def tokens(self, line: str) -> List[str]:
        """The tokens of a sentence; none of an empty one."""
        if self._tokeniser is not None:
            line = self._tokeniser.tokenize(
                line, aggressive_dash_splits=self._dash_splits, return_str=True, escape=True
            )
        if self._bpe is not None:
            line = self._bpe.process_line(line)
        if self._pieces is not None:
            line = " ".join(self._pieces.encode(line, out_type=str))
        return line.split()

    def plain(self, tokens: Sequence[str]) -> str:
        """The sentence that *tokens* are; what marks its start and end is left out, as fairseq does."""
        line = " ".join(token for token in tokens if token not in ("<s>", "</s>"))
        if self._pieces is not None:
            return line.replace(" ", "").replace("\u2581", " ").strip()
        if self._bpe is not None:
            line = (line + " ").replace("@@ ", "").rstrip()
        if self._detokeniser is not None:
            line = self._detokeniser.detokenize(line.split())
        return line


class Translator:
    """A model from a folder, in memory.

    Args:
        folder: what ``fairseq-rope export`` wrote
        threads: of the CPU; default: as many as it has cores for this process
        device: "cpu", "cuda" or "auto"

    Raises:
        TranslateError: *folder* is none of those, or a file in it has changed
    """

    def __init__(self, folder: str, threads: Optional[int] = None, device: str = "cpu") -> None:
        self.settings = read_settings(folder)
        with ThreadPoolExecutor(1) as pool:  # while the tools for text are imported
            comparison = pool.submit(refuse_changed_files, folder, self.settings.get("sha256"))
            self._text = Text(folder, self.settings)
            import ctranslate2
        comparison.result()
        # That 16-bit weights are computed with in 32 where there is nothing else is no news.
        ctranslate2.set_log_level(logging.ERROR)
        self._cores = threads or _cores()
        try:
            if device == "auto":
                device = "cuda" if ctranslate2.get_cuda_device_count() else "cpu"
            # A batch for each core is faster than all cores for one batch.
            workers = {"inter_threads": self._cores, "intra_threads": 1} if device == "cpu" else {}
            self._model = ctranslate2.Translator(folder, device=device, **workers)
            # A vocabulary without the special symbols gives an error only when it translates.
            self._model.translate_batch([["<unk>"]], suppress_sequences=[["<blank>"]], max_decoding_length=1)
        except (RuntimeError, ValueError, IndexError) as error:
            raise TranslateError(f"--model {folder}, --device {device}: {error}") from None
        kind = self.settings["quantization"] if device == "cpu" else device
        self._tokens = TOKENS.get(kind, OTHERS)

    @overload
    def translate(self, text: str, beam: Optional[int] = ..., lenpen: Optional[float] = ...) -> str: ...

    @overload
    def translate(
        self, text: Iterable[str], beam: Optional[int] = ..., lenpen: Optional[float] = ...
    ) -> List[str]: ...

    def translate(
        self, text: Union[str, Iterable[str]], beam: Optional[int] = None, lenpen: Optional[float] = None
    ) -> Union[str, List[str]]:
        """The translation of a sentence, or the list of those of several; see :meth:`translate_lines`."""
        if isinstance(text, str):
            return next(self.translate_lines([text], beam, lenpen))
        return list(self.translate_lines(text, beam, lenpen))

    def translate_lines(
        self, lines: Iterable[str], beam: Optional[int] = None, lenpen: Optional[float] = None
    ) -> Iterator[str]:
        """Yield the translations of *lines*, in their order, as they are ready; of an empty one an empty one.

        Args:
            beam: beam size; default: the settings'
            lenpen: length penalty; default: the settings'

        Raises:
            TranslateError: a line is longer than LONGEST tokens, CHARACTERS characters, or the absolute
                positions of the model; the translations of the lines before it have been yielded
        """
        chunk: List[str] = []
        first = 1
        for line in lines:
            chunk.append(line)
            if len(chunk) == CHUNK:
                yield from (nbest[0][0] for nbest in self.chunk(chunk, beam, lenpen, first))
                first += len(chunk)
                chunk = []
        yield from (nbest[0][0] for nbest in self.chunk(chunk, beam, lenpen, first))

    def chunk(
        self,
        lines: Sequence[str],
        beam: Optional[int] = None,
        lenpen: Optional[float] = None,
        first: int = 1,
        done: Callable[[int], object] = lambda count: None,
        nbest: int = 0,
    ) -> Iterator[List[Tuple[str, float]]]:
        """Yield, for each of a few *lines*, its best translations with their scores, the best first.

        Args:
            beam, lenpen: as in :meth:`translate_lines`
            first: the number of the first line, for messages
            done: called with the number of lines that a batch had, when it has been translated
            nbest: how many translations; 0: the best alone, with an approximate score

        Raises:
            TranslateError: as in :meth:`translate_lines`
        """
        sources = []
        refused = None
        positions = self.settings["positions"]["source"]  # the end of the sentence has one
        longest = LONGEST if positions is None else min(LONGEST, positions - 1)
        for number, line in enumerate(lines, start=first):
            if len(line) > CHARACTERS:
                refused = TranslateError(
                    f"line {number} has {len(line)} characters, and {CHARACTERS} are the most: divide it"
                )
                break
            source = self._text.tokens(line)
            said = f"line {number} has {len(source)} tokens"
            if len(source) > longest:
                refused = TranslateError(f"{said}, and {longest} are the most for this model: divide it")
                break
            if len(source) >= LONG:
                print(f"fairseq-rope translate: {said}, more than models are trained on", file=sys.stderr)
            if positions is None and "<pad>" in itertools.dropwhile("<pad>".__eq__, source):
                print(
                    f"fairseq-rope translate: line {number} has <pad> after a word. fairseq leaves its "
                    "position empty, which CTranslate2 cannot do: the translation may differ",
                    file=sys.stderr,
                )
            sources.append(source)
        for hypotheses in self.search(sources, beam, lenpen, done, nbest):
            yield [(self._text.plain(words), score) for words, score in hypotheses]
        if refused:
            raise refused

    def search(
        self,
        sources: Sequence[List[str]],
        beam: Optional[int] = None,
        lenpen: Optional[float] = None,
        done: Callable[[int], object] = lambda count: None,
        nbest: int = 0,
    ) -> List[List[Tuple[List[str], float]]]:
        """The best hypotheses for each of *sources*, both in tokens, and their scores; see :meth:`chunk`.

        ``<pad>`` and ``<blank>`` are padding and an unknown word in *sources*, as they are to fairseq.
        """
        s = self.settings
        best: List[List[Tuple[List[str], float]]] = [[([], 0.0)]] * len(sources)
        beam = s["beam"] if beam is None else beam
        lenpen = s["lenpen"] if lenpen is None else lenpen
        # CTranslate2 calls the padding <blank>, and attends to it.
        words = [["<unk>" if w == "<blank>" else w for w in source if w != "<pad>"] for source in sources]

        def limit(n: int) -> int:
            # As fairseq reckons it, with the end of the sentence.
            return min(len(sources[n]) + 1 + s["max_len_b"], s["positions"]["target"] or sys.maxsize)

        def is_marked(n: int) -> bool:
            return not words[n] or "<s>" in words[n] or "</s>" in words[n]

        def results_of(batch: Sequence[int]) -> List[Any]:
            given, cut = [words[n] for n in batch], 0
            if is_marked(batch[0]):
                # CTranslate2 leaves some of these untranslated, as empty sentences. It decides that before it
                # cuts a source to its length.
                given, cut = [[*given[0], "<unk>", "<unk>", "<unk>"]], len(given[0]) + 1
            return self._model.translate_batch(
                given,
                beam_size=beam,
                # With 0, CTranslate2 ends when the best is found, and fairseq when *beam* outputs have ended.
                length_penalty=lenpen or 1e-9,
                num_hypotheses=beam,
                return_scores=True,
                suppress_sequences=[["<blank>"]],  # fairseq's search takes no padding
                max_input_length=cut,
                max_decoding_length=limit(batch[0]),  # the longest
                asynchronous=True,
            )

        order = sorted((n for n in range(len(sources)) if sources[n]), key=lambda n: -len(sources[n]))
        share = sum(len(source) + 1 for source in sources) // self._cores  # so that few lines go to all cores
        unmarked = [n for n in order if not is_marked(n)]
        batches = [
            *in_batches(unmarked, sources, min(self._tokens, share)),
            *([n] for n in order if is_marked(n)),
        ]
        searches: List[Tuple[List[int], List[Any]]] = []
        for batch in batches:
            # This many searches together take the memory of one for the longest line.
            at_once = max(1, LONGEST // (len(sources[batch[0]]) + 1)) ** 2
            if len(searches) >= at_once:
                searches[-at_once][1][0].result()
            searches.append((batch, results_of(batch)))
        done(len(sources) - len(order))
        for batch, results in searches:
            for n, found in zip(batch, results):
                result = found.result()
                if any(len(hypothesis) > limit(n) for hypothesis in result.hypotheses):  # would not end
                    result = results_of([n])[0].result()
                best[n] = self._ranked(words[n], result, lenpen, limit(n), nbest)
            done(len(batch))
        return best

    def _ranked(
        self, source: List[str], result: Any, lenpen: float, limit: int, nbest: int
    ) -> List[Tuple[List[str], float]]:
        """The hypotheses that fairseq (sequence_generator.py) would rank first, and their scores.

        CTranslate2 takes the end of the sentence away at the first step before the softmax, fairseq after it:
        all hypotheses are likelier by one factor, which counts less the longer they are. At the limit
        CTranslate2 leaves the end out, where fairseq appends it at its cost. So n best, close calls, and
        those with a hypothesis that the limit has cut, are ranked by the model's score of each as a whole.
        (A hypothesis that was cut may have displaced one that ended: then the output is not fairseq's.)
        """
        hypotheses, scores = result.hypotheses, result.scores
        weights = [(len(words) + 1) ** -lenpen for words in hypotheses]  # the end is a word
        others = range(1, len(hypotheses))
        if (
            nbest
            or any(len(words) >= limit for words in hypotheses)
            or any(scores[0] - scores[n] < MOST * (weights[0] - weights[n]) for n in others)
        ):
            whole = self._model.score_batch(
                [source] * len(hypotheses),
                hypotheses,
                max_input_length=0,
                max_batch_size=LONG,  # long hypotheses one by one, for the memory
                batch_type="tokens",
            )
            scores = [sum(words.log_probs) * weight for words, weight in zip(whole, weights)]
        order = sorted(range(len(hypotheses)), key=lambda n: -scores[n])
        return [(hypotheses[n], scores[n] / math.log(2)) for n in order[: nbest or 1]]


def in_batches(order: Sequence[int], sources: Sequence[Sequence[str]], tokens: int) -> Iterator[List[int]]:
    """*order*, numbers of *sources*, the longest first, in pieces of at most *tokens* with padding."""
    batch: List[int] = []
    for n in order:
        if batch and (len(batch) + 1) * (len(sources[batch[0]]) + 1) > tokens:
            yield batch
            batch = []
        batch.append(n)
    if batch:
        yield batch


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


# -- the command -----------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Optional[str]) -> Iterator[Tuple[Callable[[int], bytes], str]]:
    """A function that reads bytes from the file *path* or standard input, and its name for messages."""
    if path is None or path == "-":
        # Not by sys.stdin.buffer: its lock, held while it waits for a line, makes Python abort at its exit.
        yield partial(os.read, sys.stdin.fileno()), "standard input"
        return
    with open(path, "rb", buffering=0) as file:
        yield gzip.GzipFile(fileobj=file).read1 if path.endswith(".gz") else file.read, path


def _lines(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """The lines of what *read* reads, without their ends, up to one that has too many characters."""
    rest = b""
    while True:
        block = read(1 << 16)
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
        if not block or len(rest) > 4 * CHARACTERS:
            if rest:
                yield rest
            return


def as_they_come(read: Callable[[int], bytes], name: str) -> Iterator[List[str]]:
    """The lines of a file, as many together as are there within WAIT seconds, up to CHUNK.

    Raises:
        InputError: a line is not UTF-8 or has too many characters, or a compressed file is damaged; the
            lines before it have been yielded
        OSError: the file cannot be read
    """
    lines: queue.Queue[Any] = queue.Queue(4 * CHUNK)

    def put_lines() -> None:
        try:
            for number, line in enumerate(_lines(read), start=1):
                if len(line) > 4 * CHARACTERS:  # of 4 bytes at most
                    raise TranslateError(
                        f"{name}, line {number}: has more than {CHARACTERS} characters: divide it"
                    )
                lines.put(decode(line, name, number - 1))
            lines.put(None)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            lines.put(TranslateError(f"{name}: is not a whole gzip file ({error})"))
        except Exception as error:
            lines.put(error)

    threading.Thread(target=put_lines, daemon=True).start()
    while True:
        last = lines.get()
        until = time.monotonic() + WAIT
        chunk = []
        while isinstance(last, str):
            chunk.append(last)
            if len(chunk) == CHUNK:
                break
            try:
                last = lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
        if chunk:
            yield chunk
        if isinstance(last, Exception):
            raise last
        if last is None:
            return


@contextlib.contextmanager
def output(path: Optional[str]) -> Iterator[IO[str]]:
    """Yield standard output, or a file that appears as *path* when the block ends without an error."""
    if path is None:
        if hasattr(signal, "SIGPIPE"):  # what reads the output may stop, as head does
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
        yield sys.stdout
        return
    with written_whole(os.path.realpath(path), suffix=f".{os.getpid()}.tmp") as (file,):
        yield codecs.getwriter("utf-8")(file)  # type: ignore[misc]


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="fairseq-rope translate",
        description="Translate plain text, a sentence a line, with an exported model.",
        epilog="example: fairseq-rope translate --model served < raw.en > translated.de",
    )
    add = parser.add_argument
    add("--version", action="version", version=f"%(prog)s {__version__}")
    add("--model", required=True, metavar="DIR", help="a folder that fairseq-rope export wrote")
    add("--input", metavar="FILE", help="may be compressed, as .gz; default: -, standard input")
    add("--output", metavar="FILE", help="is written whole or not at all; default: standard output")
    add("--beam", type=int, metavar="N", help="beam size; default: what the folder says, 4")
    add("--lenpen", type=float, metavar="X", help="length penalty; default: what the folder says, 0.6")
    add(
        "--max-len-b",
        type=int,
        metavar="N",
        help="tokens that an output may have more than its source; default: what the folder says, 50",
    )
    add(
        "--nbest",
        type=int,
        metavar="N",
        help="write the N best translations of each line, as NUMBER<tab>SCORE<tab>TRANSLATION: the number of "
        "the line, from 1, and fairseq's score, the log2 probability divided by length**lenpen",
    )
    add("--threads", type=int, metavar="N", help="default: all cores")
    add("--device", choices=("cpu", "cuda", "auto"), default="cpu", help="default: %(default)s")
    return parser


def refuse_numbers(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End as *parser* does at a wrong flag if a number of *args* is out of its range."""
    for name, least in (("beam", 1), ("nbest", 1), ("threads", 1), ("max_len_b", 0)):
        value = getattr(args, name, None)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} {value}: must be {least} or more")
    if args.lenpen is not None and not math.isfinite(args.lenpen):
        parser.error(f"--lenpen {args.lenpen}: must be a number")


def _progress(beside_the_output: bool) -> Any:
    """A bar on standard error, if no terminal shows both; in a log file, a line every half minute."""
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    every = {} if terminal else {"mininterval": 30, "delay": 30}
    return tqdm(unit=" lines", disable=terminal and beside_the_output, **every)


def write_translations(
    translator: Translator,
    chunks: Iterable[List[str]],
    out: IO[str],
    nbest: Optional[int],
    done: Callable[[int], object],
) -> None:
    """Write a line for each line of *chunks*, or one for each of its *nbest* translations, to *out*."""
    first = 1
    for lines in chunks:
        for number, found in enumerate(
            translator.chunk(lines, first=first, done=done, nbest=nbest or 0), first
        ):
            for text, score in found:
                print(text if nbest is None else f"{number}\t{score:.4f}\t{text}", file=out)
        out.flush()
        first += len(lines)


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the command; exits with status 1 and one sentence on standard error if it cannot."""
    parser = build_parser()
    args = parser.parse_args(argv)
    refuse_numbers(parser, args)
    with ending_in_one_sentence("fairseq-rope translate"):
        if (sys.stdout is None and args.output is None) or (sys.stdin is None and args.input in (None, "-")):
            raise TranslateError("standard input or output is closed")
        if args.output is not None:
            refuse_output(args.output)
        with opened(args.input) as (read, name):
            translator = Translator(args.model, args.threads, args.device)
            settings = translator.settings
            asked = {flag: getattr(args, flag) for flag in ("beam", "lenpen", "max_len_b")}
            settings.update({flag: value for flag, value in asked.items() if value is not None})
            if args.nbest is not None and args.nbest > settings["beam"]:
                raise TranslateError(
                    f"--nbest {args.nbest}: must be at most the beam size, {settings['beam']}"
                )
            shown = args.output is None and sys.stdout.isatty()
            with output(args.output) as out, _progress(beside_the_output=shown) as bar:
                write_translations(translator, as_they_come(read, name), out, args.nbest, bar.update)
