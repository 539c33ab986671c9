"""A bundle's evaluation against an account of its own: the whole float graph, the decoder, and loops over logits."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from appliance import cli
from appliance.bundle.record import EvaluationRecord, read_record
from appliance.bundle.store import Bundle
from appliance.errors import DeviceError, LossError
from appliance.runtime.decoder import open_decoder
from appliance.runtime.tokenizer import load_tokenizer
from appliance.targets import load
from export import arch, parity
from export.build import BuildRequest, build
from export.checkpoint import open_checkpoint
from quant import band, decide, schemes, texts, verify
from quant.band import Band
from quant.plan import Plan
from quant.scheme import Options, Scheme
from quant.spill import Spilled
from quant.windows import cut
from tests import tiny_embedder
from tests.checkpoints import Llama, write_gguf, write_safetensors

MODEL = Llama(3, 128, 4, 2, 144, vocab=320, context=96)


def seed() -> int:
    return int(np.random.SeedSequence().generate_state(1)[0])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(tmp_path_factory.mktemp("source") / "tiny", replace(MODEL, seed=seed()), "float32", tokenizer=True)


def request_for(source: Path, folder: Path, scheme: Scheme, *, windows: int = 2, accept: bool = False) -> BuildRequest:
    return BuildRequest(
        source, (load("cpu"),), scheme, folder / "tiny", "tiny", 0, "made up", windows=windows, accept_loss=accept
    )  # fmt: skip


def quiet(stage: str, done: int, total: int) -> None:
    """No progress."""


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    scheme = schemes.find("w4a8", Options(group=32))
    return build(request_for(source, tmp_path_factory.mktemp("models"), scheme, windows=3), quiet)


def evaluation(bundle: Bundle) -> EvaluationRecord:
    record = read_record(bundle)
    assert record is not None and record.evaluation is not None
    return record.evaluation


def log_softmax(row: np.ndarray) -> np.ndarray:
    wide = row.astype(np.float64) - float(row.max())
    return wide - math.log(math.fsum(np.exp(wide)))


@pytest.fixture(scope="module")
def both(source: Path, built: Bundle) -> Callable[[list[int]], tuple[np.ndarray, np.ndarray]]:
    """Log-probabilities of every position by the float graph as a whole, and by the shipped one."""
    opened = arch.open_model(open_checkpoint(source))
    model = parity.open_float(opened, parity.reference_target())
    decoder = open_decoder(built, "cpu", 1)

    def run(ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        first, second = parity.logits(model, ids), decoder.run(decoder.new_state(len(ids)), ids, len(ids))
        return np.array([log_softmax(row) for row in first]), np.array([log_softmax(row) for row in second])

    return run


def test_the_figures_are_those_of_the_whole_graphs(
    built: Bundle, both: Callable[[list[int]], tuple[np.ndarray, np.ndarray]]
) -> None:
    found = evaluation(built)
    tokenizer = load_tokenizer(built)
    assert [one.name for one in found.texts] == ["prose-jargon", "handbook"] and found.window == 96
    for told in found.texts:
        text = texts.load(told.name)
        windows = cut(text.name, tokenizer.encode(text.content, special=False, bos=False), length=96, count=3)
        kl, deltas, same, nll = [], [], [], []
        for window in windows:
            p, q = both(window.ids.tolist())
            for at in range(len(window.ids) - 1):
                kl.append(float((np.exp(p[at]) * (p[at] - q[at])).sum()))
                deltas.append(p[at][window.ids[at + 1]] - q[at][window.ids[at + 1]])
                nll.append(-p[at][window.ids[at + 1]])
                same.append(p[at].argmax() == q[at].argmax())
        assert (told.windows, told.tokens, told.broken, told.sha256) == (3, len(kl), 0, text.sha256)
        assert told.kl_mean == pytest.approx(np.mean(kl), rel=2e-3) and np.mean(kl) > 1e-3
        assert told.kl_median == pytest.approx(np.median(kl), rel=2e-2)
        assert told.kl_p99 == pytest.approx(np.percentile(kl, 99), rel=2e-2)
        assert told.delta == pytest.approx(np.mean(deltas), abs=5e-4)
        assert told.reference_nll == pytest.approx(np.mean(nll), rel=1e-4)
        assert told.same_top == pytest.approx(np.mean(same), abs=0.011)
        means = np.array(deltas).reshape(3, -1).mean(1)
        assert told.delta_se == pytest.approx(means.std(ddof=1) / math.sqrt(3), rel=2e-2)


def test_texts_part_where_the_float_model_would_have_gone_another_way(
    built: Bundle, both: Callable[[list[int]], tuple[np.ndarray, np.ndarray]]
) -> None:
    """Both write by themselves, a token at a time, the float graph reading all anew for each."""
    decoder = open_decoder(built, "cpu", 0)
    tokenizer, found = load_tokenizer(built), evaluation(built)
    assert [one.name for one in found.greedy] == ["prose-jargon 1", "prose-jargon 2", "handbook 1", "handbook 2"]
    text = texts.load("prose-jargon")
    windows = cut(text.name, tokenizer.encode(text.content, special=False, bos=False), length=96, count=3)
    prompt = windows[0].ids[:32].tolist()
    told = found.greedy[0]
    assert told.name == "prose-jargon 1" and told.tokens == 48
    state, ids = decoder.new_state(80), list(prompt)
    logits = decoder.run(state, prompt, 1)
    for _ in range(48):
        ids.append(int(logits[-1][: tokenizer.vocab_size].argmax()))
        logits = decoder.run(state, ids[-1:], 1)
    agreed = next((at for at in range(48) if both(ids[: 32 + at])[0][-1].argmax() != ids[32 + at]), 48)
    assert told.agreed == agreed
    assert told.common == tokenizer.decode(ids[32 : 32 + agreed], skip_special=False)


def test_layers_ablations_and_checks_are_all_there(built: Bundle) -> None:
    found = evaluation(built)
    assert [one.name for one in found.layers] == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    for one in found.layers[1:4]:
        assert one.local_snr_db is not None and 8 < one.local_snr_db < 25 and one.snr_db is not None
        assert one.local_cosine is not None and 0.9 < one.local_cosine < 1
    assert found.layers[0].local_snr_db is not None and found.layers[0].local_snr_db > 35, "8 bits"
    first, last = found.layers[1], found.layers[3]
    assert first.snr_db is not None and last.snr_db is not None and first.snr_db > last.snr_db, "loss accumulates"
    alone = {one.name: one for one in found.ablations}
    assert list(alone) == ["weights", "activations", "head"]
    assert alone["weights"].kl_mean > 10 * alone["activations"].kl_mean > 0  # type: ignore[operator]
    assert alone["weights"].kl_mean == pytest.approx(found.texts[0].kl_mean, rel=0.5)
    assert found.tokenizer is not None and found.tokenizer.equal and found.tokenizer.tokens > 50_000
    assert found.emulation is not None and found.emulation.matrices == 22 and found.emulation.worst < 1e-5  # type: ignore[operator]


def test_the_size_is_counted_in_the_files(built: Bundle) -> None:
    """onnx's own reading of the graph: every initializer's bytes, wherever they lie."""
    import onnx

    model = onnx.load(built.file("cpu/model.onnx"))
    total = sum(onnx.numpy_helper.to_array(one).nbytes for one in model.graph.initializer)
    record = read_record(built)
    assert record is not None
    assert record.sizes["cpu"].bytes == total == sum(record.sizes["cpu"].bytes_by_type.values())
    assert record.bits_per_weight == pytest.approx(8 * total / built.manifest.parameters, abs=1e-4)
    weights = {one.name: onnx.numpy_helper.to_array(one) for one in model.graph.initializer}
    body = sum(array.nbytes for name, array in weights.items() if name.startswith("model.layers") or name == "model.norm.weight")
    table = MODEL.vocab * MODEL.hidden
    assert record.bits_per_body_weight == pytest.approx(8 * body / (built.manifest.parameters - table), abs=1e-4)
    int4 = sum(array.nbytes for name, array in weights.items() if name.endswith(".q4"))
    assert record.sizes["cpu"].bytes_by_type["int4 weights"] == int4 > 0


def test_the_report_lies_in_the_bundle(built: Bundle) -> None:
    page = built.file("report.html").read_text(encoding="utf-8")
    assert "tiny" in page and "<svg" in page and "appliance evaluate tiny --source tiny --windows 3" in page
    record = read_record(built)
    assert record is not None and record.verdict is not None and record.verdict.complaint == ""
    assert record.files["cpu/model.onnx"] == built.manifest.files["cpu/model.onnx"].sha256


def altered(monkeypatch: pytest.MonkeyPatch, prefix: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Let quantization change the scales of these weights after it has solved them."""
    solve = decide.solve

    def broken(plan: Plan, *rest: object) -> Spilled:
        spilled = solve(plan, *rest)  # type: ignore[arg-type]
        if plan.name.startswith(prefix):
            scales = np.array(spilled.scales())
            np.save(spilled.folder / f"{spilled.key}.s.npy", change(scales))
        return spilled

    monkeypatch.setattr(decide, "solve", broken)


