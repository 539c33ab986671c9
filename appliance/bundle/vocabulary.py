"""Words that `export`, `quant` and `runtime` share: canonical operators, roles, metadata keys, graph inputs and outputs.

Knows: names and their meaning, nothing else. Does not know: how a node is built, rewritten or run.

The canonical graph is what `export/arch` builds and `quant` decides on: standard ONNX operators for everything
element-wise, and the few operators below (domain `appliance`) for what a target may want in another form. Each lowering
in `export/lower` turns them into what one kind of provider takes; none of them ever reaches a bundle.
"""

DOMAIN = "appliance"

# Canonical operators. [B, S] = batch, new tokens; T = tokens of context, past included.
EMBEDDING = "Embedding"
"""(ids [B,S] int64, weight [V,D]) -> [B,S,D]."""
RMS_NORM = "RMSNorm"
"""(x [...,D], weight [D]) -> [...,D]; attribute epsilon. A (1+w) norm folds the 1 into its weight when it is loaded."""
LINEAR = "Linear"
"""(x [...,K], weight [N,K] as the checkpoint stores it, bias [N]?) -> [...,N]."""
QUANT_LINEAR = "QuantLinear"
"""A decided Linear: (x [...,K], q [N,K] int8, scales [N,G], bias [N]?, zero_points [N,G] uint8?, offsets [N,G] float16?)
-> [...,N]; G = ceil(K/group).

Attributes: bits (4 | 8), group (weights of one scale along K; 0 = the whole row, whose scale is positive), activation (see
`ACTIVATIONS`); a static one has input_scale, input_zero_point, output_scale, output_zero_point too: value =
(u - zero_point) * scale, u unsigned.
q holds signed integers: -8..7 for 4 bits, -128..127 for 8. value = q * scale; with zero points, which are unsigned as the
operators store them, value = (q - (zero_point - 2^(bits-1))) * scale; with offsets, value = (q + 2^(bits-1)) * scale + offset:
an offset is what the lowest integer stands for. Only one of the two can be there.
Attribute element, where it is there: "mxfp4" = q holds twice the elements of Microscaling FP4, scales are float32 powers of two
(half the block's): value = q * scale here too."""
QUANT_EMBEDDING = "QuantEmbedding"
"""A decided Embedding: (ids [B,S], q [V,D] int8, scales [V,G], -, -, offsets [V,G] float16?) -> [B,S,D]; attributes bits, group.
Inputs are numbered as QuantLinear's are. Tied to the head when both name the same q and scales."""
ATTENTION = "Attention"
"""(q [B,S,H*d], k [B,S,Hkv*d], v [B,S,Hkv*d], past_key, past_value [B,Hkv,past,d], cos, sin [positions, rotary/2],
key_scale, value_scale [Hkv,1,d]) -> (y [B,S,H*d], present_key, present_value [B,Hkv,T,d]).

Causal, with rotary position embedding (rotate-half, not interleaved) of q and k; cos and sin may be left out (no rope).
With scales, past and present are int8: a rotated key or a value is kept as round(x / scale), half to even, within -128..127,
and attention sees integer * scale, that of the new tokens too (so chunks and single steps give the same). Without, float32.
Attributes: heads, kv_heads, head_dim, scale, softcap (0 = none), window (0 = full; otherwise a token sees itself and
the window-1 before it). State names the layer: `layer`."""
SELF_ATTENTION = "SelfAttention"
"""(q, k, v [B,S,H*d], mask [B,S] int64 of ones and zeros) -> [B,S,H*d]: an encoder's, where every token sees all that the
mask has a one for. Attributes: heads, head_dim, scale."""
KEEP_LAST = "KeepLast"
"""(hidden [B,S,D]) -> [B,R,D]: the rows whose logits are wanted; see LOGITS_TO_KEEP and LAST_INDEX."""

# metadata_props keys. The initializer's tag is the truth; a pass may lose a node's.
ROLE = "role"
STREAM = "stream"
LAYER = "layer"
PARTS = "parts"
"""On a packed tensor: "role:first:end,role:first:end" by rows, e.g. "attn.q:0:576,attn.k:576:768"."""

