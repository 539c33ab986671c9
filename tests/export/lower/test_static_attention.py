"""The decomposed attention against a plain loop in numpy, on shapes and features drawn anew in every run."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from appliance.bundle.vocabulary import ATTENTION, ATTENTION_MASK, DOMAIN, INPUT_IDS, KEEP_LAST, LOGITS, window_mask_name
from appliance.runtime.providers import SessionChoice, cpu
from appliance.runtime.static_decoder import fill_mask
from export.graph import OPSET, Nodes, add_initializer
from export.lower import passes
from export.step import Step
from tests.static_pair import STATIC, fresh_seed

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """One attention block and one step over it; `angles` = half the rotated dimensions of a head, 0 = no rotation."""

    heads: int
    kv_heads: int
    head_dim: int
    angles: int
    scale: float
    softcap: float
    window: int
    tokens: int
    context: int
    past: int
    new: int


def drawn(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    kv_heads, size, tokens, context = (int(rng.integers(1, high)) for high in (4, 9, 7, 14))
    angles = int(rng.integers(0, size + 1))
    return Case(
        heads=kv_heads * int(rng.integers(1, 5)), kv_heads=kv_heads, head_dim=2 * size, angles=angles,
        scale=float(rng.uniform(0.1, 1)), softcap=float(rng.choice([0, 0, 1.5, 20])), window=int(rng.choice([0, 0, 1, 3, 7])),
        tokens=tokens, context=context, past=int(rng.integers(0, context + 1)), new=int(rng.integers(1, tokens + 1)),
    )  # fmt: skip


def graph_of(case: Case, cosine: Array, sine: Array) -> ir.Model:
    """A canonical graph of one Attention; its `logits` are the attention's own output for the row of `last_index`."""

    def value(name: str, shape: list[int | str], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))

    wide, narrow = case.heads * case.head_dim, case.kv_heads * case.head_dim
    ids = value(INPUT_IDS, ["batch", "sequence"], ir.DataType.INT64)
    mask = value(ATTENTION_MASK, ["batch", "total"], ir.DataType.INT64)
    new = [value(name, [1, case.tokens, width]) for name, width in (("q", wide), ("k", narrow), ("v", narrow))]
    past = [value(name, ["batch", case.kv_heads, "past", case.head_dim]) for name in ("past_key", "past_value")]
    graph = ir.Graph([ids, mask, *new, *past], [], nodes=[], name="one", opset_imports={"": OPSET, DOMAIN: 1})
    tables = [
        add_initializer(graph, name, ir.tensor(table, name=name), {})
        for name, table in (("cos", cosine), ("sin", sine))
        if case.angles
    ]
    attributes: dict[str, int | float] = {
        "heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.head_dim, "scale": case.scale,
        "softcap": case.softcap, "window": case.window, "layer": 0,
    }  # fmt: skip
    write = Nodes(graph, "/one")
    node = write.node(ATTENTION, [*new, *past, *tables], attributes, domain=DOMAIN, outputs=3)
    logits = write.value(KEEP_LAST, [node.outputs[0]], domain=DOMAIN)
    for output, name, shape in (
        (logits, LOGITS, ["batch", "rows", wide]),
        (node.outputs[1], "new_key", ["batch", case.kv_heads, "present", case.head_dim]),
        (node.outputs[2], "new_value", ["batch", case.kv_heads, "present", case.head_dim]),
    ):
        output.name, output.type, output.shape = name, ir.TensorType(ir.DataType.FLOAT), ir.Shape(shape)
        graph.outputs.append(output)
    return ir.Model(graph, ir_version=10)


def expected(case: Case, given: dict[str, Array], cosine: Array, sine: Array) -> tuple[Array, Array, Array]:
    """One token and one head after another, in float64: (y [new, H*d], keys, values [Hkv, new, d])."""

    def turned(x: Array, position: int) -> NDArray[np.float64]:
        r = case.angles
        first, second, rest = x[:r].astype(float), x[r : 2 * r].astype(float), x[2 * r :].astype(float)
        c, s = cosine[position, :r].astype(float), sine[position, :r].astype(float)
        return np.concatenate([first * c - second * s, second * c + first * s, rest])

    size, group = case.head_dim, case.heads // case.kv_heads
    keys = np.zeros((case.kv_heads, case.past + case.new, size))
    values = np.zeros_like(keys)
    keys[:, : case.past], values[:, : case.past] = given["past_key"][0, :, : case.past], given["past_value"][0, :, : case.past]
    for token in range(case.new):
        for head in range(case.kv_heads):
            columns = slice(head * size, (head + 1) * size)
            keys[head, case.past + token] = turned(given["k"][0, token, columns], case.past + token)
            values[head, case.past + token] = given["v"][0, token, columns]
    y = np.zeros((case.new, case.heads * size))
    for token in range(case.new):
        position = case.past + token
        first = max(0, position - case.window + 1) if case.window else 0
        for head in range(case.heads):
            columns = slice(head * size, (head + 1) * size)
            seen = slice(first, position + 1)
            scores = keys[head // group, seen] @ turned(given["q"][0, token, columns], position) * case.scale
            if case.softcap:
                scores = case.softcap * np.tanh(scores / case.softcap)
            weights = np.exp(scores - scores.max())
            y[token, columns] = weights / weights.sum() @ values[head // group, seen]
    return y, keys[:, case.past :], values[:, case.past :]


def difference(case: Case, rng: np.random.Generator, folder: Path) -> float:
    positions = case.context + case.tokens
    angles = rng.uniform(-3, 3, (positions, max(case.angles, 1)))
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    step = Step("prefill", case.tokens, case.context)
    model = graph_of(case, cosine, sine)
    for one in passes(STATIC.flags):
        one.run(model, STATIC, step)
    path = folder / "one.onnx"
    ir.save(model, path)
    session = cpu.open_session(path, STATIC, SessionChoice(threads=1)).session
    shapes = {value.name: value.shape for value in session.get_inputs()}
    given = {name: rng.standard_normal(shapes[name]).astype(np.float32) for name in ("q", "k", "v", "past_key", "past_value")}
    mask = np.zeros((1, 1, case.tokens, case.context + case.tokens), np.float32)
    fill_mask(mask[0, 0], case.past, case.new, case.window)
    feeds = {**given, window_mask_name(case.window): mask}
    if case.angles:
        feeds["position_ids"] = case.past + np.minimum(np.arange(case.tokens), case.new - 1)[None]
    y, keys, values = expected(case, given, cosine, sine)
    worst, outputs = 0.0, [LOGITS, "new_key", "new_value"]
    for row in range(case.new):
        feeds["last_index"] = np.array([row])
        found = session.run(outputs, feeds | unread(shapes, feeds))
        pairs = [(found[0][0, 0], y[row]), (found[1][0, :, : case.new], keys), (found[2][0, :, : case.new], values)]
        worst = max(worst, *(float(np.abs(ours - theirs).max()) for ours, theirs in pairs))
    return worst


def unread(shapes: dict[str, list[int]], feeds: dict[str, NDArray[np.generic]]) -> dict[str, NDArray[np.int64]]:
    """Zeros for the integer inputs that this little graph declares and does not read."""
    return {name: np.zeros(shape, np.int64) for name, shape in shapes.items() if name not in feeds}


@pytest.mark.parametrize("draw", range(25))
def test_equal_to_a_plain_loop(draw: int, tmp_path: Path) -> None:
    seed = fresh_seed()
    case = drawn(seed)
    delta = difference(case, np.random.default_rng(seed), tmp_path)
    assert delta < 1e-5, f"seed {seed}, {case}: {delta}"
