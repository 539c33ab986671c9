"""The decision on a canonical graph: who is quantized, what is kept, what is refused, how it resumes."""

import errno
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from appliance.errors import BadInput, CheckpointError, TargetError
from quant import spill
from quant.decide import Decision, decide
from quant.scheme import Options
from quant.schemes import find
from quant.solvers import fit
from tests.quant.canonical import Weight, linear_model, target, tied_model


def table(rows: int = 50, columns: int = 96) -> np.ndarray:
    return np.random.default_rng().standard_normal((rows, columns)).astype(np.float32)


def decide_on(model: ir.Model, work: Path, options: Options | None = None, name: str = "w4a8", **weights: object) -> Decision:
    return decide(model, find(name, options), target("cpu", **weights), work)


def test_nodes_attributes_and_tags(tmp_path: Path) -> None:
    model = tied_model(table())
    decide_on(model, tmp_path)
    nodes = {node.name: node for node in model.graph}
    linear, embedding, head = nodes["/model/gate/Linear"], nodes["/model/embed/Embedding"], nodes["/model/head/Linear"]
    assert [node.op_type for node in model.graph] == [
        "QuantEmbedding", "Mul", "QuantLinear", "QuantLinear", "Add", "QuantLinear",
    ]  # fmt: skip
    assert {name: attribute.value for name, attribute in linear.attributes.items()} == {
        "bits": 4, "group": 64, "activation": "block-dynamic",
    }  # fmt: skip
    assert {name: attribute.value for name, attribute in embedding.attributes.items()} == {"bits": 8, "group": 64}
    assert embedding.inputs[1] is head.inputs[1] and embedding.inputs[2] is head.inputs[2]
    for value in (linear.inputs[1], linear.inputs[2]):
        assert value is not None and dict(value.metadata_props) == {
            "role": "mlp.gate", "stream": "layers.0.in", "layer": "0",
        }  # fmt: skip
    assert not {"embed.weight", "gate.weight", "up.weight"} & set(model.graph.initializers), "no float twin is left"
    assert [value.name for value in model.graph.outputs] == ["rows", "logits"]
    assert isinstance(linear.inputs[1].const_value, ir.LazyTensor)


def test_what_stays_float_is_listed_with_its_bytes_and_why(tmp_path: Path) -> None:
    decision = decide_on(tied_model(table()), tmp_path, Options(roles={"mlp.up": {"bits": 0}}))
    assert {(one.name, one.bytes, one.reason) for one in decision.kept} == {
        ("norm.weight", 96 * 4, "norm always stays float"),
        ("up.weight", 96 * 96 * 4, "the options ask for it, of all mlp.up"),
    }
    assert [matrix.name for matrix in decision.matrices] == ["embed.weight", "gate.weight"]
    assert decision.matrices[0].roles == ("embed", "head")
    assert decision.parameters == 50 * 96 + 2 * 96 * 96 + 96


def test_what_a_target_asks_for_is_said_to_be_the_targets(tmp_path: Path) -> None:
    npu = target("cpu").model_copy(update={"name": "npu", "role_overrides": {"mlp.up": {"bits": 0}, "mlp.gate": {"bits": 8}}})
    decision = decide(tied_model(table()), find("w4a8"), npu, tmp_path)
    assert [one.reason for one in decision.kept if one.role == "mlp.up"] == ["target npu asks for it, of all mlp.up"]
    reasons = {matrix.name: matrix.reason for matrix in decision.matrices}
    assert reasons == {"embed.weight": "", "gate.weight": "target npu asks for it, of all mlp.gate"}
    plain = decide(tied_model(table()), find("float"), target("cpu"), tmp_path)
    assert "the scheme keeps mlp.up float" in {one.reason for one in plain.kept}


def test_the_float_scheme_changes_nothing(tmp_path: Path) -> None:
    model = tied_model(table())
    decision = decide_on(model, tmp_path, name="float")
    assert decision.matrices == () and len(decision.kept) == 4
    assert [node.op_type for node in model.graph].count("Linear") == 3


@pytest.mark.parametrize(("role", "message"), [(None, "has no role"), ("mlp.dwon", 'unknown role "mlp.dwon"; did you mean')])
def test_a_weight_without_a_role_is_an_error_that_names_it(role: str | None, message: str, tmp_path: Path) -> None:
    model = linear_model(Weight("proj.weight", role, table()))
    with pytest.raises(BadInput, match=message) as caught:
        decide_on(model, tmp_path)
    assert "proj.weight" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "weights", "message"),
    [
        (Options(), {"bits": (8,)}, "takes 8 bits"),
        (Options(group=32), {"groups": (64, 128)}, "takes groups of 64, 128"),
        (Options(group=512), {"groups": (512,)}, "MatMulNBits takes groups of 16"),
        (Options(), {"operator": "DequantizeLinear", "bits": (4,), "_roles": {"embed": {"bits": 4}, "head": {"bits": 4}}},
         "an embedding takes 8 bits"),
        (Options(roles={"head": {"group": 32}}), {}, "is both embedding and head"),
    ],
)  # fmt: skip
def test_a_target_that_cannot_hold_the_scheme_says_so(
    options: Options, weights: dict[str, object], message: str, tmp_path: Path
) -> None:
    roles = weights.pop("_roles", None)
    if roles:
        options = Options(roles=roles)  # type: ignore[arg-type]
    model = tied_model(table())
    with pytest.raises(TargetError, match=message):
        decide_on(model, tmp_path, options, **weights)
    assert not any(node.op_type.startswith("Quant") for node in model.graph), "nothing was changed"
    assert not list(tmp_path.iterdir())


