"""The unit of text: what a line of the text that fairseq reads is, a sentence or a segment of a document."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Unit:
    """The unit of text of an experiment, its ``unit``. Stages ask it for names of files and for flags."""

    lines: str  # what a line of the text that fairseq reads is called
    folder: str  # the folder of that text
    plain: str  # ends the name of a test set with one sentence a line
    has_documents: bool  # whether blank lines separate documents, whose translated segments are divided into sentences
    flag: str  # of the text tools

    def of_documents(self, *files: Path) -> list[Path]:
        """*files*, which only a text with documents has; none for other texts."""
        return [*files] if self.has_documents else []


SENTENCES = Unit("sentences", "bpe", "", has_documents=False, flag="")
# The files "test" of a text with documents also have blank lines.
SEGMENTS = Unit("segments", "segments", ".sentences", has_documents=True, flag=" --documents")
