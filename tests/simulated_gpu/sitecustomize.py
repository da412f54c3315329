"""Install tests/quick_start, and SIMULATED_GPUS simulated GPUs if there are any, in each process that tests start.

The GPUs are installed when torch is imported, because many programs of the recipes start without it. With REAL_GPU,
they are those of the machine.
"""

import os
import runpy
from pathlib import Path


def with_gpus(torch):
    import gpus_on_cpu

    if os.environ.get("REAL_GPU"):
        gpus_on_cpu.observe()
    else:
        gpus_on_cpu.install(int(os.environ["SIMULATED_GPUS"]))


quick_start = runpy.run_path(str(Path(__file__).parents[1] / "quick_start" / "sitecustomize.py"))
if os.environ.get("SIMULATED_GPUS", "0") != "0":
    quick_start["AfterImport"]("torch", with_gpus)
