"""Optimisers: Adam in one pass over its numbers, and float32 copies of 16-bit weights that are saved."""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fairseq import utils
from fairseq.optim import amp_optimizer, fp16_optimizer
from fairseq.optim.adam import Adam as FairseqAdam
from torch import Tensor

from .registry import replaces

logger = logging.getLogger(__name__)

_clip_grad_norm_ = utils.clip_grad_norm_
_Mixin = fp16_optimizer._FP16OptimizerMixin
_load_state_dict = _Mixin.load_state_dict
_state_dict = _Mixin.state_dict
_sync_fp16_grads_to_fp32 = _Mixin._sync_fp16_grads_to_fp32
_sync_fp32_params_to_fp16 = _Mixin._sync_fp32_params_to_fp16
_zero_grad = _Mixin.zero_grad

FLOAT32_COPIES = "float32_params"  # the float32 copies of 16-bit weights, in the state of the optimiser
NARROW = (torch.float16, torch.bfloat16)
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")  # fairseq's names; the last one with amsgrad
FUSED_ON = ("cpu", "cuda")  # devices for which torch has the kernel


@replaces(
    "fairseq.optim.adam.Adam", prevents="lost time", until="fairseq uses a fused Adam on CPUs, and on GPUs without apex"
)
class Adam(FairseqAdam):
    """fairseq's Adam (``fairseq/optim/adam.py``) in torch's fused kernel, on CPUs and GPUs.

    fairseq's Adam is a loop over the weights with several passes over the numbers of each. Here torch's fused kernel
    makes one pass. The formula and the state in checkpoints are fairseq's, up to rounding.

    fairseq adds eps to the root of the second moment v before the correction of its bias, and torch adds it afterwards:

        sqrt(v) + eps = sqrt(1 - beta2^t) * (sqrt(v / (1 - beta2^t)) + eps / sqrt(1 - beta2^t))

    So the kernel gets eps / sqrt(1 - beta2^t). Weights in 16 bits are updated in float32, one at a time, as in fairseq.
    On other devices, such as TPUs, fairseq's own code runs.
    """

    supports_step_with_scale = True  # FP16Optimizer then leaves the division to the kernel

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        # fairseq's own __init__ looks up the name Adam in its module, which is now this class
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        torch.optim.Optimizer.__init__(self, params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, scale: Any = 1.0) -> Any:
        """Update the weights with their gradients, divided by *scale* (a number or a tensor with one element)."""
        if not all(map(self._is_fused, self.param_groups)):
            for weight in (weight for group in self.param_groups for weight in group["params"]):
                if weight.grad is not None:
                    weight.grad.div_(scale)
            return super().step(closure)  # fairseq's Adam, which refuses sparse gradients
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            together: dict[Any, list[tuple[Tensor, Tensor, dict[str, Any]]]] = defaultdict(list)
            for weight in group["params"]:
                grad = weight.grad
                if grad is None:
                    continue
                state = self._state_of(weight, group)
                state["step"] = step = state.get("step", group.get("step", 0)) + 1  # apex counts in the group
                if weight.dtype in NARROW or not weight.is_contiguous():
                    wide = weight.to(state["exp_avg"].dtype, memory_format=torch.contiguous_format, copy=True)
                    self._update([(wide, grad.to(wide.dtype), state)], step, group, scale)
                    weight.copy_(wide)
                else:
                    together[weight.device, weight.dtype, step].append((weight, grad, state))
            for (_, _, step), parts in together.items():
                self._update(parts, step, group, scale)
        return loss

    @staticmethod
    def _is_fused(group: dict[str, Any]) -> bool:
        """Return whether the kernel can update the weights of *group*."""
        grads = [weight.grad for weight in group["params"] if weight.grad is not None]
        return {grad.device.type for grad in grads}.issubset(FUSED_ON) and not any(grad.is_sparse for grad in grads)

    def _state_of(self, weight: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of *weight*: fairseq's keys, with moments in float32, or in float64 for such weights."""
        state: dict[str, Any] = self.state[weight]
        dtype = torch.float32 if weight.dtype in NARROW else weight.dtype
        moments = MOMENTS if group.get("amsgrad", False) else MOMENTS[:2]
        if not state:
            state["step"] = 0
            state.update({name: torch.zeros(weight.shape, dtype=dtype, device=weight.device) for name in moments})
        for name in moments:
            moment = state[name]
            if moment.dtype != dtype or moment.device != weight.device or not moment.is_contiguous():
                state[name] = moment.to(weight.device, dtype).contiguous()
        return state

    def _update(
        self, parts: list[tuple[Tensor, Tensor, dict[str, Any]]], step: int, group: dict[str, Any], scale: Any
    ) -> None:
        """Update weights in place for the *step*-th time: contiguous, of one device and one type.

        *parts* are the weights, their gradients, of the same type, and their states.
        """
        weights, grads, states = zip(*parts)
        first = weights[0]
        beta1, beta2 = group["betas"]
        grad_scale = None
        if torch.is_tensor(scale):
            grad_scale = scale.to(first.device, torch.float32)
        elif scale != 1.0:
            grad_scale = torch.full((), float(scale), dtype=torch.float32, device=first.device)
        torch._fused_adamw_(
            list(weights),
            [grad if grad.is_contiguous() else grad.contiguous() for grad in grads],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["max_exp_avg_sq"] for state in states] if group.get("amsgrad", False) else [],
            [torch.full((), float(step), dtype=torch.float32, device=first.device)] * len(weights),
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"] / math.sqrt(1 - beta2**step),
            amsgrad=bool(group.get("amsgrad", False)),
            maximize=False,
            grad_scale=grad_scale,
            found_inf=None,
        )


