"""Files of other exporters, quantized: exact where nothing is rounded, equal to the dequantized weights where it is."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance import cli
from appliance.bundle.vocabulary import DOMAIN, PARTS, ROLE, STREAM
from appliance.errors import BadInput, TargetError
from appliance.targets import load
from export import arch
from export.lower import lower
from quant import decide, emit, schemes
from quant.foreign import quantize as steps
from quant.foreign.quantize import Quantized, Request, quantize
from quant.scheme import Scheme
from tests.golden import recipe
from tests.quant.foreign.graphs import FOREIGN, VOCAB, logits, write_foreign
from tests.quant.foreign.test_infer import bare, side_branch
from tests.static_pair import fresh_seed


def made(source: Path, scheme: Scheme, **options: Any) -> tuple[Request, Quantized]:
    request = Request(source, scheme, load("cpu"), source.parent / "out" / "model.onnx", command="again", **options)
    request.output.parent.mkdir(exist_ok=True)
    return request, quantize(request, lambda stage, done, total: None)


def with_float_activations(path: Path) -> Path:
    """The file with its weights rounded and its activations not, beside it."""
    model = ir.load(path)
    for node in model.graph:
        if node.op_type == "MatMulNBits":  # no 8-bit one is written so, as it is slow
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 1)
    slow = path.with_name("slow.onnx")
    ir.save(model, slow)
    return slow


def ids_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (1, 12))


@pytest.mark.parametrize("name", FOREIGN)
def test_there_and_back_changes_nothing(name: str, tmp_path: Path) -> None:
    """Every weight becomes canonical and stays float: the logits are the same bits."""
    seed = fresh_seed()
    source = write_foreign(name, tmp_path, seed)
    request, _ = made(source, schemes.find("float"))
    assert np.array_equal(logits(source, ids_of(seed)), logits(request.output, ids_of(seed))), seed


def unpacked(node: ir.Node) -> np.ndarray:
    """[N, K and padding] of a MatMulNBits or GatherBlockQuantized, worked out from their descriptions alone."""
    packed, scales = (_numbers(node.inputs[index]) for index in ((1, 2) if node.op_type == "MatMulNBits" else (0, 2)))
    bits = node.attributes["bits"].as_int()
    q = packed.astype(np.int32)
    if bits == 4:
        q = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], -1).astype(np.int32)
    values = (q - (8 if bits == 4 else 128)) * scales.astype(np.float32)[..., None]
    assert values.shape[2] == node.attributes["block_size"].as_int()
    return values.reshape(len(packed), -1).astype(np.float32)


def _numbers(value: ir.Value | None) -> np.ndarray:
    assert value is not None
    if value.const_value is None:
        producer = value.producer()
        assert producer is not None and producer.op_type in ("Cast", "Unsqueeze")
        return _numbers(producer.inputs[0])
    return value.const_value.numpy()


def with_dequantized(source: Path, request: Request, folder: Path) -> Path:
    """The float graph with the quantized file's numbers in place of its own."""
    matrices = {}
    for node in ir.load(request.output).graph:
        if node.op_type in ("MatMulNBits", "GatherBlockQuantized"):
            packed = node.inputs[1 if node.op_type == "MatMulNBits" else 0]
            assert packed is not None
            matrices[str(packed.name).rpartition(".q")[0]] = unpacked(node)
    model = steps.open_graph(source)
    for one in steps.infer(model).matrices:
        array = matrices.pop(one.matrix.name, None)
        if array is not None:
            array = array[:, : one.matrix.shape[1]]
            array = array.T if one.matrix.reverse else array
            one.matrix.weight.const_value = ir.tensor(np.ascontiguousarray(array), name=one.matrix.name)
    assert not matrices
    folder.mkdir()
    path = folder / "model.onnx"
    ir.save(model, path, external_data="model.onnx.data", size_threshold_bytes=256)
    return path


