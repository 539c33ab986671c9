"""One decision in both graph forms: the dynamic graph, the static pair on the processor and on OpenVINO's plugin.

What is compared is exact but for one thing: an activation that lies within float rounding of the middle between two int8
steps may be rounded up by one provider and down by another. It happens about once in a hundred thousand activations, and
everything computed from that token on differs by part of a quantization step. So: with float activations the logits are
equal to 1e-4 at every step; with int8 activations 97 of 100 first tokens are equal to 1e-4 (measured) and all are within
`STEP`; and the greedy tokens of a model that is as sure of itself as a trained one are the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance.bundle.store import Bundle
from appliance.engine.onnx import OnnxEngine
from appliance.engine.protocol import Delta, Finished, GenerateRequest, Sampling, Started, TokenPrompt
from appliance.runtime.decoder import Decoder, open_decoder
from appliance.targets import load
from export.arch import llama, mistral
from export.build import BuildRequest, build
from quant import schemes
from quant.scheme import FLOAT, TABLES, Scheme
from tests.openvino_device import processor_listed_by_openvino
from tests.static_pair import MemoryCheckpoint, confident_checkpoint, fresh_seed, random_checkpoint, write_checkpoint

CONFIGS: dict[str, dict[str, Any]] = {
    "tied": llama.TINY["tied"],
    "untied": llama.TINY["untied"],
    "all": llama.TINY["all"],
    "window": mistral.TINY["window"],
}
TARGETS = {"cpu": "CPUExecutionProvider", "cpu-static": "CPUExecutionProvider", "openvino": "OpenVINOExecutionProvider"}
CHUNK, CONTEXT, ANSWER = 16, 128, 48
PROMPTS = (1, 15, 16, 17, 45)
"""Tokens: one, less than a chunk, a whole one, one more, several with a rest."""
STEP = 0.25
"""Most that logits may differ by after an activation was rounded the other way, in standard deviations of the logits."""
TIE = 0.25
"""Lead of the best token over the next, in natural logarithms, that one rounding may turn: measured up to 0.2 either way."""


@pytest.fixture(scope="module", autouse=True)
def openvino() -> Iterator[None]:
    with processor_listed_by_openvino():
        yield


def built(checkpoint: MemoryCheckpoint, scheme: Scheme, folder: Path) -> Bundle:
    source = write_checkpoint(folder / "source", checkpoint)
    targets = tuple(load(name).model_copy(update={"chunk": CHUNK, "context": CONTEXT}) for name in TARGETS)
    request = BuildRequest(source, targets, scheme, folder / "bundle", "tiny", CONTEXT, "test", windows=1)
    return build(request, lambda label, done, total: None)


def logits_of(decoder: Decoder, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """After each piece of up to a chunk, then after each of ten single tokens."""
    state = decoder.new_state(len(ids))
    ends = [*range(CHUNK - 3, len(ids) - 10, CHUNK - 3), *range(len(ids) - 10, len(ids) + 1)]
    rows = [decoder.run(state, ids[start:end], 1)[0].copy() for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return np.stack(rows)


def prompt_of(length: int, seed: int, vocab: int = 320) -> NDArray[np.int64]:
    return np.random.default_rng([seed, length]).integers(0, vocab, length)


@dataclass(frozen=True)
class Chosen:
    """One greedy token: the runner-up and how far behind it was, as the answer's log probabilities say."""

    token: int
    second: int
    lead: float


def greedy(engine: OnnxEngine, prompt: NDArray[np.int64]) -> tuple[str, list[Chosen]]:
    """The provider that the answer names, and its tokens."""
    request = GenerateRequest(
        "greedy",
        TokenPrompt(tuple(prompt.tolist())),
        Sampling(temperature=0.0),
        max_tokens=ANSWER,
        logprobs=2,
        ignore_eos=True,
    )
    started, *deltas, finished = engine.stream(request)
    assert isinstance(started, Started) and isinstance(finished, Finished) and finished.completion_tokens == ANSWER
    chosen = [one for delta in deltas if isinstance(delta, Delta) for one in delta.logprobs]
    return started.provider, [Chosen(one.id, one.top[1].id, one.top[0].logprob - one.top[1].logprob) for one in chosen]


