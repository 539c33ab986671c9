"""llama.cpp's side of bench/quality.py; runs in an environment of its own (llama-cpp-python).

    python quality_llama.py quantize FLOAT.gguf DESTINATION.gguf TYPE   embedding and head in Q8_0, the body in TYPE
    python quality_llama.py serve MODEL.gguf THREADS                    logits, one JSON question a line (bench/quality_side.py)

Knows: the peer's low-level API. Does not know: this project.
"""

import ctypes
import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np

BATCH = 256
"""Positions of one step: llama.cpp keeps the logits of a whole step, a megabyte each with a vocabulary of 262144."""
CONTEXT = 1024


def quantize(source: str, destination: str, kind: str) -> None:
    """Quantize the body to file type `kind` ("Q4_K_M"); llama.cpp replaces types whose blocks do not divide a row."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    options.token_embedding_type = options.output_tensor_type = llama_cpp.GGML_TYPE_Q8_0
    code = llama_cpp.llama_model_quantize(source.encode(), destination.encode(), ctypes.byref(options))
    if code:
        raise SystemExit(f"llama_model_quantize of {source} to {kind} failed with code {code}")


class Model:
    """One GGUF file in a context of its own."""

    def __init__(self, path: str, threads: int):
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise SystemExit(f"llama.cpp does not load {path}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = CONTEXT, BATCH, BATCH
        options.n_threads = options.n_threads_batch = threads
        # float32 keys and values, no flash attention: what is measured is the weights and the activations' int8.
        options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
        options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.swa_full = True
        self._context = llama_cpp.llama_init_from_model(model, options)
        if not self._context:
            raise SystemExit(f"llama.cpp makes no context for {path}")
        self._words = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def write_logits(self, ids: list[int], path: str) -> None:
        """Logits of every position, [len(ids), words] float32, into the file."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        with Path(path).open("wb") as file:
            for first in range(0, len(ids), BATCH):
                self._step(ids[first : first + BATCH], first)
                logits = llama_cpp.llama_get_logits(self._context)
                size = len(ids[first : first + BATCH])
                np.ctypeslib.as_array(logits, shape=(size, self._words)).tofile(file)

    def _step(self, ids: list[int], first: int) -> None:
        batch = self._batch
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place] = token, first + place
            batch.n_seq_id[place], batch.seq_id[place][0], batch.logits[place] = 1, 0, 1
        if code := llama_cpp.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode failed with code {code}")


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: object) -> None:
    """Errors only; the rest is pages of it."""
    if level == 4:
        sys.stderr.write(text.decode(errors="replace"))


def main() -> None:
    verb, *rest = sys.argv[1:]
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    if verb == "quantize":
        quantize(*rest)
    else:
        model = Model(rest[0], int(rest[1]))
        print(json.dumps({}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            model.write_logits(asked["ids"], asked["out"])
            print(json.dumps({}), flush=True)


if __name__ == "__main__":
    main()