def _pairs(optimizer: Any, copies: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each 16-bit weight with its part of *copies*: one tensor a weight, or one for all weights of a device."""
    if not optimizer.has_flat_params:
        yield from zip(optimizer.fp16_params, copies)
        return
    for device, flat in zip(optimizer.fp32_params, copies):
        weights = [weight for weight in optimizer.fp16_params if weight.device.index == device or len(copies) == 1]
        yield from zip(weights, flat.split([weight.numel() for weight in weights]))


def _copies(optimizer: Any) -> list[Tensor]:
    copies = optimizer.fp32_params
    return [copy.data for copy in (copies.values() if isinstance(copies, dict) else copies)]


@replaces(
    "fairseq.optim.fp16_optimizer._FP16OptimizerMixin.state_dict",
    prevents="wrong results",
    until="fairseq saves the float32 copies",
    wraps=_state_dict,
)
def state_dict(self: Any) -> dict[str, Any]:
    """Return the state of the optimiser with the float32 copies of the weights.

    With --fp16 and --bf16, fairseq updates float32 copies of the weights, and does not save them. So a training that
    resumes continues from rounded weights. Here the state of the optimiser contains the copies.
    """
    return {**_state_dict(self), FLOAT32_COPIES: _copies(self)}


@replaces(
    "fairseq.optim.fp16_optimizer._FP16OptimizerMixin.load_state_dict",
    prevents="wrong results",
    until="the patch of state_dict goes",
    wraps=_load_state_dict,
)
def load_state_dict(self: Any, state_dict: dict[str, Any], optimizer_overrides: Any = None) -> None:
    """Load the state of the optimiser and the float32 copies of the weights.

    state_dict has saved the copies. Copies that do not round to the weights of the model are not used.
    """
    fairseqs = {key: value for key, value in state_dict.items() if key != FLOAT32_COPIES}
    _load_state_dict(self, fairseqs, optimizer_overrides)
    copies, saved = _copies(self), state_dict.get(FLOAT32_COPIES)
    if saved is None:  # fairseq wrote the checkpoint: the copies are the weights of the model
        return
    are_tensors = isinstance(saved, list) and all(torch.is_tensor(copy) for copy in saved)
    if not are_tensors or [(copy.shape, copy.dtype) for copy in saved] != [(copy.shape, copy.dtype) for copy in copies]:
        logger.warning(f"the {FLOAT32_COPIES} in the checkpoint are not those of this model, and are not used")
        return
    for copy, values in zip(copies, saved):
        copy.copy_(values)
    changed = 0
    for weight, copy in _pairs(self, copies):
        if not torch.equal(copy.view_as(weight).to(weight.dtype), weight.data):
            copy.view_as(weight).copy_(weight.data)
            changed += 1
    if changed:
        dtype = self.fp16_params[0].dtype
        logger.warning(
            f"{changed} weights in the checkpoint are not their {FLOAT32_COPIES} rounded to {dtype}: they were "
            "changed, or trained in another type; training continues from the weights"
        )


@replaces(
    "fairseq.optim.fp16_optimizer._FP16OptimizerMixin.zero_grad",
    prevents="wrong results",
    until="fairseq sets the factor to 1 before each update also without a loss scale",
    wraps=_zero_grad,
)
def zero_grad(self: Any) -> None:
    """Remove the gradients, and set the factor for them to 1, or to that of the loss scale.

    With --bf16 and an optimiser that divides gradients itself (apex's Adam, and that of this plugin), fairseq
    multiplies the factor for the gradients by that of all earlier updates.
    """
    if self.has_flat_params:
        _zero_grad(self)
    else:  # without an operation for each weight
        for weight in (*self.fp16_params, *self.fp32_params):
            weight.grad = None
        self._needs_sync = False
    self._multiply_factor = 1.0 if self.scaler is None else 1.0 / float(self.scaler.loss_scale)


@replaces(
    "fairseq.optim.fp16_optimizer._FP16OptimizerMixin._sync_fp16_grads_to_fp32",
    prevents="lost time",
    until="fairseq copies all gradients in one operation",
    wraps=_sync_fp16_grads_to_fp32,
)
def sync_fp16_grads_to_fp32(self: Any) -> None:
    """Copy the gradients of 16-bit weights to those of their float32 copies, in one operation.

    With --bf16, fairseq starts an operation for each weight.
    """
    if self.has_flat_params or not self._needs_sync or any(weight.grad is None for weight in self.fp16_params):
        return _sync_fp16_grads_to_fp32(self)
    for copy in self.fp32_params:
        copy.grad = torch.empty_like(copy)
    torch._foreach_copy_([copy.grad for copy in self.fp32_params], [weight.grad for weight in self.fp16_params])
    self._needs_sync = False


@replaces(
    "fairseq.optim.fp16_optimizer._FP16OptimizerMixin._sync_fp32_params_to_fp16",
    prevents="lost time",
    until="fairseq copies all weights in one operation",
    wraps=_sync_fp32_params_to_fp16,
)
def sync_fp32_params_to_fp16(self: Any) -> None:
    """Copy the float32 copies to the 16-bit weights, in one operation.

    With --bf16, fairseq starts an operation for each weight.
    """
    if self.has_flat_params:
        return _sync_fp32_params_to_fp16(self)
    torch._foreach_copy_([weight.data for weight in self.fp16_params], [copy.data for copy in self.fp32_params])


@replaces(
    "fairseq.optim.amp_optimizer.AMPOptimizer.step",
    prevents="wrong results",
    until="fairseq gives the GradScaler one object",
    wraps=amp_optimizer.AMPOptimizer.step,
)
def amp_step(self: Any) -> None:
    """Update the weights, with gradients that are divided by the loss scale once.

    With --amp, fairseq divides the gradients by the loss scale twice, since it gives torch's GradScaler the optimiser
    once as fairseq's object and once as torch's. Adam's eps and weight decay then count too much, and other optimisers
    hardly learn.
    """
    self.scaler.step(self.optimizer)  # the object whose gradients clip_grad_norm has unscaled
    self.scaler.update()


@replaces(
    "fairseq.utils.clip_grad_norm_",
    prevents="wrong results",
    until="fairseq computes the norm on the device of the gradients, in one operation",
    wraps=_clip_grad_norm_,
)
@torch.no_grad()
def clip_grad_norm_(
    params: Any, max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Scale the gradients so that their norm is at most *max_norm*, and return their norm before.

    With --cpu on a machine with a GPU, fairseq moves the norm of the gradients to the GPU, so --clip-norm ends the
    training. Without apex, it starts an operation for each gradient and prints a warning; here one operation computes
    all norms.
    """
    weights = [params] if torch.is_tensor(params) else list(params)
    grads: list[Tensor] = []
    expert_grads: list[Tensor] = []
    for weight in weights:
        if weight is not None and weight.grad is not None:
            (expert_grads if hasattr(weight, "expert") else grads).append(weight.grad.detach())
    if not grads:
        return weights[0].new_tensor(0.0) if weights else torch.tensor(0.0)
    norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
    total_norm = torch.norm(torch.stack([norm.to(grads[0].device) for norm in norms]))
    if aggregate_norm_fn is not None:
        total_norm = aggregate_norm_fn(total_norm)
    if max_norm > 0:
        torch._foreach_mul_(grads + expert_grads, (float(max_norm) / (total_norm + 1e-6)).clamp_(max=1))
    return total_norm
