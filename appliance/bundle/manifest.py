"""The manifest: what a bundle says of itself, typed and strict.

Knows: every key of `manifest.json`. Does not know: files on disk (`appliance.bundle.store`) or sessions.
"""

import math
from typing import Final, Literal

from pydantic import Field, model_validator

from appliance.strict import StrictModel

FORMAT: Final = 1
"""Raised whenever an older program could misread a bundle. A newer one is refused."""

GraphName = Literal["model", "prefill", "decode"]
"""A graph by what it is for: the one of the dynamic form, the two of the static one."""


class StateTensor(StrictModel):
    """One tensor that a step hands on to the next."""

    name: str = Field(description='Unique within the variant, e.g. "layers.3.key".')
    kind: Literal["kv.key", "kv.value", "conv", "recurrent"]
    layer: int = Field(ge=0)
    input: str = Field(description="Graph input that takes it.")
    output: str = Field(description="Graph output that gives it back.")
    dtype: Literal["float32", "float16", "int8", "uint8"] = "float32"
    quantization: Literal["none", "channel"] = Field(
        default="none",
        description="channel: value = integer x scale of its head and channel, chosen when the bundle was built and kept in the "
        "graph, so that the runtime carries integers and needs no scale.",
    )
    shape: tuple[int | str, ...] = Field(
        description='Dimensions of the input; the words "batch" and "context" stand for what the runtime chooses.'
    )
    growth: Literal["growing", "sliding", "fixed"] = Field(
        description="growing: one row a token along the context axis; sliding: the last `window` rows; fixed: no row a token."
    )
    window: int = Field(default=0, ge=0, description="Rows a sliding tensor keeps; 0 otherwise.")
    update: Literal["inplace", "append", "replace"] = Field(
        description="inplace: the output may be the very buffer of the input; append: the output holds only the new rows, "
        "which the runtime writes at the current length; replace: the output is the next step's input."
    )

    @model_validator(mode="after")
    def _integers_have_scales(self) -> "StateTensor":
        if (self.dtype in ("int8", "uint8")) != (self.quantization != "none"):
            raise ValueError(
                f"state {self.name} is {self.dtype} with quantization {self.quantization!r}: integers alone have scales"
            )
        return self

    @property
    def bytes_a_token(self) -> int:
        """Memory that one more token of context takes; 0 for what does not grow."""
        if self.growth == "fixed":
            return 0
        size = math.prod(size for size in self.shape if isinstance(size, int))
        return size * {"float32": 4, "float16": 2, "int8": 1, "uint8": 1}[self.dtype]


class Variant(StrictModel):
    """The graphs of one target."""

    target: str
    form: Literal["dynamic", "static"]
    graphs: dict[GraphName, str] = Field(
        description="Paths inside the bundle: `model` for the dynamic form, `prefill` and `decode` for the static pair."
    )
    chunk: int = Field(
        ge=1, description="Prompt tokens of one prefill step; exact in the static form, a choice in the dynamic one."
    )
    context: int = Field(ge=1, description="Tokens of context the graphs can hold.")
    activation: str = Field(description="How linears take their activations, e.g. block-dynamic int8.")
    state: tuple[StateTensor, ...] = ()

    @property
    def bytes_a_token(self) -> int:
        """Memory that one more token of context takes in all tensors together."""
        return sum(tensor.bytes_a_token for tensor in self.state)

    @model_validator(mode="after")
    def _graphs_fit_form(self) -> "Variant":
        wanted = {"model"} if self.form == "dynamic" else {"prefill", "decode"}
        if set(self.graphs) != wanted:
            raise ValueError(f"a {self.form} variant has the graphs {sorted(wanted)}, this one has {sorted(self.graphs)}")
        return self


class WeightForm(StrictModel):
    """How the weights of one role are kept."""

    bits: int
    group: int = Field(ge=0, description="Weights that share a scale along a row; 0 = the whole row.")
    symmetric: bool = True
    activation: str
    bytes: int = Field(ge=0)
    parameters: int = Field(ge=0)


class SchemeSummary(StrictModel):
    """What quantization made of the model, by role; the evidence is in `record.json`."""

    name: str
    roles: dict[str, WeightForm]


class FileEntry(StrictModel):
    """Size and hash of one file."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class TokenizerInfo(StrictModel):
    """Which tokenizer files the bundle carries."""

    kind: Literal["tokenizers", "sentencepiece"]
    file: str
    bos: int | None = None
    eos: tuple[int, ...] = ()
    add_bos: bool = False
    added: dict[int, str] = Field(default_factory=dict, description="SentencePiece only: added tokens that the .model lacks.")
    space_prefix: Literal["never", "first", "always"] = Field(
        default="never",
        description="SentencePiece only: a space goes before no text, the text that begins the input, or each text that begins "
        "the input or follows a special token.",
    )


class Provenance(StrictModel):
    """Where the bundle comes from and how to make it again."""

    source: str
    source_sha256: dict[str, str] = Field(default_factory=dict)
    license: str = "unknown"
    command: str
    versions: dict[str, str]
    created: str = Field(description="UTC, ISO 8601.")


class Manifest(StrictModel):
    """`manifest.json`. Written last, so a folder without one is no bundle."""

    format: Literal[1]
    name: str = Field(description="The model's id on the endpoint.")
    task: Literal["generate", "embed"] = "generate"
    architecture: str = Field(description="model_type as config.json says it.")
    parameters: int = Field(ge=0, description="Weights of the model, tied ones once.")
    context_length: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    scheme: SchemeSummary
    tokenizer: TokenizerInfo
    chat_template: str | None = Field(default=None, description="File of the jinja2 template, if the model has one.")
    generation: str | None = Field(default=None, description="File of the sampling defaults.")
    variants: dict[str, Variant]
    files: dict[str, FileEntry] = Field(description="Every other file of the bundle.")
    provenance: Provenance
