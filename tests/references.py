"""References for tests: attention with each position encoding, and layers around it, in plain float64 numbers."""

import math
from itertools import product

import pytest
import torch

H, D = 3, 4  # attention heads, and the dimensions of each
C = H * D  # the dimensions of a word

SMALL_T5 = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 6}
ROPE = {"rope_base": 10000.0, "rope_layout": "interleaved", "rope_fraction": 1.0}
HALF = {"rope_base": 500.0, "rope_layout": "half", "rope_fraction": 0.5}
# the options of each encoding that are tested; sentences are longer than its largest distance
OPTIONS = {
    "none": [{}],
    "rope": [ROPE, HALF],
    "alibi": [{"alibi_type": "symmetric"}, {"alibi_type": "asymmetric"}],
    "t5": [SMALL_T5],
    "shaw": [{"max_relative_positions": 2}],
    "nezha": [{"max_relative_positions": 2}],
    "transformer-xl": [{}],
    "deberta": [{"deberta_max_distance": 3}],
    "tupe": [{"positions": 50, **SMALL_T5}, {"positions": 50, "tupe_absolute_only": True}],
    "kerple": [{}],
    "xpos": [{**ROPE, "xpos_scale_base": 512.0}, {**HALF, "xpos_scale_base": 32.0}],
}
CASES = [
    pytest.param(name, side, options, id=f"{name}-{side}-{number}")
    for name, choices in OPTIONS.items()
    for number, options in enumerate(choices)
    for side in (("decoder",) if name == "xpos" else ("encoder", "decoder"))
]


def causal_mask(queries, keys=None, dtype=torch.float32):
    """The causal mask (queries, keys) of the last *queries* of *keys* positions."""
    keys = keys or queries
    return torch.full((queries, keys), -math.inf, dtype=dtype).triu(keys - queries + 1)


# -- attention -----------------------------------------------------------------------------------------
# Each score is that of one query q at position i and one key k at position j, both lists of D numbers, in head h.
# p has the encoding's parameters as lists, o its options.


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def plus(a, b):
    return [x + y for x, y in zip(a, b, strict=True)]


