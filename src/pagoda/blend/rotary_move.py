"""Moves K to another position, by the rotary embedding of a model.

K of position p is a vector rotated by the angles p * f, one frequency f for each pair of dims.
Rotating it by s * f moves it to position p + s. V has no position.

Source: RoFormer (rotary embedding); re-rotation of reused K as in CacheBlend and EPIC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagoda.layout import Rotary

if TYPE_CHECKING:
    import torch


class RotaryMove:
    """Rotates K of one model, in two halves. Thread-safe."""

    def __init__(self, rotary: Rotary, frequencies: torch.Tensor) -> None:
        """`rotary` names the embedding in the layout; `frequencies`: float32, [dims / 2]."""
        self.rotary = rotary
        self._frequencies = frequencies

    def move(self, keys: torch.Tensor, shift: int) -> None:
        """Rotate `keys` [..., dim] in place so that all are `shift` positions later; float32
        inside.
        """
        import torch

        if not shift:
            return
        angles = self._frequencies.to(keys.device) * float(shift)
        cos = torch.cat([angles.cos()] * 2)
        sin = torch.cat([angles.sin()] * 2)
        rotated = keys[..., : self.rotary.dims]
        exact = rotated.float()
        first, second = exact.chunk(2, dim=-1)
        rotated.copy_(exact * cos + torch.cat((-second, first), dim=-1) * sin)
