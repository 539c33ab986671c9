"""Graphs of other exporters with weights to run them on, and graphs of our own exporter with everything taken off that tells.

Knows: where the files are (`tests.golden.make_foreign` makes them). Does not know: how roles are told.
"""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

FOLDER = Path(__file__).parent / "graphs"
FOREIGN = sorted(path.stem for path in FOLDER.glob("*.onnx"))
VOCAB, HEAD = 80, 16


def weight(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers that keep hidden states and logits near unit size; vectors are around 1."""
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if len(shape) == 1:
        return (1 + 0.1 * noise).astype(np.float32)
    return (noise / np.sqrt(min(shape))).astype(np.float32)


def write_foreign(name: str, folder: Path, seed: int, change: Callable[[ir.Model], None] = lambda model: None) -> Path:
    """The graph as a file with weights beside it, as its exporter would have left it. `change` may alter it before."""
    model = ir.load(FOLDER / f"{name}.onnx")
    for value in model.graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None
        if isinstance(tensor, ir.ExternalTensor):
            assert tensor.dtype == ir.DataType.FLOAT, f"{value.name}: only float weights are left out"
            value.const_value = ir.tensor(weight(str(value.name), tuple(tensor.shape.numpy()), seed), name=value.name)
    change(model)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    ir.save(model, path, external_data="model.onnx.data", size_threshold_bytes=256)
    return path


def logits(path: Path, ids: np.ndarray) -> np.ndarray:
    """Logits [B,S,V] of `ids` [B,S] with an empty past."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {}
    for one in session.get_inputs():
        if one.name == "input_ids":
            feeds[one.name] = ids
        elif one.name == "attention_mask":
            feeds[one.name] = np.ones_like(ids)
        else:
            batch, heads, _, size = one.shape
            size = size if isinstance(size, int) else HEAD  # genai's builder leaves it open
            kind = np.float16 if one.type == "tensor(float16)" else np.float32
            feeds[one.name] = np.zeros((len(ids) if isinstance(batch, str) else batch, heads, 0, size), kind)
    return np.asarray(session.run(["logits"], feeds)[0])
