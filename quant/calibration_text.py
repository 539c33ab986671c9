"""The text that a model is calibrated on: windows of token ids, and what the record says of them.

Knows: a person's files and folders of text, an older record's tokens, how ids are kept. Does not know: how a model writes its
own text (`quant.selfwritten`), what the text is used for (`quant.calibrate`).
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from appliance.bundle.store import Bundle
from appliance.errors import BadInput
from appliance.runtime.tokenizer import Tokenizer, load_tokenizer

WINDOW = 512
"""Tokens of a window. Twice as long gives attention twice the work for the same number of tokens."""
LEAST = 1024
"""Tokens that say anything about a model's inputs: fewer than its hidden size leave directions unseen."""
_MOST_BYTES = 64 << 20
"""Of one file: tokenizing takes memory, and 32k tokens are some 150 kB."""
_ENDINGS = (".txt", ".md", ".rst", ".text")

_COUNTED = ("kind", "tokens", "windows", "window", "sha256", "ids")

Ids = npt.NDArray[np.int64]
Kind = Literal["self-written", "text", "record"]


@dataclass(frozen=True)
class CalibrationText:
    """Windows of one length.

    Attributes:
        kind: where it comes from.
        ids: [W,S].
        told: what else the record says: seeds, files.
    """

    kind: Kind
    ids: Ids
    told: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Of the ids as the record keeps them."""
        return hashlib.sha256(_bytes(self.ids)).hexdigest()

    def record(self) -> dict[str, Any]:
        """For record.json; `of_record` reads it again."""
        windows, length = self.ids.shape
        return {
            "kind": self.kind,
            "tokens": int(self.ids.size),
            "windows": windows,
            "window": length,
            "sha256": self.sha256,
            "ids": base64.b64encode(_bytes(self.ids)).decode("ascii"),
            **self.told,
        }


def of_record(told: Mapping[str, Any], where: str) -> CalibrationText:
    """The text that `CalibrationText.record` told of.

    Raises:
        BadInput: the record has none, or its ids do not fit its hash.
    """
    try:
        data = base64.b64decode(told["ids"], validate=True)
        ids = np.frombuffer(data, "<u4").astype(np.int64).reshape(int(told["windows"]), int(told["window"]))
        whole = hashlib.sha256(data).hexdigest() == told["sha256"]
    except (KeyError, TypeError, ValueError):
        whole, ids = False, np.zeros((0, 0), np.int64)
    if not whole or not ids.size:
        raise BadInput(f"{where} holds no whole calibration text", "give the record.json of a calibrated bundle, or a text")
    kind: Kind = "self-written" if told.get("kind") == "self-written" else "text" if told.get("kind") == "text" else "record"
    return CalibrationText(kind, ids, {key: value for key, value in told.items() if key not in _COUNTED})


def spread(total: int, count: int) -> list[int]:
    """Numbers of `count` windows, evenly spread over all of them: a text has its kinds one after the other."""
    return [number * total // count for number in range(count)] if count < total else list(range(total))


def given(path: Path, words: Bundle, tokens: int, window: int) -> CalibrationText:
    """A person's own text: a file, a folder of text files, or the record.json of another build.

    Args:
        words: a bundle with the model's tokenizer.
        tokens: how many to take, in windows evenly spread over all the text.
        window: tokens of a window, a begin token included where the model was trained to see one.

    Raises:
        BadInput: it cannot be read, is no UTF-8 text, or is too short; the file is named.
    """
    tokenizer = load_tokenizer(words)
    if path.suffix == ".json" and path.is_file():
        return _given_record(path, tokenizer, window)
    files = _files(path)
    texts = [_text(file) for file in files]
    front = [tokenizer.info.bos] if tokenizer.info.add_bos and tokenizer.info.bos is not None else []
    ids = [token for text in texts for token in tokenizer.encode(text, special=False, bos=False)]
    if len(ids) < LEAST:
        raise BadInput(f"{path} has only {len(ids)} tokens", f"calibrate on at least {LEAST}; 32768 are good")
    step = min(window, len(ids)) - len(front)
    starts = list(range(0, len(ids) - step + 1, step))
    chosen = [starts[number] for number in spread(len(starts), max(1, tokens // window))]
    told = {"files": [{"name": file.name, "sha256": _sha256(text)} for file, text in zip(files, texts, strict=True)]}
    return CalibrationText("text", np.array([[*front, *ids[start : start + step]] for start in chosen], np.int64), told)


def _given_record(path: Path, tokenizer: Tokenizer, window: int) -> CalibrationText:
    """Its windows; their beginnings where the model has been given less context than the other had."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["calibration"]
    except (OSError, ValueError, KeyError, TypeError):
        told = None
    if not isinstance(told, dict):
        raise BadInput(f"{path} is no record of a calibrated bundle", "give a text, or such a bundle's record.json")
    found = of_record(told, str(path))
    if int(found.ids.max()) >= tokenizer.vocab_size:
        raise BadInput(f"the tokens of {path} are another vocabulary's", "give the record of a bundle of the same model")
    return CalibrationText("record", found.ids[:, :window])


def _files(path: Path) -> Sequence[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise BadInput(f"there is no file or folder {path}", "give --calibration a text file or a folder of them")
    found = sorted(one for one in path.rglob("*") if one.suffix.lower() in _ENDINGS and one.is_file())
    if not found:
        raise BadInput(f"the folder {path} holds no text", f"files ending in {', '.join(_ENDINGS)} are read")
    return found


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise BadInput(f"{path} is larger than {_MOST_BYTES >> 20} MB", "give a part of it; 32768 tokens are some 150 kB")
        data = path.read_bytes()
    except OSError as failure:
        raise BadInput(f"cannot read {path}: {failure.strerror}", "give a file that you may read") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        raise BadInput(f"{path} is no UTF-8 text: byte {failure.start} cannot be read", "convert it first") from None
    if "\0" in text:
        raise BadInput(f"{path} holds NUL characters and is no text", "give a text file")
    return text


def _bytes(ids: Ids) -> bytes:
    return np.ascontiguousarray(ids, "<u4").tobytes()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
