"""The arithmetic of bench/quality.py, its shuffled float weights and its counting of bytes, without any peer."""

import dataclasses
import sys
import xml.etree.ElementTree
from pathlib import Path

import gguf
import numpy as np
import onnx_ir as ir
import pytest

from bench import quality_bytes, quality_points, quality_table
from bench.quality import Measurement, Store, check_floats, compared
from bench.quality_environments import cmake_arguments
from bench.quality_plot import plot
from bench.quality_points import Point, Tools
from bench.quality_side import Side
from bench.quality_source import Shuffle, Sizes, write_float
from bench.quality_table import Held, Measured, held_against
from export import arch, parity
from export.checkpoint import open_checkpoint
from quant.windows import Window
from tests.checkpoints import Llama, write_gguf
from tests.static_pair import fresh_seed


def point(name: str, weights: int, kl: float, bits: float = 5.0) -> Measured:
    return Measured(name, weights, 0, bits, bits, {"Q4_0": 2}, kl, kl / 2, 4 * kl, kl, 0.01, 0.7, 4)


POINTS = [
    point("appliance/small", 90, 0.3),
    point("appliance/worse", 95, 0.4),
    point("appliance/large", 110, 0.1),
    point("llama.cpp/tiny", 89, 0.5),
    point("llama.cpp/Q4_0", 90, 0.4),
    point("genai/rtn", 109, 0.5),
    point("genai/k_quant", 110, 0.05),
    point("llama.cpp/F32", 500, 1e-9, 32.0),
]


def test_a_peer_is_held_against_the_best_of_ours_that_is_not_above_its_bytes() -> None:
    assert held_against(POINTS, "appliance") == [
        Held("llama.cpp/Q4_0", "appliance/small", pytest.approx(0.75), pytest.approx(0.75)),
        Held("genai/rtn", "appliance/small", pytest.approx(0.6), pytest.approx(0.3 * (0.1 / 0.3) ** 0.95 / 0.5)),
        Held("genai/k_quant", "appliance/large", pytest.approx(2.0), pytest.approx(2.0)),
    ]


def test_the_verdict_counts_what_reaches_the_goal_and_names_the_rest() -> None:
    told = quality_table.verdict(held_against(POINTS, "appliance"))
    assert told == "at most 0.8 of the peer's KL: 2 of 3 points at no more bytes, 2 of 3 at equal bytes; not genai/k_quant"
    assert quality_table.verdict([]).startswith("no peer")
    assert [one.ours for one in held_against(POINTS, "appliance/w")] == ["appliance/worse", "appliance/worse"], "by name alone"


def test_beyond_the_last_of_ours_nothing_is_said_of_equal_bytes() -> None:
    (held,) = held_against([*POINTS[:3], point("llama.cpp/Q8_0", 120, 0.01)], "appliance")
    assert held == Held("llama.cpp/Q8_0", "appliance/large", pytest.approx(10), None)


def test_the_table_has_every_point_and_the_ratios_where_they_are() -> None:
    lines = quality_table.table(POINTS, held_against(POINTS, "appliance")).splitlines()
    assert [line.split()[0] for line in lines[1:]] == [one.name for one in sorted(POINTS, key=lambda one: one.weights)]
    (row,) = (line for line in lines if line.startswith("genai/k_quant"))
    assert "appliance/large" in row and row.count("2.00") == 2 and "2 Q4_0" in row
    (row,) = (line for line in lines if line.startswith("llama.cpp/tiny"))
    assert "appliance" not in row


def test_the_record_is_plain_data() -> None:
    found = quality_table.record(POINTS, held_against(POINTS, "appliance"))
    assert found["points"][0]["kl"] == 0.3 and found["held"][0] == {
        "peer": "llama.cpp/Q4_0", "ours": "appliance/small", "ratio": pytest.approx(0.75), "level": pytest.approx(0.75),
    }  # fmt: skip


def test_bits_a_weight() -> None:
    assert quality_table.bits_a_weight(18, 32) == 4.5  # a block of Q4_0: 16 bytes of integers, 2 of scale


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.3.mlp.down_proj.MatMul.weight_Q4G32", "body"),
        ("model.layers.3.mlp.down_proj.weight.scales", "body"),
        ("blk.0.attn_q.weight", "body"),
        ("blk.0.attn_q_norm.weight", "other"),
        ("model.layers.0.input_layernorm.weight", "other"),
        ("output_norm.weight", "other"),
        ("lm_head.MatMul.weight_scale", "tables"),
        ("model.embed_tokens.weight.q8", "tables"),
        ("token_embd.weight", "tables"),
        ("output.weight", "tables"),
        ("cos_cache", "made"),
        ("rope.sin", "made"),
        ("rope_local.cos", "made"),
        ("/model/constants/INT64/[0]", "other"),
    ],
)
def test_kinds_of_tensors(name: str, kind: str) -> None:
    assert quality_bytes.kind_of(name) == kind


