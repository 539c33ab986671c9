"""Blocks of text encoders as canonical graph builders: what `export.blocks` lacks for them.

Knows: post-norm encoder layers, absolute positions, sentence pooling. Does not know: names in checkpoints, configs, targets.

Shapes: B batch, S tokens, D hidden, H heads, d head size.
"""

import math
from typing import Literal

import onnx_ir as ir

from appliance.bundle import vocabulary
from export.blocks import Builder
from export.graph import Nodes
from export.weights import Tag, Weights, check_tags

Pooling = Literal["mean", "cls"]
"""How token vectors become one: their mean over all real tokens, or the first token's."""

TINIEST = 1e-12
"""Norms below this count as this, as `torch.nn.functional.normalize` has it."""


class EncoderBuilder(Builder):
    """One canonical encoder graph under construction: input_ids, attention_mask [B,S] -> embedding [B,D].

    Args:
        weights: where weights come from.
        name: name of the graph.
    """

    def __init__(self, weights: Weights, name: str):
        super().__init__(weights, name)
        self.mask = self.graph.inputs[1]
        self.mask.shape = ir.Shape(["batch", "sequence"])

    def layer_norm(self, at: Nodes, x: ir.Value, name: str, size: int, epsilon: float, layer: int | None) -> ir.Value:
        """Layer norm over the last axis (Ba et al. 2016)."""
        weight = self.weights.take(self.graph, f"{name}.weight", (size,), Tag("norm", layer=layer))
        bias = self.weights.take(self.graph, f"{name}.bias", (size,), Tag("bias", layer=layer))
        return at.value("LayerNormalization", [x, weight, bias], {"axis": -1, "epsilon": epsilon})

    def placed(self, x: ir.Value, positions: str, types: str, rows: tuple[int, int], size: int) -> ir.Value:
        """Token vectors with those of their positions and of the first segment, the only one here.

        position table [P,D] - Slice(first S rows) -+
                                        x [B,S,D] --+- Add - Add --> [B,S,D]
        type table [2,D] ----- Gather(row 0) ----------------+
        """
        at = self.top.below("embeddings")
        table = self.weights.take(self.graph, positions, (rows[0], size), Tag("position"))
        segments = self.weights.take(self.graph, types, (rows[1], size), Tag("position"))
        length = at.value("Shape", [self.ids], {"start": 1, "end": 2})
        here = at.value("Slice", [table, at.ints(0), length, at.ints(0)], name="positions")
        first = at.value("Gather", [segments, at.integer(0)], {"axis": 0}, name="segment")
        return at.value("Add", [at.value("Add", [x, here]), first])

    def self_attention(self, x: ir.Value, name: str, output: str, layer: int, hidden: int, heads: int) -> ir.Value:
        """Attention in which every token sees every real one (Vaswani et al. 2017).

        x -+- query -+
           +- key ---+- SelfAttention(mask) -- output --> y
           +- value -+
        """
        at = self.top.below(f"layers.{layer}/attn")
        entering, square = f"layers.{layer}.attn_in", (hidden, hidden)
        parts = [
            self.linear(at.below(f"{part}_proj"), x, f"{name}.{part}", square, Tag(f"attn.{part[0]}", entering, layer), bias=True)
            for part in ("query", "key", "value")
        ]
        size = hidden // heads
        attributes: dict[str, int | float] = {"heads": heads, "head_dim": size, "scale": 1 / math.sqrt(size)}
        mixed = at.value(vocabulary.SELF_ATTENTION, [*parts, self.mask], attributes, domain=vocabulary.DOMAIN)
        return self.linear(at.below("o_proj"), mixed, output, square, Tag("attn.o", f"layers.{layer}.attn_out", layer), bias=True)

    def mlp(self, x: ir.Value, up: str, down: str, layer: int, sizes: tuple[int, int]) -> ir.Value:
        """x -- up -- Gelu -- down --> y; the exact Gelu (Hendrycks and Gimpel 2016), with erf."""
        at = self.top.below(f"layers.{layer}/mlp")
        hidden, inner = sizes
        wide = self.linear(at.below("up_proj"), x, up, (inner, hidden), Tag("mlp.up", f"layers.{layer}.mlp_in", layer), bias=True)
        active = at.value("Gelu", [wide])
        tag = Tag("mlp.down", f"layers.{layer}.mlp_mid", layer)
        return self.linear(at.below("down_proj"), active, down, (hidden, inner), tag, bias=True)

    def pool(self, x: ir.Value, pooling: Pooling) -> ir.Value:
        """[B,S,D] -> [B,D] of unit length.

        mean:  x - Mul(mask) - ReduceSum(axis 1) -+    (a mean's divisor does not change its direction)
        cls:   x - Gather(token 0) ---------------+- Div(ReduceL2, at least TINIEST) --> y
        """
        at = self.top.below("pool")
        if pooling == "cls":
            one = at.value("Gather", [x, at.integer(0)], {"axis": 1})
        else:
            real = at.value("Cast", [at.value("Unsqueeze", [self.mask, at.ints(2)])], {"to": int(ir.DataType.FLOAT)})
            one = at.value("ReduceSum", [at.value("Mul", [x, real]), at.ints(1)], {"keepdims": 0})
        norm = at.value("Max", [at.value("ReduceL2", [one, at.ints(1)], {"keepdims": 1}), at.number(TINIEST)])
        return at.value("Div", [one, norm])

    def finish_sentence(self, vector: ir.Value, size: int) -> ir.Model:
        """Name the output, check that every weight has a role and none is left in the checkpoint."""
        vector.name, vector.type = vocabulary.SENTENCE, ir.TensorType(ir.DataType.FLOAT)
        vector.shape = ir.Shape(["batch", size])
        self.graph.outputs.append(vector)
        check_tags(self.graph)
        self.weights.finish()
        return ir.Model(self.graph, ir_version=10, producer_name="appliance")
