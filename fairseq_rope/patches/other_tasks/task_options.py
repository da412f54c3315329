"""The options of translation tasks under ``args``, the name that they had up to fairseq 0.10."""

from typing import Any

from ..registry import replaces


class _Options:
    """The options of a task, under a name that fairseq no longer gives them. A subclass can set its own.

    --task translation_from_pretrained_bart, which fine-tunes mBART, reads them under this name, and so do
    noisy_channel_translation and tasks of users for fairseq up to 0.10. They end with an AttributeError.
    """

    def __get__(self, task: Any, owner: Any = None) -> Any:
        return self if task is None else task.cfg


OPTIONS = replaces(
    "fairseq.tasks.translation.TranslationTask.args",
    prevents="an unreadable error",
    until="fairseq reads cfg in its tasks",
)(_Options())