def test_bytes_of_a_gguf_are_those_of_its_blocks(tmp_path: Path) -> None:
    model = Llama(tied=False)
    path = write_gguf(tmp_path / "tiny.gguf", model, "Q8_0")
    found = quality_bytes.of_gguf(path)
    shapes = model.shapes()
    body = sum(int(np.prod(shape)) for name, shape in shapes.items() if "_proj" in name)
    tables = 2 * model.vocab * model.hidden
    assert (found.body, found.tables) == (body * 34 // 32, tables * 34 // 32)
    assert found.other == 4 * model.hidden * (2 * model.layers + 1) and found.made == 0
    assert found.forms == {"Q8_0": 7 * model.layers}
    assert found.weights == found.body + found.tables + found.other
    assert quality_bytes.parameters(path) == (body, body + tables + model.hidden * (2 * model.layers + 1))


def test_bytes_of_an_onnx_file_are_its_initializers_and_its_forms_its_nodes(tmp_path: Path) -> None:
    def initializer(name: str, array: np.ndarray) -> ir.Value:
        tensor = ir.tensor(array, name=name)
        return ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)

    x = ir.Value(name="x", shape=ir.Shape([1, 64]), type=ir.TensorType(ir.DataType.FLOAT))
    q = initializer("model.layers.0.q_proj.q4", np.zeros((8, 2, 16), np.uint8))
    scales = initializer("model.layers.0.q_proj.scales", np.zeros((8, 2), np.float32))
    zeros = initializer("model.layers.0.q_proj.zeros", np.zeros((8, 1), np.uint8))
    head = initializer("lm_head.q8", np.zeros((4, 1, 32), np.uint8))
    head_scales = initializer("lm_head.scales", np.zeros((4, 1), np.float16))
    cosines = initializer("cos_cache", np.zeros((3, 4), np.float32))
    attributes = {"K": 64, "N": 8, "bits": 4, "block_size": 32}
    first = ir.node("MatMulNBits", [x, q, scales, zeros], attributes, domain="com.microsoft")
    attributes = {"K": 8, "N": 4, "bits": 8, "block_size": 32}
    second = ir.node("MatMulNBits", [first.outputs[0], head, head_scales], attributes, domain="com.microsoft")
    third = ir.node("MatMul", [second.outputs[0], cosines])
    held = [q, scales, zeros, head, head_scales, cosines]
    imports = {"": 21, "com.microsoft": 1}
    graph = ir.Graph([x], third.outputs, nodes=[first, second, third], initializers=held, opset_imports=imports)
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "model.onnx")
    found = quality_bytes.of_onnx(tmp_path / "model.onnx")
    assert found == quality_bytes.Holding(256 + 64 + 8, 128 + 8, 0, 48, {"int4 g32 asym": 1})


def test_shuffled_channels_are_the_same_model_in_other_blocks(tmp_path: Path) -> None:
    """Logits agree to float rounding, while next to no number stays where it was."""
    seed = fresh_seed()
    plain = write_gguf(tmp_path / "plain.gguf", Llama(heads=4, kv_heads=2, tied=False, seed=seed))
    write_float(plain, tmp_path / "same.gguf")
    write_float(plain, tmp_path / "shuffled.gguf", seed=1 + seed)
    ids = np.random.default_rng(seed).integers(0, 256, 40).tolist()
    target = parity.reference_target()
    logits = [
        parity.logits(parity.open_float(arch.open_model(open_checkpoint(tmp_path / name)), target, threads=1), ids)
        for name in ("plain.gguf", "same.gguf", "shuffled.gguf")
    ]
    np.testing.assert_array_equal(logits[1], logits[0], err_msg=f"seed {seed}")
    np.testing.assert_allclose(logits[2], logits[0], atol=2e-4, err_msg=f"seed {seed}")
    before, after = (
        {one.name: np.array(one.data) for one in gguf.GGUFReader(tmp_path / name).tensors}
        for name in ("plain.gguf", "shuffled.gguf")
    )
    for name in before:
        if "norm" not in name:
            assert (before[name] == after[name]).mean() < 0.2, f"{name}, seed {seed}"


