"""Install tests/quick_start, and SIMULATED_GPUS simulated GPUs if there are any, in each process that tests start."""

import os
import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[1] / "quick_start" / "sitecustomize.py"))
if gpus := int(os.environ.get("SIMULATED_GPUS", 0)):
    import gpus_on_cpu

    gpus_on_cpu.install(gpus, os.environ.get("SIMULATED_OUT_OF_MEMORY", ""))