def doubled(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    altered(monkeypatch, prefix, lambda scales: 2 * scales)


NARROW = Band(kl=0.12, delta=1.0)
"""A random model's probabilities are all alike, and so is what is left of them: its KL is 0.03 to 0.07 when all is well."""


@pytest.fixture
def narrow() -> Scheme:
    return replace(schemes.find("w4a8", Options(group=32)), band=NARROW)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layer_with_doubled_scales_is_caught_and_named(
    layer: int, source: Path, narrow: Scheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled(monkeypatch, f"model.layers.{layer}.")
    with pytest.raises(LossError) as failure:
        build(request_for(source, tmp_path, narrow, windows=1), quiet)
    assert f"look at layers.{layer}, which by itself has the lowest SNR" in str(failure.value)
    assert "tiny is broken: on prose-jargon the mean KL to the float model is" in str(failure.value)
    assert "--accept-loss" in str(failure.value) and failure.value.exit_code == 4
    assert list(tmp_path.iterdir()) == [], "nothing is installed"


def test_a_broken_head_is_named(source: Path, narrow: Scheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doubled(monkeypatch, "model.embed_tokens")
    with pytest.raises(LossError, match=r"look at (embed|head), which"):
        build(request_for(source, tmp_path, narrow, windows=1), quiet)


def test_a_loss_can_be_accepted_and_is_told(
    source: Path, narrow: Scheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubled(monkeypatch, "model.layers.1.")
    bundle = build(request_for(source, tmp_path, narrow, windows=1, accept=True), quiet)
    record = read_record(bundle)
    assert record is not None and record.verdict is not None
    assert record.verdict.accepted and "look at layers.1" in record.verdict.complaint
    assert "Outside the scheme&#x27;s band" in bundle.file("report.html").read_text(encoding="utf-8")


def test_numbers_that_are_none_are_caught(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Infinite scales, which no solver gives: what comes out of the layer is no number."""
    altered(monkeypatch, "model.layers.1.mlp.up", lambda scales: np.full_like(scales, np.inf))
    with pytest.raises(LossError, match=r"logits that are no numbers; look at (the operator of model\.)?layers\.1"):
        build(request_for(source, tmp_path, schemes.find("w4a8", Options(group=32)), windows=1), quiet)


def test_evaluate_measures_the_same_again_and_touches_nothing(
    built: Bundle, source: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in built.path.rglob("*") if path.is_file()}
    assert cli.main(["evaluate", str(built.path), "--source", str(source), "--windows", "3", "--json"]) == 0
    again = EvaluationRecord.model_validate(json.loads(capsys.readouterr().out))
    found = evaluation(built)
    same = {"texts", "ablations", "layers", "greedy", "tokenizer", "provider", "ran"}
    assert again.model_dump(include=same) == found.model_dump(include=same)
    after = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in built.path.rglob("*") if path.is_file()}
    assert after == before
    assert not any((home / "cache").iterdir()), "scratch files are gone"


def test_a_rotated_and_calibrated_bundle_is_measured_again_too(
    source: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its layers stand beside those of the rotated float model, its logits beside the checkpoint's own."""
    text = tmp_path / "calibration.txt"
    text.write_text("Pack my box with five dozen liquor jugs, and mind the quick onyx goblin. " * 40, encoding="utf-8")
    request = request_for(source, tmp_path, schemes.find("w4a8-channel"), windows=1)
    bundle = build(replace(request, targets=(load("cpu-static"),), calibration=text, calibration_tokens=1000), quiet)
    found = evaluation(bundle)
    for one in found.layers[1:4]:
        assert one.local_snr_db is not None and one.local_snr_db > 8, "it is the rotated layer that it is compared with"
    assert found.texts[0].kl_mean is not None and found.texts[0].kl_mean < 0.2
    record = read_record(bundle)
    assert record is not None
    assert record.sizes["cpu-static"].bytes < bundle.file("cpu-static/weights.bin").stat().st_size + 20_000, "shared once"
    assert cli.main(["evaluate", str(bundle.path), "--source", str(source), "--windows", "1", "--json"]) == 0
    again = EvaluationRecord.model_validate(json.loads(capsys.readouterr().out))
    same = {"texts", "ablations", "layers", "greedy"}
    assert again.model_dump(include=same) == found.model_dump(include=same)


def test_evaluate_on_a_text_of_ones_own_and_finds_the_checkpoint_by_its_hash(
    built: Bundle, source: Path, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    call = ["evaluate", str(built.path), "--text", str(text), "--windows", "0", "--report", str(tmp_path / "page.html")]
    assert cli.main(call) == 2
    assert "none of the pulled checkpoints is tiny" in capsys.readouterr().err
    assert cli.main(["pull", str(source), "--yes", "--name", "some-name"]) == 0
    capsys.readouterr()
    assert cli.main(call) == 0
    shown = capsys.readouterr().out
    assert "mine: delta ln PPL" in shown and "(10 windows, 890 tokens)" in shown
    assert "mine" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_evaluate_refuses_another_checkpoint(
    built: Bundle, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_safetensors(tmp_path / "other", replace(MODEL, seed=seed()), "float32", tokenizer=True)
    assert cli.main(["evaluate", str(built.path), "--source", str(other)]) == 2
    assert "is not what tiny was made from" in capsys.readouterr().err


def test_a_band_that_is_left_on_evaluation_is_exit_code_4(
    built: Bundle, source: Path, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(band.Band, "kl", 1e-6)
    scheme = replace(schemes.find("w4a8"), band=Band(kl=1e-6))
    monkeypatch.setattr(schemes, "find", lambda name: scheme)
    assert cli.main(["evaluate", str(built.path), "--source", str(source), "--windows", "1"]) == 4
    out, err = capsys.readouterr()
    assert "outside the band of scheme w4a8: on prose-jargon" in err and "delta ln PPL" in out


@pytest.fixture(params=["safetensors", "gguf"])
def untied(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """With biases and a head of its own; and as a GGUF, whose tokens are spelt out."""
    model = replace(MODEL, seed=seed(), tied=False, hidden=64, heads=2, kv_heads=1, intermediate=128)
    if request.param == "gguf":
        yield write_gguf(tmp_path / "untied.gguf", model, "Q8_0")
    else:
        biased = replace(model, attention_bias=True, mlp_bias=True)
        yield write_safetensors(tmp_path / "untied", biased, "float16", tokenizer=True)


def test_other_shapes_of_models_are_measured_too(untied: Path, tmp_path: Path) -> None:
    found = evaluation(build(request_for(untied, tmp_path, schemes.find("w8a8"), windows=1), quiet))
    assert [one.name for one in found.layers] == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert found.texts[0].kl_mean is not None and found.texts[0].kl_mean < 5e-3
    assert found.tokenizer is not None and found.tokenizer.equal
    assert found.tokenizer.against.startswith("the token table" if untied.suffix else "the checkpoint's tokenizer.json")


def test_the_float_scheme_loses_nothing(source: Path, tmp_path: Path) -> None:
    found = evaluation(build(request_for(source, tmp_path, schemes.find("float"), windows=1), quiet))
    assert found.texts[0].kl_mean is not None and found.texts[0].kl_mean < 1e-6
    assert found.ablations == () and found.emulation is None
    assert all(one.agreed == one.tokens for one in found.greedy)


def test_an_embedding_model_is_judged_by_its_vectors(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tiny_embedder.install(tmp_path / "models", tmp_path, "w8a8")
    found = evaluation(bundle)
    assert found.texts == () and found.layers == () and [one.text for one in found.embeddings] == ["prose-jargon", "handbook"]
    for one in found.embeddings:
        assert one.passages == 32 and one.broken == 0
        assert one.cosine_min is not None and one.cosine_mean is not None and 0.99 < one.cosine_min < one.cosine_mean < 1
        assert one.top10 is not None and one.top10 > 0.8
    assert found.tokenizer is not None and found.tokenizer.equal and found.tokenizer.tokens > 10_000
    assert cli.main(["evaluate", str(bundle.path), "--source", str(tmp_path / "checkpoint"), "--windows", "2", "--json"]) == 0
    again = EvaluationRecord.model_validate(json.loads(capsys.readouterr().out))
    assert again.embeddings == found.embeddings


def test_a_broken_embedding_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    altered(monkeypatch, "encoder.layer.", lambda scales: 3 * scales)
    with pytest.raises(LossError, match="vectors have a mean cosine of"):
        tiny_embedder.install(tmp_path / "models", tmp_path, "w8a8")


def test_graphs_for_a_device_that_is_not_here_are_stood_in_for(
    built: Bundle, source: Path, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their layers run one by one on the processor, and the figures are those of the graphs, up to the order of sums."""

    def absent(*rest: object) -> None:
        raise DeviceError("no such device", "plug it in")

    monkeypatch.setattr(verify, "open_shipped", absent)
    assert cli.main(["evaluate", str(built.path), "--source", str(source), "--windows", "3", "--json"]) == 0
    again, found = EvaluationRecord.model_validate(json.loads(capsys.readouterr().out)), evaluation(built)
    assert again.ran == "the graphs cannot run here (no such device)" and again.greedy == ()
    for one, other in zip(again.texts, found.texts, strict=True):
        assert one.kl_mean == pytest.approx(other.kl_mean, rel=0.02) and one.windows == 3
        assert one.delta == pytest.approx(other.delta, abs=2e-3)


def test_graphs_that_nobody_can_run_are_refused(tmp_path: Path) -> None:
    """onnxruntime's attention takes heads of 16, 32 ... numbers, and says so only when it runs."""
    odd = Llama(2, 96, 4, 2, 112, vocab=320, context=96)
    source = write_safetensors(tmp_path / "odd", odd, "float32", tokenizer=True)
    with pytest.raises(LossError, match=r"the graphs were written, and do not run: .*head_size shall be a multiple of 16"):
        build(request_for(source, tmp_path / "models", schemes.find("w4a8", Options(group=32)), windows=1), quiet)
