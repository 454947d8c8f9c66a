"""What batches of examples of different sizes refuse: to be taken for one array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn


class NoArray:
    """A class whose operators, and conversions to an array, raise a TypeError."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(
            f"a {kind} is no array of one shape, so operators and functions of JAX and "
            "numpy do not take it: write batch.map(f) for a function of one token, "
            "ragged.vmap(f)(batch) for one of a whole example, "
            "batch.with_data(f(batch.data)) for the tokens at once, ragged.grad for "
            "gradients, or batch.to_padded() for an array"
        )

    if not TYPE_CHECKING:  # type checkers refuse what is not there
        __array__ = __jax_array__ = _refuse
        __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = _refuse
        __mod__ = __pow__ = __matmul__ = __and__ = __or__ = __xor__ = _refuse
        __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = _refuse
        __rmod__ = __rpow__ = __rmatmul__ = __rand__ = __ror__ = __rxor__ = _refuse
        __neg__ = __pos__ = __abs__ = __invert__ = _refuse
        __lt__ = __le__ = __gt__ = __ge__ = _refuse
