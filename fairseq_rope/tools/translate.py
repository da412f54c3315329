"""Translate plain text with an exported model: ``fairseq-rope translate``.

The model is a folder that ``fairseq-rope export`` wrote. The tool needs CTranslate2 and the tokenisers of the
model (sacremoses and subword-nmt, or sentencepiece), but neither torch nor fairseq.
"""

import argparse
import codecs
import collections
import contextlib
import gzip
import hashlib
import io
import itertools
import json
import logging
import math
import os
import queue
import re
import signal
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import IO, Any, Callable, Deque, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union, overload

from ..errors import InputError, ending_in_one_sentence, refuse_output
from ..files import written_whole
from ..lines import decode
from ..segments import divided, joined, segments
from . import FILE, INTEGER, NUMBER, REQUIRED, SWITCH, add_flags, command_parser
from .together import Together

SETTINGS = "fairseq_rope.json"  # in the folder: how to tokenise text, and which checkpoint was exported
# The file names of subword models, by the method's name in fairseq's --bpe. Data folders of the recipes and
# exported folders use the same names.
SUBWORDS = {"subword_nmt": "bpecodes", "sentencepiece": "sentencepiece.bpe.model"}
SHORTLIST = "vmap.txt"  # in the folder, if it has a shortlist; the name that CTranslate2 knows
CHUNK = 512  # lines that are sorted by length and translated together
WAIT = 0.1  # seconds that the first line of a chunk waits for others
# Tokens in a batch. On a CPU each core translates one batch, and these sizes were the fastest in
# benchmarks/serve.py. The size for GPUs is not measured.
BATCH_TOKENS = {"int8": 256, "int8_float32": 256, "cuda": 8192}
DEFAULT_BATCH_TOKENS = 1024
# Translator._ranked scores hypotheses again if their order changes with log-probabilities that are lower by this
# amount. CTranslate2's are too high by it if the end of the sentence has a probability of 0.63 at the first step.
CLOSE = 1.0
LONG = 1024  # tokens; fairseq does not train on longer sentences by default
# The longest line that is translated. Memory grows with the square of its tokens, and the time of BPE with
# the square of the characters of a word: docs/serving.md has the measurements.
LONGEST = 4096  # tokens
CHARACTERS = 8 * LONGEST
# A text with more lines and without a blank line gives a warning: perhaps its documents are not marked.
LONG_DOCUMENT = 200


class TranslateError(InputError):
    """A folder or file cannot be used, or a line cannot be translated; the message says which one and why."""


Rule = Tuple[Callable[[Any], bool], str]  # returns whether a value is allowed; describes the allowed values


def _integer(least: int, most: float = math.inf) -> Rule:
    return lambda value: type(value) is int and least <= value <= most, f"an integer from {least} to {most}"


def _number(most: int) -> Rule:
    return lambda value: type(value) in (int, float) and abs(value) <= most, f"a number from -{most} to {most}"


def _is_moses(value: Any) -> bool:
    types = {"source": str, "target": str, "dash_splits": bool}
    return isinstance(value, dict) and all(type(value.get(name)) is kind for name, kind in types.items())


def _is_positions(value: Any) -> bool:
    is_count, _ = _integer(1)
    if not isinstance(value, dict) or type(value.get("counts_padding", False)) is not bool:
        return False
    return all(side in value and (value[side] is None or is_count(value[side])) for side in ("source", "target"))


def _is_checksums(value: Any) -> bool:
    return isinstance(value, dict) and all(re.fullmatch(r"\w[\w.-]*", name, re.ASCII) for name in value)


def _is_segments(value: Any) -> bool:
    if not isinstance(value, dict) or not NUMBERS["segment_tokens"][0](value.get("tokens")):
        return False
    separator = value.get("separator")
    return isinstance(separator, str) and separator.split() == [separator]