@pytest.mark.parametrize(("name", "scheme"), [*((name, "w4a8") for name in FOREIGN), ("genai-qwen3", "w8a8")])
def test_the_file_computes_what_its_dequantized_weights_do(name: str, scheme: str, tmp_path: Path) -> None:
    """With float activations the rest is rounding of sums. With int8 ones, it is as near as 8 bits are."""
    seed = fresh_seed()
    source = write_foreign(name, tmp_path, seed)
    before = logits(source, ids_of(seed))
    request, _ = made(source, schemes.find(scheme))
    wanted = logits(with_dequantized(source, request, tmp_path / "float"), ids_of(seed))
    found = logits(with_float_activations(request.output), ids_of(seed))
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max(), seed
    assert np.abs(found - before).max() > 1e-4 * np.abs(wanted).max(), "nothing was rounded"
    eight = logits(request.output, ids_of(seed))
    loss = np.linalg.norm(eight - wanted) / np.linalg.norm(wanted)
    assert 1e-4 < loss < 0.08, (seed, loss)


@pytest.mark.parametrize("name", ["genai-llama", "genai-qwen3", "torch-gpt2-eager", "torch-phi3-eager"])
def test_every_matrix_is_decided_tagged_and_recorded(name: str, tmp_path: Path) -> None:
    source = write_foreign(name, tmp_path, fresh_seed())
    request, result = made(source, schemes.find("w4a8"))
    graph = ir.load(request.output).graph
    assert not [node for node in graph if node.domain == DOMAIN] and DOMAIN not in graph.opset_imports
    multiplied = [node for node in graph if node.op_type == "MatMulNBits"]
    tags = [node.inputs[1].metadata_props for node in multiplied if node.inputs[1] is not None]
    assert all((ROLE in tag) != (PARTS in tag) and tag[STREAM] for tag in tags), tags
    record = json.loads(request.record.read_text(encoding="utf-8"))
    assert record == json.loads(json.dumps(result.record))
    uses = sum(len(one["roles"]) > 0 for one in record["inferred"])
    assert len(multiplied) + sum(node.op_type == "GatherBlockQuantized" for node in graph) == uses
    packed = [one for one in record["matrices"] if len(one["roles"]) == 3]
    assert {tuple(one["roles"]) for one in packed} == {("attn.q", "attn.k", "attn.v")} and len(packed) == 2
    assert record["files"].keys() == {"model.onnx", "model.onnx.data"} and record["command"] == "again"
    assert {one["role"] for one in record["float"] if one["role"]} >= {"norm"}
    assert sorted(path.name for path in request.output.parent.iterdir()) == ["model.onnx", "model.onnx.data", "model.record.json"]


def test_a_packed_matrix_gets_the_finest_form_of_its_parts(tmp_path: Path) -> None:
    source = write_foreign("genai-llama", tmp_path, fresh_seed())
    scheme = schemes.find("w4a8")
    finer = dataclasses.replace(scheme, roles={**scheme.roles, "attn.v": dataclasses.replace(scheme.default, bits=8)})
    _, result = made(source, finer)
    bits = {tuple(one["roles"]): one["bits"] for one in result.record["matrices"]}
    assert bits["attn.q", "attn.k", "attn.v"] == 8 and bits[("attn.o",)] == 4


@pytest.mark.parametrize("copied", [True, False])
def test_a_head_that_is_a_copy_of_the_embedding_is_kept_once(copied: bool, tmp_path: Path) -> None:
    def copy(model: ir.Model) -> None:
        table = model.graph.initializers["model.embed_tokens.weight"].const_value
        assert table is not None
        head = table.numpy().T.copy()
        head[3, 5] += 0 if copied else 1e-6
        model.graph.initializers["lm_head.MatMul.weight"].const_value = ir.tensor(head, name="lm_head.MatMul.weight")

    request, result = made(write_foreign("genai-qwen3", tmp_path, fresh_seed(), copy), schemes.find("w4a8"))
    assert result.record["head_is_a_copy_of_the_embedding"] is copied
    tables = [one for one in result.record["matrices"] if {"embed", "head"} & set(one["roles"])]
    assert len(tables) == (1 if copied else 2)
    graph = ir.load(request.output).graph
    looked_up = next(node for node in graph if node.op_type == "GatherBlockQuantized")
    head = next(node for node in graph if node.op_type == "MatMulNBits" and node.attributes["N"].as_int() == VOCAB)
    assert (looked_up.inputs[0] is head.inputs[1]) is copied


