"""What a layer's moments say is what errors of its weights do to the residual stream, seen by making such errors."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance.bundle.vocabulary import ROLE
from export import arch
from export.slices import opener
from quant.attended import Entering, Shape, attended, capped_scores, probabilities
from quant.graph import lazy
from quant.layer_moments import ATTENDED, LayerMoments
from quant.layers import Part, Running, cut
from tests.golden import recipe

ROLES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
         "up": "mlp.up_proj", "gate": "mlp.gate_proj", "down": "mlp.down_proj"}  # fmt: skip


def fresh() -> tuple[int, np.random.Generator]:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    return seed, np.random.default_rng(seed)


def layer_of(name: str, kind: str, index: int) -> Part:
    config: dict[str, Any] = arch.find(name).TINY[kind]
    model = arch.open_model(recipe.Memory(config, recipe.tensors(config, 3))).build()
    return cut(model)[1 + index]


def weight(part: Part, role: str) -> str:
    return next(name for names in part.streams.values() for name in names if ROLES[role] in name)


def values(part: Part, name: str) -> np.ndarray:
    found = part.graph.initializers[name].const_value
    assert found is not None
    return np.asarray(found.numpy(), np.float32)


def stream_after(part: Part, half: str, hidden: np.ndarray, work: Path, changed: dict[str, np.ndarray]) -> np.ndarray:
    """The residual stream behind a half layer, other weights in place, by the graph alone."""
    model = part.build()
    for name, array in changed.items():
        model.graph.initializers[name].const_value = lazy(name, ir.DataType.FLOAT, array.shape, lambda array=array: array)  # type: ignore[misc]
    sums = [node for node in model.graph if node.op_type == "Add" and node.domain == "" and f"/{half}" in str(node.name)]
    output = ir.Value(name="looked.at", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", "sequence", "wide"]))
    model.graph.append(ir.node("Identity", [sums[-1].outputs[0]], name="look", outputs=[output]))
    model.graph.outputs.append(output)
    return np.asarray(Running(model, opener(hidden.shape[1], work)).run(hidden).streams["looked.at"], np.float64)


def gathered(part: Part, hidden: np.ndarray, work: Path, tokens: int | None = None) -> LayerMoments:
    found = LayerMoments(part, tokens or hidden.shape[0] * hidden.shape[1])
    found.add(Running(found.build(), opener(hidden.shape[1], work)).run(hidden), 0)
    return found


@pytest.mark.parametrize(
    ("role", "half", "name", "kind"),
    [
        ("o", "attn", "llama", "all"),
        ("o", "attn", "mistral", "window"),
        ("down", "mlp", "llama", "all"),
        ("down", "mlp", "mistral", "window"),
        ("v", "attn", "mistral", "window"),
        ("o", "attn", "gemma3_text", "period"),
        ("down", "mlp", "gemma3_text", "period"),
    ],
)
def test_an_error_costs_what_it_moves_the_stream(role: str, half: str, name: str, kind: str, tmp_path: Path) -> None:
    """Exact where the way to the stream is linear, within a few percent where a norm stands in it (Gemma).

    Every head of v makes the same error, since their moments are pooled; what o makes of it is taken to be of one size in all
    directions, so there o is made so.
    """
    seed, rng = fresh()
    part = layer_of(name, kind, 1)
    hidden = (rng.standard_normal((2, 40, 64)) * rng.uniform(0.3, 30, (2, 40, 1))).astype(np.float32)
    if role == "v":
        o = values(part, weight(part, "o"))
        side = np.linalg.qr(rng.standard_normal((max(o.shape), max(o.shape))))[0][: o.shape[0], : o.shape[1]]
        assert np.allclose(side.T @ side, np.eye(side.shape[1])), "no more columns than rows: it keeps all lengths"
        part.graph.initializers[weight(part, "o")].const_value = ir.tensor(side.astype(np.float32))
    target = weight(part, role)
    plain = values(part, target)
    error = (rng.standard_normal(plain.shape) * 1e-3).astype(np.float32)
    if role == "v":
        head = next(node for node in part.nodes if node.op_type == "Attention").attributes["head_dim"].as_int()
        error = np.tile(error[:head], (len(plain) // head, 1))
    before = stream_after(part, half, hidden, tmp_path, {})
    after = stream_after(part, half, hidden, tmp_path, {target: plain + error})
    moved = (((after - before) ** 2).mean(-1) / (before**2).mean(-1)).sum()
    moments = gathered(part, hidden, tmp_path).moments()[target]
    rows = error[:head] if role == "v" else error
    said = np.einsum("nk,kl,nl->", rows, moments.h, rows, dtype=np.float64) * moments.tokens / hidden.shape[-1]
    assert said == pytest.approx(moved, rel=0.15 if name == "gemma3_text" else 2e-2), f"seed {seed}"


@pytest.mark.parametrize(("name", "kind"), [("llama", "all"), ("gemma3_text", "period"), ("mistral", "window")])
def test_tokens_look_as_the_model_does(name: str, kind: str, tmp_path: Path) -> None:
    """What the attention of the graph gives out, from what enters it: rotation, windows, scales, shared heads."""
    seed, rng = fresh()
    part = layer_of(name, kind, 0)
    hidden = rng.standard_normal((1, 48, 64)).astype(np.float32) * 3
    model = (found := LayerMoments(part, 48)).build()
    out = Running(model, opener(48, tmp_path)).run(hidden)
    assert found._attention is not None
    shape, tables = found._attention
    q, k, v = (out.streams[f"attn.{role}.enters"][0] for role in "qkv")
    cut_tables = None if tables is None else (tables[0][:48], tables[1][:48])
    per_head = list(attended(v, Entering(q, k, v), shape, cut_tables, np.ones(48, np.float32)))
    given = next(array for tag, array in out.streams.items() if tag.endswith("attn_out"))[0]
    size, each = shape.head_dim, shape.heads // shape.kv_heads
    for head in range(shape.heads):
        mixed = per_head[head // each].vectors.reshape(each, 48, -1)[head % each]
        own = mixed[:, (head // each) * size : (head // each + 1) * size]
        assert np.abs(own - given[:, head * size : (head + 1) * size]).max() < 1e-4, f"seed {seed} head {head}"


@pytest.mark.parametrize(("softcap", "normed"), [(0.0, False), (1.5, False), (0.0, True)])
def test_keys_and_queries_cost_what_they_change(softcap: float, normed: bool) -> None:
    """Errors along every direction of a head, one token after the other, in float64 and with nothing of the code under test.

    Keys are exact but for a norm, which takes no notice of one direction in six. A query's error is one number a token where it
    is a matrix: it must not be off by more than that, over sizes of q and k that differ a hundredfold.
    """
    seed, rng = fresh()
    size, count, tokens, scale = 6, 2, 12, 0.7
    shape = Shape(heads=count, kv_heads=1, head_dim=size, scale=scale, softcap=softcap, window=0)
    q, k, v = (rng.standard_normal((tokens, heads * size)) for heads in (count, 1, 1))
    v *= np.exp(rng.uniform(-2, 2, (tokens, 1)))
    costs = np.exp(rng.uniform(-3, 3, tokens))
    if normed:
        q, k = q * np.exp(rng.uniform(-2, 2, (tokens, 1))), k * np.exp(rng.uniform(-2, 2, (tokens, 1)))
    else:
        k *= np.exp(rng.uniform(-1, 1, (tokens, 1)))

    def norm(x: np.ndarray) -> np.ndarray:
        heads = x.reshape(tokens, -1, size)
        return (heads / np.sqrt((heads**2).mean(-1, keepdims=True))).reshape(x.shape) if normed else x

    def mixed(q: np.ndarray, k: np.ndarray) -> np.ndarray:
        scores = np.einsum("thd,sd->hts", norm(q).reshape(tokens, count, size), norm(k)) * scale
        scores = np.tanh(scores / softcap) * softcap if softcap else scores
        scores = np.where(np.tril(np.ones((tokens, tokens), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        found: np.ndarray = (weights / weights.sum(-1, keepdims=True)) @ v
        return found

    entering = Entering(*(x.astype(np.float32) for x in (norm(q), norm(k), v)), (q, k) if normed else None)  # type: ignore[arg-type,misc]
    (one,) = attended(np.ones((tokens, 1), np.float32), entering, shape, None, costs.astype(np.float32))
    step, base = 1e-6, mixed(q, k)
    keys, queries = np.zeros(tokens), np.zeros(tokens)
    for token in range(tokens):
        for at in range(size):
            other = k.copy()
            other[token, at] += step
            keys[token] += (costs[:, None] * (mixed(q, other) - base) ** 2).sum() / (step * scale) ** 2
            for head in range(count):
                turned = q.copy()
                turned[token, head * size + at] += step
                queries[token] += (costs[:, None] * (mixed(turned, k) - base) ** 2).sum() / (step * scale) ** 2
    off = np.log(one.keys / keys)
    assert np.abs(off).mean() < 1.0 if normed else np.abs(off).max() < 0.02, f"seed {seed}: {off}"
    assert one.queries[0] < 1e-5 * one.queries.max() and queries[0] < 1e-5 * queries.max(), "nothing else to look at"
    off = np.log(one.queries[2:] / queries[2:])
    assert np.abs(off).mean() < 1.0, f"seed {seed}: {off}"


def test_probabilities_sum_to_one_within_the_window_and_no_softcap_is_a_large_one() -> None:
    seed, rng = fresh()
    q, k = rng.standard_normal((2, 20, 8)).astype(np.float32), rng.standard_normal((20, 8)).astype(np.float32)
    scores = capped_scores(q, k, Shape(2, 1, 8, 0.3, 0.0, 4))
    found = probabilities(scores, 4)
    assert np.allclose(found.sum(-1), 1, atol=1e-6)
    places = np.arange(20)
    seen = (places <= places[:, None]) & (places > places[:, None] - 4)
    assert (found[:, ~seen] == 0).all() and (found[:, seen] > 0).all(), f"seed {seed}"
    assert np.allclose(scores, capped_scores(q, k, Shape(2, 1, 8, 0.3, 1e4, 4)), atol=1e-4)
    assert np.abs(capped_scores(q, k, Shape(2, 1, 8, 0.3, 0.5, 4))).max() < 0.5 < np.abs(scores).max()


@pytest.mark.parametrize(("name", "kind"), [("llama", "all"), ("gemma3_text", "period")])
def test_heads_add_up_and_windows_are_told_apart(name: str, kind: str, tmp_path: Path) -> None:
    """Keys and queries of all heads, and of every second window of the whole text whatever the batches."""
    seed, rng = fresh()
    part = layer_of(name, kind, 0)
    hidden = rng.standard_normal((4, 16, 64)).astype(np.float32)
    found = LayerMoments(part, 2 * ATTENDED)
    running = Running(found.build(), opener(16, tmp_path))
    outs = [running.run(hidden[:3]), running.run(hidden[3:])]
    found.add(outs[0], 0)
    found.add(outs[1], 3)
    assert found._attention is not None
    shape, tables = found._attention
    cut_tables = None if tables is None else (tables[0][:16], tables[1][:16])
    stream = next(tag for tag in outs[0].streams if tag.endswith("attn_in"))
    wanted = {"q": np.zeros((64, 64)), "k": np.zeros((64, 64))}
    for at in (0, 2):
        x = outs[0].streams[stream][at]
        q, k, v = (outs[0].streams[f"attn.{role}.enters"][at] for role in "qkv")
        before = tuple(outs[0].streams[f"attn.{role}.leaves"][at] for role in "qk") if found._normed else None
        squares = [np.square(outs[0].streams[f"attn.o.{part}"][at]).mean(-1) for part in range(3)]
        heads = list(attended(x, Entering(q, k, v, before), shape, cut_tables, squares[1] / squares[0] / squares[2]))  # type: ignore[arg-type]
        assert len(heads) == shape.kv_heads
        for role, costs in (("q", sum(one.queries for one in heads)), ("k", sum(one.keys for one in heads))):
            wanted[role] += x.T.astype(np.float64) @ (x * np.asarray(costs)[:, None]) / 32
    moments = found.moments()
    for role, h in wanted.items():
        assert np.allclose(moments[weight(part, role)].h, h, rtol=1e-3, atol=1e-4 * np.abs(h).max()), f"seed {seed} {role}"


def test_a_layer_that_is_put_together_otherwise_gets_plain_moments(tmp_path: Path) -> None:
    seed, rng = fresh()
    part = layer_of("llama", "all", 0)
    hidden = rng.standard_normal((3, 16, 64)).astype(np.float32)
    special = gathered(part, hidden, tmp_path).moments()
    for role in ("gate", "q"):
        part.graph.initializers[weight(part, role)].metadata_props[ROLE] = "moe.expert.gate"
    plain = gathered(part, hidden, tmp_path).moments()
    streams = Running(part.build(), opener(16, tmp_path)).run(hidden).streams
    assert set(plain) == set(special) == {weight(part, role) for role in ROLES}
    for stream, names in part.streams.items():
        x = streams[stream].reshape(-1, streams[stream].shape[-1]).astype(np.float64)
        for name in names:
            assert np.allclose(plain[name].h, x.T @ x / len(x), atol=1e-4 * np.abs(x).max() ** 2), f"seed {seed} {name}"
            assert not np.allclose(special[name].h, plain[name].h, rtol=1e-2)


def test_of_a_long_text_some_windows_attention_is_left_out(tmp_path: Path) -> None:
    seed, rng = fresh()
    part = layer_of("llama", "all", 0)
    hidden = rng.standard_normal((4, 16, 64)).astype(np.float32)
    every = gathered(part, hidden, tmp_path).moments()
    some = gathered(part, hidden, tmp_path, tokens=2 * 8192).moments()
    for role in ("q", "k", "v"):
        assert some[weight(part, role)].tokens * 2 == every[weight(part, role)].tokens, f"seed {seed}"
    assert some[weight(part, "o")].tokens == every[weight(part, "o")].tokens
