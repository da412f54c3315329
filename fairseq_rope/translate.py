"""Translate plain text with an exported model: ``python -m fairseq_rope.translate``.

The model is a folder that ``fairseq_rope.export`` wrote. Needs CTranslate2 and what divides its text
(sacremoses and subword-nmt, or sentencepiece), and neither torch nor fairseq.
"""

import argparse
import json
import logging
import math
import os
import queue
import signal
import sys
import threading
import time
from typing import IO, Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence

from .errors import InputError, ending_in_one_sentence

SETTINGS = "fairseq_rope.json"  # in the folder: how to treat text, and where the model came from
CHUNK = 512  # lines that are sorted by length and translated together
WAIT = 0.1  # seconds that the first line of a chunk waits for others
# Tokens of a batch. On CPUs a core takes a batch, and the best sizes of benchmarks/serve.py are smaller for
# 8-bit weights; that of GPUs is not measured.
TOKENS = {"int8": 256, "int8_float32": 256, "cuda": 8192}
OTHERS = 1024
MOST = 1.0  # log of the factor in _best up to which calls are close: that of an end at once with p = 0.63
LONG = 1024  # tokens; above, fairseq would not have trained on it


class TranslateError(InputError):
    """A folder or file that cannot be used; the message says which."""


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
        folder: what ``fairseq_rope.export`` wrote
        threads: of the CPU; default: as many as it has cores for this process
        device: "cpu", "cuda" or "auto"

    Raises:
        TranslateError: *folder* is none of those
    """

    def __init__(self, folder: str, threads: Optional[int] = None, device: str = "cpu") -> None:
        path = os.path.join(folder, SETTINGS)
        try:
            with open(path, encoding="utf-8") as file:
                self.settings: Dict[str, Any] = json.load(file)
            self.settings["positions"], self.settings["max_len_b"], self.settings["moses"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise TranslateError(
                f"--model {folder}: must be a folder that fairseq_rope.export wrote, and {SETTINGS} cannot "
                f"be read there ({error.strerror if isinstance(error, OSError) else repr(error)})"
            ) from None
        self._text = Text(folder, self.settings)
        import ctranslate2

        # That 16-bit weights are computed with in 32 where there is nothing else is no news.
        ctranslate2.set_log_level(logging.ERROR)
        self._cores = threads or _cores()
        try:
            if device == "auto":
                device = "cuda" if ctranslate2.get_cuda_device_count() else "cpu"
            # A batch for each core is faster than all cores for one batch.
            workers = {"inter_threads": self._cores, "intra_threads": 1} if device == "cpu" else {}
            self._model = ctranslate2.Translator(folder, device=device, **workers)
        except (RuntimeError, ValueError) as error:
            raise TranslateError(f"--model {folder}, --device {device}: {error}") from None
        kind = self.settings["quantization"] if device == "cpu" else device
        self._tokens = TOKENS.get(kind, OTHERS)

    def translate(
        self, lines: Iterable[str], beam: Optional[int] = None, lenpen: Optional[float] = None
    ) -> Iterator[str]:
        """The translations of *lines*, in their order; of an empty one an empty one.

        Args:
            beam: beam size; default: the settings'
            lenpen: length penalty; default: the settings'

        Raises:
            TranslateError: a line is longer than there are positions, of a model with absolute ones; those
                before it have been translated
        """
        chunk: List[str] = []
        first = 1
        for line in lines:
            chunk.append(line)
            if len(chunk) == CHUNK:
                yield from self.chunk(chunk, beam, lenpen, first)
                first += len(chunk)
                chunk = []
        yield from self.chunk(chunk, beam, lenpen, first)

    def chunk(
        self,
        lines: Sequence[str],
        beam: Optional[int] = None,
        lenpen: Optional[float] = None,
        first: int = 1,
        done: Callable[[int], object] = lambda count: None,
    ) -> Iterator[str]:
        """:meth:`translate` of a few *lines* at once.

        Args:
            first: the number of the first line, for messages
            done: called with the number of lines that a batch had, when it has been translated
        """
        sources = []
        refused = None
        for number, line in enumerate(lines, start=first):
            source = self._text.tokens(line)
            said = f"line {number} has {len(source)} tokens"
            allowed = self.settings["positions"]["source"]
            if allowed is not None and len(source) >= allowed:
                said += f", and with the end of the sentence this model has positions for {allowed}"
                refused = TranslateError(f"{said}: divide it")
                break
            if len(source) >= LONG:
                print(f"fairseq_rope.translate: {said}, more than models are trained on", file=sys.stderr)
            sources.append(source)
        for words in self.search(sources, beam, lenpen, done):
            yield self._text.plain(words)
        if refused:
            raise refused

    def search(
        self,
        sources: Sequence[List[str]],
        beam: Optional[int] = None,
        lenpen: Optional[float] = None,
        done: Callable[[int], object] = lambda count: None,
    ) -> List[List[str]]:
        """The best hypothesis for each of *sources*, both in words of the vocabularies; see :meth:`chunk`."""
        s = self.settings
        best: List[List[str]] = [[]] * len(sources)
        beam = s["beam"] if beam is None else beam
        lenpen = s["lenpen"] if lenpen is None else lenpen

        def limit(n: int) -> int:
            # As fairseq reckons it, with the end of the sentence.
            return min(len(sources[n]) + 1 + s["max_len_b"], s["positions"]["target"] or sys.maxsize)

        def results_of(batch: Sequence[int]) -> List[Any]:
            return self._model.translate_batch(
                [sources[n] for n in batch],
                beam_size=beam,
                # With 0, CTranslate2 ends when the best is found, and fairseq when *beam* outputs have ended.
                length_penalty=lenpen or 1e-9,
                num_hypotheses=beam,
                return_scores=True,
                suppress_sequences=[["<blank>"]],  # fairseq's search takes no padding
                max_input_length=0,
                max_decoding_length=limit(batch[0]),  # the longest
                asynchronous=True,
            )

        order = sorted((n for n in range(len(sources)) if sources[n]), key=lambda n: -len(sources[n]))
        share = sum(len(source) + 1 for source in sources) // self._cores  # so that few lines go to all cores
        batches = in_batches(order, sources, min(self._tokens, share))
        searches = [(batch, results_of(batch)) for batch in batches]
        done(len(sources) - len(order))
        for batch, results in searches:
            for n, found in zip(batch, results):
                result = found.result()
                if any(len(words) > limit(n) for words in result.hypotheses):  # one that would not end
                    result = results_of([n])[0].result()
                best[n] = self._best(sources[n], result, lenpen, limit(n))
            done(len(batch))
        return best

    def _best(self, source: List[str], result: Any, lenpen: float, limit: int) -> List[str]:
        """The hypothesis that fairseq (sequence_generator.py) would rank first.

        CTranslate2 takes the end of the sentence away at the first step before the softmax, fairseq after it:
        all hypotheses are likelier by one factor, which counts less the longer they are. At the limit
        CTranslate2 leaves the end out, where fairseq appends it at its cost. So close calls, and those with
        a hypothesis that the limit has cut, are decided by what the model thinks of each as a whole. (Those
        cut may have displaced one that ended: then the output is not fairseq's.)
        """
        hypotheses, scores = result.hypotheses, result.scores
        weights = [(len(words) + 1) ** -lenpen for words in hypotheses]  # the end is a word
        others = range(1, len(hypotheses))
        if all(len(words) < limit for words in hypotheses) and not any(
            scores[0] - scores[n] < MOST * (weights[0] - weights[n]) for n in others
        ):
            return hypotheses[0]
        whole = self._model.score_batch([source] * len(hypotheses), hypotheses, max_input_length=0)
        ranked = [sum(words.log_probs) * weight for words, weight in zip(whole, weights)]
        return hypotheses[ranked.index(max(ranked))]


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


def _lines(descriptor: int) -> Iterator[bytes]:
    """The lines of an open file, without their ends.

    Not by the file object: its lock, held while it waits for a line, would have Python abort at its exit.
    """
    rest = b""
    while True:
        read = os.read(descriptor, 1 << 16)
        *lines, rest = (rest + read).split(b"\n")
        yield from lines
        if not read:
            if rest:
                yield rest
            return


def as_they_come(file: IO[bytes], name: str) -> Iterator[List[str]]:
    """The lines of *file*, as many together as are there within WAIT seconds, up to CHUNK.

    Raises:
        TranslateError: a line is not UTF-8; those before it have been yielded
    """
    lines: queue.Queue[Any] = queue.Queue(4 * CHUNK)

    def read() -> None:
        try:
            for number, line in enumerate(_lines(file.fileno()), start=1):
                try:
                    lines.put(line.decode("utf-8"))
                except UnicodeDecodeError as error:
                    raise TranslateError(f"{name}, line {number}: is not UTF-8 ({error.reason})") from None
            lines.put(None)
        except Exception as error:
            lines.put(error)

    threading.Thread(target=read, daemon=True).start()
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


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="fairseq_rope.translate",
        description="Translate plain text, a sentence a line, with an exported model.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="what fairseq_rope.export wrote")
    add("--input", metavar="FILE", help="default: standard input")
    add("--beam", type=int, metavar="N", help="beam size; default: what the folder says, 4")
    add("--lenpen", type=float, metavar="X", help="length penalty; default: what the folder says, 0.6")
    add("--threads", type=int, metavar="N", help="default: all cores")
    add("--device", choices=("cpu", "cuda", "auto"), default="cpu", help="default: %(default)s")
    return parser


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the command; exits with status 1 and one sentence on standard error if it cannot."""
    parser = build_parser()
    args = parser.parse_args(argv)
    for flag in ("beam", "threads"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            parser.error(f"--{flag} {value}: must be 1 or more")
    if args.lenpen is not None and not math.isfinite(args.lenpen):
        parser.error(f"--lenpen {args.lenpen}: must be a number")
    if hasattr(signal, "SIGPIPE"):  # what reads the output may stop, as head does
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    with ending_in_one_sentence("fairseq_rope.translate"):
        if sys.stdout is None or (sys.stdin is None and args.input is None):
            raise TranslateError("standard input or output is closed")
        file = sys.stdin.buffer if args.input is None else open(args.input, "rb")
        translator = Translator(args.model, args.threads, args.device)
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
        from tqdm import tqdm

        first = 1
        with tqdm(unit=" lines", disable=not sys.stderr.isatty() or sys.stdout.isatty()) as bar:
            for lines in as_they_come(file, args.input or "standard input"):
                for line in translator.chunk(lines, args.beam, args.lenpen, first, bar.update):
                    print(line)
                sys.stdout.flush()
                first += len(lines)


if __name__ == "__main__":
    main()
