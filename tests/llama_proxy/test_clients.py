"""Clients that know nothing of the proxy work through it as with the server alone: each test runs
against both.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest

from testbed.llama_client import CHAT, LlamaClient
from testbed.llama_proxy import owning_proxy
from testbed.llama_servers import ONLY_LETTERS, LlamaOptions, llama_server
from testbed.programs import lacking, need, path_of
from testbed.tiny_gguf import write_model

# so much room that no client is slower than an answer that fills it
OPTIONS: LlamaOptions = {"slots": 2, "context": 65536, "flash": False}
MESSAGES = [
    {"role": "system", "content": "you are a model of tests " * 12},
    {"role": "user", "content": "hello"},
]
GREEDY = {
    "temperature": 0,
    "ignore_eos": True,
    "logit_bias": ONLY_LETTERS,
}
TOKENS = 12
LONG = 30_000
ASKED = {"model": "tiny", "messages": MESSAGES, "max_tokens": TOKENS, **GREEDY}


@pytest.fixture(scope="module", params=["bare", "proxy"])
def url(
    request: pytest.FixtureRequest,
    models: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    model = write_model(models, seed=1)
    if request.param == "bare":
        with llama_server(model, "B", **OPTIONS) as server:
            yield server.url
        return
    with tempfile.TemporaryDirectory(
        prefix="pagoda-test-", dir="/dev/shm"
    ) as memory:
        pagoda = {
            "host-size": "16MiB",
            "host-path": memory,
            "chunk-tokens": "64",
        }
        with owning_proxy(model, pagoda, "B", **OPTIONS) as proxy:
            yield proxy.url


@pytest.fixture(scope="module")
def right(models: Path) -> str:
    """What a server answers that has seen nothing before."""
    with llama_server(write_model(models, seed=1), "B", **OPTIONS) as server:
        reply = LlamaClient(server.url).chat(MESSAGES, TOKENS)
        assert reply.is_right
        assert len(reply.text) == TOKENS
        return reply.text


@pytest.mark.slow
def test_the_openai_client(url: str, right: str) -> None:
    extra = {"ignore_eos": True, "logit_bias": ONLY_LETTERS}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        assert [each.id for each in client.models.list()]
        chat = client.chat.completions
        asked = {
            "model": "tiny",
            "messages": MESSAGES,
            "max_tokens": TOKENS,
            "temperature": 0,
            "extra_body": extra,
        }
        for _ in range(2):
            whole = chat.create(**asked)
            assert whole.choices[0].message.content == right
            assert whole.usage.completion_tokens == TOKENS
            with chat.create(
                **asked, stream=True, stream_options={"include_usage": True}
            ) as stream:
                parts = list(stream)
            said = [
                each.choices[0].delta.content for each in parts if each.choices
            ]
            assert "".join(filter(None, said)) == right
            assert parts[-1].usage.completion_tokens == TOKENS
        # a user who stops an answer, and asks again
        stream = chat.create(**asked | {"max_tokens": 500}, stream=True)
        next(iter(stream))
        stream.close()
        assert chat.create(**asked).choices[0].message.content == right
        with pytest.raises(openai.BadRequestError, match="context"):
            client.completions.create(
                model="tiny", prompt="a" * 70_000, max_tokens=1
            )


def test_http_as_a_program_writes_it(url: str, right: str) -> None:
    """One connection for many requests, and headers that nobody asked for."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        str(parts.hostname), parts.port, timeout=60
    )
    headers = {
        "Content-Type": "application/json",
        "Accept-Encoding": "gzip, deflate",
        "X-Stainless-Lang": "python",
        "Authorization": "Bearer none",
    }
    for _ in range(3):
        connection.request("POST", CHAT, json.dumps(ASKED), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert response.status == 200
        assert answer["choices"][0]["message"]["content"] == right
        connection.request("GET", "/v1/models", headers=headers)
        listed = connection.getresponse()
        assert listed.status == 200
        assert json.loads(listed.read())["data"]
    connection.close()


@pytest.mark.parametrize("forms", [(), ("--http1.0",), ("--compressed",)])
def test_curl_shows_an_answer_as_it_comes(
    url: str, right: str, forms: tuple[str, ...]
) -> None:
    command = [need("curl"), "-sN", "--max-time", "60", *forms]
    process = subprocess.Popen(
        [
            *command,
            *("-H", "Content-Type: application/json"),
            *("-d", "@-", f"{url}{CHAT}"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({**ASKED, "stream": True}))
    process.stdin.close()
    lines = [line.strip() for line in process.stdout]
    assert process.wait(60) == 0
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [
        json.loads(line.removeprefix("data: "))
        for line in lines
        if line.startswith("data: {")
    ]
    for event in events:
        assert "prompt_progress" not in event
    said = [
        event["choices"][0]["delta"].get("content") or ""
        for event in events
        if event["choices"]
    ]
    assert "".join(said) == right
    # each token is an event of its own
    assert len([word for word in said if word]) == TOKENS


def test_events_come_while_the_answer_is_computed(url: str) -> None:
    """Nothing on the way collects them until the end."""
    body = json.dumps({**ASKED, "max_tokens": LONG, "stream": True})
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        str(parts.hostname), parts.port, timeout=60
    )
    with contextlib.closing(connection):
        connection.request(
            "POST", CHAT, body, {"Content-Type": "application/json"}
        )
        assert connection.getresponse().readline().startswith(b"data: ")
        slots = LlamaClient(url).get("/slots")
    assert isinstance(slots, list)
    assert any(slot["is_processing"] for slot in slots)


_CHAT_OF_A_PAGE = """
async ([body, stopAfter]) => {
  const abort = new AbortController();
  const answer = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal: abort.signal,
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "", rest = "", reads = 0;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: {")) continue;
        const choice = JSON.parse(line.slice(6)).choices[0];
        text += choice?.delta?.content ?? "";
      }
      reads += 1;
      if (stopAfter && reads >= stopAfter) abort.abort();
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  }
  return { status: answer.status, type: answer.headers.get("Content-Type"), text, reads };
}
"""


@pytest.mark.slow
@pytest.mark.skipif(path_of("chromium") is None, reason=lacking("chromium"))
def test_the_chat_of_a_page_in_a_browser(url: str, right: str) -> None:
    playwright = pytest.importorskip(
        "playwright.sync_api",
        reason="needs the dev group: pip install --group dev",
    )
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=path_of("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page()
        page.goto(f"{url}/health")
        asked = {**ASKED, "stream": True}
        whole = page.evaluate(_CHAT_OF_A_PAGE, [asked, 0])
        assert whole["status"] == 200
        assert whole["type"].startswith("text/event-stream")
        assert whole["text"] == right
        long = {**asked, "max_tokens": LONG}
        stopped = page.evaluate(_CHAT_OF_A_PAGE, [long, 2])
        assert len(stopped["text"]) < LONG
        again = page.evaluate(_CHAT_OF_A_PAGE, [asked, 0])
        assert again["text"] == right
        browser.close()
