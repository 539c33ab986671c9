"""Every file that the composer writes is checked against what was decided; a spoiled one is no bundle."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from appliance import cli, targets
from appliance.bundle import store
from appliance.bundle.manifest import Variant
from appliance.errors import BundleError
from export import arch, save
from export.checkpoint import open_checkpoint
from export.stages.job import BuildRequest, Job
from export.stages.keep import keep_quantized
from export.stages.variants import write_variants
from export.tokenizer import write_tokenizer
from quant import decide, reshape, schemes, structure
from quant.graph import lazy
from quant.kv import KvScales
from quant.scheme import Options
from tests.checkpoints import Llama, write_gguf, write_safetensors
from tests.quant.test_structure import spoil
from tests.static_pair import fresh_seed


def written(
    source: Path,
    folder: Path,
    *names: str,
    scheme: str = "w4a8",
    options: Options | None = None,
    keep: bool = False,
    kv: Mapping[int, KvScales] | None = None,
) -> dict[str, Variant]:
    """The graphs of a build, without what it measures on them."""
    wanted = tuple(targets.load(name) for name in names)
    request = BuildRequest(source, wanted, schemes.find(scheme, options), folder / "bundle", "m", 0, "", keep_quantized=keep)
    opened = arch.open_model(open_checkpoint(source))
    with store.writing(request.destination) as writer:
        tokenizer = write_tokenizer(opened.checkpoint, writer)
        job = Job(request, opened, writer, lambda *_: None, {"source": "fingerprint"}, tokenizer, request.scheme, kv=kv)
        return write_variants(keep_quantized(job))[0]


CASES: Mapping[str, tuple[str, Options]] = {
    "tied": ("w4a8", Options()),
    "zero points": ("w4a8", Options(symmetric=False)),
    "some float": ("w4a8", Options(roles={role: {"bits": 0} for role in ("attn.q", "attn.k", "attn.v", "mlp.up")})),
    "one of q, k and v wider": ("w4a8", Options(roles={"attn.v": {"bits": 8}})),
    "all float": ("float", Options()),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tied", [True, False])
def test_what_the_composer_writes_passes(case: str, tied: bool, tmp_path: Path) -> None:
    scheme, options = CASES[case]
    folder = write_safetensors(tmp_path / "source", Llama(tied=tied, attention_bias=True, mlp_bias=True), tokenizer=True)
    written(folder, tmp_path, "cpu", "cpu-static", "openvino", scheme=scheme, options=options)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_what_was_carried_over_passes(kind: str, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "x.gguf", Llama(hidden=64, intermediate=96), kind)
    written(source, tmp_path, "cpu", "cpu-static", keep=True)


def test_a_byte_that_is_lost_on_the_way_to_the_disk_stops_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = save.save_all

    def careless(graphs: dict, folder: Path, weights: str, progress: object = None) -> dict:  # type: ignore[type-arg]
        paths = write(graphs, folder, weights, None)
        raw = np.memmap(folder / weights, np.uint8, "r+")
        raw[len(raw) // 2] ^= 1
        raw.flush()
        return paths

    monkeypatch.setattr(save, "save_all", careless)
    folder = write_safetensors(tmp_path / "source", Llama(hidden=256, intermediate=704), tokenizer=True)
    with pytest.raises(BundleError, match="are not those that were decided"):
        written(folder, tmp_path, "cpu")
    assert not (tmp_path / "bundle").exists()


def random_kv(model: Llama, seed: int) -> dict[int, KvScales]:
    rng, shape = np.random.default_rng(seed), (model.kv_heads, 1, model.hidden // model.heads)
    draw = [rng.uniform(0.01, 0.1, (2, *shape)).astype(np.float32) for _ in range(model.layers)]
    return {layer: KvScales(key, value) for layer, (key, value) in enumerate(draw)}


SPOILED: Mapping[str, tuple[str, str, str]] = {
    "a norm gain": ("cpu", "model.layers.1.input_layernorm.weight", "model.layers.1.input_layernorm.weight"),
    "a norm gain of the pair": ("cpu-static", "model.layers.1.input_layernorm.weight", "model.layers.1.input_layernorm.weight"),
    "one bias of three": ("cpu", "model.layers.0.self_attn.qkv_proj.bias", "model.layers.0.self_attn.q_proj.bias"),
    "a bias of the pair": ("cpu-static", "model.layers.0.self_attn.k_proj.bias", "model.layers.0.self_attn.k_proj.bias"),
    "a key scale": ("cpu", "layers.1.key.scales", "layers.1.key.scales"),
    "a value scale of the pair": ("cpu-static", "layers.0.value.scales", "layers.0.value.scales"),
    "a float matrix": ("cpu", "model.layers.1.mlp.up_proj.weight.transposed", "model.layers.1.mlp.up_proj.weight"),
    "a joined float matrix": (
        "cpu", "model.layers.1.self_attn.qkv_proj.weight.transposed", "model.layers.1.self_attn.q_proj.weight",
    ),
    "an angle": ("cpu-static", "rope.cos", "rope.cos"),
}  # fmt: skip
"""By case: target, the initializer that is spoiled, the tensor of the checkpoint that the error must name."""


@pytest.mark.parametrize("case", SPOILED)
def test_what_is_no_quantized_matrix_is_compared_too(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of the first number, in one of the files, right after they were written."""
    target, name, says = SPOILED[case]
    seed, write = fresh_seed(), save.save_all

    def careless(graphs: dict, folder: Path, *rest: Any) -> dict:  # type: ignore[type-arg]
        paths = write(graphs, folder, *rest)
        spoil(list(paths.values())[-1], name, lambda raw: raw.__setitem__(0, raw[0] ^ 1))
        return paths

    model = Llama(attention_bias=True, mlp_bias=True, seed=seed)
    folder = write_safetensors(tmp_path / "source", model, tokenizer=True)
    roles = ("attn.q", "attn.k", "attn.v", "mlp.up") if "matrix" in case else ()
    options = Options(kv="int8", roles={role: {"bits": 0} for role in roles})
    written(folder, tmp_path / "whole", target, options=options, kv=random_kv(model, seed))
    monkeypatch.setattr(save, "save_all", careless)
    with pytest.raises(BundleError, match=rf"1 numbers of {re.escape(says)} are not"):
        written(folder, tmp_path / "spoiled", target, options=options, kv=random_kv(model, seed))


