"""Make the processes that tests start begin sooner.

Importing scikit-learn takes seconds. fairseq imports these names for tasks on audio and sentence classification, which
no test uses. torch loads its compiler to exclude methods of optimisers from compilation, which takes a second or more;
here they are excluded without it. If FORKED_PROGRAMS is a folder of tests/forked_programs.py, recipes run its programs.
"""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec

UNUSED = {
    "sklearn": ("metrics",),
    "sklearn.metrics": ("f1_score", "matthews_corrcoef"),
    "scipy.stats": ("pearsonr", "spearmanr"),
}
for _module, _names in UNUSED.items():
    sys.modules[_module] = module_from_spec(ModuleSpec(_module, None))
    vars(sys.modules[_module]).update(dict.fromkeys(_names))


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
if "FORKED_PROGRAMS" in os.environ:
    AfterImport("recipes.script", lambda script: setattr(script, "PROGRAMS", os.environ["FORKED_PROGRAMS"]))
