"""Make hydra remember in this process what it parses and composes. Importing this module does it.

At each start, fairseq composes its configuration from the same dataclasses and gives hydra the same 300 options. In a
test, this takes a quarter of a command's time. hydra applies the options to a copy of what is remembered.
"""

import copy
import functools

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser

_parse = functools.lru_cache(maxsize=None)(functools.partial(OverridesParser.parse_rule, OverridesParser.create()))
_compose = ConfigLoaderImpl._compose_config_from_defaults_list
_composed = {}  # by the names and places of the parts, and the folders where hydra looks for them


def _compose_once(self, defaults, repo):
    parts = [(part.config_path, part.package, part.is_self, part.primary) for part in defaults]
    key = (*parts, *(source.path for source in repo.get_sources()))
    if key not in _composed:
        _composed[key] = _compose(self, defaults=defaults, repo=repo)
    return copy.deepcopy(_composed[key])


def _without_a_copy(self, delegate):
    """Only a configuration with its own search path changes the repository, and fairseq's has none."""
    self.delegate, self.cache = delegate, {}


OverridesParser.parse_rule = lambda self, text, rule: copy.copy(_parse(text, rule))
ConfigLoaderImpl._compose_config_from_defaults_list = _compose_once
CachingConfigRepository.__init__ = _without_a_copy
