"""Makes tests/golden/tokenizer/*.json with transformers (the `reference` extra), which the tests themselves do not need.

    python tests/golden/make_tokenizer.py SMOLLM2.gguf GEMMA3.gguf

References:
- SmolLM2: transformers' own conversion of the GGUF's tokens and merges, with the two pre-tokenizers of the published
  tokenizer.json put in place (Digits one by one, then ByteLevel with its built-in pattern), because transformers knows no
  "smollm" cuts and would leave numbers whole. A second reference written here from the definition (GPT-2's pattern through
  `regex`, merging by rank, nothing of `tokenizers`) must agree on every string.
- Gemma 3: transformers' own conversion of the GGUF (a `tokenizers` BPE whose merges it derives from the order of the
  pieces), so nothing of the `sentencepiece` library that the appliance runs.
- Chat templates: `transformers.utils.chat_template_utils.render_jinja_template`.

Ids are without BOS. Strings are drawn with a fixed seed, so that a rerun gives the same files.
"""

import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent / "tokenizer"
STRINGS = 500
POOL = {
    "english": ["The capital of France is Paris.", "it's", "we'll", "DON'T", "naïve café", "state-of-the-art", "e.g.", "a", "I"],
    "numbers": ["0", "7", "42", "1234567890", "3.14159", "1,000,000", "²³", "Ⅷ", "½", "٣٤٥", "१२३", "0x1F"],
    "code": [
        "def f(x):\n    return x ** 2\n", "for (int i = 0; i < n; ++i) {", "\tif err != nil {\n\t\treturn err\n\t}",
        "SELECT * FROM t WHERE a >= 10;", "<div class=\"a\">&amp;</div>", "#!/bin/sh\nset -eu\n", "{\"k\": [1, null, true]}",
        "λx. x", "a->b::c", "__init__", "camelCaseName", "x=y//2;", "```python\n```",
    ],
    "cjk": ["你好，世界", "日本語のテキスト", "한국어 문장입니다", "漢字かな交じり文", "。！？",
        "𠮷野家", "ｆｕｌｌ　ｗｉｄｔｈ", "が"],
    "indic": ["नमस्ते दुनिया", "क्षत्रिय", "हिन्दी में", "বাংলা", "தமிழ்"],
    "rtl": ["مرحبا بالعالم", "السَّلَامُ", "עברית", "لا", "\u200fabc\u200e"],
    "thai": ["สวัสดีชาวโลก", "ภาษาไทย", "ຂອບໃຈ"],
    "emoji": ["😀", "👩\u200d👩\u200d👧\u200d👦", "🏳️\u200d🌈", "👍🏽", "🇫🇷", "❤️", "1️⃣", "🧑\u200d💻"],
    "control": ["\x00", "\x01\x02", "\x07", "\x1b[31m", "\x7f", "\x85", "\u200b", "\ufeff", "\u2028", "\u00ad", "\ufffd"],
    "marks": ["\u0301", "\u0301\u0302", "e\u0301", "\u093f", "\u20dd", "\u0e31", "Z\u0351\u0342a\u0321"],
    "spaces": [" ", "  ", "   ", "        ", "\t", "\t\t", "\n", "\n\n", "\n\n\n\n", "\r\n", "\r\n\r\n", "\r",
        "\u00a0", "\u3000", " \n ", "\u2003"],
    "added": [
        "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<file_sep>", "<start_of_turn>", "<end_of_turn>", "<eos>",
        "<unused7>", "<|im_start|>user\n", "<|im_end", "|im_end|>", "[multimodal]", "<table>", "</h1>", "<0x41>", "<pad>",
    ],
    "latin": ["Größe", "Ænima", "œuvre", "İstanbul", "ﬁn", "Ж", "Привет, мир", "Ελληνικά", "Ω", "ǅ", "ß", "ệ"],
    "symbols": ["∑∫√", "€£¥", "—–…", "“quoted”", "‽", "$%^&*()", "!!!", "...", "~~~~", "←→", "░▒▓", "¿¡", "▁", "▁▁a", "Ġ"],
}  # fmt: skip


