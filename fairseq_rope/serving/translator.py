"""Translate with an exported model, from Python.

This needs CTranslate2 and the tokenisers of the model (sacremoses and subword-nmt, or sentencepiece), but neither torch
nor fairseq.
"""

import codecs
import itertools
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

from ..errors import InputError, warn
from ..lines import decode
from ..text.segments import divided, joined
from ..text.tokens import Tokeniser
from .ctranslate2_search import Sampling, Search
from .documents import segments_of
from .exported_folder import (
    CHARACTERS,
    LONGEST_LINE,
    SHORTLIST,
    TranslateError,
    exported_settings,
    refuse_changed_files,
    refuse_options,
)

LINES = 512  # lines that are sorted by length and translated together


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
        beam, lenpen, max_len_b: of the search; default: those with which the model was exported

    Raises:
        TranslateError: *folder* is not an exported folder, a file in it has changed or was added, it is replaced
            meanwhile, CTranslate2 cannot use *device*, or a number is not allowed
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        threads: int | None = None,
        device: str = "cpu",
        shortlist: bool = True,
        replace_unk: bool = False,
        sampling: Sampling | None = None,
        beam: int | None = None,
        lenpen: float | None = None,
        max_len_b: int | None = None,
    ) -> None:
        search = {"beam": beam, "lenpen": lenpen, "max_len_b": max_len_b}
        refuse_options(threads=threads, **search)
        if sampling is not None:
            refuse_options(sampling_topk=sampling.topk, seed=sampling.seed)
        self.folder = folder = os.fspath(folder)
        exported = exported_settings(folder)
        self.settings = {**exported, **{name: value for name, value in search.items() if value is not None}}
        refuse_changed_files(folder, exported["sha256"])
        try:
            self._text = Tokeniser(folder, exported)
        except InputError as error:
            raise TranslateError(str(error)) from None
        shortlist = shortlist and os.path.exists(os.path.join(folder, SHORTLIST))
        self._search = Search(folder, self.settings, threads, device, shortlist, replace_unk, sampling)
        if exported_settings(folder) != exported:  # which have the checksums of all files
            self.close()
            raise TranslateError(f"--model {folder}: was replaced while it was loaded; start again")

    def close(self) -> None:
        """Free the memory of the model, when its last batch is translated. Later calls raise a TranslateError."""
        self._search.close()

    def __enter__(self) -> "Translator":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def translate(self, text: str) -> str: ...  # type: ignore[overload-overlap]

    @overload
    def translate(self, text: Iterable[str]) -> list[str]: ...

    def translate(self, text: str | Iterable[str]) -> str | list[str]:
        """Return the translation of one sentence, or a list of the translations of several.

        The errors are those of :meth:`translate_lines`.
        """
        return next(self.translate_lines([text])) if isinstance(text, str) else list(self.translate_lines(text))

    def translate_lines(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the translations of *lines* in order. It reads up to 512 lines before it yields their translations.

        The translation of an empty line is empty.

        Raises:
            TranslateError: the translator was closed; or a line has more than LONGEST_LINE tokens or CHARACTERS
                characters, or more tokens than the model has positions: then the translations of the lines before it
                have been yielded
        """
        return (nbest[0][0] for nbest in self._n_best(lines, 0))

    def translate_n_best(self, lines: Iterable[str], nbest: int) -> list[list[tuple[str, float]]]:
        """Return for each of *lines* a list of its *nbest* best translations with their scores, best first.

        A score is fairseq's: the base-2 log-probability divided by length**lenpen, where the end counts. An empty
        line has one translation, which is empty, with the score 0. Each line is searched by itself, also with a model
        of segments, since the sentences of a segment have no scores of their own.

        Raises:
            TranslateError: *nbest* is not allowed or above the beam size, or as in :meth:`translate_lines`
        """
        self.refuse_n_best(nbest)
        return list(self._n_best(lines, nbest))

    def refuse_n_best(self, nbest: int) -> None:
        """Raise a TranslateError if the search does not find *nbest* translations."""
        refuse_options(nbest=nbest)
        if nbest > self.settings["beam"]:
            raise TranslateError(f"nbest {nbest}: must be at most the beam size, {self.settings['beam']}")

    def _n_best(self, lines: Iterable[str], nbest: int) -> Iterator[list[tuple[str, float]]]:
        for count, chunk in enumerate(in_chunks(lines)):
            for result in self.translate_chunk(chunk, 1 + count * LINES, nbest=nbest):
                if isinstance(result, TranslateError):
                    raise result
                yield result

    def translate_chunk(
        self, lines: Sequence[str], first: int = 1, done: Callable[[int], object] = lambda count: None, nbest: int = 0
    ) -> Iterator[list[tuple[str, float]] | TranslateError]:
        """Yield the best translations of each of *lines*, with their scores, or the error of the line.

        The lines are translated together.

        Args:
            first: the number of the first line, for messages
            done: called with the number of lines in a batch when the batch has been translated
            nbest: how many translations; 0: only the best, with an approximate score
        """
        sources: list[list[str]] = []
        errors: dict[int, TranslateError] = {}
        for n, line in enumerate(lines):
            try:
                sources.append(self._source(line, first + n))
            except TranslateError as error:
                sources.append([])
                errors[n] = error
        for n, hypotheses in enumerate(self._search(sources, done, nbest)):
            yield errors.get(n) or [(self._text.plain(words), score) for words, score in hypotheses]

    def translate_documents(self, chunks: Iterable[Sequence[str]]) -> Iterator[list[str]]:
        """Yield the translations of the lines of a text in which blank lines separate documents, in lists.

        Consecutive sentences of a document are translated together, in segments. The lists together have a line for
        each line of the text. At the end, a warning says how many segments have a translation with another number of
        separators than their source.

        Args:
            chunks: the lines of the text, in lists of any lengths. A segment is translated when the next line cannot
                be part of it. So the memory does not depend on the lengths of documents.

        Raises:
            TranslateError: the model was not exported with segments, or a sentence contains the separator or is too
                long (see :meth:`translate_lines`); the translations of the lines before it have been yielded
        """
        settings = self.settings.get("segments")
        if settings is None:
            lacking = f"the model in --model {self.folder} was not exported as one of segments of documents"
            raise TranslateError(f"--documents: {lacking}; if it is one, export it with --segment-tokens")
        separator = settings["separator"]
        total = different = 0
        try:
            for complete in segments_of(chunks, self._source, self._longest, settings["tokens"], separator):
                results = self._search([joined(sentences, separator) for sentences in complete])
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
        if len(line) > CHARACTERS:
            limit = f"the limit of {CHARACTERS}"
            raise TranslateError(f"line {number} has {len(line)} characters, more than {limit}: split the line")
        source = self._text.tokens(line)
        if len(source) > self._longest:
            limit = f"the limit of this model, {self._longest}"
            raise TranslateError(f"line {number} has {len(source)} tokens, more than {limit}: split the line")
        return source


def decoded(line: bytes, name: str, number: int) -> str:
    """Return a line of the file *name* as text, without a byte order mark in line *number* 1.

    Raises:
        InputError: the line has too many characters, or a byte of it is not UTF-8
    """
    if len(line) > 4 * CHARACTERS:  # a character has at most 4 bytes
        raise TranslateError(f"{name}, line {number}: has more than {CHARACTERS} characters: split the line")
    return decode(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, name, number - 1)


def in_chunks(lines: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield *lines* in lists of LINES lines; the last list can be shorter. Raises a TranslateError for one string."""
    if isinstance(lines, (str, bytes)):
        raise TranslateError(f"the text {reprlib.repr(lines)} must be an iterable of strings")
    pending = iter(lines)
    while chunk := list(itertools.islice(pending, LINES)):
        yield chunk
