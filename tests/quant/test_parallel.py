"""Work side by side: results in their order, the largest first, errors as they are."""

import threading
import time

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from quant.parallel import each


def blas_threads() -> set[int]:
    return {one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"}


def test_results_keep_their_order_and_products_get_one_thread_meanwhile() -> None:
    assert np.ones((2, 2)) @ np.ones(2) is not None  # numpy's library for products is loaded
    before, begun, seen = blas_threads(), [], []

    def work(item: int) -> int:
        begun.append(item)
        seen.append(blas_threads())
        time.sleep(0.01)
        return item * item

    assert before, "numpy's products are made by a library that can be told"
    assert each(work, [1, 5, 3, 4, 2], 1, lambda item: item) == [1, 25, 9, 16, 4]
    assert begun == [5, 4, 3, 2, 1] and all(found == {1} for found in seen)
    assert blas_threads() == before
    assert each(work, [], 2, lambda item: item) == []


def test_two_are_worked_on_at_once_and_an_error_comes_out() -> None:
    both = threading.Barrier(2, timeout=10)

    def meet(item: int) -> int:
        both.wait()
        return item

    assert each(meet, [7, 8], 2, lambda item: item) == [7, 8]

    def fail(item: int) -> int:
        raise ValueError(f"weight {item}")

    before = blas_threads()
    with pytest.raises(ValueError, match="weight 2"):
        each(fail, [1, 2], 2, lambda item: item)
    assert blas_threads() == before
