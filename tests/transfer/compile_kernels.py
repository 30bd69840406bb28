"""Compiles all variants of the kernels for sm_90, on any machine, and prints what they are made of
as JSON.

Run by test_kernels.py in a process of its own, because there must be no TRITON_INTERPRET. Prints
{"unable": reason} where this Triton cannot compile without a device.
"""

from __future__ import annotations

import json
import re

import torch
import triton
import triton.language as tl

from pagoda.transfer.gpu import kernels

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
# Arguments of launches of all sizes: begin, units, pieces, count, group, tiles, items
_SIZES = [
    (0, 1, 1, 1, 1, 1, 0),
    (16, 32, 48, 64, 16, 16, 160),
    (3, 2**31 - 2**16, 7, 5, 2**20 + 1, 9, 11),
]


def main() -> None:
    try:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.compiler.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        target = GPUTarget("cuda", 90, 32)
        backend = make_backend(target)
    except (ImportError, RuntimeError) as error:
        print(json.dumps({"unable": f"triton {triton.__version__}: {error}"}))
        return
    kernel = kernels._move
    bind = create_function_from_signature(
        kernel.signature, kernel.params, backend
    )
    tensor = torch.zeros(64, dtype=torch.int64)
    tensors = [(tensor, tensor, tensor), (tensor[1:], tensor[2:], tensor[3:])]
    found = []
    for variant in kernels.variants():
        constants = {**variant, "WORD": _WORDS[variant["BYTES"]]}
        kinds = [
            bind(*pointers, *numbers, **constants, num_warps=kernels.WARPS)[1]
            for pointers in tensors
            for numbers in _SIZES
        ]
        signature = dict(
            zip(kernel.arg_names, (kind for kind, _ in kinds[0]), strict=True)
        )
        places = {
            (kernel.arg_names.index(name),): value
            for name, value in constants.items()
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=places)
        made = triton.compile(
            source, target=target, options={"num_warps": kernels.WARPS}
        )
        moves = re.findall(
            r"\b(ld\.global\.cg\S*|st\.global\S*)", made.asm["ptx"]
        )
        found.append(
            {
                **variant,
                "kinds": len({str(kind) for kind in kinds}),
                "moves": [
                    re.sub(r"\.global|\.cg|\.L\S+", "", move) for move in moves
                ],
                "cubin_bytes": len(made.asm.get("cubin", b"")),
            }
        )
    print(json.dumps({"variants": found}))


if __name__ == "__main__":
    main()
