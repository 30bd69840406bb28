"""A client proves that it knows the token: what each proof is worth, and to whom. Against a real
server.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pagoda.base import serve_proof
from pagoda.base.serve_proof import ANYWHERE, HERE, Proof
from tests.serve import kit
from tests.serve.kit import TOKEN, server

TARGET = f"/v1/{bytes(32).hex()}/{bytes(32).hex()}"
OTHER_TARGET = f"/v1/{bytes(32).hex()}/{'1' * 64}"
KEY = serve_proof.key_of(TOKEN)


class Answer(NamedTuple):
    status: int
    challenge: str
    proof: str

    @property
    def nonce(self) -> str:
        return serve_proof.nonce_in(self.challenge)


class Line:
    """One connection, and the host and port that are called on it."""

    def __init__(self, served: kit.Server) -> None:
        self.host = "{}:{}".format(*served.address)
        self._connection = http.client.HTTPConnection(
            *served.address, timeout=kit.SECONDS
        )

    def ask(
        self,
        authorization: str,
        method: str = "GET",
        target: str = TARGET,
        host: str = "",
    ) -> Answer:
        """Return the answer to a request with this header."""
        headers = {"Authorization": authorization, "Host": host or self.host}
        self._connection.request(method, target, headers=headers)
        response = self._connection.getresponse()
        response.read()
        return Answer(
            response.status,
            ", ".join(response.headers.get_all("WWW-Authenticate", [])),
            response.headers.get("Pagoda-Proof", ""),
        )

    def nonce(self) -> str:
        """Ask for a nonce."""
        answer = self.ask("Pagoda", "HEAD")
        assert answer.status == 401
        assert answer.nonce
        return answer.nonce

    def prove(self, proof: Proof, **request: str) -> Answer:
        """Return the answer to a request with this proof."""
        return self.ask(proof.header, **request)

    def close(self) -> None:
        self._connection.close()


def proof_of(
    nonce: str,
    count: int,
    host: str,
    *,
    where: str = ANYWHERE,
    key: serve_proof.ProofKey = KEY,
    method: str = "GET",
) -> Proof:
    """Return the proof of a request for TARGET."""
    return Proof(nonce, serve_proof.random_number(), count, where).signed(
        key, method, TARGET, host
    )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kit.Server]:
    with server(tmp_path_factory.mktemp("stores")) as made:
        yield made


@pytest.fixture
def line(served: kit.Server) -> Iterator[Line]:
    made = Line(served)
    yield made
    made.close()


def test_a_proof_is_taken_as_the_token_and_the_answer_has_one_too(
    line: Line,
) -> None:
    nonce = line.nonce()
    for count in (1, 2, 7):
        proof = proof_of(nonce, count, line.host)
        answer = line.prove(proof)
        assert answer.status == 404
        assert answer.proof == serve_proof.proof_of_answer(KEY, proof.mac, 404)
    # nobody without a right proof gets one: it could try tokens with it
    for authorization in (
        "Pagoda",
        f"Bearer {TOKEN}",
        "Bearer wrong",
        "Pagoda x:y:1:any:z",
    ):
        assert line.ask(authorization).proof == ""


def test_a_proof_is_worth_nothing_a_second_time_or_out_of_order(
    line: Line,
) -> None:
    nonce = line.nonce()
    second = proof_of(nonce, 2, line.host)
    assert line.prove(second).status == 404
    for again in (
        second,
        proof_of(nonce, 1, line.host),
        proof_of(nonce, 2, line.host),
    ):
        answer = line.prove(again)
        assert answer.status == 401
        assert answer.proof == ""


def test_a_proof_is_worth_nothing_on_another_connection(
    served: kit.Server, line: Line
) -> None:
    nonce = line.nonce()
    other = Line(served)
    proof = proof_of(nonce, 1, line.host)
    assert other.prove(proof).status == 401
    other.nonce()  # also once that one has a number of its own
    answer = other.prove(proof)
    assert answer.status == 401
    assert serve_proof.ELSEWHERE in answer.challenge
    assert answer.proof == ""
    other.close()
    assert line.prove(proof).status == 404


def test_a_proof_is_worth_nothing_after_another_question(line: Line) -> None:
    first = line.nonce()
    assert line.nonce() != first
    assert line.prove(proof_of(first, 1, line.host)).status == 401


@pytest.mark.parametrize(
    "request_",
    [
        {"method": "DELETE"},
        {"target": OTHER_TARGET},
        {"target": f"{TARGET}?a"},
        {"host": "localhost"},
    ],
)
def test_a_proof_is_worth_nothing_for_another_request(
    line: Line, request_: dict[str, str]
) -> None:
    proof = proof_of(line.nonce(), 1, line.host)
    answer = line.prove(proof, **request_)
    assert answer.status in (401, 429)
    assert answer.proof == ""


@pytest.mark.parametrize("changed", ["nonce", "salt", "number", "where", "mac"])
def test_no_part_of_a_proof_can_be_changed(line: Line, changed: str) -> None:
    proof = proof_of(line.nonce(), 1, line.host)
    other = {
        "nonce": serve_proof.random_number(),
        "salt": serve_proof.random_number(),
        "number": 2,
        "where": HERE,
        "mac": proof.mac[:-1] + ("1" if proof.mac[-1] == "0" else "0"),
    }
    answer = line.prove(proof._replace(**{changed: other[changed]}))
    assert answer.status in (401, 429)
    assert answer.proof == ""


def test_a_proof_for_an_address_is_worth_nothing_at_another_one(
    line: Line,
) -> None:
    """Whoever passes it on has another address than the server that it is passed on to."""
    port = line.host.rpartition(":")[2]
    nonce = line.nonce()
    for count, host in enumerate(
        ("127.0.0.1:1", "127.0.0.1", f"localhost:{port}", f"10.0.0.5:{port}"), 1
    ):
        proof = proof_of(nonce, count, host, where=HERE)
        answer = line.prove(proof, host=host)
        assert answer.status == 421 and answer.proof == "", host
    assert line.prove(proof_of(nonce, 9, line.host, where=HERE)).status == 404
    other_name = proof_of(nonce, 10, "node-7", where=ANYWHERE)
    assert line.prove(other_name, host="node-7").status == 404


@pytest.mark.slow
def test_wrong_proofs_are_guesses_and_questions_are_not(tmp_path: Path) -> None:
    wrong_key = serve_proof.key_of("another-token-of-the-tests")
    with server(tmp_path) as served:
        line = Line(served)
        for _ in range(60):
            line.nonce()
        statuses = [
            line.prove(proof_of(line.nonce(), 1, line.host, key=wrong_key)).status
            for _ in range(60)
        ]
        assert statuses.count(401) >= 20
        assert statuses.count(429) >= 20
        assert line.prove(proof_of(line.nonce(), 1, line.host)).status == 404
        line.close()


def test_the_token_itself_is_taken_as_before(
    served: kit.Server, line: Line
) -> None:
    assert line.ask(f"Bearer {TOKEN}").status == 404
    answer = line.ask("Bearer wrong")
    assert answer.status in (401, 429)
    assert answer.status == 429 or answer.challenge.startswith("Bearer")


def test_keys_of_two_tokens_differ() -> None:
    macs = {
        serve_proof.key_of(token).mac("a")
        for token in (TOKEN, TOKEN + "x", TOKEN.upper())
    }
    assert len(macs) == 3
    assert serve_proof.unknown_key().mac("a") != serve_proof.unknown_key().mac(
        "a"
    )
