"""`appliance bench`: how fast a model runs here.

Knows: what is measured and how it is shown. Does not know: peers; comparisons with other programs are scripts in bench/.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from appliance.engine.protocol import Engine, Finished

EXAMPLE = "appliance bench smollm2-135m"


@dataclass(frozen=True)
class Measurement:
    """Speeds at one context length."""

    context: int
    prefill: float
    """Prompt tokens a second."""
    decode: float
    """Tokens a second after a prompt of `context` tokens; the median of the repetitions."""
    first_token: float
    """Seconds from the request to the end of prefill."""


def bench(
    model: Annotated[str, typer.Argument(help="Name of an installed model, or the folder of a bundle.")],
    context: Annotated[str, typer.Option(help="Prompt lengths, in tokens, with commas.")] = "16,512,2048",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode at each.")] = 64,
    repeat: Annotated[int, typer.Option(min=1, help="Times that each is measured; the median counts.")] = 3,
    target: Annotated[str, typer.Option(help="Which graphs to run; the configured target otherwise.")] = "",
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0 = as configured.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how fast a model reads a prompt and writes an answer on this machine."""
    from appliance.commands.show import find_bundle
    from appliance.config import load_config
    from appliance.engine.pool import open_onnx
    from appliance.progress import bar

    lengths = read_lengths(context)
    bundle = find_bundle(model, verify=True)
    settings = load_config().engine
    engine = open_onnx(target or settings.target, threads or settings.threads)(bundle)
    with bar("Loading", None):
        engine.load()
    try:
        vocabulary = bundle.manifest.vocab_size
        stats = engine.stats()
        fitting = [length for length in lengths if length + tokens <= stats.context_length]
        measure(engine, 16, 4, vocabulary, 0)  # the first run pays for memory that all others reuse
        results = []
        with bar("Measuring", len(fitting) * repeat) as advance:
            for length in fitting:
                runs = []
                for number in range(repeat):
                    runs.append(measure(engine, length, tokens, vocabulary, number + 1))
                    advance(1)
                results.append(middle(length, runs))
    finally:
        engine.unload()
    left_out = [length for length in lengths if length not in fitting]
    if as_json:
        facts = {"model": stats.model, "provider": stats.provider, "tokens": tokens, "left_out": left_out}
        print(json.dumps(facts | {"results": [asdict(result) for result in results]}))
        return
    print(f"{stats.model} on {stats.provider}, {tokens} tokens decoded, median of {repeat}")
    print(f"{'context':>8}{'prefill tok/s':>16}{'decode tok/s':>16}{'first token ms':>16}")
    for result in results:
        print(f"{result.context:>8}{result.prefill:>16.1f}{result.decode:>16.1f}{1000 * result.first_token:>16.1f}")
    for length in left_out:
        print(f"{length:>8}  does not fit the model's context of {stats.context_length} tokens")


def read_lengths(text: str) -> list[int]:
    """Prompt lengths out of "16,512"; `BadInput` when it is anything else."""
    from appliance.errors import BadInput

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise BadInput(f"--context {text!r} is no list of lengths", 'write it as "16,512"')
    return [int(part) for part in parts]


def measure(engine: "Engine", context: int, tokens: int, vocabulary: int, seed: int) -> "Finished":
    """One answer of `tokens` tokens to a prompt of `context` random ones; random, so that no cached prefix fits."""
    import random

    from appliance.engine.protocol import Finished, GenerateRequest, Sampling, TokenPrompt

    ids = tuple(random.Random(seed * 100_003 + context).choices(range(vocabulary), k=context))
    request = GenerateRequest(
        id=f"bench-{context}-{seed}",
        prompt=TokenPrompt(ids),
        sampling=Sampling(temperature=0),
        max_tokens=tokens,
        ignore_eos=True,
    )
    return next(event for event in engine.stream(request) if isinstance(event, Finished))


def middle(context: int, runs: Iterable["Finished"]) -> Measurement:
    """The median of each speed. The first token comes out of prefill, so decode counts one token less."""
    import statistics

    runs = list(runs)
    prefill = statistics.median(run.timings.prefill for run in runs)
    decode = statistics.median((run.completion_tokens - 1) / run.timings.decode for run in runs)
    return Measurement(context, context / prefill, decode, prefill)
