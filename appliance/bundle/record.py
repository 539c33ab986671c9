"""The verification record: what was decided, and what was measured of it, typed and strict.

Knows: every key of `record.json`, what it means and what it was measured on: the bundle's files, or the quantized model run a
part at a time. Does not know: how anything was measured (`quant.evaluate`, `quant.record`), or how it is shown
(`appliance.report`).
"""

import json
from typing import Any

from pydantic import Field

from appliance.bundle.store import RECORD, Bundle
from appliance.errors import BundleError
from appliance.strict import StrictModel, read


class MatrixRecord(StrictModel):
    """One quantized matrix."""

    name: str
    roles: tuple[str, ...] = Field(description="All uses of it: a tied one serves embed and head.")
    shape: tuple[int, int] = Field(description="Rows (outputs), columns (inputs).")
    bits: int
    group: int = Field(description="Weights that share a scale along a row; 0 = the whole row.")
    symmetric: bool = True
    offsets: bool = Field(
        default=False, description="Every group has a float offset: carried over from a checkpoint that has them."
    )
    element: str = Field(default="int", description='"int" or "mxfp4" (OCP Microscaling).')
    solver: str = ""
    fell_back: str = Field(default="", description="Why its solver took the plainer way.")
    reason: str = Field(default="", description="Why its form is an exception to the scheme.")
    cost_kl: float | None = Field(
        default=None,
        description="Nats of KL a token, on held-out calibration text, that the float model loses when this weight alone, with "
        "those of `cost_with`, is quantized in the form that the scheme gives it. None = no budget looked at it.",
    )
    cost_with: tuple[str, ...] = Field(default=(), description="Weights that were measured and chosen for together with it.")
    cost_by_form: dict[str, float] = Field(
        default={},
        description='What the budget could choose for it and those of `cost_with`, and the KL that it expected of each: "4/32", '
        '"4/0" (a whole row), "4/32 zero points". It counts the rounding of activations too, which `cost_kl` does not.',
    )
    proxy: float | None = Field(
        default=None, description="Loss of its outputs on the calibration text, relative; vectors count as their errors do."
    )
    plain_proxy: float | None = Field(default=None, description="The same of the plain fit, where the solver compared the two.")
    output_loss: float | None = Field(
        default=None,
        description="Loss of its outputs on the evaluation's first text, relative: mean |x(W-W')^T|^2 / mean |xW^T|^2, x as the "
        "float model has it. The same measure for every scheme. None = not measured.",
    )
    activation: str
    activation_reason: str = Field(default="", description="Why its activations have another width than the scheme gives.")
    bytes: int
    snr_db: float | None = Field(description="Of the weights; None = nothing was lost.")
    saturation: float = Field(description="Share of weights that were clipped.")


class KeptRecord(StrictModel):
    """One tensor that stayed as the checkpoint has it."""

    name: str
    role: str
    shape: tuple[int, ...]
    bytes: int
    reason: str


class CarriedRecord(StrictModel):
    """Matrices that were carried over from one stored type, to the last bit."""

    matrices: int
    parameters: int


class RequantizedRecord(StrictModel):
    """One matrix that was not."""

    name: str
    stored: str = Field(description='What the checkpoint keeps it in: "Q6_K", "BF16"; "" = it was changed before.')
    parameters: int
    reason: str


class KeptQuantizedRecord(StrictModel):
    """What --keep-quantized came to."""

    carried: dict[str, CarriedRecord] = Field(description="By stored type.")
    requantized: tuple[RequantizedRecord, ...]


class KvLayerRecord(StrictModel):
    """Keys and values of one layer, rounded, on the first tokens of the calibration text."""

    layer: int
    key_snr_db: float
    value_snr_db: float


class KvRecord(StrictModel):
    """Keys and values that are kept in int8."""

    dtype: str
    scales: str = Field(description="What has a scale of its own, and what it was found from.")
    tokens: int = Field(description="Of calibration text.")
    layers: tuple[KvLayerRecord, ...]


class ReshapedRecord(StrictModel):
    """What was done to the float model first: exact changes that make it easier to quantize."""

    seed: int = Field(description="Of all rotations.")
    residual: str = Field(description='The rotation of the residual stream, e.g. "hadamard 12x12x4"; "" = not rotated.')
    obstacle: str = Field(description='Why the residual stream was not rotated; "" = it was.')
    heads: str = Field(description='The rotation of each value head; "" = none.')
    layers: int = Field(description="Layers whose value heads were rotated.")
    folded: int = Field(description="Norms whose gain went into the weights behind them.")
    tied: bool = Field(description="Whether a square matrix before the head keeps it tied to the embedding.")
    norms: int = Field(description="Norms that were equalized with the weights behind them.")
    values: int = Field(description="Layers whose values were equalized with the output projection.")
    gated: int = Field(description="Feed-forward blocks whose up and down projections were equalized.")


