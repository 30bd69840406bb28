"""An HTTP connection to a `pagoda serve` on which both sides prove that they know the token; see
`pagoda.base.serve_proof`.

`pagoda_server` makes one for each of its connections, and calls `request` as of any HttpConnection.
"""

from __future__ import annotations

from urllib.parse import SplitResult

from pagoda.base import serve_proof
from pagoda.base.metrics import Reason
from pagoda.tiers.remote.http import HttpConnection, HttpRequest, Response
from pagoda.tiers.remote.store_client import RefusedError, ServerError

_PROBE = HttpRequest("HEAD", f"/v1/{bytes(32).hex()}/{bytes(32).hex()}", {})
"""A small request: neither a namespace nor a key, so nothing is stored under it."""
_ANSWERS = (200, 201, 204, 404, 409)
"""The statuses that a caller takes for an answer; all others are errors, and those may come from
anybody.
"""
_WRONG_TOKEN = "401: name the server's token: ?password_file=PATH in the URL"
_WRONG_TOKEN_FOUND = (
    "401: it has another token than this user: copy the file, or name it in peers with "
    "password_file"
)
_UNPROVEN = (
    "it did not prove that it knows the token, so nothing is taken from it: is it your "
    "pagoda serve?"
)
_PASSED_ON = (
    "401: a proxy passes requests on over other connections, on which a proof is worth nothing: "
    "name the server itself"
)


class ProvingConnection(HttpConnection):
    """See the module. For one thread at a time, except `abort`.

    `request` raises RefusedError too: the server does not ask for a proof, does not accept it, or
    has none itself. Then nothing but the request was sent, and nothing of its answer is returned;
    the connection is closed.
    """

    def __init__(
        self, origin: SplitResult, key: serve_proof.ProofKey, *, is_found: bool
    ) -> None:
        """Connect to nothing yet.

        Args:
            origin: scheme, host and port.
            key: what `serve_proof.key_of` makes of the token.
            is_found: the address comes from the directory of neighbours. So the server must have
                that address itself: whoever wrote it there cannot pass the proofs on to another
                server.
        """
        super().__init__(origin)
        self._key = key
        self._where = serve_proof.HERE if is_found else serve_proof.ANYWHERE
        self._remedy = (
            "name it in peers with proof=off"
            if is_found
            else "add proof=off to its URL"
        )
        self._wrong_token = _WRONG_TOKEN_FOUND if is_found else _WRONG_TOKEN
        self._nonce = ""
        self._salt = ""
        self._number = 0

    def _exchange(
        self, request: HttpRequest, until: float, *, is_new: bool
    ) -> Response:
        if self._socket is None:
            self._ask_for_nonce(until)
            # keys and KV are sent only to a server that has proved itself
            if request.body:
                self._prove(_PROBE, until, is_new=is_new)
        return self._prove(request, until, is_new=is_new)

    def _ask_for_nonce(self, until: float) -> None:
        question = {"Authorization": serve_proof.SCHEME}
        response = super()._exchange(
            _PROBE._replace(fields=question), until, is_new=True
        )
        if response.status >= 500:
            raise ServerError(f"the server answered {response.status}")
        self._nonce = ""
        for text in response.challenges:
            self._nonce = self._nonce or serve_proof.nonce_in(text)
        self._salt = serve_proof.random_number()
        self._number = 0
        if not self._nonce:
            what = "is of an older version and wants the token itself, or is no pagoda serve"
            text = f"{response.status}: it {what}: update it, or {self._remedy}"
            raise RefusedError(Reason.IO_ERROR, text)
        if response.closes:
            raise RefusedError(
                Reason.IO_ERROR, f"{_PASSED_ON}, or {self._remedy}"
            )

    def _prove(
        self, request: HttpRequest, until: float, *, is_new: bool
    ) -> Response:
        """Send a request with its proof; return the answer if that has a right one, or is an
        error.
        """
        self._number += 1
        unsigned = serve_proof.Proof(
            self._nonce, self._salt, self._number, self._where
        )
        proof = unsigned.signed(
            self._key, request.method, request.target, self.authority
        )
        fields = {**request.fields, "Authorization": proof.header}
        response = super()._exchange(
            request._replace(fields=fields), until, is_new=is_new
        )
        if response.status == 401:
            is_passed_on = any(
                serve_proof.ELSEWHERE in text for text in response.challenges
            )
            text = (
                f"{_PASSED_ON}, or {self._remedy}"
                if is_passed_on
                else self._wrong_token
            )
            raise RefusedError(Reason.IO_ERROR, text)
        if response.status in _ANSWERS:
            right = serve_proof.proof_of_answer(
                self._key, proof.mac, response.status
            )
            if not serve_proof.equal(response.proof, right):
                raise RefusedError(Reason.IO_ERROR, _UNPROVEN)
        return response
