"""A hand-made dynamic graph of a few attention layers, and the same arithmetic in numpy, with no cache and no kernels.

Knows: GroupQueryAttention and the dynamic form's inputs and outputs. Does not know: the exporter.

    ids -> embed -> [ q,k,v MatMul -> GroupQueryAttention (rope) -> o MatMul -> + ] x layers -> last rows -> head
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from appliance.bundle.manifest import StateTensor, Variant

HEADS, KV_HEADS, HEAD, WIDTH = 4, 2, 16, 24
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class GqaModel:
    """Weights of the graph, by name."""

    weights: dict[str, Floats]
    layers: int
    vocab: int
    context: int

    def variant(self, chunk: int, update: str = "inplace") -> Variant:
        state = tuple(
            StateTensor(
                name=f"layers.{layer}.{part}",
                kind="kv.key" if part == "key" else "kv.value",
                layer=layer,
                input=f"past_key_values.{layer}.{part}",
                output=f"present.{layer}.{part}",
                shape=("batch", KV_HEADS, "context", HEAD),
                growth="growing",
                update=update,  # type: ignore[arg-type]
            )
            for layer in range(self.layers)
            for part in ("key", "value")
        )
        graphs = {"model": "model.onnx"}
        return Variant(
            target="cpu", form="dynamic", graphs=graphs, chunk=chunk, context=self.context, activation="float", state=state
        )  # type: ignore[arg-type]

    def save(self, path: Path) -> Path:
        onnx.save(self._graph(), path)
        return path

    def logits(self, ids: list[int]) -> Floats:
        """[len(ids), V] after each token; the whole sequence at once."""
        x = self.weights["embed"][ids]
        size = len(ids)
        hidden = np.triu(np.full((size, size), -np.inf), 1)
        for layer in range(self.layers):
            q = self._rope((x @ self.weights[f"q.{layer}"]).reshape(size, HEADS, HEAD))
            k = self._rope((x @ self.weights[f"k.{layer}"]).reshape(size, KV_HEADS, HEAD))
            v = (x @ self.weights[f"v.{layer}"]).reshape(size, KV_HEADS, HEAD)
            rows = []
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                scores = q[:, head] @ k[:, group].T / np.sqrt(HEAD) + hidden
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                rows.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, group])
            x = x + np.concatenate(rows, axis=1) @ self.weights[f"o.{layer}"]
        logits: Floats = x @ self.weights["head"]
        return logits

    def _rope(self, x: Floats) -> Floats:
        cos, sin = self.weights["cos"][: len(x), None], self.weights["sin"][: len(x), None]
        first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _graph(self) -> onnx.ModelProto:
        f32, i64, i32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32
        shape = ["B", KV_HEADS, "past", HEAD]
        inputs = [
            helper.make_tensor_value_info("input_ids", i64, ["B", "S"]),
            helper.make_tensor_value_info("attention_mask", i64, ["B", "T"]),
        ]
        outputs = [helper.make_tensor_value_info("logits", f32, ["B", "R", self.vocab])]
        nodes = [
            helper.make_node("Gather", ["embed", "input_ids"], ["x.0"]),
            helper.make_node("ReduceSum", ["attention_mask", "one"], ["sum"], keepdims=0),
            helper.make_node("Sub", ["sum", "one"], ["last"]),
            helper.make_node("Cast", ["last"], ["seqlens"], to=i32),
            helper.make_node("Shape", ["attention_mask"], ["total64"], start=1),
            helper.make_node("Squeeze", ["total64"], ["total0"]),
            helper.make_node("Cast", ["total0"], ["total"], to=i32),
        ]
        for n in range(self.layers):
            nodes += [helper.make_node("MatMul", [f"x.{n}", f"{part}.{n}"], [f"{part}y.{n}"]) for part in "qkv"]
            past = [f"past_key_values.{n}.{part}" for part in ("key", "value")]
            present = [f"present.{n}.{part}" for part in ("key", "value")]
            nodes.append(
                helper.make_node(
                    "GroupQueryAttention",
                    [f"qy.{n}", f"ky.{n}", f"vy.{n}", *past, "seqlens", "total", "cos", "sin"],
                    [f"a.{n}", *present],
                    domain="com.microsoft",
                    num_heads=HEADS,
                    kv_num_heads=KV_HEADS,
                    do_rotary=1,
                )
            )
            nodes.append(helper.make_node("MatMul", [f"a.{n}", f"o.{n}"], [f"ao.{n}"]))
            nodes.append(helper.make_node("Add", [f"x.{n}", f"ao.{n}"], [f"x.{n + 1}"]))
            inputs += [helper.make_tensor_value_info(name, f32, shape) for name in past]
            outputs += [helper.make_tensor_value_info(name, f32, ["B", KV_HEADS, "T", HEAD]) for name in present]
        nodes += [
            helper.make_node("Neg", ["logits_to_keep"], ["from"]),
            helper.make_node("Slice", [f"x.{self.layers}", "from", "end", "one"], ["kept"]),
            helper.make_node("MatMul", ["kept", "head"], ["logits"]),
        ]
        initializers = [numpy_helper.from_array(value, name) for name, value in self.weights.items()]
        for name, number in (("one", 1), ("logits_to_keep", 1), ("end", 2**62)):
            initializers.append(numpy_helper.from_array(np.array([number], np.int64), name))
        graph = helper.make_graph(
            nodes, "gqa", [*inputs, helper.make_tensor_value_info("logits_to_keep", i64, [1])], outputs, initializers
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def random_model(seed: int, *, layers: int = 2, vocab: int = 50, context: int = 64) -> GqaModel:
    """Weights large enough that every token of the history changes the logits."""
    generator = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float) -> Floats:
        return generator.normal(0, scale / np.sqrt(rows), (rows, columns)).astype(np.float32)

    weights = {"embed": matrix(vocab, WIDTH, np.sqrt(vocab)), "head": matrix(WIDTH, vocab, 1.0)}
    for layer in range(layers):
        weights[f"q.{layer}"] = matrix(WIDTH, HEADS * HEAD, 1.5)
        weights[f"k.{layer}"] = matrix(WIDTH, KV_HEADS * HEAD, 1.5)
        weights[f"v.{layer}"] = matrix(WIDTH, KV_HEADS * HEAD, 1.0)
        weights[f"o.{layer}"] = matrix(HEADS * HEAD, WIDTH, 1.0)
    angle = np.arange(context)[:, None] * 10.0 ** -np.arange(HEAD // 2)[None]
    weights["cos"], weights["sin"] = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return GqaModel(weights, layers, vocab, context)