def make_strings() -> list[str]:
    """500 strings: each kind alone, then mixtures of two to six."""
    draw = random.Random(20261130)
    every = [text for texts in POOL.values() for text in texts]
    strings = ["", *every]
    while len(strings) < STRINGS:
        parts = draw.choices(every, k=draw.randint(2, 6))
        strings.append(draw.choice(["", " ", "", "  ", "\n"]).join(parts))
    return strings[:STRINGS]


def smollm2_ids(gguf: Path, strings: list[str]) -> list[list[int]]:
    """By transformers, checked by the definition."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    found = [tokenizer.encode(text, add_special_tokens=False) for text in strings]
    plain = from_definition(gguf)
    for text, ids in zip(strings, found, strict=True):
        if plain(text) != ids:
            raise SystemExit(f"the two references differ on {text!r}: {ids} and {plain(text)}")
    return found


def from_definition(gguf: Path):
    """Byte-level BPE as its paper has it: cut, spell bytes, join the pair of lowest rank until none is left."""
    import regex
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    tokens, merges, types = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges", "token_type"))
    ids = {text: token for token, text in enumerate(tokens)}
    rank = {tuple(merge.split(" ")): at for at, merge in enumerate(merges)}
    own = [code for code in range(256) if chr(code).isprintable() and chr(code) != " " and code != 0xAD]
    spell = {code: chr(code) for code in own}
    spell |= {code: chr(256 + at) for at, code in enumerate(code for code in range(256) if code not in spell)}
    cut = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    special = [text for text, kind in zip(tokens, types, strict=True) if kind == 3]
    split = regex.compile("(" + "|".join(regex.escape(text) for text in sorted(special, key=len, reverse=True)) + ")")

    def word(piece: str) -> list[int]:
        parts = [spell[byte] for byte in piece.encode()]
        while len(parts) > 1:
            best = min(range(len(parts) - 1), key=lambda at: rank.get((parts[at], parts[at + 1]), 1 << 30))
            if (parts[best], parts[best + 1]) not in rank:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        return [ids[part] for part in parts]

    def encode(text: str) -> list[int]:
        found: list[int] = []
        for at, part in enumerate(split.split(text)):
            if at % 2:
                found.append(ids[part])
                continue
            for digit_or_rest in regex.findall(r"\p{N}|\P{N}+", part):
                for piece in cut.findall(digit_or_rest):
                    found += word(piece)
        return found

    return encode


def gemma3_ids(gguf: Path, strings: list[str]) -> list[list[int]]:
    """By transformers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    return [tokenizer.encode(text, add_special_tokens=False) for text in strings]


def render_cases(smollm2: Path) -> list[dict]:
    """Every case of chat_cases.json with what transformers makes of it; the GGUF's own template is not copied."""
    from gguf import GGUFReader
    from transformers.utils.chat_template_utils import render_jinja_template

    carried = GGUFReader(smollm2).fields["tokenizer.chat_template"].contents()
    cases = json.loads((HERE / "chat_cases.json").read_text(encoding="utf-8"))
    for case in cases["cases"]:
        source = "\n".join(cases["templates"][case["template"]]) if case["template"] != "carried" else carried
        rendered, _ = render_jinja_template(
            conversations=[case["messages"]],
            tools=case.get("tools"),
            chat_template=source,
            add_generation_prompt=case.get("add_generation_prompt", True),
            **cases["tokens"],
            **case.get("options", {}),
        )
        case["text"] = rendered[0]
    return cases


def write(name: str, value: object) -> None:
    """One line for each item: small, and readable in a diff."""
    if isinstance(value, list):
        text = "[\n" + ",\n".join(json.dumps(item, separators=(",", ":")) for item in value) + "\n]\n"
    else:
        text = json.dumps(value, indent=1, ensure_ascii=True) + "\n"
    (HERE / name).write_text(text, encoding="utf-8")


def main(smollm2: Path, gemma3: Path) -> None:
    strings = make_strings()
    write("strings.json", strings)
    write("smollm2.json", smollm2_ids(smollm2, strings))
    write("gemma3.json", gemma3_ids(gemma3, strings))
    write("chat_cases.json", render_cases(smollm2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
