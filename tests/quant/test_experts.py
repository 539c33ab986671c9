"""Experts as QMoE takes them: onnxruntime's own kernel says which order of rows is the right one."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from quant import experts
from quant.arrays import dequantize, fit, groups_of

COUNT, SIZE, INNER, GROUP = 4, 64, 96, 32


def fresh() -> tuple[int, np.random.Generator]:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    return seed, np.random.default_rng(seed)


def quantized(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Integers [E,N,K] and scales [E,N,G] of float experts."""
    flat = weight.reshape(-1, weight.shape[-1])
    q, scales = np.empty(flat.shape, np.int8), np.empty((len(flat), groups_of(flat.shape[1], GROUP)), np.float16)
    fit(flat, bits, GROUP, q, scales)
    return q.reshape(weight.shape), scales.reshape(*weight.shape[:-1], -1)


def floats(name: str, like: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(like.shape))


def run(
    x: np.ndarray, router: np.ndarray, one: tuple[np.ndarray, np.ndarray], two: tuple[np.ndarray, np.ndarray], bits: int
) -> np.ndarray:
    """y [T,K] of a graph with one QMoE."""
    parts = {
        "fc1": experts.pack(one[0], bits), "fc1s": one[1].astype(np.float32),
        "fc2": experts.pack(two[0], bits), "fc2s": two[1].astype(np.float32),
    }  # fmt: skip
    node = helper.make_node(
        "QMoE", ["x", "router", "fc1", "fc1s", "", "fc2", "fc2s"], ["y"], domain="com.microsoft", k=2, block_size=GROUP,
        expert_weight_bits=bits, normalize_routing_weights=1, weights_prepacked=0, accuracy_level=1, **experts.ATTRIBUTES,
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "experts",
        [floats("x", x), floats("router", router)], [floats("y", x)],
        [numpy_helper.from_array(value, name) for name, value in parts.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x, "router": router})[0])


def draw(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    gate, up = (rng.standard_normal((COUNT, INNER, SIZE)).astype(np.float32) / 8 for _ in range(2))
    down = rng.standard_normal((COUNT, SIZE, INNER)).astype(np.float32) / 8
    return gate, up, down, rng.standard_normal((7, SIZE)).astype(np.float32), rng.standard_normal((7, COUNT)).astype(np.float32)


@pytest.mark.parametrize("bits", [4, 8])
def test_gate_and_up_in_turn_is_what_the_kernel_reads(bits: int) -> None:
    seed, rng = fresh()
    gate, up, down, x, router = draw(rng)
    fc1, fc2 = quantized(experts.interleave(gate, up), bits), quantized(down, bits)
    wide = [dequantize(q.reshape(-1, q.shape[-1]), scales.reshape(-1, scales.shape[-1]), GROUP).reshape(q.shape)
            for q, scales in (fc1, fc2)]  # fmt: skip
    wanted = experts.mixture(x, router, wide[0], wide[1], 2)
    limit = (2e-5 if bits == 4 else 2e-2) * np.abs(wanted).max()  # experts of 8 bits round their activations at every level
    assert np.abs(run(x, router, fc1, fc2, bits) - wanted).max() <= limit, f"seed {seed}"


@pytest.mark.parametrize("wrong", ["up first", "one below the other"])
def test_any_other_order_is_another_function(wrong: str) -> None:
    seed, rng = fresh()
    gate, up, down, x, router = draw(rng)
    spoiled = experts.interleave(up, gate) if wrong == "up first" else np.concatenate([gate, up], axis=1)
    wanted = experts.mixture(x, router, experts.interleave(gate, up), down, 2)
    y = run(x, router, quantized(spoiled, 4), quantized(down, 4), 4)
    assert np.abs(y - wanted).max() > 0.3 * np.abs(wanted).max(), f"seed {seed}"
    right = run(x, router, quantized(experts.interleave(gate, up), 4), quantized(down, 4), 4)
    assert np.abs(right - wanted).max() < 0.3 * np.abs(wanted).max(), f"seed {seed}"


def test_separating_gives_back_what_was_interleaved() -> None:
    gate, up, *_ = draw(np.random.default_rng())
    joined = experts.interleave(gate, up)
    assert np.array_equal(joined[:, 0], gate[:, 0]) and np.array_equal(joined[:, 1], up[:, 0])
    again = experts.separate(joined)
    assert np.array_equal(again[0], gate) and np.array_equal(again[1], up)


def test_scales_move_with_their_rows() -> None:
    """Quantizing, then interleaving integers and scales is interleaving, then quantizing: rows are solved on their own."""
    gate, up, *_ = draw(np.random.default_rng())
    parts = [quantized(one, 4) for one in (gate, up)]
    joined = quantized(experts.interleave(gate, up), 4)
    for index in range(2):
        assert np.array_equal(experts.interleave(parts[0][index], parts[1][index]), joined[index])
