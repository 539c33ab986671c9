"""Saving: same bytes every time, tensors once, one in memory at a time, nothing left when it fails."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from appliance.targets import load
from export import arch, parity
from export.graph import Nodes, add_initializer, lazy
from export.lower import lower
from export.save import ALIGNMENT, save, save_all
from tests.golden import recipe

CONFIG = arch.find("llama").TINY["all"]


def lowered(**config: Any) -> ir.Model:
    said = {**CONFIG, **config}
    opened = arch.open_model(recipe.Memory(said, recipe.tensors(said, 1)))
    return lower(opened.build, parity.reference_target(), 0, 1).graphs["model"]


def graph_of(*tensors: ir.TensorProtocol) -> ir.Model:
    """Sums of initializers."""
    graph = ir.Graph([], [], nodes=[], name="sums", opset_imports={"": 21})
    at = Nodes(graph, "")
    total = None
    for tensor in tensors:
        value = at.value("ReduceSum", [add_initializer(graph, str(tensor.name), tensor, {})], {"keepdims": 0})
        total = value if total is None else at.value("Add", [total, value])
    assert total is not None
    total.name, total.type, total.shape = "total", ir.TensorType(ir.DataType.FLOAT), ir.Shape([])
    graph.outputs.append(total)
    return ir.Model(graph, ir_version=10)


def random(name: str, size: int, seed: int) -> ir.LazyTensor:
    return lazy(name, (size,), ir.DataType.FLOAT, lambda: np.random.default_rng(seed).random(size, np.float32))


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        save(lowered(), folder, "model")
    for name in ("model.onnx", "model.bin"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    assert sorted(path.name for path in folders[0].iterdir()) == ["model.bin", "model.onnx"]


def test_weights_lie_outside_on_page_boundaries(tmp_path: Path) -> None:
    path = save(lowered(), tmp_path, "model")
    kept = onnx.load(path, load_external_data=False).graph.initializer
    outside = [{one.key: one.value for one in tensor.external_data} for tensor in kept if tensor.external_data]
    assert len(outside) > 10 and all(int(one["offset"]) % ALIGNMENT == 0 for one in outside)
    assert {one["location"] for one in outside} == {"model.bin"}
    names = {tensor.name for tensor in kept if not tensor.external_data}
    assert "logits_to_keep" in names and not any(name.endswith("proj.weight.transposed") for name in names)
    assert path.stat().st_size < 100_000


def test_the_model_is_as_before_after_saving(tmp_path: Path) -> None:
    model = lowered()
    before = {name: value.const_value for name, value in model.graph.initializers.items()}
    save(model, tmp_path, "model")
    assert all(model.graph.initializers[name].const_value is tensor for name, tensor in before.items())


def test_equal_tensors_are_written_once_across_graphs(tmp_path: Path) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    graphs = {
        "prefill": graph_of(random("x", 5000, seed), random("y", 3000, seed + 1)),
        "decode": graph_of(random("other", 5000, seed)),
    }
    told: list[tuple[str, int, int]] = []
    paths = save_all(graphs, tmp_path, "weights.bin", lambda *one: told.append(one))
    assert (tmp_path / "weights.bin").stat().st_size == 5 * 4096 + 3000 * 4, seed
    assert told == [("x", 0, 3), ("y", 1, 3), ("other", 2, 3)]
    x, y = (np.random.default_rng(one).random(size, np.float32) for one, size in ((seed, 5000), (seed + 1, 3000)))
    for name, wanted in (("prefill", x.sum() + y.sum()), ("decode", x.sum())):
        session = onnxruntime.InferenceSession(str(paths[name]), providers=["CPUExecutionProvider"])
        np.testing.assert_allclose(session.run(None, {})[0], wanted, rtol=1e-5, err_msg=str(seed))


@pytest.mark.parametrize("dtype", [ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT8, ir.DataType.FLOAT16])
def test_every_kind_of_weight_is_kept(dtype: ir.DataType, tmp_path: Path) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    array = np.random.default_rng(seed).integers(0, 8, (63, 129)).astype(dtype.numpy())
    graph = ir.Graph([], [], nodes=[], name="cast", opset_imports={"": 21})
    weight = add_initializer(graph, "weight", lazy("weight", (63, 129), dtype, lambda: array), {})
    out = Nodes(graph, "").value("Cast", [weight], {"to": int(ir.DataType.FLOAT)})
    out.name, out.type, out.shape = "out", ir.TensorType(ir.DataType.FLOAT), ir.Shape([63, 129])
    graph.outputs.append(out)
    path = save(ir.Model(graph, ir_version=10), tmp_path, "model")
    assert (tmp_path / "model.bin").exists()
    found = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {})[0]
    assert np.array_equal(found, array.astype(np.float32)), seed


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_nothing_is_left_when_it_fails(failure: BaseException, tmp_path: Path) -> None:
    def fail() -> np.ndarray:
        raise failure

    (tmp_path / "mine.txt").write_text("stays")
    model = graph_of(random("x", 5000, 1), lazy("broken", (5000,), ir.DataType.FLOAT, fail))
    with pytest.raises(type(failure)):
        save(model, tmp_path, "model")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_full_disk_is_told_as_the_system_tells_it(tmp_path: Path) -> None:
    os.symlink("/dev/full", tmp_path / "model.bin")
    with pytest.raises(OSError, match="No space left") as caught:
        save(graph_of(random("x", 50000, 1)), tmp_path, "model")
    assert caught.value.errno == errno.ENOSPC and list(tmp_path.iterdir()) == []


def test_canonical_operators_are_not_saved(tmp_path: Path) -> None:
    model = arch.open_model(recipe.Memory(CONFIG, recipe.tensors(CONFIG, 1))).build()
    with pytest.raises(AssertionError, match="canonical operators"):
        save(model, tmp_path, "model")
    assert list(tmp_path.iterdir()) == []


PEAK = """
import re, sys
from pathlib import Path
from appliance.targets import load
from export import arch
from export.checkpoint import open_checkpoint
from export.lower import lower
from export.save import save
def peak():  # of this program image: getrusage would count what forked it
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
opened = arch.open_model(open_checkpoint(Path(sys.argv[1])))
before = peak()
save(lower(opened.build, load("cpu"), 0, 1).graphs["model"], Path(sys.argv[2]), "model")
print((peak() - before) / 1024)
"""


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path: Path) -> None:
    """8 and 32 layers of the same width: 24 and 94 MB of weights, the same peak but for a few MB."""
    from tests.checkpoints import Llama, write_safetensors

    peaks = {}
    for layers in (8, 32):
        source = write_safetensors(tmp_path / f"source-{layers}", Llama(layers, 256, 4, 2, 704, vocab=512), "bfloat16")
        folder = tmp_path / f"made-{layers}"
        folder.mkdir()
        run = subprocess.run([sys.executable, "-c", PEAK, source, folder], capture_output=True, text=True, check=True)
        peaks[layers] = float(run.stdout)
        assert (folder / "model.bin").stat().st_size > layers * 2.9e6
    assert peaks[32] < peaks[8] + 6, peaks


def test_a_target_of_the_contrib_form_runs_from_disk(tmp_path: Path) -> None:
    opened = arch.open_model(recipe.Memory(CONFIG, recipe.tensors(CONFIG, 1)))
    path = save(lower(opened.build, load("cpu"), 0, 1).graphs["model"], tmp_path, "model")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    names = {one.name for one in onnxruntime.InferenceSession(str(path), options).get_inputs()}
    assert {"input_ids", "attention_mask", "past_key_values.1.value"} <= names
