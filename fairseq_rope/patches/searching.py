"""The search: lexical constraints that are missing.

These functions replace those of ``fairseq.search``; the table in ``patches/table.py`` says why.
"""

import functools
from typing import Any

from fairseq.search import LexicallyConstrainedBeamSearch
from torch import Tensor

from ..errors import InputError

_init_constraints = LexicallyConstrainedBeamSearch.init_constraints


@functools.wraps(_init_constraints)
def init_constraints(self: Any, batch_constraints: Tensor | None, beam_size: int) -> None:
    if batch_constraints is None:
        raise InputError(
            f"--constraints {self.representation}: there are no constraints; fairseq-generate does not read any, and "
            "fairseq-interactive reads them from its input, each after a tab"
        )
    _init_constraints(self, batch_constraints, beam_size)
