"""Simulated GPUs for whole programs: ``torch.cuda`` says that they exist, and the CPU computes.

tests/pretended_gpu.py simulates the tensors of a GPU: their device, and when the host waits for them. This module
simulates what a program sees of ``torch.cuda``, so that fairseq's programs take their branches for GPUs to the end.
What it replaces:

- A device "cuda" becomes the CPU, in every call of torch and in ``.cuda()``.
- From the first move of a tensor to "cuda", all tensors say that they are on the GPU. Operations that mix the two
  devices raise no error here. tests/pretended_gpu.py finds them.
- ``torch.cuda``'s questions have the answers of a GPU of the Ampere generation with 80 GiB, 1 of them in use.
- The random numbers of the GPU are those of the CPU.
- ``torch.cuda.DoubleTensor`` and its like are the classes of the CPU. No memory is pinned.
- Autocasting for "cuda" is that of the CPU, to the same type: float16, unless the program requests another one.
- nccl is gloo, and DistributedDataParallel has no device numbers, which it accepts with tensors on GPUs only.
- Kernels of fairseq and apex for CUDA do not exist, as in an installation without them.

``install(gpus)`` installs them. When the process ends, it prints whether a tensor was moved to a GPU, and the types of
numbers in which linear layers computed. ``observe()`` prints the same on a real GPU, and replaces nothing.
"""

import atexit
import contextlib
import os
import sys
from types import SimpleNamespace

import torch
import torch.distributed
from torch.overrides import TorchFunctionMode

GIB = 2**30
PROPERTIES = SimpleNamespace(name="Simulated GPU", major=8, minor=0, total_memory=80 * GIB, multi_processor_count=108)
DO_NOTHING = (
    *("_lazy_init", "init", "synchronize", "empty_cache", "reset_peak_memory_stats"),
    *("manual_seed", "manual_seed_all"),  # torch.manual_seed sets the CPU's
)
TYPES = ("BFloat16", "Half", "Float", "Double", "Bool", "Byte", "Char", "Short", "Int", "Long")


class Observing(TorchFunctionMode):
    """Calls torch's functions, and notes what linear layers compute."""

    name = "GPU"

    def __init__(self):
        super().__init__()
        self.types = set()  # of the results of linear layers
        self.is_used = False  # whether a GPU has computed

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.nn.functional.linear:
            self.note(result)
            self.is_used |= result.is_cuda
        return result

    def note(self, result):
        self.types.add(str(result.dtype).removeprefix("torch."))

    def report(self):
        if self.types:
            used = "used" if self.is_used else "not used"
            print(f"{self.name}: {used}, linear layers in {', '.join(sorted(self.types))}", file=sys.stderr, flush=True)


class CudaIsTheCPU(Observing):
    """Calls torch's functions with the CPU in place of CUDA devices."""

    name = "simulated GPU"

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in QUESTIONS and self.is_used:
            return QUESTIONS[function]()
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            self.is_used = True
            return args[0]
        if function is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int | str):
            kwargs, args = {**kwargs, "device": args[1]}, (args[0], *args[2:])
        args = tuple(map(self.on_cpu, args))
        result = function(*args, **{name: self.on_cpu(value, name) for name, value in kwargs.items()})
        if function is torch.nn.functional.linear:
            self.note(result)
        return result

    def on_cpu(self, value, name=""):
        """The CPU if *value* is a CUDA device, or its number or text as the argument "device"; otherwise *value*."""
        is_device = isinstance(value, torch.device) or name == "device" and value is not None
        # A number is always that of a GPU.
        if not is_device or not isinstance(value, int) and torch.device(value).type != "cuda":
            return value
        self.is_used = True
        return torch.device("cpu")


def the_gpu():
    return torch.device("cuda", torch.cuda.current_device())


QUESTIONS = {
    torch.Tensor.device.__get__: the_gpu,
    torch.Tensor.is_cuda.__get__: lambda: True,
    torch.Tensor.is_cpu.__get__: lambda: False,
    torch.Tensor.get_device: torch.cuda.current_device,
}


def install(gpus: int) -> None:
    """Make ``torch.cuda`` say that this machine has *gpus* GPUs, for the rest of this process.

    As with CUDA, CUDA_VISIBLE_DEVICES can hide some of them.
    """
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        gpus = min(gpus, len(visible.split(",")))
    # torch's build for CUDA would pin memory in a thread without the mode
    torch.accelerator.is_available = lambda: False
    observe(CudaIsTheCPU)
    _answer_questions(gpus)
    _autocast_on_the_cpu()
    _communicate_through_gloo()


def observe(mode: type[Observing] = Observing) -> None:
    """Note what this process computes on real GPUs."""
    entered = mode()
    entered.__enter__()
    atexit.register(entered.report)


def _answer_questions(gpus: int) -> None:
    cuda, current = torch.cuda, [0]

    def set_device(device):
        current[0] = device if isinstance(device, int) else torch.device(device).index or 0
        assert 0 <= current[0] < gpus, f"CUDA error: invalid device ordinal {current[0]}"

    def always(answer):  # a new function each time: torch's compiler refuses one function with two names
        return lambda *_, **__: answer

    answers = {
        "is_available": always(True),
        "is_initialized": always(True),
        "is_bf16_supported": always(True),
        "device_count": always(gpus),
        "current_device": lambda: current[0],
        "set_device": set_device,
        "device": always(contextlib.nullcontext()),
        "get_device_name": always(PROPERTIES.name),
        "get_device_capability": always((PROPERTIES.major, PROPERTIES.minor)),
        "get_device_properties": always(PROPERTIES),
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
    }
    answers |= {name: always(GIB) for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved")}
    answers |= {name: always(None) for name in DO_NOTHING}
    answers |= {f"{each}Tensor": getattr(torch, f"{each}Tensor") for each in TYPES}
    for name, answer in answers.items():
        setattr(cuda, name, answer)


def _autocast_on_the_cpu() -> None:
    autocast, is_enabled = torch.amp.autocast_mode.autocast, torch.is_autocast_enabled
    start = autocast.__init__

    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        start(self, device_type, dtype, enabled, cache_enabled)

    autocast.__init__ = __init__
    torch.is_autocast_enabled = lambda device_type="cpu": is_enabled("cpu" if device_type == "cuda" else device_type)


def _communicate_through_gloo() -> None:
    init_process_group = torch.distributed.init_process_group
    parallel = torch.nn.parallel.DistributedDataParallel
    start = parallel.__init__

    def through_gloo(backend=None, *args, **kwargs):
        if backend == "nccl":
            print("simulated GPU: gloo in place of nccl", file=sys.stderr, flush=True)
            backend = "gloo"
        init_process_group(backend, *args, **kwargs)

    def without_numbers(self, module, device_ids=None, output_device=None, *args, **kwargs):
        start(self, module, None, None, *args, **kwargs)

    torch.distributed.init_process_group = through_gloo
    parallel.__init__ = without_numbers
