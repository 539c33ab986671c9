"""onnxruntime-genai's side of bench/quality.py: its builder's graph, run by the same onnxruntime as this project's.

    python quality_onnx.py MODEL_FOLDER THREADS        logits, one JSON question a line (bench/quality_side.py)

Knows: the inputs that the peer's builder gives a decoder. Does not know: this project, how the graph was quantized.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

CHUNK = 256
"""Positions of one step: with all logits of a window of 1024 and 262144 words, a gigabyte would be held twice."""


class Model:
    """The folder's model.onnx, its past joined from step to step."""

    def __init__(self, folder: str, threads: int):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        path = str(Path(folder) / "model.onnx")
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        decoder = json.loads((Path(folder) / "genai_config.json").read_text())["model"]["decoder"]
        self._empty = np.zeros((1, decoder["num_key_value_heads"], 0, decoder["head_size"]), np.float32)
        self._past = [one.name for one in self._session.get_inputs() if one.name.startswith("past_key_values.")]
        self._inputs = {one.name for one in self._session.get_inputs()}

    def write_logits(self, ids: list[int], path: str) -> None:
        """Logits of every position, [len(ids), words] float32, into the file."""
        past = dict.fromkeys(self._past, self._empty)
        names = ["logits", *(name.replace("past_key_values", "present") for name in past)]
        with Path(path).open("wb") as file:
            for first in range(0, len(ids), CHUNK):
                part = np.array([ids[first : first + CHUNK]], np.int64)
                done = first + part.shape[1]
                feeds: dict[str, Any] = {"input_ids": part, "attention_mask": np.ones((1, done), np.int64), **past}
                if "position_ids" in self._inputs:
                    feeds["position_ids"] = np.arange(first, done)[None]
                logits, *present = self._session.run(names, feeds)
                past = dict(zip(past, present, strict=True))
                logits[0].tofile(file)


def main() -> None:
    model = Model(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        model.write_logits(asked["ids"], asked["out"])
        print(json.dumps({}), flush=True)


if __name__ == "__main__":
    main()
