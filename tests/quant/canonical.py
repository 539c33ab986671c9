"""A hand-made canonical model and an independent numpy account of what a quantized matrix must compute."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from appliance import targets
from appliance.bundle.vocabulary import DOMAIN
from appliance.targets.capabilities import Target


@dataclass(frozen=True)
class Weight:
    """One initializer of the model."""

    name: str
    role: str | None
    array: np.ndarray


def initializer(graph: ir.Graph, weight: Weight, reads: list[str] | None = None) -> ir.Value:
    """A lazy initializer; each read of its numbers is noted in `reads`."""

    def read() -> ir.TensorProtocol:
        if reads is not None:
            reads.append(weight.name)
        return ir.tensor(weight.array, name=weight.name)

    array = weight.array
    dtype = ir.tensor(array[:0]).dtype
    tensor = ir.LazyTensor(read, dtype=dtype, shape=ir.Shape(array.shape), cache=False, name=weight.name)
    value = ir.Value(name=weight.name, shape=ir.Shape(array.shape), type=ir.TensorType(dtype), const_value=tensor)
    if weight.role is not None:
        value.metadata_props.update({"role": weight.role, "stream": "layers.0.in", "layer": "0"})
    graph.register_initializer(value)
    return value


def linear_model(weight: Weight, bias: np.ndarray | None = None, reads: list[str] | None = None) -> ir.Model:
    """x [1,S,K] -> Linear -> y."""
    x = ir.Value(name="x", shape=ir.Shape([1, "S", weight.array.shape[1]]), type=ir.TensorType(ir.DataType.FLOAT))
    graph = ir.Graph([x], [], nodes=[], name="linear", opset_imports={"": 21, DOMAIN: 1})
    inputs = [x, initializer(graph, weight, reads)]
    if bias is not None:
        inputs.append(initializer(graph, Weight("proj.bias", "bias", bias)))
    y = ir.Value(name="y", shape=ir.Shape([1, "S", weight.array.shape[0]]), type=ir.TensorType(ir.DataType.FLOAT))
    graph.append(ir.node("Linear", inputs, domain=DOMAIN, name="/model/proj/Linear", outputs=[y]))
    graph.outputs.append(y)
    return ir.Model(graph, ir_version=10)


def tied_model(table: np.ndarray, *, tied: bool = True, reads: list[str] | None = None) -> ir.Model:
    """ids [1,S] -> Embedding -> rows and, through two linears of one input, -> head -> logits."""
    rows, columns = table.shape
    seed = np.random.default_rng(rows * columns)
    ids = ir.Value(name="ids", shape=ir.Shape([1, "S"]), type=ir.TensorType(ir.DataType.INT64))
    graph = ir.Graph([ids], [], nodes=[], name="tied", opset_imports={"": 21, DOMAIN: 1})
    embed = initializer(graph, Weight("embed.weight", "embed", table), reads)
    head = embed if tied else initializer(graph, Weight("head.weight", "head", table[::-1].copy()), reads)
    norm = initializer(graph, Weight("norm.weight", "norm", np.linspace(0.5, 1.5, columns, dtype=np.float32)), reads)
    square = [seed.standard_normal((columns, columns)).astype(np.float32) * 0.2 for _ in range(2)]
    a = initializer(graph, Weight("gate.weight", "mlp.gate", square[0]), reads)
    b = initializer(graph, Weight("up.weight", "mlp.up", square[1]), reads)

    def value(name: str, size: int) -> ir.Value:
        return ir.Value(name=name, shape=ir.Shape([1, "S", size]), type=ir.TensorType(ir.DataType.FLOAT))

    out = {name: value(name, size) for name, size in
           {"rows": columns, "scaled": columns, "a": columns, "b": columns, "sum": columns, "logits": rows}.items()}  # fmt: skip
    graph.extend(
        [
            ir.node("Embedding", [ids, embed], domain=DOMAIN, name="/model/embed/Embedding", outputs=[out["rows"]]),
            ir.node("Mul", [out["rows"], norm], name="/model/norm/Mul", outputs=[out["scaled"]]),
            ir.node("Linear", [out["scaled"], a], domain=DOMAIN, name="/model/gate/Linear", outputs=[out["a"]]),
            ir.node("Linear", [out["scaled"], b], domain=DOMAIN, name="/model/up/Linear", outputs=[out["b"]]),
            ir.node("Add", [out["a"], out["b"]], name="/model/Add", outputs=[out["sum"]]),
            ir.node("Linear", [out["sum"], head], domain=DOMAIN, name="/model/head/Linear", outputs=[out["logits"]]),
        ]
    )
    graph.outputs.extend([out["rows"], out["logits"]])
    return ir.Model(graph, ir_version=10)


def target(name: str, **weights: object) -> Target:
    """A built-in target with some of its weight forms changed."""
    found = targets.load(name)
    return found.model_copy(update={"weights": found.weights.model_copy(update=weights)})


def session(
    model: ir.Model, folder: Path, optimized: Path | None = None, options_of: Target | None = None
) -> ort.InferenceSession:
    """The model saved with external data and opened on the processor, with the session options of a target's file."""
    folder.mkdir(parents=True, exist_ok=True)
    ir.save(model, folder / "model.onnx", external_data="model.data", size_threshold_bytes=200)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    for key, value in (options_of.options if options_of else {}).items():
        options.add_session_config_entry(key, value)
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])


def inputs(seed: np.random.Generator, rows: int, columns: int, group: int) -> np.ndarray:
    """[rows,columns] float32 whose int8 steps lie away from halves, so that no order of operations can tip one over."""
    count = -(-columns // group)
    steps = seed.integers(-126, 127, (rows, count, group)) + seed.uniform(-0.4, 0.4, (rows, count, group))
    steps[:, :, 0] = 127 * seed.choice([-1, 1], (rows, count))
    x = steps * seed.uniform(0.001, 0.1, (rows, count, 1))
    if count > 2:
        x[0, 1] = 0  # a block of zeros must not become NaN
    return np.ascontiguousarray(x.reshape(rows, -1)[:, :columns], np.float32)


def emulate(x: np.ndarray, q: np.ndarray, scales: np.ndarray, group: int) -> np.ndarray:
    """Float64 sum over blocks of (int8 activations . integers) * both scales. Loops, on purpose."""
    rows, columns = x.shape
    y = np.zeros((rows, len(q)))
    for block, start in enumerate(range(0, columns, group)):
        part = slice(start, min(start + group, columns))
        most = np.abs(x[:, part]).max(axis=1, keepdims=True).astype(np.float64)
        scale = most / 127
        steps = np.where(most > 0, np.round(x[:, part] / np.where(most > 0, scale, 1)), 0)
        y += (steps @ q[:, part].T.astype(np.float64)) * scale * scales[:, block].astype(np.float64)
    return y
