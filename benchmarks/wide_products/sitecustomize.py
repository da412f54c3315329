"""For quality on a CPU without bfloat16: --bf16 in fairseq-train, with products computed in float32.

    PYTHONPATH=benchmarks/wide_products python -m recipes demo precision=bf16

A CPU without instructions for bfloat16 multiplies matrices in it hundreds of times slower than in float32. Here each
matrix product and attention of bfloat16 tensors is computed in float32 and rounded to bfloat16. A product of two
bfloat16 numbers is exact in float32, and hardware sums in float32 too. So the results are those of hardware but for the
order of its sums; attention rounds less often. All else is torch's own bfloat16. This says nothing about speed.
"""

import os
import sys
from typing import Any

if os.path.basename(sys.argv[0] if hasattr(sys, "argv") and sys.argv else "") == "fairseq-train":
    import torch
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
    ATTENTION_GRADIENT = aten._scaled_dot_product_flash_attention_for_cpu_backward
    PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, ATTENTION, ATTENTION_GRADIENT}

    def is_narrow(x: object) -> bool:
        return isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16

    class WideProducts(TorchDispatchMode):
        """Computes PRODUCTS of bfloat16 tensors in float32."""

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            packet = operation.overloadpacket
            if packet not in PRODUCTS or not any(map(is_narrow, args)):
                return operation(*args, **kwargs)
            wide = pytree.tree_map(lambda x: x.float() if is_narrow(x) else x, (args, kwargs))
            results = operation(*wide[0], **wide[1])
            if packet is ATTENTION:  # the logarithms of sums stay in float32
                return (results[0].bfloat16(), *results[1:])
            return pytree.tree_map_only(torch.Tensor, torch.Tensor.bfloat16, results)

    WideProducts().__enter__()
