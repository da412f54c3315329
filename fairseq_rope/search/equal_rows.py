"""Which rows of an encoder's output are equal, because a beam search has repeated them."""

from typing import Any, Dict, List, Optional

from torch import Tensor

# The largest beam to share a cache: each hypothesis attends past the tokens of all others, which costs more
# than it saves when they are many.
LARGEST = 32


class EqualRows(list):
    """An entry of an encoder's output: the *beam* rows of each sentence, side by side, are equal.

    This holds for the tensors in *encoder_out* as they are when the entry is made, and no longer when one of
    them is replaced or written to. The entry is an empty list, as fairseq's own entries can be, for code that
    goes through the tensors of all entries.
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
    """The sentences of which *new_order* has *beam* rows each, side by side; None if it is no such order."""
    of = [row // beam for row in new_order.tolist()]
    kept = of[::beam]
    whole = of == [sentence for sentence in kept for _ in range(beam)] and len(set(kept)) == len(kept)
    return kept if whole else None
