"""For the processes that tests start: fairseq without the seconds that importing scikit-learn takes.

fairseq imports these names for tasks on audio and sentence classification, which no test uses.
"""

import sys
from types import ModuleType

UNUSED = {
    "sklearn": ("metrics",),
    "sklearn.metrics": ("f1_score", "matthews_corrcoef"),
    "scipy.stats": ("pearsonr", "spearmanr"),
}
for _module, _names in UNUSED.items():
    sys.modules[_module] = ModuleType(_module)
    vars(sys.modules[_module]).update(dict.fromkeys(_names))
