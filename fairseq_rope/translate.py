"""Translate plain text with an exported model: ``python -m fairseq_rope.translate``.

The model is a folder that ``fairseq_rope.export`` wrote. Needs CTranslate2 and what divides its text
(sacremoses and subword-nmt, or sentencepiece), and neither torch nor fairseq.
"""

import argparse
import json
import os
import queue
import signal
import sys
import threading
from typing import IO, Any, Dict, Iterable, Iterator, List, Optional, Sequence

from .errors import InputError, ending_in_one_sentence

SETTINGS = "fairseq_rope.json"  # in the folder: how to treat text, and where the model came from
CHUNK = 2048  # lines that are sorted by length and translated together
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
            if subwords["kind"] == "sentencepiece":
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
            return self._pieces.encode(line, out_type=str)
        return line.split()

    def plain(self, tokens: Sequence[str]) -> str:
        """The sentence that *tokens* are."""
        line = " ".join(tokens)
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
        except (OSError, ValueError) as error:
            raise TranslateError(
                f"--model {folder}: must be a folder that fairseq_rope.export wrote, and {SETTINGS} cannot "
                f"be read there ({error.strerror if isinstance(error, OSError) else error})"
            ) from None
        self._text = Text(folder, self.settings)
        import ctranslate2

        # A batch for each core is faster than all cores for one batch.
        self._cores = threads or _cores()
        if device == "auto":
            device = "cuda" if ctranslate2.get_cuda_device_count() else "cpu"
        workers = {"inter_threads": self._cores, "intra_threads": 1} if device == "cpu" else {}
        self._model = ctranslate2.Translator(folder, device=device, **workers)
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
            TranslateError: a line is longer than there are positions, of a model with absolute ones
        """
        chunk: List[str] = []
        for line in lines:
            chunk.append(line)
            if len(chunk) == CHUNK:
                yield from self.chunk(chunk, beam, lenpen)
                chunk = []
        if chunk:
            yield from self.chunk(chunk, beam, lenpen)

    def chunk(self, lines: Sequence[str], beam: Optional[int], lenpen: Optional[float]) -> List[str]:
        """:meth:`translate` of a few *lines* at once."""
        s = self.settings
        sources = [self._text.tokens(line) for line in lines]
        for line, source in zip(lines, sources):
            if len(source) >= LONG:
                if s["positions"] is not None and len(source) >= s["positions"]:
                    raise TranslateError(
                        f"a line of {len(source)} tokens, and the absolute positions of this model end at "
                        f"{s['positions']}; divide it: {line[:40]} …"
                    )
                print(
                    f"fairseq_rope.translate: a line of {len(source)} tokens, more than models are trained "
                    f"on: {line[:40]} …",
                    file=sys.stderr,
                )
        translated = [""] * len(lines)

        beam = s["beam"] if beam is None else beam
        lenpen = s["lenpen"] if lenpen is None else lenpen

        def search(batch: Sequence[int]) -> List[Any]:
            # As fairseq reckons it, with the end of the sentence; the first of a batch is the longest.
            return self._model.translate_batch(
                [sources[n] for n in batch],
                beam_size=beam,
                # With 0, CTranslate2 ends when the best is found, and fairseq when *beam* outputs have ended.
                length_penalty=lenpen or 1e-9,
                num_hypotheses=beam,
                return_scores=True,
                max_input_length=0,
                max_decoding_length=limit(batch[0]),
                asynchronous=True,
            )

        def limit(n: int) -> int:
            return min(len(sources[n]) + 1 + s["max_len_b"], s["positions"] or sys.maxsize)

        order = sorted((n for n in range(len(lines)) if sources[n]), key=lambda n: -len(sources[n]))
        share = sum(len(source) + 1 for source in sources) // self._cores  # so that few lines go to all cores
        batches = in_batches(order, sources, min(self._tokens, share))
        searches = [(batch, search(batch)) for batch in batches]
        for batch, results in searches:
            for n, found in zip(batch, results):
                result = found.result()
                if any(len(tokens) > limit(n) for tokens in result.hypotheses):  # one that would not end
                    result = search([n])[0].result()
                translated[n] = self._text.plain(self._best(sources[n], result, lenpen, limit(n)))
        return translated

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


def as_they_come(file: IO[str]) -> Iterator[List[str]]:
    """The lines of *file*, as many together as are there, up to CHUNK: a pipe or terminal waits for none."""
    lines: queue.Queue[Any] = queue.Queue(2 * CHUNK)

    def read() -> None:
        try:
            for line in file:
                lines.put(line.rstrip("\n"))
            lines.put(None)
        except (OSError, ValueError) as error:
            lines.put(error)

    threading.Thread(target=read, daemon=True).start()
    while True:
        chunk = [lines.get()]
        while len(chunk) < CHUNK and chunk[-1] is not None and not isinstance(chunk[-1], Exception):
            try:
                chunk.append(lines.get(timeout=0.05))  # a file is read faster than that
            except queue.Empty:
                break
        last = chunk[-1]
        if last is None or isinstance(last, Exception):
            chunk.pop()
        if chunk:
            yield chunk
        if isinstance(last, UnicodeDecodeError):
            raise TranslateError(f"the input is not UTF-8: {last.reason} at byte {last.start} of a line")
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
    if hasattr(signal, "SIGPIPE"):  # what reads the output may stop, as head does
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    with ending_in_one_sentence("fairseq_rope.translate"):
        translator = Translator(args.model, args.threads, args.device)
        if args.input is None:
            sys.stdin.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
            file: IO[str] = sys.stdin
        else:
            file = open(args.input, encoding="utf-8", newline="\n")
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # type: ignore[union-attr]
        from tqdm import tqdm

        with tqdm(unit=" lines", disable=not sys.stderr.isatty() or sys.stdout.isatty()) as bar:
            for chunk in as_they_come(file):
                for line in translator.chunk(chunk, args.beam, args.lenpen):
                    print(line)
                sys.stdout.flush()
                bar.update(len(chunk))


if __name__ == "__main__":
    main()
