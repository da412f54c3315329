"""Translate with an exported model, from Python.

This needs CTranslate2 and the tokenisers of the model (sacremoses and subword-nmt, or sentencepiece), but neither torch
nor fairseq.
"""

import codecs
import collections
import contextlib
import itertools
import os
import re
import reprlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, overload

from ..errors import InputError, warn
from ..lines import decode
from ..text.segments import divided, joined
from ..text.tokens import Tokeniser
from .ctranslate2_search import Hypotheses, Sampling, Search
from .documents import segments_of
from .exported_folder import (
    CHARACTERS,
    LONGEST_LINE,
    SETTINGS,
    SHORTLIST,
    TranslateError,
    exported_settings,
    problem_of,
    refuse_changed_files,
)

LINES = 512  # lines that are sorted by length and translated together
LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # not a character, and not possible in UTF-8
LONG = 1024  # tokens; fairseq does not train on longer sentences by default


class Translator:
    """Loads the model of an exported folder, and translates with it.

    All methods may be called from several threads at the same time.

    Args:
        folder: a folder that ``fairseq-rope export`` wrote
        threads: number of CPU threads; each translates one batch; default: the number of cores that this process may
            use. A GPU translates one batch at a time.
        device: "cpu", "cuda" (the first GPU), or "auto" (a GPU if CTranslate2 finds one)
        shortlist: whether the search uses the shortlist of the folder, if it has one
        replace_unk: whether an unknown word of a translation becomes the source word that it attends to most
        sampling: draw translations instead of searching the best ones, with one thread and without the shortlist. The
            seed decides the translations if the calls have the same order and lines.

    Raises:
        TranslateError: *folder* is not an exported folder, a file in it has changed or was added, it is replaced
            meanwhile, CTranslate2 cannot use *device*, or *threads* or *sampling* is not
            allowed
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        threads: int | None = None,
        device: str = "cpu",
        shortlist: bool = True,
        replace_unk: bool = False,
        sampling: Sampling | None = None,
    ) -> None:
        folder = os.fspath(folder)
        refuse_options(threads=threads)
        if sampling is not None:
            refuse_options(sampling_topk=sampling.topk, seed=sampling.seed)
            threads = 1  # each thread of CTranslate2 draws by itself
        self.folder = folder
        self.settings = exported_settings(folder)
        shortlist = shortlist and os.path.exists(os.path.join(folder, SHORTLIST))
        with ThreadPoolExecutor(1) as pool:  # check the files while the tokenisers and CTranslate2 are imported
            check = pool.submit(refuse_changed_files, folder, self.settings["sha256"])
            try:
                self._text = Tokeniser(folder, self.settings)
            except InputError as error:
                raise TranslateError(str(error)) from None
            import ctranslate2  # noqa: F401
        check.result()
        cores = threads or available_cores()
        self._search = Search(folder, self.settings, cores, device, shortlist, replace_unk, sampling)
        if exported_settings(folder) != self.settings:  # which have the checksums of all files
            self._search.close()
            raise TranslateError(f"--model {folder}: was replaced while it was loaded; start again")
        self._process = os.getpid()
        self._users: list[int] = []  # the thread of each call that uses the model
        self._is_closed, self._changed = False, threading.Condition()

    def close(self) -> None:
        """Free the memory of the model as soon as no thread uses it; later calls raise a TranslateError.

        Raises:
            TranslateError: this thread is translating, for example because a signal's handler calls this
        """
        with self._changed:
            if threading.get_ident() in self._users:
                raise TranslateError(f"--model {self.folder}: cannot be closed by a thread that is translating")
            self._is_closed = True
            self._changed.wait_for(lambda: not self._users)
        self._search.close()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        if os.getpid() != self._process:  # CTranslate2's threads are not there, and it would wait forever
            raise TranslateError(f"--model {self.folder}: was loaded before os.fork(); load it in the new process")
        thread = threading.get_ident()
        with self._changed:
            if self._is_closed and thread not in self._users:  # a call that began before may end
                raise TranslateError(f"--model {self.folder}: the translator is closed")
            self._users.append(thread)
        try:
            yield
        finally:
            with self._changed:
                self._users.remove(thread)
                self._changed.notify_all()

    def __enter__(self) -> "Translator":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except TranslateError:  # this thread translates: if an exception, for example of a signal, ends it, that counts
            if kind is None:
                raise

    @overload
    def translate(self, text: str, beam: int | None = ..., lenpen: float | None = ...) -> str: ...  # type: ignore[overload-overlap]

    @overload
    def translate(self, text: Iterable[str], beam: int | None = ..., lenpen: float | None = ...) -> list[str]: ...

    def translate(
        self, text: str | Iterable[str], beam: int | None = None, lenpen: float | None = None
    ) -> str | list[str]:
        """Return the translation of one sentence, or a list of the translations of several.

        Several threads can call it. The arguments and errors are those of :meth:`translate_lines`.
        """
        refuse_options(beam=beam, lenpen=lenpen)
        with self._in_use():
            if not isinstance(text, str):
                return list(self.translate_lines(text, beam, lenpen))
            [best] = self._search([self._source(text, 1)], beam, lenpen)
        return self._text.plain(best[0][0])

    def translate_lines(
        self, lines: Iterable[str], beam: int | None = None, lenpen: float | None = None
    ) -> Iterator[str]:
        """Yield the translations of *lines* in order. It reads up to 512 lines before it yields their translations.

        The translation of an empty line is empty.

        Args:
            beam, lenpen: beam size and length penalty; default: those of the settings

        Raises:
            TranslateError: *beam* or *lenpen* is not allowed, or the translator was closed; or a line is not a string,
                contains a lone surrogate, has more than LONGEST_LINE tokens or CHARACTERS characters, or has more
                tokens than the model has positions: then the translations of the lines before it have been yielded
        """
        return (nbest[0][0] for nbest in self._best(lines, beam, lenpen))

    def translate_n_best(
        self, lines: Iterable[str], n: int, beam: int | None = None, lenpen: float | None = None
    ) -> list[list[tuple[str, float]]]:
        """Return for each of *lines* a list of its *n* best translations with their scores, best first.

        A score is fairseq's: the base-2 log-probability divided by length**lenpen, where the end counts. An empty
        line has one translation, which is empty, with the score 0. Each line is searched by itself, also with a model
        of segments, since the sentences of a segment have no scores of their own.

        Raises:
            TranslateError: *n* is not allowed or above the beam size, or as in :meth:`translate_lines`
        """
        refuse_options(n=n or 0, beam=beam, lenpen=lenpen)
        size = self.settings["beam"] if beam is None else beam
        if n > size:
            raise TranslateError(f"n {n}: must be at most the beam size, {size}; give a larger beam")
        with self._in_use():
            return list(self._best(lines, beam, lenpen, n))

    def _best(
        self, lines: Iterable[str], beam: int | None, lenpen: float | None, nbest: int = 0
    ) -> Iterator[list[tuple[str, float]]]:
        """Yield what :meth:`chunk` yields, for any number of lines."""
        for count, chunk in enumerate(in_chunks(lines)):
            yield from self.chunk(chunk, beam, lenpen, 1 + count * LINES, nbest=nbest)

    def chunk(
        self,
        lines: Sequence[str],
        beam: int | None = None,
        lenpen: float | None = None,
        first: int = 1,
        done: Callable[[int], object] = lambda count: None,
        nbest: int = 0,
    ) -> Iterator[list[tuple[str, float]]]:
        """Yield the best translations of each of *lines*, with their scores, best first.

        The other arguments and the errors are those of :meth:`translate_lines`.

        Args:
            first: the number of the first line, for messages
            done: called with the number of lines in a batch when the batch has been translated
            nbest: how many translations; 0: only the best, with an approximate score
        """
        sources: list[list[str]] = []
        refusal = None
        try:
            for number, line in enumerate(lines, start=first):
                sources.append(self._source(line, number))
        except TranslateError as error:
            refusal = error
        for hypotheses in self.search(sources, beam, lenpen, done, nbest):
            yield [(self._text.plain(words), score) for words, score in hypotheses]
        if refusal:
            raise refusal

    def chunk_with_errors(
        self, lines: Sequence[str], first: int = 1, done: Callable[[int], object] = lambda count: None
    ) -> Iterator["str | TranslateError"]:
        """Yield the best translation of each of *lines*, or the error that :meth:`chunk` would raise for the line.

        The arguments are those of :meth:`chunk`.
        """
        sources: list[list[str]] = []
        errors = {}
        for number, line in enumerate(lines, start=first):
            try:
                sources.append(self._source(line, number))
            except TranslateError as error:
                sources.append([])
                errors[number] = error
        for number, [(words, _)] in enumerate(self.search(sources, done=done), start=first):
            yield errors[number] if number in errors else self._text.plain(words)

    def translate_documents(
        self, documents: Iterable[Iterable[str]], beam: int | None = None, lenpen: float | None = None
    ) -> Iterator[list[str]]:
        """Yield the translations of the sentences of each document, in order, as soon as they are ready.

        Consecutive sentences of a document are translated together, in segments. An empty sentence has an empty
        translation and ends a segment. In messages, the lines have the numbers of a text with one blank line after
        each document.

        Raises:
            TranslateError: the model was not exported with segments, or a sentence contains the separator or is too
                long (see :meth:`translate_lines`); the documents before it have been yielded
        """
        counts: collections.deque[int] = collections.deque()

        def lines() -> Iterator[str]:
            for document in several(documents):
                sentences = list(several(document))
                counts.append(len(sentences))
                yield from sentences
                yield ""

        translations = itertools.chain.from_iterable(self.document_lines(in_chunks(lines()), beam, lenpen))
        for line in translations:
            yield [line, *itertools.islice(translations, counts.popleft())][:-1]

    def document_lines(
        self, chunks: Iterable[Sequence[str]], beam: int | None = None, lenpen: float | None = None
    ) -> Iterator[list[str]]:
        """Yield the translations of the lines of a text in which blank lines separate documents.

        The lists together have a line for each line of the text. At the end, a warning says how many segments have
        a translation with another number of separators than their source.

        Args:
            chunks: the lines of the text, in lists of any lengths. A segment is translated when the next line cannot
                be part of it. So the memory does not depend on the lengths of documents.

        Raises:
            TranslateError: as in :meth:`translate_documents`; the translations of the lines before it have been yielded
        """
        settings = self.settings.get("segments")
        if settings is None:
            lacking = f"the model in --model {self.folder} has no segments in {SETTINGS}"
            way_out = "if it was trained on segments of documents, export it with --segment-tokens and --separator"
            raise TranslateError(f"--documents: {lacking}; {way_out}")
        separator = settings["separator"]
        total = different = 0
        try:
            for complete in segments_of(chunks, self._source, self._longest, settings["tokens"], separator):
                results = self.search([joined(sentences, separator) for sentences in complete], beam, lenpen)
                lines: list[str] = []
                for sentences, [(words, _)] in zip(complete, results):
                    translations, is_same = divided(words, len(sentences), separator)
                    lines += map(self._text.plain, translations)
                    total += bool(sentences[0])
                    different += not is_same
                yield lines
        finally:
            if different:
                differing = f"{different} of {total} segments have a translation with another number of separators"
                shifted = "some of their sentences may be on another line, or on none"
                warn("translate", f"{differing} than their source: {shifted}")

    @property
    def _longest(self) -> int:
        """The number of tokens in the longest line that is translated."""
        positions = self.settings["positions"]["source"]  # the end of the sentence takes one of them
        return LONGEST_LINE if positions is None else min(LONGEST_LINE, positions - 1)

    def _source(self, line: str, number: int) -> list[str]:
        """Return the tokens of a line, or raise the errors of :meth:`translate_lines`; *number* is for messages."""
        if not isinstance(line, str):
            raise TranslateError(f"line {number} is of the type {type(line).__name__}, and must be a string")
        if len(line) > CHARACTERS:
            limit = f"the limit of {CHARACTERS}"
            raise TranslateError(f"line {number} has {len(line)} characters, more than {limit}: split the line")
        if lone := LONE_SURROGATE.search(line):  # for example of a file that was read with errors="surrogateescape"
            raise TranslateError(f"line {number} has the lone surrogate U+{ord(lone[0]):04X}: remove it")
        source = self._text.tokens(line)
        if len(source) > self._longest:
            limit = f"the limit of this model, {self._longest}"
            raise TranslateError(f"line {number} has {len(source)} tokens, more than {limit}: split the line")
        if len(source) >= LONG:
            warn("translate", f"line {number} has {len(source)} tokens, more than models are trained on")
        positions = self.settings["positions"]
        counts_padding = positions.get("counts_padding", positions["source"] is None)
        if counts_padding and "<pad>" in itertools.dropwhile("<pad>".__eq__, source):
            empty = "fairseq leaves its position empty, which CTranslate2 cannot do: the translation may differ"
            warn("translate", f"line {number} has <pad> after a word. {empty}")
        return source

    def search(
        self,
        sources: Sequence[list[str]],
        beam: int | None = None,
        lenpen: float | None = None,
        done: Callable[[int], object] = lambda count: None,
        nbest: int = 0,
    ) -> list[Hypotheses]:
        """Return the best hypotheses for each of *sources*, in tokens, with their scores.

        The arguments are those of :meth:`chunk`. As in fairseq, ``<pad>`` in *sources* is padding and ``<blank>`` an
        unknown word. A TranslateError is raised if CTranslate2 cannot search with this model or these options.
        """
        refuse_options(beam=beam, lenpen=lenpen, nbest=nbest or None)
        with self._in_use():
            return self._search(sources, beam, lenpen, done, nbest)


def available_cores() -> int:
    """Return how many cores this process may use."""
    on_macos = not hasattr(os, "sched_getaffinity")
    return os.cpu_count() or 1 if on_macos else len(os.sched_getaffinity(0))


def refuse_options(**options: Any) -> None:
    """Raise a TranslateError if one of *options* has a value that is neither None nor allowed."""
    for name, value in options.items():
        if value is not None and (problem := problem_of(name, value)):
            raise TranslateError(f"{name} {value!r}: {problem}")


def decoded(line: bytes, name: str, number: int) -> str:
    """Return a line of the file *name* as text, without a byte order mark in line *number* 1.

    Raises:
        InputError: the line has too many characters, or a byte of it is not UTF-8
    """
    if len(line) > 4 * CHARACTERS:  # a character has at most 4 bytes
        raise TranslateError(f"{name}, line {number}: has more than {CHARACTERS} characters: split the line")
    return decode(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, name, number - 1)


def several(lines: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator over *lines*; raise a TranslateError if they are one string or bytes, or not iterable."""
    if isinstance(lines, (str, bytes, bytearray)) or not isinstance(lines, Iterable):
        kind = f"is of the type {type(lines).__name__}, and must be an iterable of strings"
        raise TranslateError(f"the text {reprlib.repr(lines)} {kind}")
    return iter(lines)


def in_chunks(lines: Iterable[str]) -> Iterator[list[str]]:
    """Return an iterator over *lines* in lists of LINES lines; the last list can be shorter."""
    pending = several(lines)
    return iter(lambda: list(itertools.islice(pending, LINES)), [])
