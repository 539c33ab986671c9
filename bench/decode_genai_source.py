"""A checkpoint as the folder that onnxruntime-genai's model builder reads; runs in the peer's environment.

Knows: transformers. Does not know: this project. Arguments: GGUF file or safetensors folder, destination.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    source, destination = Path(sys.argv[1]), Path(sys.argv[2])
    folder, options = (source, {}) if source.is_dir() else (source.parent, {"gguf_file": source.name})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    # A config that still names a quantization makes the builder look for packed weights; these are plain floats.
    settings = {key: value for key, value in model.config.to_dict().items() if key not in ("quantization_config", "dtype")}
    plain = type(model)(type(model.config)(**settings))
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(destination)
    AutoTokenizer.from_pretrained(folder, **options).save_pretrained(destination)


if __name__ == "__main__":
    main()
