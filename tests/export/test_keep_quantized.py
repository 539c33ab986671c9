"""A GGUF carried over: the file holds its very weights and, without rounded activations, computes what the float model does."""

import json
from pathlib import Path

import gguf
import numpy as np
import onnx_ir as ir
import pytest

from appliance import cli, targets
from appliance.targets.capabilities import Target
from export import arch, lower, parity, save
from export.arch import Opened
from export.checkpoint import open_checkpoint
from quant import schemes
from quant.decide import decide
from quant.emit import emit
from quant.keep import Keeping, keep
from quant.structure import base_name
from quant.written import GraphFile, Written
from tests.checkpoints import Llama, gguf_name, write_gguf


def carried(opened: Opened, target: Target, folder: Path) -> tuple[lower.Lowered, Keeping]:
    """The lowered graphs of a build that keeps what is quantized, without rounded activations."""
    found: list[Keeping] = []

    def decided() -> ir.Model:
        model = opened.build()
        found.append(keep(model, schemes.find("w4a8"), [target], folder, "x"))
        decide(model, found[-1].scheme, target, folder, source="x")
        return model

    lowered = lower.lower(decided, target, min(256, opened.config.context_length), target.chunk)
    for model in lowered.graphs.values():
        emit(model, target)
        for node in model.graph:
            if node.op_type == "MatMulNBits":  # no build is slow in this way, so it is asked for afterwards
                node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)
    return lowered, found[0]


def value_of(written: Written, columns: int) -> np.ndarray:
    """Float32 [N,K] of a matrix in the file, in GGUF's own order of operations."""
    pieces = list(written.pieces())
    q = np.zeros((max(one.rows.stop for one in pieces), max(one.columns.stop for one in pieces)), np.float32)
    for one in pieces:
        q[one.rows, one.columns] = one.q
    wide = [np.repeat(part.astype(np.float32), written.group, axis=1) for part in (written.scales, written.zeros)]
    if written.offsets is None:
        return ((q - wide[1]) * wide[0])[:, :columns]
    return ((q + 2 ** (written.bits - 1)) * wide[0] + np.repeat(written.offsets, written.group, axis=1))[:, :columns]


def dequantized(path: Path, heads: dict[str, int]) -> dict[str, np.ndarray]:
    """Every matrix of the file by the `gguf` package, q and k with their rows as Hugging Face has them."""
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        if len(tensor.shape) != 2:
            continue
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        for part, count in heads.items():
            if part in tensor.name:
                pairs = values.reshape(count, -1, 2, values.shape[1])
                values = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], axis=1).reshape(values.shape)
        found[tensor.name] = values
    return found


