"""Who may say that a request is a job's: whoever brings the key that the daemon made for its own jobs."""

import pytest

from appliance.api.chat import PRIORITY_HEADER, priority_of
from appliance.jobs import endpoint
from tests.api.conftest import Serve


@pytest.mark.parametrize(
    ("headers", "key", "priority"),
    [
        ({PRIORITY_HEADER: "job", "authorization": "Bearer k1"}, "k1", "job"),
        ({PRIORITY_HEADER: "job", "authorization": "Bearer k2"}, "k1", "interactive"),
        ({PRIORITY_HEADER: "job", "authorization": "Bearer kä"}, "k1", "interactive"),
        ({PRIORITY_HEADER: "job"}, "k1", "interactive"),
        ({PRIORITY_HEADER: "job", "authorization": "Bearer "}, "", "interactive"),
        ({"authorization": "Bearer k1"}, "k1", "interactive"),
    ],
)
def test_only_the_key_makes_a_request_a_jobs(headers: dict[str, str], key: str, priority: str) -> None:
    assert priority_of(headers, key) == priority


def test_a_stranger_cannot_say_so(serve: Serve) -> None:
    served = serve()
    served.http.headers.update({PRIORITY_HEADER: "job", "authorization": "Bearer guess"})
    assert served.chat().status_code == 200
    assert served.engine.requests[0].priority == "interactive"


def test_jobs_send_the_header_that_is_read() -> None:
    sent = endpoint.Endpoint("http://x", None, "k1").headers
    assert sent[endpoint.PRIORITY_HEADER] == "job" and endpoint.PRIORITY_HEADER == PRIORITY_HEADER
    assert priority_of(sent, "k1") == "job"
