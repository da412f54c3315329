"""Which rows of an encoder's output are equal, because a beam search has repeated them."""

from typing import Any, Dict, List, Optional

from torch import Tensor

# The largest beam to share a cache: each hypothesis attends past the tokens of all others, which costs more
# than it saves when they are many.
LARGEST = 32


class EqualRows(List[Tensor]):
    """An entry of an encoder's output that says: the *beam* adjacent rows of each sentence are equal.

    It holds for the tensors that are in *encoder_out* when the entry is made. It is void as soon as one of
    them is replaced or written to. The entry is an empty list, so that code which iterates over the tensors
    of all entries still works.
    """

    NAME = "fairseq_rope.equal_rows"

    def __init__(self, encoder_out: Dict[str, List[Tensor]], beam: int) -> None:
        super().__init__()
        self.beam = beam
        self._tensors = [(x, x._version) for x in _contents(encoder_out)]

    @classmethod
    def of(cls, encoder_out: Dict[str, List[Tensor]]) -> int:
        """The number of rows of each sentence that are equal; 1 without a valid entry in *encoder_out*."""
        entry = encoder_out.get(cls.NAME)
        if not isinstance(entry, cls):
            return 1
        contents = _contents(encoder_out)
        same = len(contents) == len(entry._tensors) and all(
            x is known and known._version == version for x, (known, version) in zip(contents, entry._tensors)
        )
        return entry.beam if same else 1


def _contents(encoder_out: Dict[str, List[Tensor]]) -> List[Any]:
    """The tensors of all entries of *encoder_out*."""
    return [x for value in encoder_out.values() for x in (value if isinstance(value, list) else [value])]


def whole_sentences(new_order: Tensor, beam: int) -> Optional[List[int]]:
    """The sentences whose *beam* adjacent rows make up *new_order*; None if it has another form."""
    sentences = [row // beam for row in new_order.tolist()]
    first_rows = sentences[::beam]
    repeated = [sentence for sentence in first_rows for _ in range(beam)]
    return first_rows if sentences == repeated and len(set(first_rows)) == len(first_rows) else None
