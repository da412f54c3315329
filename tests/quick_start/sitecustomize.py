"""Make the tests, and the processes that they start, begin sooner.

Importing scikit-learn and scipy.stats takes seconds. fairseq imports four functions of them; here a call of one of them
imports it. torch loads its compiler to exclude methods of optimisers from compilation, which takes a second or more;
here they are excluded without it.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec

STAND_INS = {name: module_from_spec(ModuleSpec(name, None)) for name in ("sklearn", "sklearn.metrics", "scipy.stats")}


def imported_when_called(module, name):
    """Return a function that calls the function *name* of *module*, in place of its stand-in."""

    def call(*args, **kwargs):
        for each, stand_in in STAND_INS.items():
            if sys.modules.get(each) is stand_in:
                del sys.modules[each]
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call


for _module, _names in (
    ("sklearn.metrics", ("f1_score", "matthews_corrcoef")),
    ("scipy.stats", ("pearsonr", "spearmanr")),
):
    vars(STAND_INS[_module]).update({_name: imported_when_called(_module, _name) for _name in _names})
sys.modules.update(STAND_INS)


class AfterImport:
    """Finds the module *name*, and calls *change* with it after its import."""

    def __init__(self, name, change):
        self.name, self.change = name, change
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module):
            load(module)
            self.change(module)

        spec.loader.exec_module = load_and_change
        return spec


def note_as_excluded(optimizers):
    for method in vars(optimizers.Optimizer).values():
        if hasattr(method, "__wrapped__"):
            vars(method.__wrapped__).setdefault("__dynamo_disable", method.__wrapped__)


AfterImport("torch.optim.optimizer", note_as_excluded)