def test_what_is_not_understood_is_refused_or_left_float(tmp_path: Path) -> None:
    seed = fresh_seed()
    source = write_foreign("torch-llama-eager", tmp_path, seed, side_branch)
    with pytest.raises(BadInput, match="value_head"):
        made(source, schemes.find("w4a8"))
    request, result = made(source, schemes.find("w4a8"), leave_float=True)
    assert [one["weight"] for one in result.record["not_understood"]] == ["value_head"]
    graph = ir.load(request.output).graph
    left = [node for node in graph if node.op_type == "MatMul" and any(value.is_initializer() for value in node.inputs if value)]
    assert [node.inputs[1].name for node in left if node.inputs[1] is not None] == ["value_head"]


def test_a_rerun_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write_foreign("genai-llama", tmp_path, fresh_seed())
    first = {path.name: path.read_bytes() for path in made(source, schemes.find("w4a8"))[0].output.parent.iterdir()}
    assert first == {path.name: path.read_bytes() for path in made(source, schemes.find("w4a8"))[0].output.parent.iterdir()}


def test_an_interrupted_run_leaves_what_the_next_one_goes_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_foreign("genai-llama", tmp_path, fresh_seed())
    request = Request(source, schemes.find("w4a8"), load("cpu"), tmp_path / "out.onnx")

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "write":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(request, stop)
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data", request.work.name}
    monkeypatch.setattr("quant.decide.solve", lambda *_: pytest.fail("a weight was solved again"))
    quantize(request, lambda *_: None)
    assert not request.work.exists() and request.output.is_file()


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (lambda path: path.unlink(), "is no file"),
    "no ONNX": (lambda path: path.write_bytes(b"GGUF and more of it") and None, "cannot be read as ONNX"),
    "weights missing": (lambda path: path.with_name("model.onnx.data").unlink(), "model.onnx.data, which holds the weights"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_file_that_cannot_be_read_is_named(fault: str, tmp_path: Path) -> None:
    source = write_foreign("torch-llama-eager", tmp_path, fresh_seed())
    BROKEN[fault][0](source)
    with pytest.raises(BadInput, match=BROKEN[fault][1]) as caught:
        made(source, schemes.find("w4a8"))
    assert "\n" not in str(caught.value)


def test_a_calibrated_scheme_and_the_model_itself_as_output_are_refused(tmp_path: Path) -> None:
    source = write_foreign("torch-llama-eager", tmp_path, fresh_seed())
    with pytest.raises(TargetError, match="appliance build"):
        made(source, dataclasses.replace(schemes.find("w4a8"), budget=5.0))
    with pytest.raises(BadInput, match="is the model itself"):
        quantize(Request(source, schemes.find("w4a8"), load("cpu"), source), lambda *_: None)
    assert logits(source, ids_of(1)).shape == (1, 12, VOCAB)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["quantize", *words])
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.mark.usefixtures("home")
def test_the_command_shows_what_it_took_each_weight_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_foreign("genai-llama", tmp_path / "in", fresh_seed())
    code, out, _ = run(capsys, str(source), "--scheme", "w4a8", "--output", str(tmp_path / "new"))
    assert code == 0 and (tmp_path / "new" / "model.onnx").is_file()
    assert "attn.q + attn.k + attn.v" in out and "0-1" in out and "bits a weight" in out
    code, out, _ = run(capsys, str(source), "--json")
    facts = json.loads(out)
    assert code == 0 and Path(facts["output"]).name == "model.w4a8.onnx" and Path(facts["record"]).is_file()
    assert facts["inferred"][0]["roles"] == ["embed"] and facts["scheme"] == "w4a8"