class RangeRecord(StrictModel):
    """Unsigned integers over a calibrated range: value = (u - zero_point) * scale."""

    bits: int
    scale: float
    zero_point: int


class StreamRecord(StrictModel):
    """The calibrated ranges of the linears of one stream: of what enters them all, and of what leaves each."""

    stream: str
    bits: int
    reason: str = Field(description='Why it has another width than the scheme gives; "" = it has not.')
    cost_8_bits: float = Field(
        description="Mean square change of a token's hidden state that 8 bits here make, relative; 0 = not measured."
    )
    low: float = Field(description="Smallest value of the range in 8 bits.")
    high: float
    input: RangeRecord | None = Field(default=None, description="As it is used. None = an older record, which does not tell.")
    outputs: dict[str, RangeRecord] = Field(default={}, description="By name of the linear's node in the canonical graph.")


class SizeRecord(StrictModel):
    """Counted in the graph files of one target: bytes of all initializers, those that several graphs share once."""

    bits_per_weight: float = Field(description="All bytes x 8 / parameters, tied ones once.")
    bits_per_body_weight: float | None = Field(description="The same of all weights but embedding and head.")
    bytes: int
    bytes_by_type: dict[str, int] = Field(description='e.g. "int4 weights", "scales", "float32".')


class Share(StrictModel):
    """Mean KL of the positions first..last-1 of their windows."""

    first: int
    last: int
    kl: float


class TextRecord(StrictModel):
    """What was lost on one text; nats a token. None where nothing finite was there to measure."""

    name: str
    sha256: str
    windows: int
    tokens: int
    broken: int = Field(description="Positions whose logits held NaN or infinity.")
    reference_nll: float | None = Field(description="Mean -ln p(next token) of the float model.")
    delta: float | None = Field(description="How much more the bundle has: delta ln PPL, paired.")
    delta_se: float | None = Field(description="Its standard error over windows; None for a single one.")
    kl_mean: float | None
    kl_median: float | None
    kl_p99: float | None
    same_top: float | None = Field(description="Share of positions where both put the same token first.")
    by_position: tuple[Share, ...] = ()


class LayerRecord(StrictModel):
    """One layer's output against the float layer's, on real text.

    Local: the quantized layer on the float model's input, by what it adds to the residual stream: what this layer loses by
    itself. Accumulated: the residual stream after it, when the quantized layers before it feed it. No SNR = nothing was lost;
    no cosine = nothing finite came out.
    """

    name: str = Field(description='"embed", "layers.3" or "head".')
    local_snr_db: float | None
    local_cosine: float | None
    snr_db: float | None
    cosine: float | None


class AblationRecord(StrictModel):
    """The float model with one thing quantized alone."""

    name: str
    what: str
    text: str
    windows: int
    delta: float | None
    delta_se: float | None
    kl_mean: float | None
    same_top: float | None


class GreedyRecord(StrictModel):
    """One prompt answered with the likeliest token each time, by the bundle; the float model reads along."""

    name: str
    prompt: str
    tokens: int = Field(description="How many were written.")
    agreed: int = Field(description="How many of them the float model would have written too, until the first other one.")
    common: str = Field(description="The text that both write.")
    next: str = Field(description='The bundle\'s first other token; "" if there is none.')
    reference_next: str = Field(description="The float model's.")


class TokenizerRecord(StrictModel):
    """The bundle's tokenizer against another reader of the same vocabulary."""

    against: str = Field(description="What it was compared with.")
    blind_to: str = Field(default="", description='What such a comparison cannot see; "" = both sides were written apart.')
    texts: int
    tokens: int
    equal: bool
    first_difference: str = ""


class EmulationRecord(StrictModel):
    """Each quantized matrix's operator, emitted as for the target's graphs but in a graph of its own on the CPU provider, against
    numpy doing the same arithmetic, on real inputs."""

    matrices: int
    rows: int
    worst: float | None = Field(
        description="Largest difference of an output, relative to the matrix's largest output; None = no number came out."
    )
    worst_matrix: str


class EmbeddingRecord(StrictModel):
    """What an embedding model lost: its vectors against the float model's."""

    text: str
    sha256: str
    passages: int
    broken: int
    cosine_mean: float | None
    cosine_min: float | None
    top1: float | None = Field(description="Share of passages whose nearest other passage is the same.")
    top10: float | None = Field(description="Mean share of the ten nearest that are the same.")
    rank_correlation: float | None = Field(description="Spearman's, of all other passages by nearness; mean over passages.")


