"""One side of bench/quality.py: a process that writes the logits of a window into a file when it is asked to.

Knows: the protocol, and where the file lies. Does not know: what the process runs.
"""

import json
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[1]
Floats = npt.NDArray[np.float32]


class Side:
    """A process that answers {"ids": [...], "out": FILE} with one line once the file holds [len(ids), words] float32.

    Args:
        name: for messages.
        command: what to start; its first line says that the model is loaded.
        scratch: the file for the logits: a gigabyte for a window of 1024 and 262144 words.
    """

    def __init__(self, name: str, command: list[str], scratch: Path):
        self.name = name
        self._scratch = scratch
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self._answer()

    def logits(self, ids: npt.NDArray[np.int64]) -> Floats:
        """Logits of every position, [len(ids), words]; the next question overwrites them."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": ids.tolist(), "out": str(self._scratch)}) + "\n")
        self._process.stdin.flush()
        self._answer()
        found: Floats = np.memmap(self._scratch, np.float32, "r").reshape(len(ids), -1)
        return found

    def close(self) -> None:
        """End the process and give its disk space back."""
        self._end()
        self._scratch.unlink(missing_ok=True)

    def _end(self) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        return self._process.wait(60)

    def _answer(self) -> None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self._end()}")
        json.loads(line)