@pytest.mark.usefixtures("home")
def test_the_command_takes_exceptions_and_tells_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_foreign("genai-llama", tmp_path, fresh_seed())
    code, out, _ = run(capsys, str(source), "--exception", "*down_proj*=8/64", "--exception", "*.1.*gate*=0", "--json")
    assert code == 0
    record = json.loads(Path(json.loads(out)["record"]).read_text(encoding="utf-8"))
    wide = {one["name"]: one for one in record["matrices"] if one["bits"] == 8 and not set(one["roles"]) & {"embed", "head"}}
    assert {name.split(".")[4] for name in wide} == {"down_proj"} and len(wide) == 2
    assert {(one["group"], one["reason"]) for one in wide.values()} == {(64, "asked for: --exception *down_proj*=8/64")}
    assert [one["reason"] for one in record["float"] if "gate" in one["name"]] == ["asked for: --exception *.1.*gate*=0"]
    assert record["command"].endswith("--exception '*down_proj*=8/64' --exception '*.1.*gate*=0'")
    code, _, err = run(capsys, str(source), "--exception", "*.mpl.down_proj.*=8")
    assert code == 2 and "no weight is called so" in err and "mlp.down_proj.MatMul.weight" in err


@pytest.mark.usefixtures("home")
def test_the_command_gives_zero_points_and_every_matrix_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = fresh_seed()
    source = write_foreign("genai-llama", tmp_path, seed)
    code, out, _ = run(capsys, str(source), "--asymmetric", "--group", "32", "--json")
    assert code == 0
    facts = json.loads(out)
    record = json.loads(Path(facts["record"]).read_text(encoding="utf-8"))
    tables = {"embed", "head"}
    body = [one for one in record["matrices"] if not set(one["roles"]) & tables]
    assert {(one["group"], one["symmetric"], one["reason"]) for one in body} == {
        (32, False, "asked for: --group 32; asked for: --asymmetric")
    }
    assert {one["reason"] for one in record["matrices"] if set(one["roles"]) & tables} == {"asked for: --group 32"}
    assert record["options"]["symmetric"] is False and record["command"].endswith("--group 32 --asymmetric")
    nodes = [node for node in ir.load(facts["output"]).graph if node.op_type == "MatMulNBits"]
    four = [node for node in nodes if node.attributes["bits"].as_int() == 4]
    assert four and all(len(node.inputs) > 3 and node.inputs[3] is not None for node in four), seed
    code, _, err = run(capsys, str(source), "--scheme", "w8a8", "--asymmetric")
    assert code == 2 and "scheme w8a8 has no 4-bit weights that could have zero points" in err


@pytest.mark.usefixtures("home")
def test_the_command_refuses_by_name_and_can_only_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_foreign("torch-llama-eager", tmp_path, fresh_seed(), side_branch)
    code, out, err = run(capsys, str(source), "--dry-run")
    assert code == 2 and "not understood: value_head" in out and "--leave-float" in err
    code, out, _ = run(capsys, str(source), "--dry-run", "--leave-float", "--json")
    assert code == 0 and json.loads(out)["not_understood"][0]["weight"] == "value_head"
    assert {path.name for path in tmp_path.iterdir()} >= {"model.onnx"} and not list(tmp_path.glob("*.record.json"))


@pytest.mark.parametrize(("kind", "variant"), [("llama", "all"), ("gemma3_text", "period")])
def test_our_own_float_graph_gets_the_integers_that_a_build_gives_it(kind: str, variant: str, tmp_path: Path) -> None:
    """Tags and names taken off, told again, quantized: packed integers and scales are those of a build, bit for bit."""
    seed = fresh_seed()
    config = arch.find(kind).TINY[variant]
    opened = arch.open_model(recipe.Memory(config, recipe.tensors(config, seed % 1000)))
    target, scheme = load("cpu"), schemes.find("w4a8")

    def decided() -> ir.Model:
        model = opened.build()
        decide.decide(model, scheme, target, tmp_path / "work")
        return model

    built = lower(decided, target, 64, 16).graphs["model"]
    emit.emit(built, target)
    float_graph = lower(opened.build, target, 64, 16).graphs["model"]
    bare(float_graph, seed)
    ir.save(float_graph, tmp_path / "model.onnx")
    request, _ = made(tmp_path / "model.onnx", scheme)
    assert weights_of(ir.load(request.output)) == weights_of(built), seed


def weights_of(model: ir.Model) -> list[bytes]:
    kinds = (ir.DataType.UINT8, ir.DataType.FLOAT16)
    tensors = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    return sorted(tensor.numpy().tobytes() for tensor in tensors if tensor.dtype in kinds)
