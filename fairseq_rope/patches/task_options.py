"""The options of translation tasks under ``args``, the name that they had up to fairseq 0.10.

This attribute is added to fairseq's; the table in ``patches/table.py`` says why.
"""

from typing import Any


class _Options:
    """The options of a task, under a name that fairseq no longer gives them. A subclass can set its own."""

    def __get__(self, task: Any, owner: Any = None) -> Any:
        return self if task is None else task.cfg


OPTIONS = _Options()
