"""A canonical graph of one attention whose q, k and v are rows of tables, and the same in numpy with no cache.

Knows: the canonical Attention's inputs and the arithmetic that its description promises. Does not know: any lowering.

    ids -+- Embedding q -+
         +- Embedding k -+- Attention - KeepLast -- logits [B,R,H*d]
         +- Embedding v -+
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from appliance.bundle import vocabulary
from export.blocks import GROWTH, OUTPUT, ROPE_COS, ROPE_SIN, STATE
from export.graph import OPSET, Nodes, add_initializer
from quant import kv

Floats = NDArray[np.float32]
WORDS, POSITIONS = 40, 96


@dataclass(frozen=True)
class AttentionGraph:
    """Sizes, tables [WORDS, heads*d] and scales [Hkv,1,d] of one attention."""

    heads: int
    kv_heads: int
    size: int
    rope: bool
    window: int
    softcap: float
    tables: dict[str, Floats]
    scales: kv.KvScales

    def build(self, scales: kv.KvScales | None = None) -> ir.Model:
        """The canonical graph with its state in int8."""
        ids, mask = _input(vocabulary.INPUT_IDS, "batch", "sequence"), _input(vocabulary.ATTENTION_MASK, "batch", "total")
        graph = ir.Graph([ids, mask], [], nodes=[], name="attention", opset_imports={"": OPSET, vocabulary.DOMAIN: 1})
        at = Nodes(graph, "/model")
        entering = [self._rows(at, ids, part) for part in "qkv"]
        past = [self._past(graph, part) for part in ("key", "value")]
        tables = [
            add_initializer(graph, name, ir.tensor(array, name=name), {vocabulary.ROLE: "rope"})
            for name, array in zip((ROPE_COS, ROPE_SIN), self._angles(), strict=True)
        ]
        attributes: dict[str, int | float] = {
            "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.size, "scale": self.size**-0.5,
            "softcap": self.softcap, "window": self.window, "layer": 0,
        }  # fmt: skip
        inputs = [*entering, *past, *(tables if self.rope else [])]
        node = at.below("layers.0/attn").node(vocabulary.ATTENTION, inputs, attributes, domain=vocabulary.DOMAIN, outputs=3)
        for part, value in zip(("key", "value"), node.outputs[1:], strict=True):
            value.name = vocabulary.present_name(0, part)
            value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), past[0].shape
        logits = at.value(vocabulary.KEEP_LAST, [node.outputs[0]], domain=vocabulary.DOMAIN)
        logits.name, logits.type = vocabulary.LOGITS, ir.TensorType(ir.DataType.FLOAT)
        logits.shape = ir.Shape(["batch", "rows", self.heads * self.size])
        graph.outputs.extend([logits, *node.outputs[1:]])
        model = ir.Model(graph, ir_version=10)
        kv.rewrite(model, {0: scales or self.scales})
        return model

    def rotated(self, ids: NDArray[np.int64], part: str) -> Floats:
        """Rows of q or k at the positions 0.., [heads,len(ids),d] float32."""
        x = self._split(ids, part)
        if not self.rope:
            return x
        cos, sin = (table[: len(ids)] for table in self._angles())
        first, second = x[..., : self.size // 2], x[..., self.size // 2 :]
        turned: Floats = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return turned

    def kept(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int8], NDArray[np.int8]]:
        """Integers of keys and values, [Hkv,len(ids),d]."""
        return tuple(
            np.clip(np.rint(x / scale), -128, 127).astype(np.int8)
            for x, scale in ((self.rotated(ids, "k"), self.scales.key), (self._split(ids, "v"), self.scales.value))
        )  # type: ignore[return-value]

    def attended(self, ids: NDArray[np.int64], key: NDArray[np.int8], value: NDArray[np.int8]) -> Floats:
        """Attention's output [len(ids), H*d] over the integers [Hkv,len(ids),d], all in float64."""
        q = self.rotated(ids, "q").astype(np.float64)
        keys, values = key * self.scales.key.astype(np.float64), value * self.scales.value.astype(np.float64)
        row, column = np.arange(len(ids))[:, None], np.arange(len(ids))
        seen = (column <= row) & ((column > row - self.window) | (self.window == 0))
        rows = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            scores = q[head] @ keys[group].T * self.size**-0.5
            if self.softcap:
                scores = self.softcap * np.tanh(scores / self.softcap)
            weights = np.exp(np.where(seen, scores, -np.inf) - scores.max(axis=1, keepdims=True))
            rows.append(weights / weights.sum(axis=1, keepdims=True) @ values[group])
        return np.concatenate(rows, axis=1).astype(np.float32)

    def _split(self, ids: NDArray[np.int64], part: str) -> Floats:
        return np.ascontiguousarray(self.tables[part][ids].reshape(len(ids), -1, self.size).transpose(1, 0, 2))

    def _angles(self) -> tuple[Floats, Floats]:
        half = self.size // 2
        angles = np.arange(POSITIONS)[:, None] * 100.0 ** (-np.arange(half) / half)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def _rows(self, at: Nodes, ids: ir.Value, part: str) -> ir.Value:
        name = f"{part}.weight"
        weight = add_initializer(at.graph, name, ir.tensor(self.tables[part], name=name), {vocabulary.ROLE: "embed"})
        return at.below(part).value(vocabulary.EMBEDDING, [ids, weight], domain=vocabulary.DOMAIN)

    def _past(self, graph: ir.Graph, part: str) -> ir.Value:
        value = _input(vocabulary.past_name(0, part), "batch", self.kv_heads, "past", self.size, dtype=ir.DataType.FLOAT)
        tags = {STATE: f"kv.{part}", vocabulary.LAYER: "0", GROWTH: "growing", OUTPUT: vocabulary.present_name(0, part)}
        value.metadata_props.update(tags)
        graph.inputs.append(value)
        return value


def random_graph(
    seed: int, *, heads: int = 6, kv_heads: int = 2, size: int = 32, rope: bool = True, window: int = 0, softcap: float = 0.0
) -> AttentionGraph:
    """Every channel of keys and values has a range of its own, and some numbers lie beyond it."""
    rng = np.random.default_rng(seed)
    spread = {part: rng.lognormal(0, 1, count * size) for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))}
    spread["q"] = np.full(heads * size, 0.7)
    tables = {part: (rng.normal(0, 1, (WORDS, len(wide))) * wide).astype(np.float32) for part, wide in spread.items()}
    made = [(2.5 / 127 * spread[part]).reshape(kv_heads, 1, size).astype(np.float32) for part in "kv"]
    return AttentionGraph(heads, kv_heads, size, rope, window, softcap, tables, kv.KvScales(*made))


def _input(name: str, *shape: int | str, dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
