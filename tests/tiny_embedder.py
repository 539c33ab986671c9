"""A tiny sentence embedder from disk to bundle, through the real exporter.

Knows: the golden recipe's weights, a WordPiece vocabulary of single characters. Does not know: engines or routes.
"""

import json
from pathlib import Path

import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from appliance import targets
from appliance.bundle.store import Bundle
from export.arch import bert
from export.build import BuildRequest, build
from quant import schemes
from tests.golden import recipe_bert

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,!?[]-"
CONTEXT = bert.TINY["mean"]["max_position_embeddings"]


def write_checkpoint(folder: Path) -> Path:
    """A sentence-transformers folder as published: weights, config, pooling, tokenizer that cuts and pads, as MiniLM's does."""
    folder.mkdir(parents=True)
    config = bert.TINY["mean"]
    save_file(recipe_bert.tensors(config, 1), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    recipe_bert.write_modules(folder, "mean")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *CHARACTERS, *(f"##{one}" for one in CHARACTERS)]
    inner = tokenizers.Tokenizer(models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    inner.decoder = decoders.WordPiece()
    inner.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    inner.enable_truncation(8)
    inner.enable_padding(length=8)
    inner.save(str(folder / "tokenizer.json"))
    return folder


def install(models_folder: Path, work: Path, scheme: str = "float", name: str = "tiny-embedder") -> Bundle:
    """Build it into the models folder."""
    target = targets.load("cpu")
    checkpoint = write_checkpoint(work / "checkpoint")
    models_folder.mkdir(parents=True, exist_ok=True)
    request = BuildRequest(checkpoint, (target,), schemes.find(scheme), models_folder / name, name, 0, "none")
    return build(request, lambda stage, done, total: None)
