"""Install tests/quick_start, and SIMULATED_GPUS simulated GPUs if there are any, in each process that tests start.

The GPUs are installed when torch is imported, because many programs of the recipes start without it. With REAL_GPU,
they are those of the machine.
"""

import importlib.util
import os
import runpy
import sys
from pathlib import Path


class WithGPUs:
    """Finds torch, and installs the GPUs after its import."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        import_torch = spec.loader.exec_module

        def exec_module(module):
            import_torch(module)
            import gpus_on_cpu

            failures = os.environ.get("SIMULATED_OUT_OF_MEMORY", "")
            if os.environ.get("REAL_GPU"):
                gpus_on_cpu.observe(failures)
            else:
                gpus_on_cpu.install(int(os.environ["SIMULATED_GPUS"]), failures)

        spec.loader.exec_module = exec_module
        return spec


runpy.run_path(str(Path(__file__).parents[1] / "quick_start" / "sitecustomize.py"))
if os.environ.get("SIMULATED_GPUS", "0") != "0":
    sys.meta_path.insert(0, WithGPUs)
