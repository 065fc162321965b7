"""Kernels compiled ahead of time, without a GPU: `compile_kernel`, and `source_hash`, which says of which text."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from shardplan.errors import TypingError, optional

FIRST = {
    "table": "*i64", "rows": "*i64", "begin": "*i32", "state": "i32", "rank0": "i32", "polls": "i32",
    "cuts": "*i64", "spot": "*i64",
}  # fmt: skip
TARGETS = {"sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    target: str = "sm_90",
    aligned: Sequence[str] = (),
    **options: Any,
) -> dict[str, str]:
    """Return the text of a kernel for a target, by stage: `ttir`, `ttgir`, and `ptx` or `amdgcn`.

    Under `shared` it has the bytes of shared memory. `types` are Triton's words for types of the kernel's own
    arguments, such as `*bf16`; those named in `aligned` are
    divisible by 16. Pointers that a launch gives first always are. Raises `TypingError` where the target is
    unknown, or Triton's interpreter has taken the kernel (TRITON_INTERPRET).
    """
    if target not in TARGETS or not hasattr(kernel, "arg_names") or "Interpret" in type(kernel).__name__:
        legal = f"{', '.join(TARGETS)}, without TRITON_INTERPRET"
        raise TypingError(f"kernel {getattr(kernel, '__name__', kernel)} for {target}; legal are {legal}")
    triton = optional("triton", "triton")
    source = optional("triton.compiler", "triton").ASTSource
    gpu = optional("triton.backends.compiler", "triton").GPUTarget
    names = list(kernel.arg_names)
    first = {name: kind for name, kind in FIRST.items() if name in names}
    signature = first | dict(types) | dict.fromkeys(constants, "constexpr")
    pointers = [name for name, kind in first.items() if kind[0] == "*"]
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in (*pointers, *aligned)}
    made = source(kernel, signature=signature, constexprs=dict(constants), attrs=hints)
    built = triton.compile(made, target=gpu(*TARGETS[target]), options=options)
    text = {stage: text for stage, text in built.asm.items() if isinstance(text, str)}
    return text | {"shared": str(built.metadata.shared)}


def source_hash(kernel: Any) -> str:
    """Return the first 16 digits of a hash of a kernel's source, and of all functions of Triton that it calls.

    It is the same in the interpreter, ahead of time, and on a GPU.
    """
    seen: dict[str, str] = {}
    ahead = [kernel]
    while ahead:
        function = ahead.pop().fn
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        if name in seen:
            continue
        seen[name] = inspect.getsource(function)
        ahead += [found for key in function.__code__.co_names if hasattr(found := function.__globals__.get(key), "fn")]
    return hashlib.sha256("".join(f"{k}\n{seen[k]}\n" for k in sorted(seen)).encode()).hexdigest()[:16]
