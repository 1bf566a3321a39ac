"""Traces continue those of the caller, and metrics cannot be made to grow."""

import pytest
from digit_service import application, in_base64, pixels
from fastapi.testclient import TestClient

from alight.serve.monitoring import FIRST, HORIZON, DisagreementWatch

TRACE, PARENT = 32 * "a", 16 * "b"


def ancestors(span, spans):
    """Return the ids of all spans that a span is within; FastAPI may have some of its own between ours."""
    parents = {each.context.span_id: each.parent.span_id for each in spans}
    found = [span.parent.span_id]
    while found[-1] in parents:
        found.append(parents[found[-1]])
    return found


def test_a_request_continues_the_trace_of_its_caller():
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    with TestClient(application()) as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert client.post("/predict", json={"images": [in_base64(pixels(1)[0])]}, headers=headers).status_code == 200
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert {"POST /predict", "read", "queue", "run"} <= set(spans)  # and those of FastAPI itself
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    assert f"{spans['POST /predict'].parent.span_id:016x}" == PARENT
    assert spans["POST /predict"].attributes["http.response.status_code"] == 200
    for name in ("read", "queue", "run"):
        assert spans["POST /predict"].context.span_id in ancestors(spans[name], spans.values())
        assert spans["POST /predict"].start_time <= spans[name].start_time <= spans[name].end_time
    assert spans["run"].attributes["policy"] == "unpaced"


def test_paths_that_clients_make_up_are_counted_as_one():
    with TestClient(application()) as client:
        for number in range(20):
            client.get(f"/nowhere/{number}")
            client.get(f"/v2/models/{number}")
        lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("alight_requests_total")]
    assert len(lines) == 2
    assert 'alight_requests_total{path="other",status="404"} 20.0' in lines
    assert 'alight_requests_total{path="/v2/models/{name}",status="404"} 20.0' in lines


@pytest.mark.guarantee
def test_the_alarm_of_disagreement_is_seldom_false_and_finds_a_doubled_rate():
    import numpy as np

    rng = np.random.default_rng(0)
    false, delays = 0, []
    for _ in range(100):
        watch = DisagreementWatch()
        for count in rng.binomial(50, 0.05, size=HORIZON // 50 // 5):
            watch.add(50, int(count))
        false += watch.alarmed
        while not watch.alarmed:
            watch.add(50, int(rng.binomial(50, 0.2)))
        delays.append(watch.samples - HORIZON // 5)
    assert false <= 2
    assert np.median(delays) < 10 * FIRST
