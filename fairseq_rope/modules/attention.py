"""Attention: self-attention with a position encoding, and fairseq's cross-attention, faster.

Shapes: T target positions, S source positions (keys), B batch, H heads, D head dimension, C = H * D. Keys and values
can have fewer heads, G. H / G heads of queries then share one head of keys and values (Ainslie et al. 2023, "GQA",
arXiv:2305.13245; for G = 1, Shazeer 2019, arXiv:1911.02150).
"""

import math
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from ..positions.interface import PositionEncoding, for_each_head
from ..positions.sharing import FUTURE_MASK, current_pass, saved_tensors_are_hooked
from .masks import aligned, assert_right_padded, is_right_padded, pad_scores

SHORT = 512  # keys, up to which a CPU trains attention of 16 bits faster in float32


def is_faster_in_float32(q: Tensor, keys: int) -> bool:
    """Return whether torch's fused kernel is faster in float32 for queries *q* in 16 bits and a number of *keys*.

    This is so for gradients on a CPU. In 16 bits, the kernel prepares a product of oneDNN for each sentence and head,
    which takes longer than the product itself: for 64 sentences of 16 words, it took 20 times as long as in float32.
    """
    is_narrow = q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)
    return is_narrow and keys <= SHORT and torch.is_grad_enabled() and q.requires_grad


def matmul_by_group(x: Tensor, y: Tensor) -> Tensor:
    """Return *x* (B, H, T, N) times *y* (B, G, N, M), whose heads are shared by H / G heads of *x*: (B, H, T, M)."""
    if x.size(1) == y.size(1):
        return torch.matmul(x, y)
    rows = x.size(1) // y.size(1) * x.size(2)
    product = torch.matmul(x.reshape(x.size(0), y.size(1), rows, x.size(3)), y)
    return product.view(x.size(0), x.size(1), x.size(2), y.size(3))


