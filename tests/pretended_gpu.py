"""A pretended GPU: tensors that compute on the CPU, report the device "cuda:0", and follow CUDA's rules about devices.

So code takes its branches for GPUs on any machine. An operation on tensors of two devices fails as on CUDA. Each wait
of the host for the GPU (a number or a size that the host reads, a blocking copy) is recorded with the innermost line of
fairseq_rope or fairseq that causes it. Results can be compared with the CPU's, because they are computed there.
"""

import os
import sys

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from fairseq_rope.modules import overrides

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
# operations whose result, or the size of it, the host reads
READS = {
    *(aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default),
    *(aten._unique2.default, aten.unique_dim.default, aten.bincount.default, aten.repeat_interleave.Tensor),
}
# operations that take indices, which may be on the host
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
# operations that may copy between devices
COPIES = {aten.copy_.default, aten._to_copy.default, aten.lift_fresh.default, aten.detach.default}


class WrongDeviceError(RuntimeError):
    """An operation has tensors on the host and on the GPU."""


class OnGPU(torch.Tensor):
    """A tensor that holds its numbers in ``host``, a tensor on the CPU, and reports that it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    @staticmethod
    def __new__(cls, host):
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        # autograd's C++ refuses "cuda" in a build without it
        tensor = torch.Tensor._make_wrapper_subclass(cls, host.size(), device="meta", **layout)
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return Waits.current().compute(operation, args, kwargs or {})

    def tolist(self):
        Waits.current().record("tolist")
        return self.host.tolist()

    def __getitem__(self, index):
        return super().__getitem__(_lists_copied(index))

    def __setitem__(self, index, value):
        super().__setitem__(_lists_copied(index), value)


def _lists_copied(index):
    """Return *index* with each list as a tensor on the GPU, to which CUDA copies it."""
    if isinstance(index, tuple):
        return tuple(_lists_copied(part) for part in index)
    return torch.tensor(index, device=CUDA, dtype=torch.int64) if isinstance(index, list) else index


class Waits(TorchDispatchMode):
    """The context with a pretended GPU; ``places`` lists the waits: (operation, "package/file.py:line")."""

    _stack = []

    def __init__(self):
        super().__init__()
        self.places = []

    @classmethod
    def current(cls):
        return cls._stack[-1] if cls._stack else cls()

    def of(self, package):
        """Return the waits that lines of *package* cause."""
        return [wait for wait in self.places if wait[1].startswith(f"{package}/")]

    def record(self, operation):
        frame = sys._getframe(1)
        while frame is not None:
            for package in ("fairseq_rope", "fairseq"):
                _, found, file = frame.f_code.co_filename.rpartition(f"{os.sep}{package}{os.sep}")
                if found:
                    self.places.append((operation, f"{package}/{file}:{frame.f_lineno}"))
                    return
            frame = frame.f_back
        self.places.append((operation, "elsewhere"))

    def __enter__(self):
        self._stack.append(self)
        self._replaced = torch.tensor, torch.cuda._lazy_init, overrides.Tensor
        torch_tensor = torch.tensor

        def tensor(data, *, device=None, **options):  # in torch, C++ makes it on the host and copies it
            made = torch_tensor(data, **options)
            if device is None or torch.device(device).type == "cpu":
                return made
            if made.numel() > 0:
                self.record("tensor")
            return OnGPU(made)

        torch.tensor, torch.cuda._lazy_init = tensor, lambda: None
        overrides.Tensor = OnGPU  # a plain weight
        return super().__enter__()

    def __exit__(self, *error):
        torch.tensor, torch.cuda._lazy_init, overrides.Tensor = self._replaced
        self._stack.pop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return self.compute(operation, args, kwargs or {})

    def compute(self, operation, args, kwargs):
        """Return the result of *operation*, computed on the CPU, on the device where CUDA would have it."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        reads_gpu = any(isinstance(x, OnGPU) for x in tensors)
        asked = kwargs.get("device")
        gives_gpu = reads_gpu if asked is None else torch.device(asked).type in ("cuda", "meta")
        if not (reads_gpu or gives_gpu):
            return operation(*args, **kwargs)
        if operation is aten.copy_.default:
            gives_gpu, reads_gpu = (isinstance(x, OnGPU) for x in args[:2])
        if operation in COPIES:
            is_started = gives_gpu and bool(kwargs.get("non_blocking"))  # from pageable memory, the driver copies first
            if reads_gpu != gives_gpu and args[0].numel() > 0 and not is_started:
                self.record(operation.name())
        elif reads_gpu:
            refuse_other_devices(operation, args, kwargs, tensors)
            if operation in READS or operation in INDEXING and _waits_for_indices(operation, args):
                self.record(operation.name())
        host_args, host_kwargs = pytree.tree_map_only(OnGPU, lambda x: x.host, (args, kwargs))
        if asked is not None:
            host_kwargs["device"] = torch.device("cpu")
        result = operation(*host_args, **host_kwargs)
        if not gives_gpu:
            return result
        return return_and_correct_aliasing(operation, args, kwargs, pytree.tree_map_only(torch.Tensor, OnGPU, result))


def refuse_other_devices(operation, args, kwargs, tensors):
    """Raise a WrongDeviceError if CUDA would refuse the tensors: it takes numbers and indices on the host only."""
    arguments = operation._schema.arguments
    given = {**dict(zip((argument.name for argument in arguments), args)), **kwargs}
    written = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    if operation in INDEXING:
        tensors = [args[0], *args[2:3]]
    on_host = [x for x in tensors if isinstance(x, torch.Tensor) and not isinstance(x, OnGPU)]
    is_number = torch.Tag.pointwise in operation.tags
    if any(type(x) is torch.Tensor for x in written) or any(x.dim() > 0 or not is_number for x in on_host):
        shapes = ", ".join(str(tuple(x.shape)) for x in on_host)
        raise WrongDeviceError(f"{operation}: tensors of shape {shapes} are on the host, others on the GPU")


def _waits_for_indices(operation, args):
    """Return whether an index is copied to the GPU, or is a mask whose number of elements the host must know."""
    indices = [x for x in args[1] if x is not None]
    fills = operation is not aten.index.Tensor and len(indices) == 1 and args[2].numel() == 1
    copied = any(not isinstance(x, OnGPU) and x.dim() > 0 for x in indices)
    return copied or not fills and any(x.dtype in (torch.bool, torch.uint8) for x in indices)


def to_gpu(thing):
    """Return a sample, a list or a tensor on the GPU; move a module's parameters and buffers there in place."""
    if isinstance(thing, torch.nn.Module):
        moved = {}  # a tied parameter stays tied
        for module in thing.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if parameter not in moved:
                        moved[parameter] = torch.nn.Parameter(
                            OnGPU(parameter.detach().clone()), parameter.requires_grad
                        )
                    module._parameters[name] = moved[parameter]
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else OnGPU(buffer.clone())
        return thing
    return pytree.tree_map_only(torch.Tensor, OnGPU, thing)
