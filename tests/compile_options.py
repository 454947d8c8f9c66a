"""How XLA compiles the programs of the tests: quickly, unless generated code is tested.

Most tests compare values within a tolerance, or look at traces and errors. Less
optimisation changes nothing there, and takes half the time.
"""

import functools
from typing import Any

import jax

QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
USUAL: dict[str, Any] = {"xla_backend_optimization_level": 3}  # XLA's own defaults
if jax.__version_info__ < (0, 11):  # later ones have this emitter alone
    QUICK["xla_cpu_use_fusion_emitters"] = False
    USUAL["xla_cpu_use_fusion_emitters"] = True
    # A program is one module for LLVM, not one for each of its larger kernels.
    QUICK["xla_cpu_parallel_codegen_split_count"] = 1
    USUAL["xla_cpu_parallel_codegen_split_count"] = 32

# For tests of what XLA makes of a program: the backend xla, memory, bits.
usual_jit = functools.partial(jax.jit, compiler_options=USUAL)


def flags(options: dict[str, Any]) -> str:
    """Return the options as they stand in the variable XLA_FLAGS."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())
