"""A client of llama.cpp's server, or of a proxy in front of one: whole and streamed answers of the
three routes that people use, and a client that goes away.

    client = LlamaClient("http://127.0.0.1:8080")
    reply = client.complete([1, 100, 101], stream=True)
    print(reply.text, reply.hits, reply.first_seconds)

Called by tests and benchmarks. Thread-safe: each request has a connection of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from testbed.llama_servers import ONLY_LETTERS
from testbed.patience import Patience

COMPLETION = "/completion"
OPENAI_COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"

# A request of a tiny model takes less than a second.
DEADLINE_SECONDS = 120.0

Message = Mapping[str, str]


class Hung(Exception):
    """A request got no answer long after it should have."""


@dataclass
class Reply:
    """What came back for one request."""

    status: int = 0  # 0: the connection ended before an answer
    text: str = ""
    hits: int = 0  # tokens that the server did not compute
    computed: int = 0  # tokens of the prompt that it computed
    error: str = ""  # what the server says is wrong, or how the connection ended
    headers: Mapping[str, str] = field(default_factory=dict)
    events: list[dict[str, object]] = field(default_factory=list)
    ended: bool = False  # the answer came to its end
    began: float = 0.0  # time.monotonic() at the request
    arrivals: list[float] = field(default_factory=list)  # of each text

    @property
    def first_seconds(self) -> float:
        """Return the time to the first token. IndexError: there was none."""
        return self.arrivals[0] - self.began

    @property
    def is_right(self) -> bool:
        """Return whether there is a whole answer."""
        return self.status == 200 and self.ended and not self.error


class LlamaClient:
    """Requests to one server. Greedy, and only letters are answered."""

    def __init__(
        self,
        url: str,
        key: str = "",
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        """Make a client; no request is sent.

        Arguments:
            url: of the server or the proxy
            key: the API key sent with each request; empty: none
            deadline_seconds: for a whole answer, on a machine that has nothing else to do
        """
        self.url = url
        self._key = key
        self._deadline_seconds = deadline_seconds

    def complete(
        self,
        prompt: Sequence[int] | str,
        predict: int = 8,
        *,
        stream: bool = False,
        abort_seconds: float | None = None,
        **more: object,
    ) -> Reply:
        """Ask /completion to continue a prompt of tokens or text."""
        body = {"prompt": prompt, "n_predict": predict, **more}
        return self.ask(COMPLETION, body, stream, abort_seconds)

    def complete_openai(
        self,
        prompt: Sequence[int] | str,
        predict: int = 8,
        *,
        stream: bool = False,
        abort_seconds: float | None = None,
        **more: object,
    ) -> Reply:
        """Ask /v1/completions to continue a prompt of tokens or text."""
        body = {"prompt": prompt, "max_tokens": predict, **more}
        return self.ask(OPENAI_COMPLETION, body, stream, abort_seconds)

    def chat(
        self,
        messages: Sequence[Message],
        predict: int = 8,
        *,
        stream: bool = False,
        abort_seconds: float | None = None,
        **more: object,
    ) -> Reply:
        """Ask /v1/chat/completions for the next message."""
        body = {"messages": messages, "max_tokens": predict, **more}
        return self.ask(CHAT, body, stream, abort_seconds)

    def ask(
        self,
        route: str,
        body: Mapping[str, object],
        stream: bool = False,
        abort_seconds: float | None = None,
    ) -> Reply:
        """Send one request and return what came back, whatever it is.

        Arguments:
            route: one of the three above
            body: of the request; what makes an answer greedy and letters is added
            stream: ask for events
            abort_seconds: after this time the client goes away

        Raises:
            Hung: nothing came for the deadline.
        """
        whole = {
            "temperature": 0,
            "seed": 1,
            "ignore_eos": True,
            "logit_bias": ONLY_LETTERS,
            "stream": stream,
            **body,
        }
        reply = Reply(began=time.monotonic())
        try:
            with self._sent("POST", route, whole, abort_seconds) as response:
                reply.status = response.status
                reply.headers = dict(response.getheaders())
                if stream and response.status == 200:
                    self._read_events(reply, response)
                else:
                    self._read_whole(reply, response)
        except TimeoutError:
            waited = time.monotonic() - reply.began
            raise Hung(f"{route}: no answer for {waited:.0f} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            # ValueError: the answer is cut in the middle of a word
            reply.error = reply.error or f"{type(error).__name__}: {error}"
        return reply

    def get(self, path: str) -> object:
        """Return the answer to a GET. RuntimeError for a status other than 200."""
        return self._plain("GET", path, None)

    def post(self, path: str, body: object) -> object:
        """Return the answer to a POST. RuntimeError for a status other than 200."""
        return self._plain("POST", path, body)

    def tokens_of(self, route: str, body: Mapping[str, object]) -> list[int]:
        """Return the tokens of a request's prompt, as the server would cut it."""
        prompt = body.get("prompt")
        if route == CHAT:
            templated = self.post("/apply-template", body)
            assert isinstance(templated, dict)
            prompt = templated["prompt"]
        if isinstance(prompt, str):
            asked = {
                "content": prompt,
                "add_special": True,
                "parse_special": True,
            }
            answer = self.post("/tokenize", asked)
            assert isinstance(answer, dict)
            prompt = answer["tokens"]
        assert isinstance(prompt, list)
        return prompt

    # ---- one connection

    @contextlib.contextmanager
    def _sent(  # type: ignore[no-untyped-def]
        self,
        method: str,
        path: str,
        body: object,
        abort_seconds: float | None = None,
    ):
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(
            parts.hostname or "", parts.port, timeout=self._deadline_seconds
        )
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        with contextlib.closing(connection):
            connection.connect()
            aborting = _abort_later(connection.sock, abort_seconds)
            try:
                text = None if body is None else json.dumps(body)
                connection.request(method, path, text, headers)
                yield connection.getresponse()
            finally:
                aborting()

    def _plain(self, method: str, path: str, body: object) -> object:
        with self._sent(method, path, body) as response:
            text = response.read()
            if response.status != 200:
                raise RuntimeError(f"{path}: {response.status} {text.decode()}")
        return json.loads(text)

    # ---- answers

    def _read_whole(
        self, reply: Reply, response: http.client.HTTPResponse
    ) -> None:
        text = response.read()
        reply.arrivals.append(time.monotonic())
        self._add(reply, json.loads(text))
        reply.ended = True

    def _read_events(
        self, reply: Reply, response: http.client.HTTPResponse
    ) -> None:
        patience = Patience(self._deadline_seconds)
        while line := response.readline():
            if patience.ended:
                raise TimeoutError
            name, _, value = line.decode().strip().partition(":")
            value = value.strip()
            if value == "[DONE]":
                reply.ended = True
            elif name == "error":
                self._add(reply, {"error": json.loads(value)})
            elif name == "data":
                before = len(reply.text)
                event = json.loads(value)
                reply.events.append(event)
                self._add(reply, event)
                if len(reply.text) > before:
                    reply.arrivals.append(time.monotonic())

    def _add(self, reply: Reply, answer: dict[str, object]) -> None:
        """Add a whole answer, or one event of a stream."""
        error = answer.get("error")
        if error is not None:
            reply.error = str(error)
            return
        reply.text += _text_of(answer)
        if answer.get("stop") is True:
            reply.ended = True
        timings = answer.get("timings")
        if isinstance(timings, dict):
            reply.hits = timings["cache_n"]
            reply.computed = timings["prompt_n"]


def _text_of(answer: Mapping[str, object]) -> str:
    content = answer.get("content")
    if isinstance(content, str):
        return content
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        return ""
    choice = choices[0]
    said = choice.get("delta") or choice.get("message") or {}
    return str(said.get("content") or choice.get("text") or "")


def _abort_later(sock: socket.socket, seconds: float | None):  # type: ignore[no-untyped-def]
    """Let the client of a connection go away later; return what calls this off."""
    if seconds is None:
        return lambda: None

    def abort() -> None:
        # a reset: the other end notices at once, as when a program is killed
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, abort)
    timer.daemon = True
    timer.start()
    return timer.cancel
