"""What int8 keys and values gain and cost: two bundles of one model, with and without --kv int8, in one interleaved run.

    python bench/kv.py FLOAT_BUNDLE INT8_BUNDLE [--contexts 512,2048,8000] [--threads 2] [--rounds 5] [--steps 64]

Both run the same prompts of random tokens greedily, taking turns at every round; medians are shown, and what the state takes
in memory a token of context. A human table first; the last line of stdout is one JSON object.

Knows: the two bundles' places. Does not know: how a run is timed (bench/decode.py, bench/decode_appliance.py).
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from decode import HERE, Runner, measure

from appliance.bundle.store import open_bundle

SIDES = ("float32", "int8")


def bytes_a_token(bundle: Path, wanted: str) -> int:
    """Of the bundle's state, which must be kept as `wanted`."""
    variant = open_bundle(bundle).variant("cpu")
    found = {tensor.dtype for tensor in variant.state}
    if found != {wanted}:
        raise SystemExit(f"{bundle}: its state is {', '.join(sorted(found))}; wanted {wanted}")
    return variant.bytes_a_token


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs=2, metavar="BUNDLE")
    parser.add_argument("--contexts", default="512,2048,8000")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=64)
    asked = parser.parse_args()
    memory = {side: bytes_a_token(bundle, side) for side, bundle in zip(SIDES, asked.bundles, strict=True)}
    print(f"{'':>10} {'context':>8} {'prefill/s':>10} {'decode/s':>10} {'peak MiB':>10}")
    runners = [
        Runner(side, [sys.executable, str(HERE / "decode_appliance.py"), str(bundle), str(asked.threads)])
        for side, bundle in zip(SIDES, asked.bundles, strict=True)
    ]
    try:
        rows = measure(runners, [int(one) for one in asked.contexts.split(",")], asked.rounds, asked.steps)
    finally:
        for runner in runners:
            runner.close()
    ratios: list[dict[str, Any]] = []
    for plain, small in zip(rows[::2], rows[1::2], strict=True):
        ratio = {key: round(small[key] / plain[key], 2) for key in ("prefill", "decode", "peak_rss_mib")}
        print(f"{'ratio':>10} {small['context']:>8} {ratio['prefill']:>10} {ratio['decode']:>10} {ratio['peak_rss_mib']:>10}")
        ratios.append({"context": small["context"], **ratio})
    settings = {"threads": asked.threads, "rounds": asked.rounds, "steps": asked.steps}
    print(json.dumps({"bench": "kv", **settings, "bytes_a_token": memory, "ratios": ratios, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
