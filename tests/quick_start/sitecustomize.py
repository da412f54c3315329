"""Replace scikit-learn in the processes that tests start, because importing it takes seconds.

fairseq imports these names for tasks on audio and sentence classification, which no test uses.
"""

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
