"""A process that has no Triton: `python -m tests.gpu.without_triton SEED`. KV crosses run by run,
and is right.
"""

from __future__ import annotations

import sys


def main() -> None:
    sys.modules["triton"] = None  # type: ignore[assignment] # importing it fails from now on
    import torch

    from tests.gpu.forms import FORMS, SHORT, TINY
    from tests.gpu.moves import Memory, check_load, check_store
    from tests.gpu.rig import KINDS, open_rig

    seed = int(sys.argv[1])
    with open_rig() as rig:
        engine = rig.engine(kernels=False) if rig.small else rig.engine()
        assert engine.device.kernels is None
        for way in ("direct", "staged"):
            try:
                rig.engine(way, kernels=False)
            except ValueError as error:
                assert "pip install triton" in str(error), error
            else:
                raise AssertionError(f"{way} without Triton")
        size = TINY if rig.small else SHORT
        for form in FORMS:
            for kind in KINDS:
                check_store(
                    Memory.of(rig, form, size, "bfloat16", seed),
                    engine,
                    kind,
                    seed,
                )
                check_load(
                    Memory.of(rig, form, size, "bfloat16", seed + 1),
                    engine,
                    kind,
                    seed,
                )
            rig.check()
        memory = Memory.of(rig, FORMS[6], size, "bfloat16", seed)
        kv = memory.kv(engine)
        starts = memory.starts(seed)
        real = memory.flat.clone()
        snapshot = kv.snapshot(starts)  # type: ignore[attr-defined]
        rig.launch(lambda: memory.flat.zero_())
        slots = rig.slots(memory.layout, len(starts), "mixed")
        snapshot.to_slots(slots)
        rig.finish()
        assert not memory.flat.any()
        memory.flat = real
        for start, slot in zip(starts, slots, strict=True):
            memory.holds(start, slot)
        rig.check()
    print("right without Triton, torch", torch.__version__)


if __name__ == "__main__":
    main()