class SourceRecord(StrictModel):
    """The checkpoint that the bundle was made from."""

    name: str
    files: dict[str, str] = Field(description="sha256 by file name.")


class EvaluationRecord(StrictModel):
    """All that was measured by running something on text.

    By the graph files, if `ran` says so: `texts`, `embeddings`, and the answers of `greedy`. By the quantized model with the same
    integers, run a part at a time: `layers`, `ablations`, `emulation`, `output_loss`; and `texts` where `ran` says that the files
    could not be run.
    """

    target: str
    provider: str = Field(description="Who ran the graphs, read back from the session.")
    ran: str = Field(description='"files": the shipped graphs; otherwise why something else had to stand in.')
    window: int = Field(description="Tokens of a window.")
    texts: tuple[TextRecord, ...] = ()
    embeddings: tuple[EmbeddingRecord, ...] = ()
    layers: tuple[LayerRecord, ...] = ()
    ablations: tuple[AblationRecord, ...] = ()
    greedy: tuple[GreedyRecord, ...] = ()
    tokenizer: TokenizerRecord | None = None
    emulation: EmulationRecord | None = None
    output_loss: dict[str, float] = Field(
        default={}, description="By matrix, of an evaluation that stands alone; a record has them at its matrices."
    )
    command: str = Field(description="Measures it again.")
    seconds: float


class VerdictRecord(StrictModel):
    """The measured loss against what the scheme promises."""

    band: dict[str, float] = Field(description="Limits by name: the most there may be, but the least of layer_snr_db and cosine.")
    complaint: str = Field(description='What is outside the band, and where to look; "" when nothing is.')
    accepted: bool = Field(default=False, description="The builder was told to go on all the same: --accept-loss.")


class Record(StrictModel):
    """`record.json`."""

    scheme: str
    options: dict[str, Any]
    solver: str = ""
    budget: float | None = Field(
        default=None,
        description="Bits a weight of the body, scales included, that exceptions may be bought with. None = none are.",
    )
    wide: float = Field(
        default=0.0,
        description="Share of the products of all linears with static 8-bit activations that may have 16-bit ones instead.",
    )
    target: str
    parameters: int
    bits_per_weight: float | None
    bits_per_body_weight: float | None
    bytes_by_role: dict[str, int]
    activations: dict[str, str] = Field(description="By role; how many of its matrices have which, where they differ.")
    snr_db_by_role: dict[str, float | None]
    matrices: tuple[MatrixRecord, ...]
    float: tuple[KeptRecord, ...]
    command: str = ""
    source: SourceRecord | None = Field(default=None, description="None = an older record; the manifest tells.")
    versions: dict[str, str] = Field(default={}, description="Of python and the packages that made the bundle.")
    calibration: dict[str, Any] | None = Field(default=None, description="What the solver saw: seeds, token ids, or files.")
    kv: KvRecord | None = Field(default=None, description="None = keys and values stay float.")
    kept_quantized: KeptQuantizedRecord | None = Field(default=None, description="None = it was not asked for.")
    reshaped: ReshapedRecord | None = Field(default=None, description="None = the float model was taken as it is.")
    ranges: dict[str, tuple[StreamRecord, ...]] = Field(default={}, description="Of static activations, by target.")
    sizes: dict[str, SizeRecord] = Field(default={}, description="By target.")
    evaluation: EvaluationRecord | None = None
    verdict: VerdictRecord | None = None
    files: dict[str, str] = Field(default={}, description="sha256 of every file that was there when this was written.")

    def measured(self, evaluation: EvaluationRecord) -> "Record":
        """The record with this evaluation in place of its own, what each matrix loses of its outputs with it."""
        lost = evaluation.output_loss
        matrices = tuple(one.model_copy(update={"output_loss": lost.get(one.name)}) for one in self.matrices)
        return self.model_copy(
            update={"matrices": matrices, "evaluation": evaluation.model_copy(update={"output_loss": {}}), "verdict": None}
        )


def read_record(bundle: Bundle) -> Record | None:
    """The bundle's record; None when it has none.

    Raises:
        BundleError: it is damaged, or has a key that this program does not know.
    """
    path = bundle.path / RECORD
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as failure:
        raise BundleError(f"{path}: not valid JSON: {failure}", "build the bundle again") from None
    if not isinstance(data, dict):
        raise BundleError(f"{path}: not a JSON object", "build the bundle again")
    return read(Record, data, str(path), BundleError)
