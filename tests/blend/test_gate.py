"""Which settings a gate remembers, and for which weights and adapters. Without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagoda.base.errors import ConfigError
from pagoda.blend import BlendGate, blend_setting
from pagoda.cache import Cache
from tests.cache.kit import LAYOUT, NAMESPACE


def checked(gate: BlendGate) -> list[tuple[str, str]]:
    return [(str(state.setting), state.checked) for state in gate.states]


def test_each_setting_is_named_once_with_the_adapters_and_for_the_present_weights(
    tmp_path: Path,
) -> None:
    named = NAMESPACE.with_(weights="w1")
    with Cache(
        layout=LAYOUT,
        namespace=named,
        chunk_tokens=16,
        host_size="1MiB",
        host_shared=False,
        quality_verdicts=tmp_path,
    ) as cache:
        gate = BlendGate(cache)
        setting = blend_setting()
        everything = blend_setting(recompute=1.0)
        for adapters in (None, "style", "another"):
            assert gate.state_of(setting, True, adapters).checked == "unchecked"
            with pytest.raises(ConfigError, match="pagoda quality"):
                gate.state_of(setting, False, adapters)  # not allowed for good
        assert gate.state_of(everything, False, "style").checked == "exact"
        both = [(str(setting), "unchecked"), (str(everything), "exact")]
        assert checked(gate) == both
        cache.weights_changed()
        assert checked(gate) == []
        assert gate.state_of(everything).checked == "exact"
        assert checked(gate) == both[1:]
