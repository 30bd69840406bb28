"""The bytes of KV per token and the work of computing a token, for well-known models. Pure."""

from __future__ import annotations

from typing import NamedTuple

from pagoda.config.did_you_mean import did_you_mean
from pagoda_tools.cli import UsageError


class Model(NamedTuple):
    """The KV of a token: `planes` vectors of `heads` x `dim` elements in each layer (K and V, or
    one latent vector).

    `active`: the number of parameters, in billions, that compute a token.
    """

    layers: int
    heads: int
    dim: int
    active: float
    planes: int = 2

    def token_bytes(self, dtype: str) -> int:
        """Return the bytes of KV per token. Raises ValueError for an unknown dtype."""
        from pagoda.layout import itemsize

        return self.layers * self.planes * self.heads * self.dim * itemsize(dtype)


MODELS = {
    "llama-3-8b": Model(32, 8, 128, 8.0),
    "llama-3-70b": Model(80, 8, 128, 70.6),
    "llama-3.1-405b": Model(126, 8, 128, 405.9),
    "llama-3.2-1b": Model(16, 8, 64, 1.2),
    "llama-3.2-3b": Model(28, 8, 128, 3.2),
    "mistral-7b": Model(32, 8, 128, 7.2),
    "mixtral-8x7b": Model(32, 8, 128, 12.9),
    "qwen2.5-7b": Model(28, 4, 128, 7.6),
    "qwen2.5-14b": Model(48, 8, 128, 14.8),
    "qwen2.5-32b": Model(64, 8, 128, 32.8),
    "qwen2.5-72b": Model(80, 8, 128, 72.7),
    "qwen3-8b": Model(36, 8, 128, 8.2),
    "qwen3-14b": Model(40, 8, 128, 14.8),
    "qwen3-32b": Model(64, 8, 128, 32.8),
    "qwen3-30b-a3b": Model(48, 4, 128, 3.3),
    "qwen3-235b-a22b": Model(94, 4, 128, 22.0),
    "phi-4": Model(40, 10, 128, 14.7),
    "deepseek-v2-lite": Model(27, 1, 576, 2.4, planes=1),
    "deepseek-v3": Model(61, 1, 576, 37.0, planes=1),
    "kimi-k2": Model(61, 1, 576, 32.0, planes=1),
}
"""Llama 3, Qwen and the like have K and V for each KV head; DeepSeek and Kimi one latent vector
(512 + 64).
"""


def model_of(name: str) -> Model:
    """Return the model of that name. Raises UsageError, which names the known ones."""
    found = MODELS.get(name.lower())
    if found is None:
        near = did_you_mean(name, MODELS) or f"; known are {', '.join(MODELS)}"
        raise UsageError(
            f"--model {name}: unknown{near} (or give --bytes-per-token)"
        )
    return found
