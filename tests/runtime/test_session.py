"""Where nodes ran, as it is read back and judged; discovery of providers."""

from collections import Counter

import pytest

from appliance.errors import TargetError
from appliance.runtime import providers
from appliance.runtime.session import Placement, joined, judge

NPU, CPU = "NpuExecutionProvider", "CPUExecutionProvider"


def test_a_graph_that_runs_whole_on_its_provider_has_no_fallbacks() -> None:
    placement = judge(Counter({NPU: 12}), {NPU: Counter({"MatMul": 12})}, NPU)
    assert placement == Placement(NPU, ((NPU, 12),), ())


def test_nodes_elsewhere_are_counted_and_named() -> None:
    operators = {NPU: Counter({"MatMul": 9}), CPU: Counter({"Attention": 2, "Gather": 1})}
    placement = judge(Counter({NPU: 9, CPU: 3}), operators, NPU)
    assert placement.provider == NPU
    assert placement.fallbacks == (f"3 of 12 nodes run on {CPU}, not on {NPU}: Attention x2, Gather x1",)


def test_a_session_that_fell_back_whole_is_named_after_what_runs_it() -> None:
    placement = judge(Counter({CPU: 3}), {CPU: Counter({"MatMul": 3})}, NPU)
    assert placement.provider == CPU
    assert len(placement.fallbacks) == 1


def test_a_pair_is_as_true_as_its_worse_half() -> None:
    whole = judge(Counter({NPU: 5}), {NPU: Counter({"MatMul": 5})}, NPU)
    fallen = judge(Counter({CPU: 5}), {CPU: Counter({"MatMul": 5})}, NPU)
    for pair in ([whole, fallen], [fallen, whole]):
        placement = joined(pair)
        assert placement.provider == CPU
        assert placement.fallbacks == fallen.fallbacks
        assert dict(placement.nodes) == {NPU: 5, CPU: 5}


def test_an_unknown_provider_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TargetError, match=r'unknown provider "gpu"; known providers: .*cpu'):
        providers.find("gpu")
