"""Linear attention with a rotation, whose time and memory grow linearly with the length: ``--attention-type linear``.

Katharopoulos et al. 2020 (arXiv:2006.16236) replace softmax by a feature map φ with positive features. RoFormer
(arXiv:2104.09864, equation 19) rotates the features in the numerator, and not in the denominator, which stays positive:

    output of query m = Σ_n (R_m φ(q_m))ᵀ (R_n φ(k_n)) v_n / Σ_n φ(q_m)ᵀ φ(k_n)

The sums over n do not depend on m, or grow by one term with each m in a decoder. So no score of a pair is stored.

Shapes: T positions, B batch, H heads, G heads of keys and values, D head dimension, M features of a head.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..positions.interface import PositionEncoding, for_each_head
from .attention import SelfAttention


class Elu1(nn.Module):
    """φ(x) = elu(x) + 1, of Katharopoulos et al. 2020: M = D."""

    def forward(self, x: Tensor, is_key: bool) -> Tensor:
        return torch.where(x > 0, x + 1, x.clamp(max=0.0).exp())  # F.elu(x) + 1 rounds small features


class Favor(nn.Module):
    """Positive random features whose products estimate softmax's exp(qᵀk / sqrt(D)).

    With x' = x D^(-1/4), φ(x) = M^(-1/2) (exp(min(ωᵀx' - |x'|² / 2 - c, 40)) + 1e-4) (Choromanski et al. 2021,
    arXiv:2009.14794). For queries, c is the largest exponent of each query; but for the 1e-4, it cancels out in
    equation 19. For keys, c = 0. The largest exponent of all keys, which the authors' code uses, would let a decoder
    see later words. The bound of 40 keeps sums finite in float32: |ω|² / 2 is the largest possible exponent.

    The vectors ω are orthogonal in groups of D, with lengths of normal vectors. All layers and heads have the same.
    They are stored in the checkpoint, because different machines can compute different ones from the same seed. They
    stay in float32 in a model in 16 bits, because exponents are sums of products with them.

    Args:
        head_dim: D
        features: M
        seed: of the random vectors
    """

    omega: Tensor  # (M, D)

    def __init__(self, head_dim: int, features: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(seed)

        def normal(rows: int) -> Tensor:
            return torch.randn(rows, head_dim, generator=generator, dtype=torch.float64, device="cpu")

        blocks = [torch.linalg.qr(normal(head_dim))[0].t() for _ in range(-(-features // head_dim))]
        omega = torch.cat(blocks)[:features] * normal(features).norm(dim=1, keepdim=True)
        self.register_buffer("omega", omega.float())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Favor":
        omega = self.omega
        super()._apply(fn, recurse)
        if self.omega.dtype in (torch.float16, torch.bfloat16):
            self.omega = omega.to(self.omega.device)
        return self

    def forward(self, x: Tensor, is_key: bool) -> Tensor:
        features, dim = self.omega.shape
        x = x * dim**-0.25
        exponents = torch.matmul(x, self.omega.to(x.dtype).t()) - x.square().sum(dim=-1, keepdim=True) / 2
        if not is_key:
            exponents = exponents - exponents.amax(dim=-1, keepdim=True)
        return (exponents.clamp(max=40.0).exp() + 1e-4) * features**-0.5


class LinearSelfAttention(SelfAttention):
    """fairseq's self-attention, with its parameters, and with linear attention in the place of softmax.

    A search keeps sums instead of keys and values, so its state has the same size at each step. The entries of
    fairseq's incremental state are ``numerator`` (B, G, M, D), ``denominator`` (B, G, M, 1) and ``positions`` (B, n,
    0): the sum of R φ(k) vᵀ, the sum of φ(k), and an empty tensor, whose size n is the number of positions so far:
    reading a value would be a device synchronisation. Sums are computed in float32 (float64 if the
    input is). There are no weights of pairs, so none are dropped and none are returned.

    Args:
        feature_map: φ
        position: the encoding, which rotates M features
        embed_dim, num_heads, q_noise, qn_block_size: those of :class:`SelfAttention`
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        feature_map: nn.Module,
        position: PositionEncoding,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
    ) -> None:
        super().__init__(embed_dim, num_heads, position, q_noise=q_noise, qn_block_size=qn_block_size)
        self.feature_map = feature_map

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention from *query* to itself and to the positions in *incremental_state*.

        If *attn_mask* is given, whatever its values, a query attends to earlier positions and itself only. The other
        arguments are those of :class:`SelfAttention`. The result is the output (T, B, C), and None.
        """
        assert not static_kv and not before_softmax, "linear attention has no static keys and no scores"
        assert attn_mask is None or incremental_state is None, "fairseq gives no mask in a search"
        q, k, v = self._projected(query)
        state = self._get_input_buffer(incremental_state)
        with torch.autocast(query.device.type, enabled=False):  # a sum of many products does not fit into float16
            attn = self._attend_linearly(q, k, v, key_padding_mask, attn_mask is not None, state)
        if incremental_state is not None:
            self._set_input_buffer(incremental_state, state)
        attn = attn.to(query.dtype).permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), q.size(1) * v.size(3))
        return self.out_proj(attn), None

    def _attend_linearly(
        self, q: Tensor, k: Tensor, v: Tensor, is_pad: Tensor | None, causal: bool, state: dict[str, Tensor | None]
    ) -> Tensor:
        """Return the output (B, H, T, D) for *q* (B, H, T, D), *k* and *v* (B, G, T, D). *state* gets the new sums."""
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        q, k, v = self.feature_map(q.to(wide), False), self.feature_map(k.to(wide), True), v.to(wide)
        if is_pad is not None:
            k = k.masked_fill(is_pad.to(torch.bool).unsqueeze(1).unsqueeze(3), 0.0)
        positions = state["positions"] if "positions" in state else None
        offset = 0 if positions is None else positions.size(1)
        turned_q, turned_k = self.position.queries_and_keys(q, k, offset)
        if causal:
            turned_k, v = for_each_head(turned_k, q.size(1)), for_each_head(v, q.size(1))
            top = causal_products(turned_q, turned_k, v)
            bottom = (q * for_each_head(k.cumsum(dim=2), q.size(1))).sum(dim=3, keepdim=True)
            return quotient(top, bottom)
        numerator = torch.matmul(turned_k.transpose(2, 3), v)  # (B, G, M, D)
        denominator = k.sum(dim=2).unsqueeze(3)  # (B, G, M, 1)
        if positions is not None:
            earlier, of_earlier = state["numerator"], state["denominator"]
            assert earlier is not None and of_earlier is not None
            numerator, denominator = numerator + earlier, denominator + of_earlier
        state["numerator"], state["denominator"] = numerator, denominator
        state["positions"] = torch.empty([k.size(0), offset + k.size(2), 0], device=k.device)
        numerator, denominator = for_each_head(numerator, q.size(1)), for_each_head(denominator, q.size(1))
        return quotient(torch.matmul(turned_q, numerator), torch.matmul(q, denominator))


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return *numerator* / *denominator*, or 0 without a gradient where the denominator is smaller than the floor.

    The denominator is 0 in a row with only padding, and can underflow. Smaller ones could give infinite gradients.
    """
    floor = 1e-290 if denominator.dtype == torch.float64 else 1e-30
    return numerator / denominator.masked_fill(denominator < floor, float("inf"))


def causal_products(q: Tensor, k: Tensor, v: Tensor, chunk: int = 64) -> Tensor:
    """Return Σ_{n ≤ m} (q_mᵀ k_n) v_n for each position m: (B, H, T, D).

    Products of pairs are computed within chunks of *chunk* positions. All earlier chunks are one sum.

    Args:
        q, k: (B, H, T, M)
        v: (B, H, T, D)
    """
    length = q.size(2)
    rest = (chunk - length % chunk) % chunk
    q, k, v = (F.pad(x, [0, 0, 0, rest]).unflatten(2, (-1, chunk)) for x in (q, k, v))  # (B, H, chunks, chunk, …)
    sums = torch.matmul(k.transpose(3, 4), v).cumsum(dim=2)  # (B, H, chunks, M, D)
    earlier = F.pad(sums[:, :, :-1], [0, 0, 0, 0, 1, 0])
    products = torch.matmul(q, earlier) + torch.matmul(torch.matmul(q, k.transpose(3, 4)).tril(), v)
    return products.flatten(2, 3)[:, :, :length]