class FusedAttention(MultiheadAttention):
    """The base class of self- and cross-attention: computes the output from queries, keys and values.

    If no attention weights are needed, torch's fused kernels compute it (``F.scaled_dot_product_attention``).

    Attributes:
        average_length: if it is not 0, queries are multiplied by max(ln n, 0.1) / ln(average_length). n is the number
            of keys that a query attends to, without padding (Su 2021, https://kexue.fm/archives/8823)
    """

    average_length = 0.0
    position: PositionEncoding | None  # of self-attention; cross-attention has None

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        need_weights: bool = False,
        need_head_weights: bool = False,
        before_softmax: bool = False,
        explicit: bool = False,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what ``forward`` returns, from *q* (B, H, T, D), *k* and *v* (B, G, S, D).

        Args:
            mask: added to the scores; broadcasts to (B, H, T, S)
            need_weights, need_head_weights, before_softmax: those of ``forward``; *before_softmax* comes first
            explicit: whether weights are computed even if only the output is needed
            is_causal: that there is no *mask*, T = S, and a query attends to earlier positions and itself
        """
        only_output = not (need_weights or need_head_weights or before_softmax)
        weights: Tensor | None = None
        if only_output and not explicit:
            shares_keys = q.size(1) != k.size(1)
            if shares_keys and q.device.type != "cpu":  # enable_gqa excludes the kernel for GPUs that takes a mask
                k, v, shares_keys = for_each_head(k, q.size(1)), for_each_head(v, q.size(1)), False
            drops = self.training or self.dropout_module.apply_during_inference
            dropout = float(self.dropout_module.p) if drops else 0.0
            result = q.dtype
            if not dropout and is_faster_in_float32(q, k.size(2)):
                q, k, v, mask = q.float(), k.float(), v.float(), None if mask is None else mask.float()
            attn = F.scaled_dot_product_attention(  # (B, H, T, D)
                q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, enable_gqa=shares_keys
            ).to(result)
        else:
            scores = matmul_by_group(q * self.scaling, k.transpose(2, 3))  # (B, H, T, S)
            if mask is not None:
                scores = scores + mask
            if before_softmax:
                return scores.flatten(0, 1), for_each_head(v, self.num_heads).flatten(0, 1)
            wide = torch.float64 if q.dtype == torch.float64 else torch.float32
            weights = torch.softmax(scores, dim=-1, dtype=wide)  # (B, H, T, S)
            dropped = self.dropout_module(weights.to(q.dtype))
            attn = matmul_by_group(dropped, v)  # (B, H, T, D)
            position_values = None if self.position is None else self.position.values(dropped)
            if position_values is not None:
                attn = attn + position_values

        # (B, H, T, D) -> (T, B, C); a pruned layer has fewer heads than its input has dimensions.
        attn = self.out_proj(attn.permute(2, 0, 1, 3).reshape(q.size(2), q.size(0), self.num_heads * self.head_dim))
        if only_output or weights is None:
            return attn, None
        weights = weights.transpose(0, 1)  # (H, B, T, S)
        return attn, weights if need_head_weights else weights.mean(dim=0)

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Return what the masks (T, S) and (B, S) and positions add to scores: None, or broadcasting to (B, H, T, S).

        The result has the type of *q* (B, H, T, D), queries as projected; *k* is (B, G, S, D). Layers with the same
        masks and the same encoding share the result, unless its bias depends on queries or keys.
        """

        position = self.position

        def compute() -> Tensor | None:
            terms = []
            if attn_mask is not None:
                is_boolean = attn_mask.dtype == torch.bool
                zeros = torch.zeros_like(attn_mask, dtype=q.dtype) if is_boolean else None
                terms.append(attn_mask.to(q.dtype) if zeros is None else zeros.masked_fill(attn_mask, -math.inf))
            if key_padding_mask is not None:
                terms.append(pad_scores(key_padding_mask, q))
            bias = None if position is None else position.bias(q, k, key_padding_mask)
            if bias is not None:
                terms.append(bias)
            mask = sum(terms[1:], terms[0]) if terms else None
            return mask if mask is None or q.device.type == "cpu" else aligned(mask)

        if position is not None and not position.shares_bias():
            return compute()
        made_from = (position, attn_mask, key_padding_mask, q.dtype, q.device, q.size(2), k.size(2))
        return current_pass().shared("mask", made_from, compute)

    def _scaled_by_length(
        self, q: Tensor, keys: int, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> Tensor:
        """Return *q* (B, H, T, D), each query multiplied by the factor for its number of keys, S = *keys*."""

        def compute() -> Tensor:  # the factor of each query: (B or 1, 1, T, 1)
            attended = torch.ones([1, q.size(2), keys], dtype=torch.bool, device=q.device)
            if attn_mask is not None:
                # fairseq's encoder layer writes -1e4 or -1e8 where attention is forbidden
                attended = attended & (~attn_mask if attn_mask.dtype == torch.bool else attn_mask > -1e3)
            if key_padding_mask is not None:
                attended = attended & ~key_padding_mask.to(torch.bool).unsqueeze(1)
            count = attended.sum(dim=2).clamp(min=1).to(torch.float64)  # (B or 1, T)
            factor = count.log().clamp(min=0.1) / math.log(self.average_length)
            return factor.to(q.dtype).unsqueeze(1).unsqueeze(3)

        made_from = (attn_mask, key_padding_mask, q.dtype, q.device, q.size(2), keys)
        return q * current_pass().shared("length factors", made_from, compute)

    def _split_heads(self, x: Tensor) -> Tensor:
        """Return a view of *x* (T, B, H * D) with the shape (B, H, T, D), for any number H of heads."""
        return x.unflatten(2, (-1, self.head_dim)).permute(1, 2, 0, 3)

    def keep_key_value_heads(self, heads: int) -> None:
        """Keep the first *heads* heads of keys and values, with their initial numbers; heads of queries share them."""
        rows = heads * self.head_dim
        for projection in (self.k_proj, self.v_proj):
            projection.out_features = rows
            for name, parameter in list(projection.named_parameters()):
                setattr(projection, name, nn.Parameter(parameter.detach()[:rows].clone()))

    def set_beam_size(self, beam_size: int) -> None:
        """Do nothing: each row keeps its keys and values; in fairseq, *beam_size* adjacent rows share those of one."""

    def _get_reserve_head_index(self, num_heads_to_keep: int) -> list[tuple[int, int]]:  # fairseq's pruning begins here
        if self.k_proj.out_features != self.q_proj.out_features or self.q_proj.bias is None:
            raise ValueError("heads that share keys and values, and projections without biases, cannot be pruned")
        return super()._get_reserve_head_index(num_heads_to_keep)

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse ``torch.jit.script``, which calls this method of each module first."""
        raise TypeError(
            "torch.jit.script does not support fairseq-rope's models; use fairseq-rope export to serve them"
        )


class SelfAttention(FusedAttention):
    """fairseq's self-attention with a position encoding.

    Parameters, their names and their initialisation are those of ``fairseq/modules/multihead_attention.py``; so are
    head pruning, quantisation noise and the names in the incremental state. ``prev_key`` holds keys as the encoding
    returns them. With RoPE, a key is rotated once, when it enters the cache. The position of a new token is the number
    of keys in the cache.

    A position is an index into the tensor, and padding counts. If scores depend only on differences of positions,
    padding on the left changes nothing.

    Args:
        embed_dim: C
        num_heads: H
        position: the encoding, which several layers can share
        dropout: probability of dropping an attention weight
        q_noise, qn_block_size: quantisation noise of the projections, as fairseq's

    Attributes:
        q_norm, k_norm: norms of each head's queries and keys, before the position encoding (``--qk-norm``), or None
        right_padded: whether the task says that it pads targets on the right
    """

    position: PositionEncoding
    right_padded = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        position: PositionEncoding,
        dropout: float = 0.0,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout=dropout, self_attention=True, q_noise=q_noise, qn_block_size=qn_block_size
        )
        # --retain-dropout-modules goes by the name of fairseq's class.
        self.dropout_module.module_name = "MultiheadAttention"
        self.position = position
        position.attach(self)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None

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
        """Return the attention from *query* to itself and to the keys and values in *incremental_state*.

        Args:
            query: (T, B, C)
            key, value, static_kv: arguments of fairseq's signature that are not used; self-attention reads *query*
            key_padding_mask: (B, T), nonzero for padding; that of earlier positions is in *incremental_state*
            incremental_state: fairseq's cache of values, and of keys as the encoding returns them
            need_weights, need_head_weights: also return the attention weights, averaged over heads or of each head
            attn_mask: (T, S), added to the scores; or boolean, true where attention is forbidden
            before_softmax: return the masked scores (B * H, T, S) and the values (B * H, S, D)

        Returns:
            The output (T, B, C), and None or the weights: (B, T, S), or (H, B, T, S) with *need_head_weights*, in
            float32 (float64 if *query* is).
        """
        assert not static_kv, "self-attention has no static keys"
        q, k, v = self._projected(query)  # (B, H, T, D), (B, G, T, D), (B, G, T, D)
        cache = {} if incremental_state is None else self._get_input_buffer(incremental_state)
        earlier = cache.get("prev_key")  # (B, G, S - T, D)
        offset = 0 if earlier is None else earlier.size(2)
        keys = offset + k.size(2)  # S
        if incremental_state is not None:
            key_padding_mask = self._append_prev_key_padding_mask(
                key_padding_mask, cache.get("prev_key_padding_mask"), query.size(1), src_len=keys, static_kv=False
            )
        if self.average_length:
            q = self._scaled_by_length(q, keys, attn_mask, key_padding_mask)
        turned, k = self.position.queries_and_keys(q, k, offset)

        if incremental_state is not None:
            if earlier is not None:
                k, v = torch.cat([earlier, k], dim=2), torch.cat([cache["prev_value"], v], dim=2)  # (B, G, S, D)
            cache.update(prev_key=k, prev_value=v, prev_key_padding_mask=key_padding_mask)
            self._set_input_buffer(incremental_state, cache)

        explicit = self.position.overrides("values") or need_weights or need_head_weights or before_softmax
        if self.training and incremental_state is None and attn_mask is not None and not explicit:
            if not self.position.overrides("bias") and self._is_causal(attn_mask, key_padding_mask):
                return self._attend(turned, k, v, None, is_causal=True)
        mask = self._mask(attn_mask, key_padding_mask, q, k)  # None, or broadcasts to (B, H, T, S)
        return self._attend(turned, k, v, mask, need_weights, need_head_weights, before_softmax, explicit)

    def _is_causal(self, attn_mask: Tensor, key_padding_mask: Tensor | None) -> bool:
        """Return whether the masks (T, T) and (B, T) only hide later positions from words; kernels then need no mask.

        *attn_mask* must be the mask that the decoder made in this forward pass. Padding on the right is later than all
        words. The outputs at padding differ, so this is for training, whose losses ignore them. On a GPU the host does
        not read the padding. It relies on ``right_padded``, which the GPU checks without a wait. On one core of a CPU,
        a training step of ``benchmarks/train.py``'s small model takes 2% less time at 30 words, and 7% less at 512.
        """
        if not torch.is_grad_enabled() or torch.jit.is_tracing():
            return False
        current = current_pass()
        if not current.has(FUTURE_MASK, (attn_mask.size(0),), attn_mask):
            return False
        on_cpu = attn_mask.device.type == "cpu"
        if on_cpu and self.dropout_module.p > 0:  # the CPU has no kernel for it, and would make the mask in each layer
            return False
        if saved_tensors_are_hooked():  # a checkpointed layer is computed again, outside the forward pass, with a mask
            return False
        if key_padding_mask is None:
            return True
        if on_cpu:
            return current.shared("is right-padded", (key_padding_mask,), lambda: is_right_padded(key_padding_mask))
        if self.right_padded:
            current.shared("is asserted", (key_padding_mask,), lambda: assert_right_padded(key_padding_mask))
        return self.right_padded

    def _projected(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, T, D), keys and values (B, G, T, D) of *query* (T, B, C), without positions."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (self._split_heads(projection(query)) for projection in projections)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v


class CrossAttention(FusedAttention):
    """fairseq's encoder-decoder attention, with the same parameters, results and names in the incremental state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.position = None

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
        """Return the attention from *query* (T, B, C) to the encoder's output, *key* and *value* (S, B, C there).

        Args:
            key_padding_mask: (B, S), nonzero for padding
            incremental_state: fairseq's cache; with *static_kv*, keys and values are projected only once
            others, and the result: as in :class:`SelfAttention`
        """
        q = self._split_heads(self.q_proj(query))  # (B, H, T, D)
        cache = {} if incremental_state is None else self._get_input_buffer(incremental_state)
        k, v = cache.get("prev_key"), cache.get("prev_value")  # (B, G, S, D)
        if static_kv and k is not None and v is not None:
            key_padding_mask = cache.get("prev_key_padding_mask", key_padding_mask)
        else:
            k, v = self._split_heads(self.k_proj(key)), self._split_heads(self.v_proj(value))
            if incremental_state is not None:
                cache.update(prev_key=k, prev_value=v, prev_key_padding_mask=key_padding_mask)
                self._set_input_buffer(incremental_state, cache)
        if self.average_length:
            q = self._scaled_by_length(q, k.size(2), None, key_padding_mask)
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        return self._attend(q, k, v, mask, need_weights, need_head_weights, before_softmax)
