"""Makes the golden embeddings again, by torch and transformers, from the same weights.

    pip install '.[reference]'
    python -m tests.golden.make_bert                     # tiny random models
    python -m tests.golden.make_bert --minilm FOLDER     # and all-MiniLM-L6-v2's embeddings of twenty texts

Knows: transformers; the pooling that sentence-transformers does. Does not know: our graphs.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from export.arch import bert
from tests.golden import recipe_bert

FOLDER = Path(__file__).parent / "bert"
SEED = 1
TEXTS = (
    "A man is eating food.",
    "The cat sits outside, watching the rain.",
    "How do I reset the password of my router?",
    "Press and hold the reset button for ten seconds.",
    "Die Katze sitzt draußen im Regen.",
    "Où est la bibliothèque la plus proche ?",
    "東京都は日本の首都です。",
    "ไฟฟ้าดับทั้งเมือง",
    "Ein Kündigungsschreiben muss bis zum 30. September 2026 vorliegen.",
    "x",
    "!!! ??? ...",
    "for i in range(10): print(i ** 2)",
    "The invoice of 1,234.56 EUR is due on 2026-11-30; IBAN DE02 1203 0000 0000 2020 51.",
    "Quarterly revenue grew by 12 % while costs fell.",
    "She sells sea shells by the sea shore. " * 8,
    "The warranty lasts two years from the date of purchase. It does not cover damage by water. " * 5,
    "UPPER CASE AND lower case are the same here.",
    "naïve café résumé Ångström",
    "🙂 emoji are unknown words",
    "A photovoltaic system turns light into electric current.",
)


def main() -> None:
    """Write every golden file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minilm", type=Path, help="the checkpoint's folder")
    arguments = parser.parse_args()
    for variant, config in bert.TINY.items():
        make_tiny(variant, config)
    if arguments.minilm:
        make_minilm(arguments.minilm)


def make_tiny(variant: str, config: dict[str, Any]) -> None:
    """`bert/<variant>.npz`: config, seed, ids and mask [B,S], embeddings [B,D] float32."""
    import torch
    import transformers

    settings = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model("bert", **settings, attn_implementation="eager")
    model = transformers.BertModel(made).eval()
    weights = {key: torch.from_numpy(array) for key, array in recipe_bert.tensors(config, SEED).items()}
    model.load_state_dict(weights, strict=True)
    ids, mask = recipe_bert.batch(config, SEED)
    found = pooled(model, torch.from_numpy(ids), torch.from_numpy(mask), variant)
    FOLDER.mkdir(exist_ok=True)
    np.savez_compressed(FOLDER / f"{variant}.npz", config=json.dumps(config), seed=SEED, ids=ids, mask=mask, embeddings=found)
    print(variant, found.shape)


def pooled(model: Any, ids: Any, mask: Any, pooling: str) -> np.ndarray:
    """Unit vectors [B,D] as sentence-transformers' Pooling and Normalize make them of the last hidden states."""
    import torch

    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
        if pooling == "cls":
            vector = hidden[:, 0]
        else:
            wide = mask.unsqueeze(-1).expand(hidden.size()).float()
            vector = (hidden * wide).sum(1) / wide.sum(1).clamp(min=1e-9)
        found: np.ndarray = torch.nn.functional.normalize(vector, p=2, dim=1).numpy()
    return found


def make_minilm(path: Path) -> None:
    """`bert/minilm.npz`: texts, token counts, embeddings [20,384] float32; each text alone, so without any padding."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    counts, found = [], []
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text, truncation=False, padding=False)["input_ids"]])
        counts.append(ids.shape[1])
        found.append(pooled(model, ids, torch.ones_like(ids), "mean")[0])
    np.savez_compressed(FOLDER / "minilm.npz", texts=np.array(TEXTS), tokens=np.array(counts), embeddings=np.array(found))
    print("minilm", len(found), counts)


if __name__ == "__main__":
    main()
