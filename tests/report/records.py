"""A record with every section filled in, and the manifest beside it: what pages and tables are made from in tests."""

from appliance.bundle.manifest import FORMAT, Manifest, Provenance, SchemeSummary, TokenizerInfo, Variant
from appliance.bundle.record import (
    AblationRecord,
    EmbeddingRecord,
    EmulationRecord,
    EvaluationRecord,
    GreedyRecord,
    KeptRecord,
    KvLayerRecord,
    KvRecord,
    LayerRecord,
    MatrixRecord,
    Record,
    ReshapedRecord,
    Share,
    SizeRecord,
    SourceRecord,
    StreamRecord,
    TextRecord,
    TokenizerRecord,
    VerdictRecord,
)


def text(name: str = "prose-jargon", delta: float | None = 0.2154) -> TextRecord:
    shares = tuple(Share(first=first, last=last, kl=0.1 + last / 1e4) for first, last in ((0, 16), (16, 32), (32, 64), (64, 100)))
    found = delta is not None
    return TextRecord(
        name=name, sha256="ab" * 32, windows=2, tokens=198, broken=0 if found else 198, reference_nll=3.4 if found else None,
        delta=delta, delta_se=0.0113 if found else None, kl_mean=0.19 if found else None, kl_median=0.08 if found else None,
        kl_p99=1.7 if found else None, same_top=0.733 if found else None, by_position=shares if found else (),
    )  # fmt: skip


def evaluation(**changes: object) -> EvaluationRecord:
    whole = EvaluationRecord(
        target="cpu",
        provider="CPUExecutionProvider",
        ran="files",
        window=100,
        texts=(text(), text("handbook", 0.1822)),
        layers=tuple(
            LayerRecord(name=f"layers.{number}", local_snr_db=20 - number, local_cosine=0.99, snr_db=15 - number, cosine=0.98)
            for number in range(4)
        ),
        ablations=(
            AblationRecord(name="weights", what="weights as shipped, activations float", text="prose-jargon", windows=1,
                           delta=0.21, delta_se=None, kl_mean=0.18, same_top=0.7),
            AblationRecord(name="head", what="only the head", text="prose-jargon", windows=1, delta=-0.001, delta_se=None,
                           kl_mean=0.001, same_top=0.99),
        ),
        greedy=(
            GreedyRecord(name="chat 1", prompt="Hello?", tokens=48, agreed=7, common=" Hi there", next=" big",
                         reference_next=" small"),
        ),
        tokenizer=TokenizerRecord(against="another reader", texts=2, tokens=1000, equal=True),
        emulation=EmulationRecord(matrices=5, rows=8, worst=3.1e-7, worst_matrix="model.layers.3.mlp.down_proj.weight"),
        command="appliance evaluate small --windows 2",
        seconds=51,
    )  # fmt: skip
    return whole.model_copy(update=changes)


def embedding() -> EmbeddingRecord:
    return EmbeddingRecord(
        text="handbook", sha256="cd" * 32, passages=50, broken=0, cosine_mean=0.9991, cosine_min=0.9978, top1=0.96, top10=0.98,
        rank_correlation=0.999,
    )  # fmt: skip


def record(**changes: object) -> Record:
    matrices = [
        MatrixRecord(name=f"model.layers.{layer}.mlp.{part}_proj.weight", roles=(f"mlp.{part}",), shape=(64, 96), solver="fit",
                     bits=8 if layer == 3 else 4, group=32, activation="block-dynamic", bytes=3456, snr_db=20.0 + layer,
                     saturation=0.01, reason="measured to be sensitive" if layer == 3 else "")
        for layer in range(4)
        for part in ("gate", "down")
    ]  # fmt: skip
    whole = Record(
        scheme="w4a8",
        options={"group": 32},
        solver="fit",
        target="cpu",
        parameters=100_000,
        bits_per_weight=5.22,
        bits_per_body_weight=4.26,
        bytes_by_role={"mlp.gate": 13824},
        activations={"mlp.gate": "block-dynamic"},
        snr_db_by_role={"mlp.gate": 21.5},
        matrices=tuple(matrices),
        float=(KeptRecord(name="model.norm.weight", role="norm", shape=(64,), bytes=256, reason="norm always stays float"),),
        command="appliance build checkpoint --target cpu --scheme w4a8 --name small",
        sizes={
            "cpu": SizeRecord(
                bits_per_weight=5.22,
                bits_per_body_weight=4.26,
                bytes=65250,
                bytes_by_type={"int4 weights": 60000, "scales": 5250},
            )
        },
        evaluation=evaluation(),
        verdict=VerdictRecord(band={"kl": 1.0}, complaint=""),
        files={"cpu/model.onnx": "ef" * 32},
        source=SourceRecord(name="checkpoint", files={"model.safetensors": "12" * 32}),
        versions={"python": "3"},
    )
    return whole.model_copy(update=changes)


