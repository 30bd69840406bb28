"""The models are those of the connector's tests."""

from tests.llamacpp.conftest import models

__all__ = ["models"]
