"""Blocks of transformer decoders as canonical graph builders (see `appliance.bundle.vocabulary`).

Knows: the operators of a block, which weight has which role, rotary tables. Does not know: names in checkpoints,
configs, targets, quantization.

Shapes: B batch, S new tokens, T tokens of context with the past, D hidden, H heads, Hkv key-value heads, d head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from appliance.bundle import vocabulary
from export.graph import OPSET, Nodes, add_initializer, lazy, sizes
from export.weights import Tag, Weights, check_tags

STATE, GROWTH, UPDATE, OUTPUT = "state", "growth", "update", "output"
"""Metadata of a graph input that carries state: kind, growth and update as `StateTensor` names them, and the output's name."""

ROPE_COS, ROPE_SIN = "rope.cos", "rope.sin"

FREQUENCIES = "appliance.frequencies"
"""`meta` of a table's value: the radians a position [head_dim/2] that it is made of."""

Activation = Literal["silu", "gelu_tanh"]
"""Of a gated block: SiLU, or the Gelu that is computed with tanh (Hendrycks and Gimpel 2016)."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context the model was first trained on.

    kind: none; linear: all by `factor` (position interpolation); llama3: long wave lengths by `factor`, short ones not,
    between them a blend (the `llama3` rope type of Hugging Face's configs); factors: each frequency by its own factor,
    as llama.cpp stores it.
    """

    kind: Literal["none", "linear", "llama3", "factors"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and numbers of one attention block; meanings as in `vocabulary.ATTENTION`."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    bias: bool = False
    out_bias: bool = False
    window: int = 0
    softcap: float = 0.0
    qk_epsilon: float = 0.0
    """Epsilon of the norm that each head of q and k goes through before it is rotated; 0 = there is none."""


class Builder:
    """One canonical graph under construction.

    Args:
        weights: where weights come from.
        name: name of the graph.
    """

    def __init__(self, weights: Weights, name: str):
        self.weights = weights
        self.ids = _input(vocabulary.INPUT_IDS, ir.DataType.INT64, ("batch", "sequence"))
        mask = _input(vocabulary.ATTENTION_MASK, ir.DataType.INT64, ("batch", "total"))
        self.graph = ir.Graph([self.ids, mask], [], nodes=[], name=name, opset_imports={"": OPSET, vocabulary.DOMAIN: 1})
        self.top = Nodes(self.graph, "/model")
        self._present: list[ir.Value] = []

    def embedding(self, name: str, vocab: int, hidden: int, *, scale: float = 1.0) -> ir.Value:
        """input_ids [B,S] -> [B,S,D], times `scale`; the weight `name`.weight has V rows."""
        weight = self.weights.take(self.graph, f"{name}.weight", (vocab, hidden), Tag("embed", "embed_in"))
        at = self.top.below("embed_tokens")
        node = at.node(vocabulary.EMBEDDING, [self.ids, weight], domain=vocabulary.DOMAIN)
        node.metadata_props.update(weight.metadata_props)
        return node.outputs[0] if scale == 1.0 else at.value("Mul", [node.outputs[0], at.number(scale)])

    def norm(self, at: Nodes, x: ir.Value, name: str, size: int, epsilon: float, layer: int | None) -> ir.Value:
        """Root-mean-square norm over the last axis (Zhang and Sennrich 2019)."""
        weight = self.weights.take(self.graph, f"{name}.weight", (size,), Tag("norm", layer=layer))
        return at.value(vocabulary.RMS_NORM, [x, weight], {"epsilon": epsilon}, domain=vocabulary.DOMAIN)

    def linear(self, at: Nodes, x: ir.Value, name: str, shape: tuple[int, int], tag: Tag, *, bias: bool = False) -> ir.Value:
        """x [...,K] -> [...,N] for a weight of `shape` (N, K)."""
        inputs = [x, self.weights.take(self.graph, f"{name}.weight", shape, tag)]
        if bias:
            inputs.append(self.weights.take(self.graph, f"{name}.bias", shape[:1], Tag("bias", layer=tag.layer)))
        node = at.node(vocabulary.LINEAR, inputs, domain=vocabulary.DOMAIN)
        node.metadata_props.update(tag.props())
        return node.outputs[0]

    def rope(
        self, head_dim: int, theta: float, positions: int, scaling: RopeScaling, kind: str = ""
    ) -> tuple[ir.Value, ir.Value]:
        """Tables of cosines and sines [positions, head_dim/2]; `kind` tells a second pair's names from the first's."""
        shape = (positions, head_dim // 2)
        made = []
        for plain, wave in ((ROPE_COS, np.cos), (ROPE_SIN, np.sin)):
            name = f"{plain}.{kind}" if kind else plain
            tensor = lazy(name, shape, ir.DataType.FLOAT, _rope_table(wave, head_dim, theta, positions, scaling))
            value = add_initializer(self.graph, name, tensor, Tag("rope").props())
            value.meta[FREQUENCIES] = rope_frequencies(head_dim, theta, scaling)
            made.append(value)
        return made[0], made[1]

    def attention(
        self, x: ir.Value, name: str, layer: int, shape: AttentionShape, rope: tuple[ir.Value, ir.Value] | None
    ) -> ir.Value:
        """Self-attention with grouped key-value heads (Ainslie et al. 2023).

        x -+- q_proj [- norm] -+
           +- k_proj [- norm] -+- Attention(rope, causal, window) -- o_proj --> y
           +- v_proj ----------+       |  ^
                               present_i  past_i
        """
        at = self.top.below(f"layers.{layer}/attn")
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        entering = f"layers.{layer}.attn_in"
        parts = [
            self.linear(
                at.below(f"{part}_proj"), x, f"{name}.{part}_proj", (rows, shape.hidden),
                Tag(f"attn.{part}", entering, layer), bias=shape.bias,
            )
            for part, rows in (("q", wide), ("k", narrow), ("v", narrow))
        ]  # fmt: skip
        if shape.qk_epsilon:
            for index, (part, heads) in enumerate((("q", shape.heads), ("k", shape.kv_heads))):
                parts[index] = self._head_norm(at.below(f"{part}_norm"), parts[index], f"{name}.{part}_norm", layer, heads, shape)
        past = [self._state(layer, part, shape) for part in ("key", "value")]
        attributes: dict[str, int | float] = {
            "heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "scale": shape.scale,
            "softcap": shape.softcap, "window": shape.window, "layer": layer,
        }  # fmt: skip
        node = at.node(vocabulary.ATTENTION, [*parts, *past, *(rope or ())], attributes, domain=vocabulary.DOMAIN, outputs=3)
        for part, value in zip(("key", "value"), node.outputs[1:], strict=True):
            value.name = vocabulary.present_name(layer, part)
            value.type = ir.TensorType(ir.DataType.FLOAT)
            value.shape = ir.Shape(["batch", shape.kv_heads, "present", shape.head_dim])
            self._present.append(value)
        tag = Tag("attn.o", f"layers.{layer}.attn_out", layer)
        return self.linear(at.below("o_proj"), node.outputs[0], f"{name}.o_proj", (shape.hidden, wide), tag, bias=shape.out_bias)

    def _head_norm(self, at: Nodes, x: ir.Value, name: str, layer: int, heads: int, shape: AttentionShape) -> ir.Value:
        """x [B,S,H*d] -- Reshape [B,S,H,d] -- RMSNorm -- Reshape --> [B,S,H*d]; all heads share one weight [d]."""
        split = at.value("Reshape", [x, at.ints(0, 0, heads, shape.head_dim)], name="Split")
        normed = self.norm(at, split, name, shape.head_dim, shape.qk_epsilon, layer)
        return at.value("Reshape", [normed, at.ints(0, 0, heads * shape.head_dim)], name="Join")

    def gated_mlp(
        self, x: ir.Value, name: str, layer: int, hidden: int, inner: int, *, bias: bool = False, activation: Activation = "silu"
    ) -> ir.Value:
        """Gated feed-forward block (Shazeer 2020).

        x -+- gate_proj -+- Sigmoid -+
           |             +---------- Mul -+                   or Gelu in place of Sigmoid and Mul
           +- up_proj ------------------ Mul -- down_proj --> y
        """
        at = self.top.below(f"layers.{layer}/mlp")
        entering, inside = f"layers.{layer}.mlp_in", f"layers.{layer}.mlp_mid"
        gate = self.linear(
            at.below("gate_proj"), x, f"{name}.gate_proj", (inner, hidden), Tag("mlp.gate", entering, layer), bias=bias
        )
        up = self.linear(at.below("up_proj"), x, f"{name}.up_proj", (inner, hidden), Tag("mlp.up", entering, layer), bias=bias)
        if activation == "silu":
            active = at.value("Mul", [gate, at.value("Sigmoid", [gate], name="act/Sigmoid")], name="act/Mul")
        else:
            active = at.value("Gelu", [gate], {"approximate": "tanh"}, name="act/Gelu")
        return self.linear(
            at.below("down_proj"), at.value("Mul", [active, up]), f"{name}.down_proj", (hidden, inner),
            Tag("mlp.down", inside, layer), bias=bias,
        )  # fmt: skip

    def add(self, at: Nodes, x: ir.Value, y: ir.Value) -> ir.Value:
        """x + y: the residual stream."""
        return at.value("Add", [x, y], name="Add")

    def keep_last(self, x: ir.Value) -> ir.Value:
        """Only the rows whose logits are wanted."""
        return self.top.value(vocabulary.KEEP_LAST, [x], domain=vocabulary.DOMAIN)

    def head(self, x: ir.Value, name: str, vocab: int, hidden: int) -> ir.Value:
        """Logits [B,R,V]. A tied head names the embedding: it reads the very same initializer, whose tag stays `embed`."""
        return self.linear(Nodes(self.graph, "/lm_head"), x, name, (vocab, hidden), Tag("head", "head_in"))

    def finish(self, logits: ir.Value) -> ir.Model:
        """Name the outputs, check that every weight has a role and none is left in the checkpoint."""
        logits.name, logits.type = vocabulary.LOGITS, ir.TensorType(ir.DataType.FLOAT)
        vocab = sizes(self.graph.initializers[_weight_of(logits)])[0]
        logits.shape = ir.Shape(["batch", "rows", vocab])
        self.graph.outputs.extend([logits, *self._present])
        check_tags(self.graph)
        self.weights.finish()
        return ir.Model(self.graph, ir_version=10, producer_name="appliance")

    def _state(self, layer: int, part: str, shape: AttentionShape) -> ir.Value:
        value = _input(vocabulary.past_name(layer, part), ir.DataType.FLOAT, ("batch", shape.kv_heads, "past", shape.head_dim))
        value.metadata_props.update(
            {
                STATE: f"kv.{part}",
                vocabulary.LAYER: str(layer),
                GROWTH: "growing",
                OUTPUT: vocabulary.present_name(layer, part),
            }
        )
        self.graph.inputs.append(value)
        return value


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Radians a position, [head_dim/2] float32 (Su et al. 2021), stretched as `scaling` says.

    In float32 from the start, as the reference implementation computes them: at position 8000 the last bit of a
    frequency is worth 5e-4 radians, and the model was trained with the rounded one.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain: np.ndarray = (np.float32(1) / np.power(np.float32(theta), exponents)).astype(np.float32)
    if scaling.kind == "linear":
        return np.asarray(plain / np.float32(scaling.factor))
    if scaling.kind == "factors":
        return np.asarray(plain / np.array(scaling.factors, np.float32))
    if scaling.kind == "llama3":
        turns = scaling.original_context * plain / np.float32(2 * np.pi)  # full turns within the first context
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)  # 1: fast, stays; 0: slow, stretched
        return np.asarray((1 - kept) * plain / np.float32(scaling.factor) + kept * plain)
    return plain


def _rope_table(
    wave: Callable[[np.ndarray], np.ndarray], head_dim: int, theta: float, positions: int, scaling: RopeScaling
) -> Callable[[], np.ndarray]:
    def make() -> np.ndarray:
        angles = np.outer(np.arange(positions, dtype=np.float32), rope_frequencies(head_dim, theta, scaling))
        return wave(angles).astype(np.float32)

    return make


def _input(name: str, dtype: ir.DataType, shape: tuple[int | str, ...]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _weight_of(value: ir.Value) -> str:
    node = value.producer()
    assert node is not None and node.inputs[1] is not None and node.inputs[1].name is not None
    return node.inputs[1].name
