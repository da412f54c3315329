"""The interface of an export target: the files in which programs without fairseq read a model.

CTranslate2's folder (:mod:`.export`) is a target. The checks in :mod:`.export_checks` know a target through this
interface only, and run before the output gets its name. Another target is one file here, with a subclass of
:class:`Target`, one in ``tools/`` with a command line, and one row in ``__main__.TOOLS``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import InputError

Words = list[str]  # of a sentence, as in the data: subwords, without the end
Pair = tuple[Words, Words]  # a source and its translation


class ExportError(InputError):
    """A target does not support the model, a flag cannot be used, or a check failed; the message says which."""


class Scores(NamedTuple):
    """The result of :meth:`Target.score`.

    Attributes:
        log_probs: a list for each pair, with the log-probability (base e) of each word of its translation and of the
            end: n + 1 numbers for n words
        computed_in: the type of the computation on this machine, such as "float32" or "int8_float32"
    """

    log_probs: list[list[float]]
    computed_in: str


class Target(ABC):
    """One export of one model. First ``refuse`` is called, then ``write``, then ``score`` and ``translate``.

    Attributes:
        folder: where ``write`` has written the model, and where ``score`` and ``translate`` read it
    """

    folder: str

    @abstractmethod
    def refuse(self) -> None:
        """Check, before anything is written, that the target supports the model.

        Raises:
            ExportError: names the first option that the target does not support
        """

    @abstractmethod
    def write(self, folder: str) -> None:
        """Write the model into *folder*, which has a temporary name.

        Raises:
            OSError: the folder cannot be written
        """

    @abstractmethod
    def score(self, pairs: Sequence[Pair]) -> Scores:
        """Return the scores of *pairs* with the written model, N lists for N pairs.

        Raises:
            RuntimeError: the programs cannot load the model
        """

    @abstractmethod
    def translate(self, sources: Sequence[Words]) -> list[Words]:
        """Return the best translation of each of *sources* with the written model, N lists for N sources.

        Raises:
            InputError: the programs cannot search with the model
        """
