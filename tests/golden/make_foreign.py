"""Makes the graphs of other exporters again that `appliance quantize` is tested on: tiny models, without their weights.

    pip install '.[reference,peers]' onnxscript
    python -m tests.golden.make_foreign

Knows: torch's exporter, onnxruntime-genai's builder. Does not know: any code of ours. The weights of a graph are left out,
but for small ones: the tests fill them in (`tests.quant.foreign.graphs`), so that a file holds structure alone.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "quant" / "foreign" / "graphs"
KEPT = 256
"""Bytes; tensors below stay in the graph."""
SIZES: dict[str, Any] = {
    "vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "tie_word_embeddings": True},
    "qwen3": {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False},
    "phi3": {**SIZES, "tie_word_embeddings": False},
    "gpt2": {"vocab_size": 80, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2},
    "gemma3_text": {
        **SIZES, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}  # fmt: skip
BUILT = ("llama", "qwen3")
"""Kinds that onnxruntime-genai's builder takes as transformers writes them today."""


def main() -> None:
    """Write every graph."""
    import torch
    import transformers

    FOLDER.mkdir(exist_ok=True)
    for kind, sizes in KINDS.items():
        torch.manual_seed(1)
        config = transformers.AutoConfig.for_model(kind, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():  # not all ones: equal constants are written once, and their roles with them
            torch.nn.init.normal_(parameter)
        with tempfile.TemporaryDirectory() as folder:
            for attention in ("sdpa", "eager") if kind in ("llama", "gpt2") else ("eager",):
                model.set_attn_implementation(attention)
                by_torch(model, Path(folder) / "model.onnx")
                without_weights(Path(folder) / "model.onnx", FOLDER / f"torch-{kind}-{attention}.onnx")
            if kind in BUILT:
                by_genai(model, Path(folder))
                without_weights(Path(folder) / "built" / "model.onnx", FOLDER / f"genai-{kind}.onnx")


def by_torch(model: Any, path: Path) -> None:
    """torch.onnx.export of ids [B,S] -> logits [B,S,V]."""
    import torch

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False).logits
            return logits

    torch.onnx.export(
        Logits(), (torch.zeros((1, 9), dtype=torch.int64),), path, input_names=["input_ids"], output_names=["logits"],
        dynamic_shapes=({0: "batch", 1: "sequence"},), dynamo=True, external_data=False, verbose=False,
    )  # fmt: skip


def by_genai(model: Any, folder: Path) -> None:
    """onnxruntime-genai's builder in float32; it wants a tokenizer beside the weights."""
    import tokenizers
    import transformers

    source = folder / "source"
    model.save_pretrained(source)
    words = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={chr(65 + one): one for one in range(80)}, merges=[]))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(source)
    module = "onnxruntime_genai.models.builder"
    words_of = ["-i", str(source), "-o", str(folder / "built"), "-p", "fp32", "-e", "cpu", "-c", str(folder / "cache")]
    subprocess.run([sys.executable, "-m", module, *words_of], check=True)


def without_weights(source: Path, destination: Path) -> None:
    """The graph without notes of its making, its weights in a file that is then left out."""
    import onnx_ir as ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    model = ir.load(source)
    ClearMetadataAndDocStringPass()(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / destination.name
        ir.save(model, path, external_data="weights.bin", size_threshold_bytes=KEPT)
        destination.write_bytes(path.read_bytes())
    print(destination.name, destination.stat().st_size)


if __name__ == "__main__":
    main()
