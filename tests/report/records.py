"""A record with every section filled in, and the manifest beside it: what pages and tables are made from in tests."""

from appliance.bundle.manifest import FORMAT, Manifest, Provenance, SchemeSummary, TokenizerInfo, Variant
from appliance.bundle.record import (
    AblationRecord,
    EmbeddingRecord,
    EmulationRecord,
    EvaluationRecord,
    GreedyRecord,
    KeptRecord,
    LayerRecord,
    MatrixRecord,
    Record,
    Share,
    SizeRecord,
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
        verdict=VerdictRecord(band={"KL": 1.0}, complaint=""),
        files={"cpu/model.onnx": "ef" * 32},
    )
    return whole.model_copy(update=changes)


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
