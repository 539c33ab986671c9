"""Outliers planted by an exactly equivalent rescaling of a canonical model: a few channels grow, what reads them shrinks.

Knows: names of Llama's and Gemma's weights. Does not know: how anything of ours finds or undoes such channels.
"""

import re

import numpy as np
import onnx_ir as ir

READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "pre_feedforward_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def plant(model: ir.Model, rng: np.random.Generator, most: float = 200.0, channels: int = 3) -> None:
    """In every layer: norm gains x s, the weights behind them / s; rows of v and up x s, columns of o and down / s."""
    names = set(model.graph.initializers)
    layers = sorted({match[0] for name in names if (match := re.match(r".*layers\.\d+\.", name))})
    assert layers
    for at in layers:
        norms = dict(READERS)
        if f"{at}pre_feedforward_layernorm.weight" in names:
            del norms["post_attention_layernorm"]  # it stands before the addition there, and nothing linear reads it
        for norm, readers in norms.items():
            if f"{at}{norm}.weight" in names:
                s = _sizes(rng, _size(model, f"{at}{norm}.weight", 0), most, channels)
                _scale(model, f"{at}{norm}.weight", s)
                for reader in readers:
                    _scale(model, f"{at}{reader}.weight", 1 / s)
        wide, narrow = _size(model, f"{at}self_attn.o_proj.weight", 1), _size(model, f"{at}self_attn.v_proj.weight", 0)
        head = _head_size(model)
        s = _sizes(rng, narrow, most, channels)
        heads = np.repeat(s.reshape(-1, 1, head), wide // narrow, 1).reshape(-1)
        for path, inner, outer in (("self_attn.v_proj", s, None), ("self_attn.o_proj", None, heads)):
            _rows_and_columns(model, f"{at}{path}", inner, outer)
        s = _sizes(rng, _size(model, f"{at}mlp.up_proj.weight", 0), most, channels)
        _rows_and_columns(model, f"{at}mlp.up_proj", s, None)
        _rows_and_columns(model, f"{at}mlp.down_proj", None, s)


def _rows_and_columns(model: ir.Model, path: str, rows: np.ndarray | None, columns: np.ndarray | None) -> None:
    if rows is not None:
        _scale(model, f"{path}.weight", rows[:, None])
        if f"{path}.bias" in model.graph.initializers:
            _scale(model, f"{path}.bias", rows)
    if columns is not None:
        _scale(model, f"{path}.weight", 1 / columns)


def _head_size(model: ir.Model) -> int:
    return next(node.attributes["head_dim"].as_int() for node in model.graph if node.op_type == "Attention")


def _size(model: ir.Model, name: str, axis: int) -> int:
    return int(model.graph.initializers[name].const_value.shape[axis])  # type: ignore[union-attr,arg-type]


def _sizes(rng: np.random.Generator, count: int, most: float, channels: int) -> np.ndarray:
    s = np.ones(count)
    s[rng.choice(count, channels, replace=False)] = np.exp(rng.uniform(0.5 * np.log(most), np.log(most), channels))
    return s


def _scale(model: ir.Model, name: str, factor: np.ndarray) -> None:
    """Multiply, lazily: a large model's weights are not all held."""
    value = model.graph.initializers[name]
    old = value.const_value
    assert old is not None

    def read() -> ir.TensorProtocol:
        return ir.tensor((old.numpy().astype(np.float64) * factor).astype(np.float32), name=name)

    value.const_value = ir.LazyTensor(read, dtype=ir.DataType.FLOAT, shape=ir.Shape(old.shape), cache=False, name=name)
