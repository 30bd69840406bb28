"""Checks the options that an engine passes to a connector, and finds those without effect. Changes
nothing.

Called by vLLM's and SGLang's connectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pagoda.base.errors import ConfigError
from pagoda.config import option_names
from pagoda.config.did_you_mean import did_you_mean
from pagoda.config.sources import DEFAULT, load


class ExtraOptions(NamedTuple):
    """The options `given` in a mapping, and the engine's name of the mapping. All methods raise
    ConfigError.
    """

    where: str
    given: Mapping[str, Any]

    def refuse_unknown(
        self, known: Sequence[str], of_engine: Sequence[str]
    ) -> None:
        """Refuse options that are neither `known` here nor used by the engine, which has the same
        mapping.
        """
        for name in self.given:
            if name not in (*known, *of_engine):
                raise ConfigError(
                    f"{self.where}: {name}: no such "
                    f"option{did_you_mean(str(name), (*known, *of_engine))} "
                    f"(known are {', '.join(sorted(known))})"
                )

    def text(self, name: str) -> str | None:
        """Return an option that must be a text that is not empty; None: it was not given."""
        value = self.given.get(name)
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(
                f"{self.where}: {name} = {value!r}: a text that is not empty is needed"
            )
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return an option that must be true or false."""
        value = self.given.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(
                f"{self.where}: {name} = {value!r}: write true or false"
            )
        return value


def unused_options(engine: str, given: Mapping[str, Any]) -> str:
    """Return a log message about options of blending, which an engine that counts prefixes cannot
    use; or "".

    `given`: the connector's options. Reads the environment and the configuration file like the
    connector, with the same errors.
    """
    names = [name for name in option_names() if name.startswith("blend_")]
    origins = load(
        **{name: given[name] for name in option_names() if name in given}
    ).origins
    found = [
        f"{name} ({origins[name]})" for name in names if origins[name] != DEFAULT
    ]
    if not found:
        return ""
    return (
        f"{' and '.join(found)}: {engine} counts prefixes only, so nothing is blended here; "
        "Transformers "
        "(CachedModel.generate(documents=...)) and own engines blend"
    )
