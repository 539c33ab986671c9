"""An embedding model as a function from texts to unit vectors.

Knows: the encoder graph's inputs and output, its tokenizer's frame tokens, padding. Does not know: queues, requests, indexes.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from appliance.bundle.store import Bundle
from appliance.bundle.tokenizer_file import parse_json, read_bytes
from appliance.bundle.vocabulary import ATTENTION_MASK, INPUT_IDS, SENTENCE
from appliance.errors import BundleError, ContextLengthError, DeviceError
from appliance.runtime import providers
from appliance.runtime.session import OpenSession, Placement, give_back_memory
from appliance.runtime.tokenizer import checked_text
from appliance.targets import load

FIX = "build the bundle again"


class Encoder:
    """One loaded embedding model. `tokenize` may be called from any thread, `run` from one.

    Args:
        opened: the session of its graph.
        tokenizer: bytes and path of its tokenizer.json.
        context: most tokens of a text.
        vocab_size: ids are 0..vocab_size-1.
    """

    def __init__(self, opened: OpenSession, tokenizer: tuple[bytes, Path], context: int, vocab_size: int):
        self.context = context
        self._opened: OpenSession | None = opened
        self._tokenizer = parse_json(*tokenizer, BundleError, FIX)
        # "[SEP]" in a document is four letters in brackets, never the token that ends a text.
        self._tokenizer.encode_special_tokens = True
        if max(self._tokenizer.get_vocab().values(), default=vocab_size) >= vocab_size:
            raise BundleError(f"{tokenizer[1]} has more tokens than the model, which knows {vocab_size}", FIX)
        inputs = {one.name for one in opened.session.get_inputs()}
        outputs = {one.name for one in opened.session.get_outputs()}
        if inputs != {INPUT_IDS, ATTENTION_MASK} or outputs != {SENTENCE}:
            raise BundleError(f"the graph takes {sorted(inputs)} and gives {sorted(outputs)}, which is no embedding model", FIX)

    @property
    def placement(self) -> Placement:
        """Where the graph runs, read back from the session."""
        return self._session.placement

    @property
    def _session(self) -> OpenSession:
        if self._opened is None:
            raise DeviceError("the model is closed", "load it again")
        return self._opened

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text with the model's begin and end tokens; nothing is cut off.

        Raises:
            RequestError: a text is no valid Unicode.
        """
        return [self._tokenizer.encode(checked_text(text)).ids for text in texts]

    def run(self, rows: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Vectors [len(rows), D] of unit length.

        Raises:
            ContextLengthError: a row has more tokens than `context`.
        """
        longest = max(map(len, rows))
        if longest > self.context:
            raise ContextLengthError(f"a text has {longest} tokens, the model takes {self.context}", "split it")
        ids = np.zeros((len(rows), longest), np.int64)
        mask = np.zeros_like(ids)
        for at, row in enumerate(rows):
            ids[at, : len(row)] = row
            mask[at, : len(row)] = 1
        found = self._session.session.run([SENTENCE], {INPUT_IDS: ids, ATTENTION_MASK: mask})[0]
        vectors: NDArray[np.float32] = np.asarray(found, np.float32)
        return vectors

    def close(self) -> None:
        """Free the session."""
        self._opened = None
        give_back_memory()


def open_encoder(bundle: Bundle, target_name: str, threads: int, *, targets: Path | None = None) -> Encoder:
    """Open the embedding graph of `bundle` for one target; arguments and errors as `runtime.decoder.open_decoder` has them."""
    variant = bundle.variant(target_name)
    target = load(target_name, targets)
    info = bundle.manifest.tokenizer
    if variant.form != "dynamic" or info.kind != "tokenizers":
        raise BundleError(f"{bundle.path}: no embedding model has {variant.form} graphs and a {info.kind} vocabulary", FIX)
    path = bundle.file(info.file)
    graph = bundle.file(variant.graphs["model"])
    opened = providers.find(target.provider).open_session(graph, target, providers.SessionChoice(threads=threads))
    return Encoder(opened, (read_bytes(path, BundleError, FIX), path), variant.context, bundle.manifest.vocab_size)
