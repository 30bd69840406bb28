"""Whether documents may be blended: by the verdict of `pagoda quality`, or unchecked. Engines ask at each request."""

from __future__ import annotations

from pagoda.cache import Cache
from pagoda.quality_verdict import QualityState, Setting, require_quality


class BlendGate:
    """What is known of the settings of blending, for the weights of one cache. Remembers its answers. Thread-safe.

    It is for the weights that the cache was opened for: make another one, and open documents again, after they changed.
    """

    def __init__(self, prompts: Cache) -> None:
        """`prompts`: the cache of the model's prompts, whose namespace names the weights."""
        self._prompts = prompts
        self._states: dict[str, QualityState] = {}

    @property
    def states(self) -> list[QualityState]:
        """The settings that were used, and whether a verdict covers them."""
        return list(self._states.values())

    def state_of(
        self, setting: Setting, unchecked: bool = False, adapters: str | None = None
    ) -> QualityState:
        """Return why a setting may be used: reads verdicts the first time.

        Args:
            setting: `blend_setting(policy, recompute)`.
            unchecked: use it without a passing verdict, as the option `unchecked` of the cache says for all requests.
            adapters: what names the active adapters, as `lora` of the cache's calls.

        Raises:
            ConfigError: there is no passing verdict; one sentence that says what to do.
        """
        name = f"{setting}{unchecked}{adapters}"
        if name not in self._states:
            self._states[name] = self._checked(setting, unchecked, adapters or "")
        return self._states[name]

    def _checked(self, setting: Setting, unchecked: bool, adapters: str) -> QualityState:
        if setting.options["recompute"] == 1.0:
            return QualityState(setting, "exact", "every token after the first document is computed")
        space, config = self._prompts.namespace, self._prompts.config
        return require_quality(
            setting, weights=space.weights, weights_epoch=space.weights_epoch, adapters=adapters,
            verdicts=config.quality_verdicts, unchecked=unchecked or config.unchecked,
        )  # fmt: skip
