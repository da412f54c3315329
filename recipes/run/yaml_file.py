"""Read YAML 1.2, in which ``no`` is text and ``2e-3`` is a number."""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError

from fairseq_rope.errors import InputError
from fairseq_rope.lines import decode


class SettingsError(InputError):
    """A setting is unknown or has a wrong value. The message names it and says what is allowed."""


class _Constructor(SafeConstructor):
    """Dates are text, since no setting is a date."""


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", SafeConstructor.construct_yaml_str)


def read_yaml(text: str, where: str) -> Any:
    """The contents of YAML 1.2: ``no`` is text, ``2e-3`` a number. Raises a SettingsError that begins with *where*."""
    reader = YAML(typ="safe", pure=True)
    reader.Constructor = _Constructor
    try:
        return reader.load(text)
    except (YAMLError, ValueError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise SettingsError(f"{where}{line}: is not YAML: {' '.join(problem.split())}") from None


def read_yaml_file(path: Path, where: str) -> Any:
    """The contents of *path*, as :func:`read_yaml` reads them. Raises an InputError if it cannot be read or decoded."""
    try:
        text = decode(path.read_bytes(), where)
    except OSError as error:
        raise SettingsError(f"{where}: {error.strerror}") from None
    return read_yaml(text, where)