def conditions() -> dict[str, object]:
    """What a record has of a bundle that was rotated, with static activations and keys and values in int8."""
    streams = [
        StreamRecord(stream=f"layers.{layer}.{name}", bits=16 if name == "mlp_mid" else 8, low=-1.5, high=2.25, cost_8_bits=1e-4,
                     reason=f"8 bits in layer {layer} cost 7%" if name == "mlp_mid" else "")
        for layer in range(4)
        for name in ("mlp_in", "mlp_mid")
    ]  # fmt: skip
    head = StreamRecord(stream="head_in", bits=16, reason="", cost_8_bits=0, low=-3, high=3)
    first = record().matrices[0]
    wide = {"activation": "static-u16", "activation_reason": "8 bits cost 7% there", "output_loss": 0.0123}
    return {
        "options": {
            "group": None, "symmetric": False, "kv": "int8", "roles": {"mlp.down": {"bits": 8, "group": 0}, "head": {"bits": 0}},
            "weights": {"a": {"bits": 8}, "b": {"bits": 8}},
        },
        "reshaped": ReshapedRecord(seed=0, residual="hadamard 64", obstacle="", heads="hadamard 16", layers=4, folded=9,
                                   tied=True, norms=0, values=4, gated=3),
        "ranges": {"cpu-static": (*streams, head)},
        "kv": KvRecord(dtype="int8", scales="one for each head", tokens=8192, layers=tuple(
            KvLayerRecord(layer=layer, key_snr_db=40.0 - layer, value_snr_db=30.5 + layer) for layer in range(4))),
        "matrices": (first.model_copy(update=wide), *record().matrices[1:]),
    }  # fmt: skip


SAID = (
    "zero points, keys and values in int8, mlp.down 8 bits in one scale a row, head float, 2 weights with forms of their own",
    "residual stream rotated (hadamard 64); value heads of 4 layers rotated (hadamard 16); gains of 9 norms folded into the "
    "weights behind them; a square matrix before the head keeps it tied; equalized: 4 layers' values, 3 feed-forward blocks",
    "cpu-static: 16 bits for 5 of 9 streams, 4 of them because 8 cost most there (layers.0.mlp_mid, layers.1.mlp_mid, "
    "layers.2.mlp_mid, ...)",
    "keys and values in int8, SNR of keys 37.0 dB or more (layer 3), of values 30.5 dB or more (layer 0)",
)
"""What is said of `conditions`."""


def manifest() -> Manifest:
    variant = Variant(
        target="cpu", form="dynamic", graphs={"model": "cpu/model.onnx"}, chunk=16, context=64, activation="block-dynamic"
    )
    return Manifest(
        format=FORMAT,
        name="small",
        architecture="llama",
        parameters=100_000,
        context_length=64,
        vocab_size=300,
        hidden_size=64,
        scheme=SchemeSummary(name="w4a8", roles={}),
        tokenizer=TokenizerInfo(kind="tokenizers", file="tokenizer.json"),
        variants={"cpu": variant},
        files={},
        provenance=Provenance(
            source="checkpoint", command="made up", versions={"python": "3"}, created="2026-11-30T00:00:00+00:00"
        ),
    )