# The allowed values of numeric options. Larger ones would exhaust the memory or overflow.
NUMBERS = {
    "beam": _integer(1, 1000),
    "nbest": _integer(1, 1000),
    "threads": _integer(1, 1024),
    "max_len_b": _integer(0, 10_000),
    "lenpen": _number(100),
    "segment_tokens": _integer(1, LONGEST),
    "shortlist_candidates": _integer(1, 1_000_000),
    "shortlist_frequent": _integer(1, 1_000_000),
}
_SUBWORD_SETTINGS = [{"kind": kind, "file": file} for kind, file in SUBWORDS.items()]
# The allowed values of each setting.
ALLOWED: Dict[str, Rule] = {
    "moses": (lambda value: value is None or _is_moses(value), "null or an object with source, target and dash_splits"),
    # No other file is opened, because the folder may come from someone else.
    "subwords": (lambda value: value in [None, *_SUBWORD_SETTINGS], f"null or one of {_SUBWORD_SETTINGS}"),
    "positions": (
        _is_positions,
        "an object with source and target, each null or an integer of at least 1, and true or false as counts_padding",
    ),
    **{name: NUMBERS[name] for name in ("beam", "lenpen", "max_len_b")},
    "quantization": (lambda value: isinstance(value, str), "a string"),
    # The first version of this project wrote no segments.
    "segments": (
        lambda value: value is None or _is_segments(value),
        f"null or an object with tokens, {NUMBERS['segment_tokens'][1]}, and separator, one token",
    ),
    # The first version of this project wrote no checksums.
    "sha256": (lambda value: value is None or _is_checksums(value), "null or the checksums of files in the folder"),
}


