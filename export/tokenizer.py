"""The tokenizer's files of a bundle, from whatever a checkpoint has of them.

Knows: which files and keys name the vocabulary and its begin and end tokens. Does not know: how a GGUF vocabulary is rebuilt
(`export.gguf_vocabulary`), what templates and sampling defaults look like (`export.chat_files`), or graphs.

    tokenizer.json ─┐                      ┌─ tokenizer.json | tokenizer.model
    tokenizer.model ┼─ the first there is ─┼─ special_tokens_map.json   names for the template
    GGUF vocabulary ┘                      ├─ chat_template.jinja
    tokenizer_config, generation_config ───┴─ generation.json           stop tokens, sampling defaults
"""

import json
from dataclasses import dataclass

from appliance.bundle.manifest import TokenizerInfo
from appliance.bundle.store import BundleWriter
from export.chat_files import SpecialTokens, read_special_tokens, write_chat_template, write_generation
from export.checkpoint.source import Checkpoint
from export.vocabulary_files import Vocabulary, read_vocabulary_files

SPECIAL_TOKENS = "special_tokens_map.json"


@dataclass(frozen=True)
class TokenizerFiles:
    """What was written: for the manifest."""

    info: TokenizerInfo
    chat_template: str | None
    generation: str | None


def write_tokenizer(checkpoint: Checkpoint, writer: BundleWriter) -> TokenizerFiles:
    """Write the checkpoint's tokenizer, chat template, stop tokens and sampling defaults into a bundle.

    Raises:
        CheckpointError: there is no tokenizer, or one of its files is damaged or names tokens it does not have.
    """
    vocabulary = read_vocabulary_files(checkpoint)
    special = read_special_tokens(checkpoint, vocabulary)
    writer.path(vocabulary.file).write_bytes(vocabulary.data)
    writer.path(SPECIAL_TOKENS).write_text(json.dumps(special.names, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return TokenizerFiles(
        info=_info(vocabulary, special),
        chat_template=write_chat_template(checkpoint, writer),
        generation=write_generation(checkpoint, writer, special.stops),
    )


def _info(vocabulary: Vocabulary, special: SpecialTokens) -> TokenizerInfo:
    return TokenizerInfo(
        kind=vocabulary.kind,
        file=vocabulary.file,
        bos=special.bos,
        eos=special.stops,
        add_bos=special.add_bos,
        added=dict(vocabulary.added),
        space_prefix=vocabulary.space_prefix,
    )
