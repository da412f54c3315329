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

from .masks import aligned, is_causal, pad_scores
from .positions.cross_attention import query_positions
from .positions.interface import PositionEncoding
from .positions.rotary import RotaryEmbedding
from .positions.sharing import once_per_forward_pass


def for_each_head(x: Tensor, heads: int) -> Tensor:
    """Return keys or values *x* (B, G, S, D), repeated for the *heads* that share them: (B, H, S, D)."""
    return x if x.size(1) == heads else x.repeat_interleave(heads // x.size(1), dim=1)


def matmul_by_group(x: Tensor, y: Tensor) -> Tensor:
    """Return *x* (B, H, T, N) times *y* (B, G, N, M), whose heads are shared by H / G heads of *x*: (B, H, T, M)."""
    if x.size(1) == y.size(1):
        return torch.matmul(x, y)
    rows = x.size(1) // y.size(1) * x.size(2)
    product = torch.matmul(x.reshape(x.size(0), y.size(1), rows, x.size(3)), y)
    return product.view(x.size(0), x.size(1), x.size(2), y.size(3))


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, is_causal: bool = False
) -> Tensor:
    """Return the attention of *q* (B, H, T, D) to *k* and *v* (B, G, S, D): (B, H, T, D).

    If *is_causal*, there is no *mask*, T = S, and a query attends to earlier positions and itself.
    """
    if q.size(1) != k.size(1) and q.device.type == "cpu":  # on GPUs, this excludes the kernel that takes a mask
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, enable_gqa=True
        )
    k, v = for_each_head(k, q.size(1)), for_each_head(v, q.size(1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal)


class FusedAttention(MultiheadAttention):
    """The base class of self- and cross-attention: computes the output from queries, keys and values.

    If no attention weights are needed, torch's fused kernels compute it (``F.scaled_dot_product_attention``).

    Attributes:
        average_length: if it is not 0, queries are multiplied by max(ln n, 0.1) / ln(average_length). n is the number
            of keys that a query attends to, without padding (Su 2021, https://kexue.fm/archives/8823)
    """

    __constants__ = ["average_length"]  # for TorchScript
    average_length = 0.0

    def _split_heads(self, x: Tensor) -> Tensor:
        """Return a view of *x* (T, B, H * D) with the shape (B, H, T, D), for any number H of heads."""
        heads = x.size(2) // self.head_dim
        return x.view(x.size(0), x.size(1), heads, self.head_dim).permute(1, 2, 0, 3)

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

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        need_weights: bool,
        before_softmax: bool,
        need_head_weights: bool,
        explicit: bool,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what ``forward`` returns, from *q* (B, H, T, D), *k* and *v* (B, G, S, D).

        *mask* is added to the scores, and broadcasts to (B, H, T, S). With *explicit*, weights are always computed.
        *is_causal* is for :func:`fused_attention`.
        """
        weights: Tensor | None = None
        # A search has a new shape at each step, for which cuDNN's attention would be planned anew.
        explicit = explicit or (q.size(2) == 1 and q.device.type != "cpu")
        if need_weights or need_head_weights or before_softmax or explicit:
            scores = matmul_by_group(q * self.scaling, k.transpose(2, 3))  # (B, H, T, S)
            if mask is not None:
                scores = scores + mask
            if before_softmax:
                return scores.flatten(0, 1), for_each_head(v, self.num_heads).flatten(0, 1)
            wide = torch.float64 if q.dtype == torch.float64 else torch.float32
            weights = torch.softmax(scores, dim=-1, dtype=wide)
            dropped = self.dropout_module(weights.to(q.dtype))
            attn = matmul_by_group(dropped, v)
            of_positions = self._position_values(dropped)
            if of_positions is not None:
                attn = attn + of_positions
        else:
            attn = fused_attention(q, k, v, mask, self._dropout(), is_causal)

        # (B, H, T, D) -> (T, B, C); a pruned layer has fewer heads than its input has dimensions.
        attn = self.out_proj(attn.permute(2, 0, 1, 3).reshape(q.size(2), q.size(0), self.num_heads * self.head_dim))
        if weights is not None and (need_weights or need_head_weights):
            weights = weights.transpose(0, 1)  # (H, B, T, S)
            return attn, weights if need_head_weights else weights.mean(dim=0)
        return attn, None

    def _dropout(self) -> float:
        return float(self.dropout_module.p) if self.training or self.dropout_module.apply_during_inference else 0.0

    def _bias(self, q: Tensor, keys: int) -> Tensor | None:
        return None

    def _position_values(self, weights: Tensor) -> Tensor | None:
        return None

    def _scaled_by_length(
        self, q: Tensor, keys: int, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> Tensor:
        """Return *q* (B, H, T, D), each query multiplied by the factor for its number of keys, S = *keys*."""
        if self.average_length == 0.0:
            return q
        if not torch.jit.is_scripting():
            key = ("length", attn_mask, key_padding_mask, q.dtype, q.device, q.size(2), keys)
            return q * once_per_forward_pass(key, self._length_factors, q, keys, attn_mask, key_padding_mask)
        return q * self._length_factors(q, keys, attn_mask, key_padding_mask)

    def _length_factors(
        self, q: Tensor, keys: int, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> Tensor:
        """Return the factor of each query: (B or 1, 1, T, 1) in the type of *q*."""
        attended = torch.ones([1, q.size(2), keys], dtype=torch.bool, device=q.device)
        if attn_mask is not None:
            # fairseq's encoder layer writes -1e4 or -1e8 where attention is forbidden
            attended = attended & (~attn_mask if attn_mask.dtype == torch.bool else attn_mask > -1e3)
        if key_padding_mask is not None:
            attended = attended & ~key_padding_mask.to(torch.bool).unsqueeze(1)
        count = attended.sum(dim=2).clamp(min=1).to(torch.float64)  # (B or 1, T)
        factor = count.log().clamp(min=0.1) / math.log(self.average_length)
        return factor.to(q.dtype).unsqueeze(1).unsqueeze(3)

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, keys: int) -> Tensor | None:
        """Return what the masks (T, S) and (B, S) and positions add to scores: None, or broadcasting to (B, H, T, S).

        The result has the type of *q*, queries as projected. *keys* is S. Layers with the same masks and the same
        encoding share the result, unless its bias depends on the queries.
        """
        if not torch.jit.is_scripting():
            position = getattr(self, "position", None)
            if position is None or position.shared:
                key = (position, attn_mask, key_padding_mask, q.dtype, q.device, q.size(2), keys)
                return once_per_forward_pass(key, self._score_mask, attn_mask, key_padding_mask, q, keys)
        return self._score_mask(attn_mask, key_padding_mask, q, keys)

    def _score_mask(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, keys: int
    ) -> Tensor | None:
        mask: Tensor | None = None
        if attn_mask is not None:
            mask = attn_mask.to(q.dtype)
            if attn_mask.dtype == torch.bool:
                mask = torch.zeros_like(mask).masked_fill(attn_mask, float("-inf"))
        if key_padding_mask is not None:
            pad_score = pad_scores(key_padding_mask, q)
            mask = pad_score if mask is None else mask + pad_score
        bias = self._bias(q, keys)
        if bias is not None:
            mask = bias if mask is None else mask + bias
        return mask if mask is None or q.device.type == "cpu" or q.size(2) == 1 else aligned(mask)


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
            key_padding_mask: (B, T), or (B, S) with the cached positions; nonzero for padding
            incremental_state: fairseq's cache of values, and of keys as the encoding returns them
            need_weights, need_head_weights: also return the attention weights, averaged over heads or of each head
            attn_mask: (T, S), added to the scores; or boolean, true where attention is forbidden
            before_softmax: return the masked scores (B * H, T, S) and the values (B * H, S, D)

        Returns:
            The output (T, B, C), and None or the weights: (B, T, S), or (H, B, T, S) with *need_head_weights*, in
            float32 (float64 if *query* is).
        """
        assert not static_kv, "self-attention has no static keys"
        q, k, v = self._projected(query)

        saved_state: dict[str, Tensor | None] = {}
        if incremental_state is not None:
            saved_state = self._get_input_buffer(incremental_state)
        prev_key = saved_state["prev_key"] if "prev_key" in saved_state else None
        offset = 0 if prev_key is None else prev_key.size(2)
        keys = offset + k.size(2)
        if incremental_state is not None:
            prev_mask = saved_state["prev_key_padding_mask"] if "prev_key_padding_mask" in saved_state else None
            key_padding_mask = self._append_prev_key_padding_mask(
                key_padding_mask, prev_mask, batch_size=query.size(1), src_len=keys, static_kv=False
            )
        q = self._scaled_by_length(q, keys, attn_mask, key_padding_mask)
        projected = q
        q, k = self.position.queries_and_keys(q, k, offset)

        if incremental_state is not None:
            if prev_key is not None:
                prev_value = saved_state["prev_value"]
                assert prev_value is not None
                k = torch.cat([prev_key, k], dim=2)  # (B, G, S, D)
                v = torch.cat([prev_value, v], dim=2)
            saved_state["prev_key"] = k
            saved_state["prev_value"] = v
            saved_state["prev_key_padding_mask"] = key_padding_mask
            self._set_input_buffer(incremental_state, saved_state)

        explicit = self.position.explicit_weights
        needs_scores = need_weights or need_head_weights or before_softmax or explicit
        if not torch.jit.is_scripting() and self.training and not needs_scores and incremental_state is None:
            has_bias = getattr(self.position.bias, "__func__", None) is not PositionEncoding.bias
            if not has_bias and is_causal(attn_mask, key_padding_mask, self._dropout(), self.right_padded):
                return self._attend(q, k, v, None, False, False, False, False, is_causal=True)
        mask = self._mask(attn_mask, key_padding_mask, projected, keys)
        return self._attend(q, k, v, mask, need_weights, before_softmax, need_head_weights, explicit)

    def _projected(self, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, T, D), keys and values (B, G, T, D) of *query* (T, B, C), without positions."""
        q, k = self._split_heads(self.q_proj(query)), self._split_heads(self.k_proj(query))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, self._split_heads(self.v_proj(query))

    def _bias(self, q: Tensor, keys: int) -> Tensor | None:
        return self.position.bias(q, keys)

    def _position_values(self, weights: Tensor) -> Tensor | None:
        return self.position.values(weights)


class CrossAttention(FusedAttention):
    """fairseq's encoder-decoder attention, with the same parameters, results and names in the incremental state.

    Attributes:
        rotary: rotates keys by their positions in the source, and queries by positions that continue those of the
            source: if a source has S tokens without padding, its target begins at position S. None: no rotation
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary: RotaryEmbedding | None = None

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
            key_padding_mask: (B, S), nonzero for padding; with ``rotary``, (B, S + n) can include the padding of all n
                positions of the target so far, and the queries are the last T of these
            incremental_state: fairseq's cache; with *static_kv*, keys and values are projected only once
            others, and the result: as in :class:`SelfAttention`
        """
        q, padding = self._split_heads(self.q_proj(query)), key_padding_mask  # q: (B, H, T, D)
        saved_state: dict[str, Tensor | None] = {}
        if incremental_state is not None:
            saved_state = self._get_input_buffer(incremental_state)
        k: Tensor | None = None
        v: Tensor | None = None
        if static_kv and "prev_key" in saved_state:
            k, v = saved_state["prev_key"], saved_state["prev_value"]
            if "prev_key_padding_mask" in saved_state:
                key_padding_mask = saved_state["prev_key_padding_mask"]
        else:
            assert key is not None and value is not None
            k, v = self._split_heads(self.k_proj(key)), self._split_heads(self.v_proj(value))
            if self.rotary is not None:
                k = self.rotary(k)
                if key_padding_mask is not None:
                    key_padding_mask = key_padding_mask[:, : k.size(2)]
            if incremental_state is not None:
                saved_state["prev_key"] = k
                saved_state["prev_value"] = v
                saved_state["prev_key_padding_mask"] = key_padding_mask
                self._set_input_buffer(incremental_state, saved_state)
        assert k is not None and v is not None
        if self.rotary is not None:
            if incremental_state is not None and (padding is None or padding.size(1) <= k.size(2)):
                raise ValueError("a step of RoPE in cross-attention needs the target's padding: call extract_features")
            q = self._rotated_queries(q, padding, k.size(2))
        q = self._scaled_by_length(q, k.size(2), None, key_padding_mask)
        mask = self._mask(attn_mask, key_padding_mask, q, k.size(2))
        return self._attend(q, k, v, mask, need_weights, before_softmax, need_head_weights, False)

    def _rotated_queries(self, q: Tensor, padding: Tensor | None, keys: int) -> Tensor:
        """Return *q* (B, H, T, D) rotated by the :func:`query_positions` of *padding*; layers share their tables."""
        assert self.rotary is not None
        if torch.jit.is_scripting():
            cos, sin = self._query_tables(padding, q.size(2), keys, q.device)
        else:
            key = ("cross-attention", self.rotary, padding, q.size(2), keys, q.device)
            cos, sin = once_per_forward_pass(key, self._query_tables, padding, q.size(2), keys, q.device)
        return self.rotary.rotated(q, cos, sin)

    def _query_tables(
        self, padding: Tensor | None, queries: int, keys: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        assert self.rotary is not None
        position = query_positions(padding, queries, keys, device)  # (B or 1, T)
        tokens = queries if padding is None else max(padding.size(1) - keys, queries)
        cos, sin = self.rotary.tables(0, keys + tokens, device)
        return cos[position].unsqueeze(1), sin[position].unsqueeze(1)


from . import plugin  # noqa: E402, F401  the plugin imports names from here, so this line is last