def read_settings(folder: str) -> Dict[str, Any]:
    """Return the settings of an exported *folder*.

    Raises:
        TranslateError: they cannot be read, or a value is not in ALLOWED
    """
    try:
        with open(os.path.join(folder, SETTINGS), encoding="utf-8") as file:
            settings = json.load(file)
        if not isinstance(settings, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        folders = "must be a folder that fairseq-rope export wrote"
        raise TranslateError(f"--model {folder}: {folders}, and {SETTINGS} cannot be read there ({reason})") from None
    for name, (is_allowed, allowed) in ALLOWED.items():
        value = settings.get(name)
        if not is_allowed(value):
            shown = json.dumps(value)
            shown = shown if len(shown) <= 100 else f"{shown[:100]}…"
            raise TranslateError(f"--model {folder}: in {SETTINGS}, {name} is {shown}, and must be {allowed}")
    return settings


def checksum(path: str) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def refuse_changed_files(folder: str, checksums: Optional[Dict[str, str]]) -> None:
    """Raise a TranslateError if a file in *folder* is missing or does not have its checksum."""
    for name, expected in (checksums or {}).items():
        try:
            same = checksum(os.path.join(folder, name)) == expected
        except OSError as error:
            raise TranslateError(f"--model {folder}: {name} cannot be read ({error.strerror})") from None
        if not same:
            changed = f"{name} is not the file that was exported: its SHA-256 differs from the one in {SETTINGS}"
            raise TranslateError(f"--model {folder}: {changed}; copy or export the model again")


class Text:
    """Converts plain text to tokens and back, as ``fairseq-interactive`` does with the flags of the recipes.

    It follows moses_tokenizer.py, subword_nmt_bpe.py and sentencepiece_bpe.py in ``fairseq/data/encoders``.

    Args:
        folder: an exported folder, or "" if the settings contain the path of the subword model
        settings: ``moses`` and ``subwords`` of ``fairseq_rope.json``

    Raises:
        TranslateError: the subword model cannot be read
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
                self._pieces = _read_sentencepiece(path)
            else:
                self._bpe = _read_bpe(path)

    def tokens(self, line: str) -> List[str]:
        """Return the tokens of a sentence; an empty sentence has none."""
        if self._tokeniser is not None:
            options = {"aggressive_dash_splits": self._dash_splits, "return_str": True, "escape": True}
            line = self._tokeniser.tokenize(line, **options)
        if self._bpe is not None:
            line = self._bpe.process_line(line)
        if self._pieces is not None:
            line = " ".join(self._pieces.encode(line, out_type=str))
        return line.split()

    def plain(self, tokens: Sequence[str]) -> str:
        """Return *tokens* as plain text. ``<s>`` and ``</s>`` are removed, as in fairseq."""
        line = " ".join(token for token in tokens if token not in ("<s>", "</s>"))
        if self._pieces is not None:
            return line.replace(" ", "").replace("\u2581", " ").strip()
        if self._bpe is not None:
            line = (line + " ").replace("@@ ", "").rstrip()
        if self._detokeniser is not None:
            line = self._detokeniser.detokenize(line.split())
        return line


def _read_sentencepiece(path: str) -> Any:
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=path)
    except (RuntimeError, OSError) as error:
        raise TranslateError(f"{path}: cannot be read as a sentencepiece model ({error})") from None


def _read_bpe(path: str) -> Any:
    from subword_nmt.apply_bpe import BPE

    printed = io.StringIO()
    try:
        with open(path, encoding="utf-8") as codes, contextlib.redirect_stderr(printed):
            return BPE(codes)
    except (ValueError, SystemExit) as error:  # subword-nmt prints the line and exits
        line = re.search(r"invalid (line \d+)", printed.getvalue())
        reason = f"{line.group(1)} is not two subwords" if line else error
        raise TranslateError(f"{path}: cannot be read as a file of BPE codes ({reason})") from None


class Translator:
    """Loads the model of an exported folder, and translates with it.

    Args:
        folder: a folder that ``fairseq-rope export`` wrote
        threads: CPU threads; default: the number of cores that this process may use
        device: "cpu", "cuda" or "auto"
        shortlist: whether the search uses the shortlist of the folder, if it has one

    Raises:
        TranslateError: *folder* is not an exported folder, or a file in it has changed
    """

    def __init__(self, folder: str, threads: Optional[int] = None, device: str = "cpu", shortlist: bool = True) -> None:
        self.folder = folder
        self.settings = read_settings(folder)
        self.shortlist = shortlist and os.path.exists(os.path.join(folder, SHORTLIST))
        with ThreadPoolExecutor(1) as pool:  # check the files while the tokenisers are imported
            check = pool.submit(refuse_changed_files, folder, self.settings.get("sha256"))
            self._text = Text(folder, self.settings)
            import ctranslate2
        check.result()
        # CTranslate2 warns if the CPU has no 16-bit arithmetic and it computes with 32 bits instead.
        ctranslate2.set_log_level(logging.ERROR)
        self._cores = threads or _cores()
        try:
            if device == "auto":
                device = "cuda" if ctranslate2.get_cuda_device_count() else "cpu"
            # One batch for each core is faster than all cores for one batch.
            workers = {"inter_threads": self._cores, "intra_threads": 1} if device == "cpu" else {}
            self._model = ctranslate2.Translator(folder, device=device, **workers)
            # CTranslate2 looks for the special symbols in the vocabulary only when it translates.
            self._model.translate_batch([["<unk>"]], suppress_sequences=[["<blank>"]], max_decoding_length=1)
            if device == "cpu":  # on GPUs, CTranslate2 may pad the output
                self._refuse_other_vocabulary(folder)
            self._known = frozenset(_vocabulary(folder, "source")[1] if self.shortlist else ())
        except (RuntimeError, ValueError, IndexError) as error:
            raise TranslateError(f"--model {folder}, --device {device}: {error}") from None
        kind = self.settings["quantization"] if device == "cpu" else device
        self._batch_tokens = BATCH_TOKENS.get(kind, DEFAULT_BATCH_TOKENS)
        self._together = Together(self._search, self._cores)
        self._users, self._is_closed, self._changed = 0, False, threading.Condition()

    def close(self) -> None:
        """Free the memory of the model as soon as no thread uses it; later calls raise a TranslateError."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: not self._users)
        self._model.unload_model()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        with self._changed:
            if self._is_closed:
                raise TranslateError(f"--model {self.folder}: the translator is closed")
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def __enter__(self) -> "Translator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_other_vocabulary(self, folder: str) -> None:
        """Raise a ValueError if the model and its vocabulary have different numbers of words."""
        options = {"beam_size": 1, "max_decoding_length": 1, "return_logits_vocab": True}
        (result,) = self._model.translate_batch([["<unk>"]], **options)
        scored = result.logits[0][0].shape[-1]
        name, words = _vocabulary(folder, "target")
        if len(words) != scored:
            raise ValueError(f"{name} has {len(words)} words, and the model has {scored}")

    @overload
    def translate(self, text: str, beam: Optional[int] = ..., lenpen: Optional[float] = ...) -> str: ...  # type: ignore[overload-overlap]

    @overload
    def translate(self, text: Iterable[str], beam: Optional[int] = ..., lenpen: Optional[float] = ...) -> List[str]: ...

    def translate(
        self, text: Union[str, Iterable[str]], beam: Optional[int] = None, lenpen: Optional[float] = None
    ) -> Union[str, List[str]]:
        """Return the translation of one sentence, or a list of the translations of several.

        Several threads can call it. Single sentences that arrive while others are translated are then translated
        together, which is faster. The arguments are those of :meth:`translate_lines`.
        """
        if isinstance(text, str):
            with self._in_use():
                best = self._together(self._source(text, 1), beam=beam, lenpen=lenpen)
            return self._text.plain(best[0][0])
        return list(self.translate_lines(text, beam, lenpen))

    def translate_lines(
        self, lines: Iterable[str], beam: Optional[int] = None, lenpen: Optional[float] = None
    ) -> Iterator[str]:
        """Yield the translations of *lines* in order, as soon as they are ready.

        The translation of an empty line is empty.

        Args:
            beam: beam size; default: that of the settings
            lenpen: length penalty; default: that of the settings

        Raises:
            TranslateError: a line has more than LONGEST tokens or CHARACTERS characters, or more tokens than
                the model has positions; the translations of the lines before it have been yielded
        """
        pending = iter(lines)
        first = 1
        while True:
            chunk = list(itertools.islice(pending, CHUNK))
            yield from (nbest[0][0] for nbest in self.chunk(chunk, beam, lenpen, first))
            first += len(chunk)
            if len(chunk) < CHUNK:
                return

    def chunk(
        self,
        lines: Sequence[str],
        beam: Optional[int] = None,
        lenpen: Optional[float] = None,
        first: int = 1,
        done: Callable[[int], object] = lambda count: None,
        nbest: int = 0,
    ) -> Iterator[List[Tuple[str, float]]]:
        """Yield the best translations of each of *lines*, with their scores, best first.

        Args:
            beam, lenpen: as in :meth:`translate_lines`
            first: the number of the first line, for messages
            done: called with the number of lines in a batch when the batch has been translated
            nbest: how many translations; 0: only the best, with an approximate score

        Raises:
            TranslateError: as in :meth:`translate_lines`
        """
        sources = []
        refusal = None
        for number, line in enumerate(lines, start=first):
            try:
                source = self._source(line, number)
            except TranslateError as error:
                refusal = error
                break
            sources.append(source)
        for hypotheses in self.search(sources, beam, lenpen, done, nbest):
            yield [(self._text.plain(words), score) for words, score in hypotheses]
        if refusal:
            raise refusal

    def translate_documents(
        self, documents: Iterable[Iterable[str]], beam: Optional[int] = None, lenpen: Optional[float] = None
    ) -> Iterator[List[str]]:
        """Yield the translations of the sentences of each document, in order, as soon as they are ready.

        Consecutive sentences of a document are translated together, in segments. An empty sentence has an empty
        translation and ends a segment. In messages, the lines have the numbers of a text with one blank line after
        each document.

        Args:
            documents: each contains sentences
            beam, lenpen: as in :meth:`translate_lines`

        Raises:
            TranslateError: the model was not exported with segments, or a sentence contains the separator or is too
                long (see :meth:`translate_lines`); the documents before it have been yielded
        """
        counts: Deque[int] = collections.deque()

        def lines() -> Iterator[str]:
            for document in documents:
                sentences = list(document)
                counts.append(len(sentences))
                yield from sentences
                yield ""

        pending = lines()
        chunks = iter(lambda: list(itertools.islice(pending, CHUNK)), [])
        translations = itertools.chain.from_iterable(self.document_lines(chunks, beam, lenpen))
        for line in translations:
            yield [line, *itertools.islice(translations, counts.popleft())][:-1]

    def document_lines(
        self, chunks: Iterable[Sequence[str]], beam: Optional[int] = None, lenpen: Optional[float] = None
    ) -> Iterator[List[str]]:
        """Yield the translations of the lines of a text in which blank lines separate documents.

        The lists together have a line for each line of the text. At the end, a warning says how many segments have
        a translation with another number of separators than their source.

        Args:
            chunks: the lines of the text, in lists of any lengths. A segment is translated when the next line cannot
                be part of it. So the memory does not depend on the lengths of documents.
            beam, lenpen: as in :meth:`translate_lines`

        Raises:
            TranslateError: as in :meth:`translate_documents`; the translations of the lines before it have been yielded
        """
        settings = self.settings.get("segments")
        if settings is None:
            raise TranslateError(
                f"--documents: the model in --model {self.folder} has no segments in {SETTINGS}; if it was trained on "
                "segments of documents, export it with --segment-tokens and --separator"
            )
        separator = settings["separator"]
        total = different = 0
        try:
            for complete in self._segments(chunks, settings["tokens"], separator):
                results = self.search([joined(sentences, separator) for sentences in complete], beam, lenpen)
                lines: List[str] = []
                for sentences, [(words, _)] in zip(complete, results):
                    translations, is_same = divided(words, len(sentences), separator)
                    lines += map(self._text.plain, translations)
                    total += bool(sentences[0])
                    different += not is_same
                yield lines
        finally:
            if different:
                _warn(
                    f"{different} of {total} segments have a translation with another number of separators than their "
                    "source: some of their sentences may be on another line, or on none"
                )

    def _segments(
        self, chunks: Iterable[Sequence[str]], tokens: int, separator: str
    ) -> Iterator[List[List[List[str]]]]:
        """Yield for each of *chunks* the segments that are complete, as lists of sentences of tokens.

        A blank line is a segment with one sentence without tokens. After an error of *chunks*, or a line that cannot
        be translated, the segments of the lines before it are yielded, and then the error is raised.
        """
        most = min(tokens, self._longest)
        complete: List[List[List[str]]] = []
        sentences: List[List[str]] = []  # of this document, not yet in a complete segment
        failure: Optional[Exception] = None
        number = blank_lines = 0

        def cut() -> List[List[List[str]]]:
            found = segments([len(sentence) for sentence in sentences], lambda: most)
            return [sentences[segment.start : segment.stop] for segment in found]

        try:
            for lines in chunks:
                for line in lines:
                    number += 1
                    sentence = self._source(line, number)
                    if separator in sentence:
                        raise TranslateError(
                            f"line {number} contains {separator}, which this model uses as the separator of sentences: "
                            "remove it"
                        )
                    if len(sentence) > tokens:
                        length = f"line {number} has {len(sentence)} tokens"
                        _warn(f"{length}, more than the longest segments that the model was trained on, {tokens}")
                    if sentence:
                        sentences.append(sentence)
                    else:
                        complete += [*cut(), [[]]]
                        sentences = []
                        blank_lines += 1
                *others, sentences = cut() or [[]]  # the next line may be part of the last segment
                yield complete + others
                complete = []
        except (InputError, OSError) as error:
            failure = error
        yield complete + cut()
        if failure is not None:
            raise failure
        if number > LONG_DOCUMENT and not blank_lines:
            _warn(f"the text has {number} lines and no blank line: it was translated as one document")

    @property
    def _longest(self) -> int:
        """The number of tokens in the longest line that is translated."""
        positions = self.settings["positions"]["source"]  # the end of the sentence takes one of them
        return LONGEST if positions is None else min(LONGEST, positions - 1)

    def _source(self, line: str, number: int) -> List[str]:
        """Return the tokens of a line; *number* is for messages.

        Raises:
            TranslateError: the line has too many tokens or characters
        """
        if len(line) > CHARACTERS:
            raise TranslateError(
                f"line {number} has {len(line)} characters, more than the limit of {CHARACTERS}: split the line"
            )
        source = self._text.tokens(line)
        if len(source) > self._longest:
            limit = f"the limit of this model, {self._longest}"
            raise TranslateError(f"line {number} has {len(source)} tokens, more than {limit}: split the line")
        if len(source) >= LONG:
            _warn(f"line {number} has {len(source)} tokens, more than models are trained on")
        positions = self.settings["positions"]
        counts_padding = positions.get("counts_padding", positions["source"] is None)
        if counts_padding and "<pad>" in itertools.dropwhile("<pad>".__eq__, source):
            _warn(
                f"line {number} has <pad> after a word. fairseq leaves its position empty, which CTranslate2 "
                "cannot do: the translation may differ"
            )
        return source

    def search(
        self,
        sources: Sequence[List[str]],
        beam: Optional[int] = None,
        lenpen: Optional[float] = None,
        done: Callable[[int], object] = lambda count: None,
        nbest: int = 0,
    ) -> List[List[Tuple[List[str], float]]]:
        """Return the best hypotheses for each of *sources*, in tokens, with their scores.

        The arguments are those of :meth:`chunk`. As in fairseq, ``<pad>`` in *sources* is padding and
        ``<blank>`` an unknown word.

        Raises:
            TranslateError: CTranslate2 cannot search with this model or these options, or the translator is closed
        """
        with self._in_use():
            return self._search(sources, beam, lenpen, done, nbest)

    def _search(
        self,
        sources: Sequence[List[str]],
        beam: Optional[int] = None,
        lenpen: Optional[float] = None,
        done: Callable[[int], object] = lambda count: None,
        nbest: int = 0,
    ) -> List[List[Tuple[List[str], float]]]:
        settings = self.settings
        best: List[List[Tuple[List[str], float]]] = [[([], 0.0)]] * len(sources)
        beam = settings["beam"] if beam is None else beam
        lenpen = settings["lenpen"] if lenpen is None else lenpen
        # CTranslate2 calls padding <blank>, and attends to it.
        known = self._known  # CTranslate2 looks a word up in the shortlist as it is
        words = [
            ["<unk>" if w == "<blank>" or known and w not in known else w for w in source if w != "<pad>"]
            for source in sources
        ]

        max_len_b: int = settings["max_len_b"]
        positions: int = settings["positions"]["target"] or sys.maxsize

        def limit(n: int) -> int:
            return min(len(sources[n]) + 1 + max_len_b, positions)  # + 1: as in fairseq, the end counts

        def is_marked(n: int) -> bool:
            return not words[n] or "<s>" in words[n] or "</s>" in words[n]

        def results_of(batch: Sequence[int]) -> List[Any]:
            inputs, cut = [words[n] for n in batch], 0
            if is_marked(batch[0]):
                # CTranslate2 treats some of these sources as empty and does not translate them. It decides
                # this before it truncates a source to the maximum length, so three words are added.
                inputs, cut = [[*inputs[0], "<unk>", "<unk>", "<unk>"]], len(inputs[0]) + 1
            pending: List[Any] = self._model.translate_batch(
                inputs,
                beam_size=beam,
                # With 0, CTranslate2 stops at the first finished hypothesis; fairseq stops after *beam* of them.
                length_penalty=lenpen or 1e-9,
                num_hypotheses=beam,
                return_scores=True,
                suppress_sequences=[["<blank>"]],  # fairseq's search never selects padding
                use_vmap=self.shortlist,
                max_input_length=cut,
                max_decoding_length=limit(batch[0]),  # the first of a batch is its longest
                asynchronous=True,
            )
            return pending

        order = sorted((n for n in range(len(sources)) if sources[n]), key=lambda n: -len(sources[n]))
        share = sum(len(source) + 1 for source in sources) // self._cores  # a few lines use all cores, too
        unmarked = [n for n in order if not is_marked(n)]
        batches = [
            *in_batches(unmarked, sources, min(self._batch_tokens, share)),
            *([n] for n in order if is_marked(n)),
        ]
        searches: List[Tuple[List[int], List[Any]]] = []
        try:
            for batch in batches:
                # This many searches at a time need no more memory than one search for the longest line.
                at_once = max(1, LONGEST // (len(sources[batch[0]]) + 1)) ** 2
                if len(searches) >= at_once:
                    searches[-at_once][1][0].result()
                searches.append((batch, results_of(batch)))
            done(len(sources) - len(order))
            for batch, results in searches:
                for n, pending in zip(batch, results):
                    result = pending.result()
                    if any(len(hypothesis) > limit(n) for hypothesis in result.hypotheses):  # too long
                        result = results_of([n])[0].result()
                    best[n] = self._ranked(words[n], result, lenpen, limit(n), nbest)
                done(len(batch))
        except (RuntimeError, ValueError) as error:
            raise TranslateError(f"CTranslate2 cannot search with this model: {error}") from None
        return best

    def _ranked(
        self, source: List[str], result: Any, lenpen: float, limit: int, nbest: int
    ) -> List[Tuple[List[str], float]]:
        """Return the hypotheses that fairseq (sequence_generator.py) ranks first, with their scores.

        At the first step, CTranslate2 removes the end of the sentence before the softmax, and fairseq after
        it. So CTranslate2 adds the same amount to the log-probabilities of all hypotheses, and the length
        penalty reduces it more in longer ones. At the length limit, CTranslate2 leaves out the end, and
        fairseq adds its log-probability. So three kinds of results are ranked again by the model's scores of
        the complete hypotheses: n-best lists, results with close scores, and results with a hypothesis that
        reached the limit. (Such a hypothesis may have displaced a finished one. Then the output differs.)
        """
        hypotheses, scores = result.hypotheses, result.scores
        weights = [(len(words) + 1) ** -lenpen for words in hypotheses]  # + 1: the end
        close = [score - CLOSE * weight for score, weight in zip(scores, weights)]
        if nbest or any(len(words) >= limit for words in hypotheses) or max(close) > close[0]:
            sources = [source] * len(hypotheses)
            options = {"max_input_length": 0, "max_batch_size": LONG, "batch_type": "tokens"}  # limits the memory
            whole = self._model.score_batch(sources, hypotheses, **options)
            scores = [sum(words.log_probs) * weight for words, weight in zip(whole, weights)]
        order = sorted(range(len(hypotheses)), key=lambda n: -scores[n])
        return [(hypotheses[n], scores[n] / math.log(2)) for n in order[: nbest or 1]]


def _vocabulary(folder: str, side: str) -> Tuple[str, List[str]]:
    """Return the name of the file with the words of a side, "source" or "target", in *folder*, and the words."""
    names = ("shared_vocabulary.json", f"{side}_vocabulary.json")
    name = next(name for name in names if os.path.exists(os.path.join(folder, name)))
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        words: List[str] = json.load(file)
    return name, words


def in_batches(order: Sequence[int], sources: Sequence[Sequence[str]], tokens: int) -> Iterator[List[int]]:
    """Yield *order* in batches of at most *tokens* tokens, padding included.

    Args:
        order: indices of *sources*, the longest source first
    """
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


def _warn(message: str) -> None:
    print(f"fairseq-rope translate: warning: {message}", file=sys.stderr)


# -- the command -----------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Optional[str]) -> Iterator[Tuple[Callable[[int], bytes], str]]:
    """Yield a function that reads bytes from *path* or standard input, and the name of the input in messages."""
    if path is None or path == "-":
        # Not sys.stdin.buffer: it holds a lock while it waits for input, and Python aborts if it exits then.
        yield partial(os.read, sys.stdin.fileno()), "standard input"
        return
    with open(path, "rb", buffering=0) as file:
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


def as_they_come(read: Callable[[int], bytes], name: str) -> Iterator[List[str]]:
    """Yield lists of up to CHUNK lines of a file, each with the lines that arrive within WAIT seconds.

    Raises:
        InputError: a line is not UTF-8 or has too many characters, or a compressed file is damaged; the
            lines before it have been yielded
        OSError: the file cannot be read
    """
    lines: queue.Queue[Any] = queue.Queue(4 * CHUNK)

    def put_lines() -> None:
        try:
            for number, line in enumerate(_lines(read), start=1):
                if len(line) > 4 * CHARACTERS:  # a character has at most 4 bytes
                    raise TranslateError(
                        f"{name}, line {number}: has more than {CHARACTERS} characters: split the line"
                    )
                lines.put(decode(line, name, number - 1))
            lines.put(None)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            lines.put(TranslateError(f"{name}: is not a valid gzip file ({error})"))
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
    rows = [
        ("--model", {**REQUIRED, "metavar": "DIR"}, "a folder that fairseq-rope export wrote"),
        ("--input", FILE, "plain text or .gz; default: -, standard input"),
        ("--output", FILE, "the file to write, complete or not at all; default: standard output"),
        ("--beam", INTEGER, "beam size; default: the exported setting, usually 4"),
        ("--lenpen", NUMBER, "length penalty; default: the exported setting, usually 0.6"),
        ("--max-len-b", INTEGER, longer),
        ("--threads", INTEGER, "CPU threads; default: all cores"),
        ("--device", devices, "default: %(default)s"),
        ("--no-shortlist", SWITCH, "score every target subword, even if the folder has a shortlist"),
    ]
    add_flags(parser, rows)
    rows = [("--nbest", INTEGER, best), ("--documents", SWITCH, documents)]
    add_flags(parser.add_mutually_exclusive_group(), rows)
    return parser


def refuse_numbers(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with the usage and an error if a number in *args* is out of its range."""
    for name, (is_allowed, allowed) in NUMBERS.items():
        value = getattr(args, name, None)
        if value is not None and not is_allowed(value):
            parser.error(f"--{name.replace('_', '-')} {value}: must be {allowed}")


def _progress(beside_the_output: bool) -> Any:
    """Return a progress bar on standard error; in a log file, it writes a line every 30 seconds.

    There is no bar if the translations go to the same terminal.
    """
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    every = {} if terminal else {"mininterval": 30, "delay": 30}
    return tqdm(unit=" lines", disable=terminal and beside_the_output, **every)


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the command; after an error, exit with status 1 and print one sentence to standard error."""
    parser = build_parser()
    args = parser.parse_args(argv)
    refuse_numbers(parser, args)
    with ending_in_one_sentence("fairseq-rope translate"):
        if (sys.stdout is None and args.output is None) or (sys.stdin is None and args.input in (None, "-")):
            raise TranslateError("standard input or output is closed")
        if args.output is not None:
            refuse_output(args.output)
        with opened(args.input) as (read, name):
            translator = Translator(args.model, args.threads, args.device, not args.no_shortlist)
            settings = translator.settings
            flags = {flag: getattr(args, flag) for flag in ("beam", "lenpen", "max_len_b")}
            settings.update({flag: value for flag, value in flags.items() if value is not None})
            if args.nbest is not None and args.nbest > settings["beam"]:
                raise TranslateError(f"--nbest {args.nbest}: must be at most the beam size, {settings['beam']}")
            on_terminal = args.output is None and sys.stdout.isatty()
            first = 1
            with output(args.output) as out, _progress(beside_the_output=on_terminal) as bar:
                chunks = as_they_come(read, name)
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