def test_activations_that_the_target_does_not_compute_are_refused(tmp_path: Path) -> None:
    found = target("cpu")
    static = found.model_copy(update={"flags": found.flags.model_copy(update={"activations": ("static-u16",)})})
    with pytest.raises(TargetError, match=r"wants block-dynamic activations.*computes in static-u16"):
        decide(tied_model(table()), find("w4a8"), static, tmp_path)


def test_a_damaged_weight_is_named_and_leaves_no_file(tmp_path: Path) -> None:
    weight = table()
    weight[7, 3] = np.nan
    with pytest.raises(CheckpointError, match=r"weight proj\.weight: rows 0 to 49: NaN or infinity"):
        decide_on(linear_model(Weight("proj.weight", "attn.q", weight)), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_rerun_uses_what_is_there_and_reads_no_weight(tmp_path: Path) -> None:
    weight, reads = table(), []
    for _ in range(2):
        decide(tied_model(weight, reads=reads), find("w4a8"), target("cpu"), tmp_path, source="sha256:1")
    assert sorted(reads) == ["embed.weight", "gate.weight", "up.weight"]
    decide(tied_model(weight, reads=reads), find("w4a8"), target("cpu"), tmp_path, source="sha256:2")
    assert len(reads) == 6, "another checkpoint is another key"


def test_without_a_fingerprint_the_values_are_the_key(tmp_path: Path) -> None:
    weight = table()
    decide_on(linear_model(Weight("proj.weight", "attn.q", weight)), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    decide_on(linear_model(Weight("other.weight", "attn.k", weight)), tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    weight[0, 0] += 1
    decide_on(linear_model(Weight("proj.weight", "attn.q", weight)), tmp_path)
    decide_on(linear_model(Weight("proj.weight", "attn.q", weight)), tmp_path, Options(group=32))
    assert len(list(tmp_path.iterdir())) == 3 * len(before)


def test_a_stopped_build_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, fits = table(), []

    def stop_at_the_second(done: int, total: int, label: str) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decide(tied_model(weight), find("w4a8"), target("cpu"), tmp_path, stop_at_the_second)
    solve = fit.solve
    monkeypatch.setattr(fit, "solve", lambda *args: fits.append(args[0].shape) or solve(*args))
    decide(tied_model(weight), find("w4a8"), target("cpu"), tmp_path)
    assert fits == [(96, 96), (96, 96)], "the table was there"


@pytest.mark.parametrize("ending", [".q.npy", ".s.npy", ".json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "empty"])
def test_a_file_that_is_not_whole_is_written_again(ending: str, damage: str, tmp_path: Path) -> None:
    weight = table()
    decide_on(linear_model(Weight("proj.weight", "attn.q", weight)), tmp_path)
    path = next(path for path in tmp_path.iterdir() if path.name.endswith(ending))
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"")
    decide_on(linear_model(Weight("proj.weight", "attn.q", weight)), tmp_path)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("ending", [".q.npy", ".s.npy"])
def test_a_file_of_another_shape_is_written_again(ending: str, tmp_path: Path) -> None:
    weight = table()
    decide_on(linear_model(Weight("proj.weight", "attn.q", weight)), tmp_path)
    path = next(path for path in tmp_path.iterdir() if path.name.endswith(ending))
    whole = path.read_bytes()
    np.save(path, np.load(path)[:7])
    decide_on(linear_model(Weight("proj.weight", "attn.q", weight)), tmp_path)
    assert path.read_bytes() == whole


def test_a_stop_in_the_middle_of_a_matrix_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(spill, "_save", stop)
    with pytest.raises(KeyboardInterrupt):
        decide_on(linear_model(Weight("proj.weight", "attn.q", table())), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array_header_1_0", full)
    with pytest.raises(OSError, match="No space left"):
        decide_on(linear_model(Weight("proj.weight", "attn.q", table())), tmp_path)
    assert not list(tmp_path.iterdir())


def test_progress_counts_parameters(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    decide(tied_model(table()), find("w4a8"), target("cpu"), tmp_path, lambda *now: seen.append(now))
    total = 50 * 96 + 2 * 96 * 96
    assert seen == [
        (0, total, "embed.weight"), (4800, total, "gate.weight"), (4800 + 9216, total, "up.weight"), (total, total, ""),
    ]  # fmt: skip
