"""Whether documents may be blended: by a verdict of `pagoda quality`, or unchecked. Engines ask at
each request.
"""

from __future__ import annotations

from pagoda.base.quality_verdict import QualityState, Setting, require_quality
from pagoda.cache import Cache
from pagoda.keys import Namespace

# the number of answers, by setting, weights and adapters, that are remembered
_MOST_STATES = 1024


class BlendGate:
    """Decides whether settings of blending may be used, for the present weights of one cache.
    Thread-safe.

    It remembers its answers, for each version of the weights and each adapter.
    """

    def __init__(self, prompts: Cache) -> None:
        """`prompts`: the cache of the model's prompts, whose namespace names the weights."""
        self._prompts = prompts
        self._states: dict[tuple[str, bool, Namespace], QualityState] = {}

    @property
    def states(self) -> list[QualityState]:
        """The settings used with the present weights; adapters with the same answer have one
        entry.
        """
        present = self._prompts.present_namespace()
        found: dict[tuple[str, str], QualityState] = {}
        for (setting, _, weights), state in list(self._states.items()):
            if weights.with_(lora=present.lora) == present:
                found.setdefault((setting, state.checked), state)
        return list(found.values())

    def state_of(
        self,
        setting: Setting,
        unchecked: bool = False,
        adapters: str | None = None,
    ) -> QualityState:
        """Return why a setting may be used; read verdicts the first time.

        Args:
            setting: `blend_setting(policy, recompute)`.
            unchecked: use it without a passing verdict, as the option `unchecked` of the cache says
                for all requests.
            adapters: the name of the active adapters, like `lora` of the cache's calls.

        Raises:
            ConfigError: there is no passing verdict; one sentence that says what to do.
        """
        weights = self._prompts.present_namespace(adapters)
        name = str(setting), unchecked, weights
        found = self._states.get(name)
        if found is None:
            found = self._checked(setting, unchecked, weights)
            while len(self._states) >= _MOST_STATES:
                self._states.pop(next(iter(self._states)), None)
            self._states[name] = found
        return found

    def _checked(
        self, setting: Setting, unchecked: bool, weights: Namespace
    ) -> QualityState:
        if setting.options["recompute"] == 1.0:
            return QualityState(
                setting,
                "exact",
                "every token after the first document is computed",
            )
        config = self._prompts.config
        return require_quality(
            setting,
            weights=weights.weights,
            weights_epoch=weights.weights_epoch,
            adapters=weights.lora,
            verdicts=config.quality_verdicts,
            unchecked=unchecked or config.unchecked,
        )