def check_weights(file: GraphFile, wanted: dict[str, np.ndarray]) -> None:
    """Every matrix in the graph file is, bit for bit, one of the checkpoint's, or q, k and v below one another."""
    left = set(wanted)
    for written in file.matrices():
        name = gguf_name(base_name(written.weight))
        parts = [name.replace("self_attn.qkv_proj", f"attn_{part}") for part in "qkv"] if "qkv" in name else [name]
        whole = np.concatenate([wanted[part] for part in parts])
        assert np.array_equal(value_of(written, whole.shape[1]).view(np.uint32), whole.view(np.uint32)), written.weight
        left -= set(parts)
    assert not left


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("name", ["cpu", "cpu-static"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_small_model(kind: str, name: str, tied: bool, tmp_path: Path) -> None:
    model = Llama(tied=tied, seed=int(np.random.SeedSequence().generate_state(1)[0]))
    path = write_gguf(tmp_path / "x.gguf", model, kind)
    opened = arch.open_model(open_checkpoint(path))
    lowered, keeping = carried(opened, targets.load(name), tmp_path / "work")
    if name == "cpu" or kind == "Q8_0":
        assert not keeping.requantized
        files = save.save_all(lowered.graphs, tmp_path, "weights.bin")
        wanted = dequantized(path, {"attn_q": model.heads, "attn_k": model.kv_heads})
        for file in files.values():
            check_weights(GraphFile(file), wanted)
    else:
        assert {one.name for one in keeping.requantized} == {"model.embed_tokens.weight"}, "4-bit rows cannot be picked there"
    if name == "cpu":
        check_logits(
            opened, lowered, np.random.default_rng(model.seed).integers(0, model.vocab, 40).tolist(), f"seed {model.seed}"
        )


def check_logits(opened: Opened, lowered: lower.Lowered, ids: list[int], said: str) -> None:
    reference = parity.logits(parity.open_float(opened, parity.reference_target(), threads=1), ids)
    found = parity.logits(parity.open_lowered(lowered, threads=1), ids)
    assert np.abs(found - reference).max() <= 2e-5 * np.abs(reference).max(), said


def test_another_scale_is_seen_by_both_checks(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", Llama(), "Q4_1")
    opened = arch.open_model(open_checkpoint(path))
    lowered, _ = carried(opened, targets.load("cpu"), tmp_path / "work")
    graph = lowered.graphs["model"].graph
    value = graph.initializers["model.layers.0.mlp.up_proj.weight.offsets"]
    assert value.const_value is not None
    other = value.const_value.numpy().copy()
    other[3, 1] *= 1.01
    value.const_value = ir.tensor(other, name=value.name)
    files = save.save_all(lowered.graphs, tmp_path, "weights.bin")
    with pytest.raises(AssertionError, match="up_proj"):
        check_weights(GraphFile(files["model"]), dequantized(path, {"attn_q": 4, "attn_k": 2}))
    with pytest.raises(AssertionError):
        check_logits(opened, lowered, list(range(40)), "")


@pytest.mark.model
@pytest.mark.slow
def test_the_starter_model(starter_gguf: Path, tmp_path: Path) -> None:
    """SmolLM2 is Q4_1 with a Q8_0 table: all of its 134 M weights are carried over."""
    opened = arch.open_model(open_checkpoint(starter_gguf))
    lowered, keeping = carried(opened, targets.load("cpu"), tmp_path / "work")
    assert not keeping.requantized and {one.kind for one in keeping.carried} == {"Q4_1", "Q8_0"}
    files = save.save_all(lowered.graphs, tmp_path, "weights.bin")
    check_weights(GraphFile(files["model"]), dequantized(starter_gguf, {"attn_q": 9, "attn_k": 3}))
    ids = np.random.default_rng(int(np.random.SeedSequence().generate_state(1)[0])).integers(0, 49152, 48).tolist()
    check_logits(opened, lowered, ids, f"ids {ids}")


def build_said(home: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `appliance build` printed; the bundle is called m."""
    assert cli.main(["build", *words, "--name", "m", "--windows", "1", "--accept-loss"]) == 0
    return capsys.readouterr().out


def test_the_command_says_what_was_carried_over_and_what_was_not(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(home / "x.gguf", Llama(), "Q4_1")
    told = build_said(home, capsys, str(path), "--target", "cpu", "--target", "cpu-static", "--keep-quantized")
    assert "carried over as the checkpoint has them: 14 in Q4_1 (" in told
    assert "quantized again: 1 matrices (model.embed_tokens.weight): standard operators cannot pick rows" in told
    record = json.loads((home / "models" / "m" / "record.json").read_text())
    assert record["kept_quantized"]["carried"]["Q4_1"]["matrices"] == 14
    assert [one["name"] for one in record["kept_quantized"]["requantized"]] == ["model.embed_tokens.weight"]
    assert "--keep-quantized" in record["command"]
    assert cli.main(["show", "m"]) == 0
    assert "Q4_1" in capsys.readouterr().out


def test_nothing_is_calibrated_when_nothing_is_left(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(home / "x.gguf", Llama(), "Q4_0")
    told = build_said(home, capsys, str(path), "--target", "cpu", "--scheme", "w4a8-gptq", "--keep-quantized")
    assert "carried over as the checkpoint has them: 15 in Q4_0 (100.0% of the quantized weights)" in told
    record = json.loads((home / "models" / "m" / "record.json").read_text())
    assert record["calibration"] is None and {one["solver"] for one in record["matrices"]} == {"stored"}
    assert {one["snr_db"] for one in record["matrices"]} == {None}


def test_without_the_option_everything_is_quantized_again(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = build_said(home, capsys, str(write_gguf(home / "x.gguf", Llama(), "Q4_0")), "--target", "cpu", "--scheme", "w4a8")
    record = json.loads((home / "models" / "m" / "record.json").read_text())
    assert "carried over" not in told and record["kept_quantized"] is None


def test_what_is_left_is_calibrated_on_what_was_carried_over(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(home / "x.gguf", Llama(), "Q4_1", others={"down_proj": "F16", "embed": "Q8_0"})
    text = home / "text.txt"
    text.write_text("".join(chr(97 + letter) for letter in np.random.default_rng(1).integers(0, 26, 4000)))
    words = ("--scheme", "w4a8-gptq", "--keep-quantized", "--calibration", str(text), "--calibration-tokens", "1024")
    told = build_said(home, capsys, str(path), "--target", "cpu", *words)
    assert (
        "12 in Q4_1, 1 in Q8_0" in told and "quantized again: 2 matrices (model.layers.0.mlp.down_proj.weight, ...): F16" in told
    )
    record = json.loads((home / "models" / "m" / "record.json").read_text())
    solvers = {one["name"]: one["solver"] for one in record["matrices"]}
    assert {name for name, solver in solvers.items() if solver == "gptq"} == {
        f"model.layers.{n}.mlp.down_proj.weight" for n in (0, 1)
    }
    assert {solver for name, solver in solvers.items() if "down" not in name} == {"stored"}
    assert record["calibration"]["tokens"] == 1024
    assert all(one["proxy"] <= one["plain_proxy"] for one in record["matrices"] if one["solver"] == "gptq")