def compared(wanted: list[Chosen], found: list[Chosen], what: str) -> int:
    """Tokens that are the same. Answers may part only where the two best were as good as tied: later nothing can be compared."""
    for at, (ours, theirs) in enumerate(zip(wanted, found, strict=True)):
        if theirs.token != ours.token:
            assert theirs.token == ours.second and ours.lead < TIE, f"{what}, token {at}: {ours} became {theirs}"
            return at
    return len(wanted)


@pytest.mark.parametrize("name", ["untied", "all", "window"])
def test_same_greedy_tokens_on_every_target(name: str, tmp_path: Path) -> None:
    seed = fresh_seed()
    bundle = built(confident_checkpoint(CONFIGS[name], seed), schemes.find("w4a8"), tmp_path)
    answers: dict[str, list[list[Chosen]]] = {}
    for target, provider in TARGETS.items():
        engine = OnnxEngine(bundle, target=target, threads=1)
        engine.load()
        found = [greedy(engine, prompt_of(length, seed)) for length in PROMPTS]
        stats = engine.stats()
        engine.unload()
        assert [named for named, _ in found] == [provider] * len(PROMPTS)
        assert (stats.provider, stats.fallbacks) == (provider, ())
        answers[target] = [chosen for _, chosen in found]
    assert all(len(answer) == ANSWER for answer in answers["cpu"])
    assert len({one.token for answer in answers["cpu"] for one in answer}) > 40, f"seed {seed}: too plain to tell apart"
    for target in ("cpu-static", "openvino"):
        pairs = zip(answers["cpu"], answers[target], strict=True)
        same = [compared(ours, theirs, f"{target}, seed {seed}") for ours, theirs in pairs]
        # Ties that fall the other way are about one in ten thousand tokens here; more would be a fault, not rounding.
        assert sum(count == ANSWER for count in same) >= len(PROMPTS) - 1, f"{target}, seed {seed}: {same}"


def test_answers_may_part_only_at_a_tie() -> None:
    ours = [Chosen(5, 6, 3.0), Chosen(7, 8, 0.05), Chosen(9, 1, 2.0)]
    assert compared(ours, ours, "") == 3
    assert compared(ours, [ours[0], Chosen(8, 7, 0.01), Chosen(3, 2, 1.0)], "") == 1
    for other in (Chosen(6, 5, 0.1), Chosen(1, 2, 3.0)):
        with pytest.raises(AssertionError, match="token 0"):
            compared(ours, [other, *ours[1:]], "")
    with pytest.raises(AssertionError, match="token 1"):
        compared(ours, [ours[0], Chosen(2, 7, 0.01), ours[2]], "")


@pytest.mark.parametrize("name", ["tied", "all", "window"])
def test_equal_logits_with_float_activations(name: str, tmp_path: Path) -> None:
    seed = fresh_seed()
    scheme = schemes.find("w4a8")
    plain = replace(
        scheme,
        default=replace(scheme.default, activation="float"),
        roles={role: FLOAT for role in TABLES},  # 8 bits are multiplied by int8 alone
    )
    bundle = built(random_checkpoint(CONFIGS[name], seed), plain, tmp_path)
    ids = prompt_of(100, seed)
    wanted = logits_of(open_decoder(bundle, "cpu", 1), ids)
    assert wanted.std() > 1
    for target in ("cpu-static", "openvino"):
        delta = np.abs(logits_of(open_decoder(bundle, target, 1), ids) - wanted).max()
        assert delta < 1e-4, f"{target}, seed {seed}: {delta}"


@pytest.mark.parametrize("name", ["tied", "all"])
def test_logits_within_a_rounding_with_int8_activations(name: str, tmp_path: Path) -> None:
    seed = fresh_seed()
    bundle = built(random_checkpoint(CONFIGS[name], seed), schemes.find("w4a8"), tmp_path)
    ids = prompt_of(100, seed)
    decoders = {target: open_decoder(bundle, target, 1) for target in TARGETS}
    wanted = logits_of(decoders["cpu"], ids)
    for target in ("cpu-static", "openvino"):
        delta = np.abs(logits_of(decoders[target], ids) - wanted).max() / wanted.std()
        assert delta < STEP, f"{target}, seed {seed}: {delta}"
        firsts = []
        for token in range(40):
            first, second = (decoders[one].run(decoders[one].new_state(1), [token], 1)[0] for one in ("cpu", target))
            firsts.append(np.abs(first - second).max())
        equal = float(np.mean(np.array(firsts) < 1e-4))
        assert equal >= 0.8, f"{target}, seed {seed}: only {equal:.0%} of first tokens are equal, that is not rounding alone"