@pytest.mark.parametrize("left_out", ["blk.1.ffn_down.weight", "blk.0.attn_v.weight", "blk.0.attn_norm.weight", "output.weight"])
def test_a_tensor_that_is_not_shuffled_along_is_seen(tmp_path: Path, left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write_gguf(tmp_path / "plain.gguf", Llama(tied=False))
    shuffle = Shuffle.__call__
    monkeypatch.setattr(Shuffle, "__call__", lambda self, name, array: array if name == left_out else shuffle(self, name, array))
    write_float(plain, tmp_path / "wrong.gguf", seed=3)
    ids, target = list(range(40)), parity.reference_target()
    right, wrong = (
        parity.logits(parity.open_float(arch.open_model(open_checkpoint(tmp_path / name)), target, threads=1), ids)
        for name in ("plain.gguf", "wrong.gguf")
    )
    assert np.abs(right - wrong).max() > 1e-2


def test_value_heads_are_shuffled_each_on_its_own() -> None:
    change = Shuffle(Sizes(hidden=8, mlp=6, heads=4, value_heads=2, head=4), 5)
    rows = change("blk.0.attn_v.weight", np.arange(8, dtype=np.float32)[:, None] * np.ones((1, 8), np.float32))[:, 0]
    columns = change("blk.0.attn_output.weight", np.ones((8, 1), np.float32) * np.arange(16, dtype=np.float32))[0]
    assert sorted(rows[:4]) == [0, 1, 2, 3] and sorted(rows[4:]) == [4, 5, 6, 7]
    np.testing.assert_array_equal(columns % 4, np.concatenate([rows[:4], rows[:4], rows[4:] - 4, rows[4:] - 4]))


def test_points_are_chosen_by_side_and_pattern(tmp_path: Path) -> None:
    names = [one.name for one in quality_points.chosen("llama.cpp/Q4_*,genai/rtn,appliance/w4a8", tmp_path)]
    assert names[:2] == ["llama.cpp/F32", "genai/fp32"]
    assert set(names[2:]) == {"llama.cpp/Q4_0", "llama.cpp/Q4_1", "llama.cpp/Q4_K_M", "genai/rtn", "appliance/w4a8"}
    assert not [one.name for one in quality_points.chosen("appliance", tmp_path) if one.side != "appliance"]
    with pytest.raises(SystemExit, match="no point fits"):
        quality_points.chosen("ollama", tmp_path)


def test_what_was_measured_is_kept_by_point_and_by_the_windows_tokens(tmp_path: Path) -> None:
    random = np.random.default_rng(fresh_seed())
    ids = random.integers(0, 50, 20)
    logits = random.standard_normal((20, 50)).astype(np.float32)
    rows = compared(logits, logits + random.standard_normal(logits.shape).astype(np.float32), ids)
    assert len(rows.kl) == 19 and (rows.kl > 0).all()
    store, window = Store(tmp_path), Window("text", 0, ids)
    store.write("key", window, rows)
    found = store.read("key", Window("text", 3, ids))
    assert found is not None
    for field in dataclasses.fields(rows):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(rows, field.name))
    assert store.read("other", window) is None
    assert store.read("key", Window("text", 0, ids + 1)) is None


def test_llama_cpp_is_compiled_without_amx(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu avx2 avx512f amx_tile amx_int8 avx512_vnni\n")
    found = cmake_arguments(tmp_path / "cpuinfo").split()
    assert {"-DGGML_NATIVE=OFF", "-DGGML_AMX_INT8=OFF", "-DGGML_AMX_TILE=OFF"} <= set(found)
    assert "-DGGML_AVX=ON" not in found


def test_the_plot_is_xml_with_every_point() -> None:
    result = {"model": "a <model>", "seed": 7, "windows": 4, **quality_table.record(POINTS, [])}
    text = "".join(xml.etree.ElementTree.fromstring(plot([result, result])).itertext())
    assert text.count("k_quant") == 2 and "a <model>" in text and "F32" not in text


@dataclasses.dataclass(frozen=True)
class FloatPoint(Point):
    """A stand-in for a peer: our own float graph of whatever file it has."""

    def command(self, tools: Tools) -> list[str]:
        return [sys.executable, "-m", "bench.quality_appliance", "float", str(self.path), "1"]


def test_floats_are_held_to_be_the_same_and_nothing_is_measured_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_gguf(tmp_path / "source.gguf", Llama(seed=1))
    write_float(source, tmp_path / "same.gguf", seed=4)
    other = write_gguf(tmp_path / "other.gguf", Llama(seed=2))
    tools = Tools(Path(), Path(), 1)
    cuts = [Window("text", at, np.random.default_rng(at).integers(0, 256, 30)) for at in range(2)]
    measurement = Measurement(source, tmp_path, tools, cuts, together=1)
    check_floats(measurement, [FloatPoint("peer/same", tmp_path / "same.gguf")])
    assert "peer/same is the float graph" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="peer/other is not the same float model"):
        check_floats(measurement, [FloatPoint("peer/other", other)])
    assert not list(tmp_path.glob("logits-*")), "logits are left on the disk"
    monkeypatch.setattr(FloatPoint, "command", lambda self, tools: pytest.fail("it was measured again"))
    check_floats(measurement, [FloatPoint("peer/same", tmp_path / "same.gguf")])


def test_a_side_that_ends_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="the peer ended with code 3"):
        Side("the peer", [sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "scratch")