def test_the_check_runs_for_every_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    check = structure.check

    def watched(files: Iterable[Path], *rest: Any) -> None:
        seen.append([path.name for path in files])
        check(files, *rest)

    monkeypatch.setattr(structure, "check", watched)
    folder = write_safetensors(tmp_path / "source", Llama(), tokenizer=True)
    written(folder, tmp_path, "cpu", "cpu-static")
    assert seen == [["model.onnx"], ["prefill.onnx", "decode.onnx"]]


@pytest.mark.parametrize(("scheme", "symmetric"), [("w4a8", True), ("w4a8", False), ("w4a8-rtn", True), ("w8a8", True)])
def test_a_rerun_gives_the_same_bytes(scheme: str, symmetric: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing left of the first run, and with another number of threads for the solver."""
    source = write_safetensors(tmp_path / "source", Llama(hidden=96, heads=3, kv_heads=1, intermediate=160), tokenizer=True)
    files: list[dict[str, bytes]] = []
    checked = structure.check

    def kept(paths: Iterable[Path], *rest: Any) -> None:
        paths = list(paths)
        checked(paths, *rest)
        files.append({path.name: path.read_bytes() for path in [*paths, paths[0].with_name("weights.bin")]})

    monkeypatch.setattr(structure, "check", kept)
    solve = decide.solve
    for threads in (2, 1):
        monkeypatch.setattr(decide, "solve", lambda *parts, threads=threads: solve(*parts[:-1], threads))
        written(source, tmp_path / str(threads), "cpu", "cpu-static", scheme=scheme, options=Options(symmetric=symmetric))
    assert len(files) == 4 and files[:2] == files[2:]


def test_a_reshaping_that_moves_logits_stops_the_build(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rotated float model is held against the checkpoint's own before anybody believes what quantizing it cost.

    That an honest one passes is shown by every build of such a scheme.
    """
    apply = reshape.Reshaping.apply

    def careless(self: reshape.Reshaping, model: ir.Model) -> reshape.Reshaped:
        told = apply(self, model)
        value = model.graph.initializers["model.layers.0.mlp.up_proj.weight"]
        tensor = value.const_value
        assert tensor is not None
        shape = tuple(tensor.shape.numpy())
        value.const_value = lazy(str(value.name), tensor.dtype, shape, lambda: tensor.numpy() * np.float32(1.01))
        return told

    monkeypatch.setattr(reshape.Reshaping, "apply", careless)
    folder = write_safetensors(home / "source", Llama(), tokenizer=True)
    words = ["build", str(folder), "--name", "m", "--scheme", "w4a8-channel", "--target", "cpu-static", "--windows", "1"]
    assert cli.main([*words, "--calibration-tokens", "1024", "--accept-loss"]) == 2
    assert "the rotation and equalization of the float model changes logits by 0.0" in capsys.readouterr().err
    assert not (home / "models" / "m").exists()
