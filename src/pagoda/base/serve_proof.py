"""How a client and a `pagoda serve` show each other that they know the token, which itself is never
sent.

`serve.access` and `tiers.remote.proving_connection` call this.

    1. on a new connection the client asks            Authorization: Pagoda
    2. the server answers 401 with a random number    WWW-Authenticate: Pagoda nonce=NONCE
    3. each request then has a proof                  Authorization: Pagoda
                                                      NONCE:SALT:NUMBER:WHERE:MAC
    4. and so has each answer to a right one          Pagoda-Proof: MAC

MAC is an HMAC-SHA256 under a key made of the token. What it covers decides what a proof is worth to
somebody else:

    NONCE      of the server: nothing on another connection or at another server
    NUMBER     rises: nothing a second time
    method, path with query, Host header    nothing for another request
    WHERE      "here": nothing at a server whose own address is not in the Host header
    SALT       of the client: an answer that was recorded earlier is no answer to it

The proof of an answer covers the proof of its request, and the status. No proof covers a body.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from functools import lru_cache
from typing import NamedTuple

SCHEME = "Pagoda"
"""The name of this scheme in the headers Authorization and WWW-Authenticate."""
ANSWER_HEADER = "Pagoda-Proof"
"""The header with the proof of an answer."""
HERE = "here"
"""The proof holds only at a server whose own address, or `--advertise`, is in the Host header."""
ANYWHERE = "any"
"""The proof holds at a server that is called by any name."""
ELSEWHERE = "error=connection"
"""Follows the nonce if a proof was of another connection: something between passes requests on over
others.
"""

_VERSION = "pagoda-serve-1"
_RANDOM_BYTES = 16
# who hears a proof can try tokens at his leisure: this makes each try cost some milliseconds
_KEY_ROUNDS = 10_000
_FEW_KEYS = 64
_MAC = "[0-9a-f]{64}"
_RANDOM = "[0-9a-f]{32}"
_CREDENTIALS = re.compile(
    rf"({_RANDOM}):({_RANDOM}):(\d{{1,18}}):({HERE}|{ANYWHERE}):({_MAC})"
)
_CHALLENGE = re.compile(rf"\b{SCHEME} nonce=({_RANDOM})\b", re.IGNORECASE)


class ProofKey:
    """The key of MACs that is made of a token. Immutable, thread-safe."""

    def __init__(self, key: bytes) -> None:
        """`key`: secret bytes."""
        # a copy costs a tenth of a new one
        self._begun = hmac.new(key, digestmod="sha256")

    def mac(self, text: str) -> str:
        """Return the MAC of a text."""
        begun = self._begun.copy()
        # a header may have bytes that are no UTF-8: both sides have them as surrogates
        begun.update(text.encode("utf-8", "surrogateescape"))
        return begun.hexdigest()


class Proof(NamedTuple):
    """The proof of one request. `number`: its number on the connection. `where`: HERE or
    ANYWHERE.
    """

    nonce: str
    salt: str
    number: int
    where: str
    mac: str = ""

    def signed(self, key: ProofKey, method: str, target: str, host: str) -> Proof:
        """Return the proof with its MAC for a request. `target`: path and query; `host`: the Host
        header. Pure.
        """
        covered = (
            _VERSION,
            self.nonce,
            self.salt,
            str(self.number),
            self.where,
            method,
            target,
            host,
        )
        return self._replace(mac=key.mac("\n".join(covered)))

    @property
    def header(self) -> str:
        """The value of the header Authorization."""
        return f"{SCHEME} {self.nonce}:{self.salt}:{self.number}:{self.where}:{self.mac}"


@lru_cache(_FEW_KEYS)
def key_of(token: str) -> ProofKey:
    """Return the key that is made of a token. Takes some milliseconds the first time.
    Thread-safe.
    """
    return ProofKey(
        hashlib.pbkdf2_hmac(
            "sha256", token.encode(), _VERSION.encode(), _KEY_ROUNDS
        )
    )


def unknown_key() -> ProofKey:
    """Return a key that nobody else has: no proof is right."""
    return ProofKey(secrets.token_bytes())


def random_number() -> str:
    """Return a nonce or a salt: it never comes again."""
    return secrets.token_hex(_RANDOM_BYTES)


def challenge(nonce: str, note: str = "") -> str:
    """Return the value of the header WWW-Authenticate. `note`: ELSEWHERE or nothing. Pure."""
    return (
        f"{SCHEME} nonce={nonce}, {note}" if note else f"{SCHEME} nonce={nonce}"
    )


def nonce_in(text: str) -> str:
    """Return the nonce in a header WWW-Authenticate; empty if there is none. Pure."""
    found = _CHALLENGE.search(text)
    return found[1].lower() if found else ""


def proof_in(credentials: str) -> Proof | None:
    """Return the proof in a header Authorization, after the scheme; None if it has another form.
    Pure.
    """
    found = _CREDENTIALS.fullmatch(credentials)
    if found is None:
        return None
    nonce, salt, number, where, mac = found.groups()
    return Proof(nonce, salt, int(number), where, mac)


def proof_of_answer(key: ProofKey, request_mac: str, status: int) -> str:
    """Return the proof of the answer to a request, whose MAC was right. Pure."""
    return key.mac(f"{_VERSION}\nanswer\n{request_mac}\n{status}")


def equal(one: str, other: str) -> bool:
    """Return whether two proofs are equal, in the same time for all of one length. Pure."""
    return hmac.compare_digest(one.encode(), other.encode())