STORED_GRID = "stored_grid"
"""In the `meta` of a weight's lazy tensor, never in a file: the integers that the checkpoint holds, where it is quantized
already. It belongs to these very numbers: a pass that changes them makes another tensor, which has none."""

STORED_TYPE = "stored_type"
"""Likewise: what the checkpoint calls the type it keeps the weight in ("Q6_K", "BF16")."""

ROLES = frozenset(
    {
        "attn.q", "attn.k", "attn.v", "attn.o",
        "mlp.gate", "mlp.up", "mlp.down",
        "moe.router", "moe.expert.gate", "moe.expert.up", "moe.expert.down", "moe.shared_gate",
        "linear_attn.in", "linear_attn.gates", "linear_attn.conv", "linear_attn.out",
        "embed", "head", "norm", "bias", "rope", "position", "pool",
    }
)  # fmt: skip
"""Every role a weight initializer can have. A Linear or Embedding weight without one is an error."""

FLOAT_ROLES = frozenset(
    {"norm", "bias", "rope", "position", "moe.router", "moe.shared_gate", "linear_attn.gates", "linear_attn.conv"}
)
"""Roles that no scheme ever quantizes."""

ACTIVATIONS = ("float", "block-dynamic", "token-dynamic", "static-u8", "static-u16", "mxfp8")
"""Granularity of a linear's activations: one int8 scale per weight block and row, per row, calibrated ranges, or FP8 (E4M3) with
a power of two per 32 of a row."""

# Graph inputs and outputs, both forms.
INPUT_IDS = "input_ids"
"""[B,S] int64 (dynamic form); [1,chunk] and [1,1] in the static pair."""
LOGITS = "logits"
"""[B,R,V] float32."""
SENTENCE = "embedding"
"""[B,D] float32, unit length: the one output of a model whose task is "embed". It takes INPUT_IDS and ATTENTION_MASK [B,S]."""

# Dynamic form (named as onnxruntime-genai names them, so that a bundle loads there too).
ATTENTION_MASK = "attention_mask"
"""[B,T] int64 of ones and zeros, right-padded: row b holds past_b + S ones."""
LOGITS_TO_KEEP = "logits_to_keep"
"""[1] int64, overridable initializer with default 1: how many last positions get logits."""

# Static pair.
POSITION_IDS = "position_ids"
"""[1,S] int64: absolute positions; padding repeats the last valid one."""
STATIC_MASK = "mask"
"""[1,1,S,context+S] float32, added to the scores: 0 = may see, MASKED = may not. Columns: context buffer, then new rows.

Layers with a sliding window take an input of their own (`window_mask_name`), which the runtime fills too: so the graph
compares no integers, which not every NPU can, and layers of one window share one input."""
LAST_INDEX = "last_index"
"""[1] int64: the row of the chunk whose logits are wanted (the last one that is no padding)."""
MASKED = -1e9


def past_name(layer: int, part: str) -> str:
    """Graph input of a carried tensor, e.g. part "key" -> "past_key_values.3.key"."""
    return f"past_key_values.{layer}.{part}"


def present_name(layer: int, part: str) -> str:
    """Graph output of a carried tensor, e.g. part "key" -> "present.3.key"."""
    return f"present.{layer}.{part}"


def window_mask_name(window: int) -> str:
    """Graph input with the mask of the layers whose window is `window` tokens; 0 = full attention, `STATIC_MASK` itself."""
    return f"{STATIC_MASK}.window.{window}" if window else STATIC_MASK


def window_of_mask(name: str) -> int | None:
    """The inverse of `window_mask_name`: 0 for `STATIC_MASK`, None for a name that is no mask's."""
    if name == STATIC_MASK:
        return 0
    head, _, window = name.rpartition(".")
    return int(window) if head == f"{STATIC_MASK}.window" and window.isdecimal() else None
