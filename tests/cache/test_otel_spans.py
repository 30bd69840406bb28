"""OpenTelemetry spans of calls: none unless they are asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
    InMemorySpanExporter,
)

from pagoda.base.errors import ConfigError
from pagoda.cache import call
from tests.cache.kit import CHUNK, cache_at, keys_of, prompt, served, stored


class Processor(SimpleSpanProcessor):
    """A processor of the program, which may fail."""

    fails = False

    def on_end(self, span: ReadableSpan) -> None:
        if self.fails:
            raise RuntimeError("no room for spans")
        super().on_end(span)


@pytest.fixture(scope="module")
def made() -> tuple[Processor, InMemorySpanExporter]:
    """The processor of this process's spans, whose provider can be set once, and what it exports
    to.
    """
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    processor = Processor(exporter)
    provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)
    return processor, exporter


@pytest.fixture
def exporter(
    made: tuple[Processor, InMemorySpanExporter], monkeypatch: pytest.MonkeyPatch
) -> InMemorySpanExporter:
    """What was exported in one test."""
    monkeypatch.setattr(call, "_spans", None)
    made[1].clear()
    return made[1]


def test_tokens_behind_a_missing_chunk_have_an_attribute(
    shm_root: Path, exporter: InMemorySpanExporter
) -> None:
    tokens = prompt(4)
    with cache_at(shm_root, None, otel=True) as cache:
        stored(cache, tokens)
        for tier in cache._tiers.all:
            tier.remove(keys_of(cache, tokens)[1])
        cache.lookup(tokens, pieces=True)
    looked = exporter.get_finished_spans()[-1]
    assert looked.attributes is not None
    assert looked.attributes["pagoda.hit_tokens"] == CHUNK
    assert looked.attributes["pagoda.behind_tokens"] == 2 * CHUNK


def test_off_by_default(shm_root: Path, exporter: InMemorySpanExporter) -> None:
    with cache_at(shm_root, None) as cache:
        stored(cache, prompt(2))
        served(cache, prompt(2))
    assert exporter.get_finished_spans() == ()


def test_each_call_is_a_span_under_that_of_its_caller(
    shm_root: Path, tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    tokens = prompt(4)
    tracer = trace.get_tracer("an engine")
    with (
        cache_at(shm_root, tmp_path, otel=True) as cache,
        tracer.start_as_current_span("a request") as request,
    ):
        stored(cache, tokens[: 2 * CHUNK], salt="hunter2")
        cache.lookup(tokens, salt="hunter2")
        kv = served(cache, tokens, salt="hunter2")[1]
        cache.retrieve(tokens[CHUNK:], kv.transfer, tiers="disk")
    assert cache.lookup(tokens).num_tokens == 0  # it is closed
    stored_, looked, retrieved, other, asked, refused = (
        exporter.get_finished_spans()
    )
    assert [span.name for span in (stored_, looked, retrieved)] == [
        "pagoda.store",
        "pagoda.lookup",
        "pagoda.retrieve",
    ]
    assert stored_.attributes == {
        "pagoda.stored_tokens": 2 * CHUNK,
        "pagoda.refused_chunks": 0,
    }
    hit = {
        "pagoda.tokens": 4 * CHUNK,
        "pagoda.hit_tokens": 2 * CHUNK,
        "pagoda.tiers": ("host",),
    }
    assert (
        looked.attributes
        == retrieved.attributes
        == {**hit, "pagoda.reason": "absent"}
    )
    nothing = {
        "pagoda.tokens": 3 * CHUNK,
        "pagoda.hit_tokens": 0,
        "pagoda.tiers": (),
        "pagoda.reason": "absent",
    }
    assert other.attributes == nothing
    assert asked.name == "a request"
    assert refused.name == "pagoda.lookup"
    assert refused.attributes is not None
    assert refused.attributes["pagoda.reason"] == "closed"
    assert refused.parent is None
    context = request.get_span_context()
    for span in (stored_, looked, retrieved, other):
        assert span.parent is not None
        assert span.parent.span_id == context.span_id
        assert span.start_time is not None
        assert span.end_time is not None
        assert asked.end_time is not None
        assert span.start_time < span.end_time <= asked.end_time
        assert "hunter2" not in span.to_json()


def test_a_program_whose_spans_fail_is_served_all_the_same(
    shm_root: Path, made: tuple[Processor, InMemorySpanExporter], exporter: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(made[0], "fails", True)
    with cache_at(shm_root, None, otel=True) as cache:
        stored(cache, prompt(2))
        assert served(cache, prompt(2))[0].num_tokens == 2 * CHUNK
    warnings = [line for line in caplog.messages if "OpenTelemetry" in line]
    assert warnings == [
        "no more OpenTelemetry spans are made: RuntimeError: no room for spans"
    ]


def test_without_the_package_it_is_said_what_to_install(
    shm_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with (
        pytest.raises(
            ConfigError, match=r"otel = true: .* pip install 'pagodakv\[otel\]'"
        ),
        cache_at(shm_root, None, otel=True),
    ):
        pass
