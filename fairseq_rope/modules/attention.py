"""Attention: self-attention with a position encoding, and fairseq's cross-attention, faster.

Shapes: T target positions, S source positions (keys), B batch, H heads, D head dimension, C = H * D. Keys and values
can have fewer heads, G. H / G heads of queries then share one head of keys and values (Ainslie et al. 2023, "GQA",
arXiv:2305.13245; for G = 1, Shazeer 2019, arXiv:1911.02150).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from ..positions.interface import PositionEncoding, for_each_head
from ..positions.sharing import current_pass
from .masks import aligned, assert_right_padded, is_right_padded, mask_scores, pad_scores

SHORT = 512  # keys, up to which a CPU trains attention of 16 bits faster in float32


def is_faster_in_float32(q: Tensor, keys: int) -> bool:
    """Return whether torch's fused kernel is faster in float32 for queries *q* in 16 bits and a number of *keys*.

    This is so for gradients on a CPU. In 16 bits, the kernel prepares a product of oneDNN for each sentence and head,
    which takes longer than the product itself.
    """
    is_narrow = q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)
    return is_narrow and keys <= SHORT and torch.is_grad_enabled() and q.requires_grad


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
        need_weights: bool,
        need_head_weights: bool,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what ``forward`` returns, from *q* (B, H, T, D), *k* and *v* (B, G, S, D).

        *mask*, which broadcasts to (B, H, T, S), is added to the scores. *is_causal* says that there is none, that
        T = S, and that a query attends to earlier positions and itself.
        """
        k, v = for_each_head(k, q.size(1)), for_each_head(v, q.size(1))  # (B, H, S, D)
        weights: Tensor | None = None
        if need_weights or need_head_weights or (self.position is not None and self.position.overrides("values")):
            attn, weights = self._with_weights(q, k, v, mask)
        else:
            attn = self._fused(q, k, v, mask, is_causal)  # (B, H, T, D)
        # (B, H, T, D) -> (T, B, C); a pruned layer has fewer heads than its input has dimensions.
        attn = self.out_proj(attn.permute(2, 0, 1, 3).reshape(q.size(2), q.size(0), self.num_heads * self.head_dim))
        if weights is None or not (need_weights or need_head_weights):
            return attn, None
        weights = weights.transpose(0, 1)  # (H, B, T, S)
        return attn, weights if need_head_weights else weights.mean(dim=0)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        """Return the output (B, H, T, D) of torch's fused kernels; all arguments have H heads."""
        drops = self.training or self.dropout_module.apply_during_inference
        dropout = float(self.dropout_module.p) if drops else 0.0
        dtype = q.dtype
        if not dropout and is_faster_in_float32(q, k.size(2)):
            q, k, v, mask = q.float(), k.float(), v.float(), None if mask is None else mask.float()
        attn = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal)
        return attn.to(dtype)

    def _with_weights(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output (B, H, T, D), and the attention weights (B, H, T, S) in float32 or float64."""
        scores = torch.matmul(q * self.scaling, k.transpose(2, 3))  # (B, H, T, S)
        if mask is not None:
            scores = scores + mask
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        weights = torch.softmax(scores, dim=-1, dtype=wide)  # (B, H, T, S)
        dropped = self.dropout_module(weights.to(q.dtype))
        attn = torch.matmul(dropped, v)  # (B, H, T, D)
        of_positions = None if self.position is None else self.position.values(dropped)
        return attn if of_positions is None else attn + of_positions, weights

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Return what is added to the scores: None, or a tensor that broadcasts to (B, H, T, S), in the type of *q*.

        It is the sum of *attn_mask* (T, S), *key_padding_mask* (B, S) and the bias of positions. *q* (B, H, T, D) and
        *k* (B, G, S, D) are those that ``position.bias`` reads. Layers with the same arguments and the same encoding
        share the result, unless the bias depends on queries or keys.
        """
        position = self.position

        def compute() -> Tensor | None:
            terms = []
            if attn_mask is not None:
                terms.append(mask_scores(attn_mask, q, k.size(2)))
            if key_padding_mask is not None:
                terms.append(pad_scores(key_padding_mask, q))
            bias = None if position is None else position.bias(q, k, key_padding_mask)
            if bias is not None:
                terms.append(bias)
            mask = sum(terms[1:], terms[0]) if terms else None
            return mask if mask is None or q.device.type == "cpu" else aligned(mask)

        if position is not None and not position.shares_bias():
            return compute()
        key = ("mask", position, attn_mask, key_padding_mask, q.dtype, q.device, q.size(2), k.size(2))
        return current_pass().shared(key, compute)

    def _scaled_by_length(
        self, q: Tensor, keys: int, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> Tensor:
        """Return *q* (B, H, T, D), each query multiplied by the factor for its number of keys, S = *keys*."""

        def compute() -> Tensor:  # the factor of each query: (B or 1, 1, T, 1)
            attended = torch.ones([1, q.size(2), keys], dtype=torch.bool, device=q.device)
            if attn_mask is not None:
                # fairseq's encoder layer writes -1e4 or -1e8 where attention is forbidden
                attended = attended & (mask_scores(attn_mask, q, keys) > -1e3)
            if key_padding_mask is not None:
                attended = attended & ~key_padding_mask.to(torch.bool).unsqueeze(1)
            count = attended.sum(dim=2).clamp(min=1).to(torch.float64)  # (B or 1, T)
            factor = count.log().clamp(min=0.1) / math.log(self.average_length)
            return factor.to(q.dtype).unsqueeze(1).unsqueeze(3)

        key = ("length factors", attn_mask, key_padding_mask, q.dtype, q.device, q.size(2), keys)
        return q * current_pass().shared(key, compute)

    def _split_heads(self, x: Tensor) -> Tensor:
        """Return a view of *x* (T, B, H * D) with the shape (B, H, T, D), for any number H of heads."""
        return x.view(x.size(0), x.size(1), -1, self.head_dim).permute(1, 2, 0, 3)

    def keep_key_value_heads(self, heads: int) -> None:
        """Keep the first *heads* heads of keys and values, with their initial numbers; heads of queries share them."""
        rows = heads * self.head_dim
        for projection in (self.k_proj, self.v_proj):
            projection.out_features = rows
            for name, parameter in list(projection.named_parameters()):
                setattr(projection, name, nn.Parameter(parameter.detach()[:rows].clone()))

    def _get_input_buffer(self, incremental_state: Any) -> Any:
        """Return the cache of this layer. Without a state, its key is not read, so that layers compile to one code."""
        return {} if incremental_state is None else super()._get_input_buffer(incremental_state)

    def set_beam_size(self, beam_size: int) -> None:
        """Do nothing: each row keeps its keys and values; in fairseq, *beam_size* adjacent rows share those of one."""

    def _get_reserve_head_index(self, num_heads_to_keep: int) -> list[tuple[int, int]]:  # fairseq's pruning begins here
        if self.k_proj.out_features != self.q_proj.out_features or self.q_proj.bias is None:
            raise ValueError("heads that share keys and values, and projections without biases, cannot be pruned")
        return super()._get_reserve_head_index(num_heads_to_keep)


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
            attn_mask: (T, S), added to the scores; or boolean, true where attention is forbidden; or empty, if a query
                attends to earlier positions and itself only
            before_softmax: must be False

        Returns:
            The output (T, B, C), and None or the weights: (B, T, S), or (H, B, T, S) with *need_head_weights*, in
            float32 (float64 if *query* is).
        """
        assert not static_kv and not before_softmax, "self-attention has no static keys, and returns no scores"
        q, k, v = self._projected(query)  # (B, H, T, D), (B, G, T, D), (B, G, T, D)
        cache = self._get_input_buffer(incremental_state)
        earlier = cache.get("prev_key")  # (B, G, S - T, D)
        offset = 0 if earlier is None else earlier.size(2)
        keys = offset + k.size(2)  # S
        if incremental_state is not None:
            key_padding_mask = self._append_prev_key_padding_mask(
                key_padding_mask, cache.get("prev_key_padding_mask"), query.size(1), src_len=keys, static_kv=False
            )
        if self.average_length:
            q = self._scaled_by_length(q, keys, attn_mask, key_padding_mask)
        turned, k = self.position.queries_and_keys(q, k, offset)  # (B, H, T, D), (B, G, T, D)

        if incremental_state is not None:
            if earlier is not None:
                k, v = torch.cat([earlier, k], dim=2), torch.cat([cache["prev_value"], v], dim=2)  # (B, G, S, D)
            cache.update(prev_key=k, prev_value=v, prev_key_padding_mask=key_padding_mask)
            self._set_input_buffer(incremental_state, cache)

        is_causal = attn_mask is not None and attn_mask.numel() == 0 and not (need_weights or need_head_weights)
        if is_causal and self._needs_no_mask(key_padding_mask, q.device):
            return self._attend(turned, k, v, None, need_weights, need_head_weights, is_causal=True)
        mask = self._mask(attn_mask, key_padding_mask, q, k)  # None, or broadcasts to (B, H, T, S)
        return self._attend(turned, k, v, mask, need_weights, need_head_weights)

    def _needs_no_mask(self, key_padding_mask: Tensor | None, device: torch.device) -> bool:
        """Return whether causal attention can do without a mask: there is no bias, and padding is on the right.

        Padding on the right is later than all words. The outputs at padding differ, so this is for training, whose
        losses ignore them. On a GPU, this relies on ``right_padded``, which the GPU checks without a device
        synchronisation.
        """
        if not self.training or self.position.overrides("bias", "values"):
            return False
        # With dropout, the CPU's kernel would make the mask in each layer. torch compiles no question to the values.
        if device.type == "cpu" and (self.dropout_module.p > 0 or torch.compiler.is_compiling()):
            return False
        if key_padding_mask is None:
            return True
        padding, current = key_padding_mask, current_pass()
        if device.type == "cpu":
            return current.shared(("is right-padded", padding), lambda: is_right_padded(padding))
        if self.right_padded:
            current.shared(("is asserted", padding), lambda: assert_right_padded(padding))
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
        assert not before_softmax, "cross-attention returns no scores"
        q = self._split_heads(self.q_proj(query))  # (B, H, T, D)
        cache = self._get_input_buffer(incremental_state)
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
        return self._attend(q, k, v, mask, need_weights, need_head_weights)