def rotated(x, m, o=ROPE, power=0.0):
    """RoFormer, equation 34, of a list; with *power*, also multiplies pair t by zeta_t^power (xPos, algorithm 1)."""
    d, out = round(o["rope_fraction"] * len(x)), list(x)
    for t in range(d // 2):
        a, b = (2 * t, 2 * t + 1) if o["rope_layout"] == "interleaved" else (t, t + d // 2)
        angle, scale = m * o["rope_base"] ** (-2 * t / d), ((2 * t / d + 0.4) / 1.4) ** power
        out[a] = scale * (x[a] * math.cos(angle) - x[b] * math.sin(angle))
        out[b] = scale * (x[a] * math.sin(angle) + x[b] * math.cos(angle))
    return out


def xpos(q, k, i, j, h, p, o, side):
    scale_base = o["xpos_scale_base"]
    return dot(rotated(q, i, o, i / scale_base), rotated(k, j, o, -j / scale_base)) / math.sqrt(D)


def alibi(q, k, i, j, h, p, o, side):
    slope = [2**-4, 2**-8, 2**-2][h]  # of 2 heads, then the first of 4
    nearer = 0.5 if o["alibi_type"] == "asymmetric" and j > i else 0.0
    return dot(q, k) / math.sqrt(D) - slope * (abs(i - j) - nearer)


def bucket(distance, both_directions, buckets, max_distance):
    """mesh_tensorflow's _relative_position_bucket, of *distance* = j - i."""
    first, n = 0, max(-distance, 0)
    if both_directions:
        buckets //= 2
        first, n = (buckets if distance > 0 else 0), abs(distance)
    exact = buckets // 2
    if n < exact:
        return first + n
    part = math.log(n / exact) / math.log(max_distance / exact)
    return first + min(buckets - 1, exact + math.floor(part * (buckets - exact)))


def t5(q, k, i, j, h, p, o, side):
    bias = p["relative_attention_bias"][bucket(j - i, side == "encoder", *o.values())][h]
    return dot(q, k) / math.sqrt(D) + bias


def clip(distance, o):
    k = o["max_relative_positions"]
    return max(-k, min(k, distance)) + k


def shaw(q, k, i, j, h, p, o, side):
    return dot(q, plus(k, p["relative_position_keys"][clip(j - i, o)])) / math.sqrt(D)


def sinusoid(distance, width):
    return [f(distance / 10000 ** (2 * t / width)) for t in range(width // 2) for f in (math.sin, math.cos)]


def nezha_vector(distance, o):
    return sinusoid(clip(distance, o) - o["max_relative_positions"], D)


def nezha(q, k, i, j, h, p, o, side):
    return dot(q, plus(k, nezha_vector(j - i, o))) / math.sqrt(D)


def transformer_xl(q, k, i, j, h, p, o, side):
    projected = [dot(p["linear_pos.weight"][h * D + n], sinusoid(i - j, C)) for n in range(D)]
    with_u, with_v = plus(q, p["pos_bias_u"][h]), plus(q, p["pos_bias_v"][h])
    return (dot(with_u, k) + dot(with_v, projected)) / math.sqrt(D)


def deberta_row(i, j, o):
    k = o["deberta_max_distance"]
    return 0 if i - j <= -k else 2 * k - 1 if i - j >= k else i - j + k


def deberta(q, k, i, j, h, p, o, side):
    """He et al. 2020, equations 2 to 4."""
    names = ("key_projection", "query_projection")
    of_key, of_query = (p["relative_embeddings"][row] for row in (deberta_row(i, j, o), deberta_row(j, i, o)))
    key, query = ([dot(p[name][h * D + n], of) for n in range(D)] for name, of in zip(names, (of_key, of_query)))
    return (dot(q, k) + dot(q, key) + dot(k, query)) / math.sqrt(3 * D)


def tupe(q, k, i, j, h, p, o, side):
    def projected(position, name):
        vector = p["position_embeddings"][position]
        mean = sum(vector) / C
        deviation = math.sqrt(sum((x - mean) ** 2 for x in vector) / C + 1e-5)
        normed = [
            (x - mean) / deviation * weight + bias
            for x, weight, bias in zip(vector, p["position_norm.weight"], p["position_norm.bias"], strict=True)
        ]
        return [dot(p[name][h * D + n], normed) for n in range(D)]

    positions = dot(projected(i, "position_query_projection"), projected(j, "position_key_projection"))
    bias = 0.0
    if "tupe_absolute_only" not in o:
        buckets = [o[name] for name in SMALL_T5]
        bias = p["relative.relative_attention_bias"][bucket(j - i, side == "encoder", *buckets)][h]
    return (dot(q, k) + positions) / math.sqrt(2 * D) + bias


def kerple(q, k, i, j, h, p, o, side):
    r1, r2 = max(0.01, p["r1"][h]), max(0.01, p["r2"][h])
    return dot(q, k) / math.sqrt(D) - r1 * math.log(1 + r2 * abs(i - j))


SCORES = {
    "none": lambda q, k, i, j, h, p, o, side: dot(q, k) / math.sqrt(D),
    "rope": lambda q, k, i, j, h, p, o, side: dot(rotated(q, i, o), rotated(k, j, o)) / math.sqrt(D),
    "alibi": alibi,
    "t5": t5,
    "shaw": shaw,
    "nezha": nezha,
    "transformer-xl": transformer_xl,
    "deberta": deberta,
    "tupe": tupe,
    "kerple": kerple,
    "xpos": xpos,
}


def by_the_paper(attention, name, side, o, x, pad):
    """Output (T, B, C) and weights (H, B, T, S), sentence by sentence without its padding; 0 where a pad stands."""
    p = {key: value.double().tolist() for key, value in attention.position.named_parameters()}
    p |= {f"{name}.weight": getattr(attention, name).weight.double().tolist() for name in ("q_proj", "k_proj")}
    out, all_weights = torch.zeros(*x.shape).double(), torch.zeros(H, x.size(1), x.size(0), x.size(0)).double()
    for b in range(x.size(1)):
        words = (~pad[b]).nonzero().squeeze(1).tolist()

        def project(projection, words=words, b=b):
            projected = x[words, b].double() @ projection.weight.double().T + projection.bias.double()
            return projected.view(len(words), H, D).tolist()

        q, k, v = map(project, (attention.q_proj, attention.k_proj, attention.v_proj))
        for i, h in product(range(len(words)), range(H)):
            keys = range(i + 1 if side == "decoder" else len(words))
            exps = [math.exp(SCORES[name](q[i][h], k[j][h], i, j, h, p, o, side)) for j in keys]
            total, attended = sum(exps), [0.0] * D
            for j in keys:
                weight = exps[j] / total
                value = v[j][h]
                if name == "shaw":
                    value = plus(value, p["relative_position_values"][clip(j - i, o)])
                if name == "nezha":
                    value = plus(value, nezha_vector(j - i, o))
                all_weights[h, b, words[i], words[j]] = weight
                attended = [a + weight * n for a, n in zip(attended, value, strict=True)]
            out[words[i], b, h * D : (h + 1) * D] = torch.tensor(attended, dtype=torch.float64)
        projection = attention.out_proj
        out[words, b] = out[words, b] @ projection.weight.double().T + projection.bias.double()
    return out, all_weights


# -- layers --------------------------------------------------------------------------------------------


def layer_normalised(x, norm):
    """LayerNorm of *x* with the weights of *norm*."""
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return scaled * norm.weight.double() + norm.bias.double()


def linear(x, layer):
    return x @ layer.weight.double().T + layer.bias.double()


def gelu(x):
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def plain_layers(layers, name, side, options, x, pad, activation):
    """The output of *layers*, with norms before or after their two parts, for *x* (T, B, C)."""
    for layer in layers:
        for part, norm in (("attention", layer.self_attn_layer_norm), ("feed-forward", layer.final_layer_norm)):
            before = layer_normalised(x, norm) if layer.normalize_before else x
            if part == "attention":
                x = x + by_the_paper(layer.self_attn, name, side, options, before, pad)[0]
            else:
                x = x + linear(activation(linear(before, layer.fc1)), layer.fc2)
            x = x if layer.normalize_before else layer_normalised(x, norm)
    return x
