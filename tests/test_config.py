"""Tests of the settings in the environment."""

import pytest

from ostinato import _config

VARIABLES = (
    "OSTINATO_DISABLE_NATIVE",
    "OSTINATO_CPU_ISA",
    "OSTINATO_NUM_THREADS",
    "OSTINATO_BACKEND",
    "OSTINATO_CACHE_DIR",
)


@pytest.mark.parametrize("empty", [{}, dict.fromkeys(VARIABLES, "")])
def test_nothing_set_means_everything_allowed(empty):
    assert _config.read(empty) == _config.Config(False, "avx512_amx", None)


def test_values_are_read():
    environ = dict(zip(VARIABLES, ("1", "avx2", "03", "cuda", "/tmp"), strict=True))
    assert _config.read(environ) == _config.Config(True, "avx2", 3, "cuda", "/tmp")
    assert not _config.read({"OSTINATO_DISABLE_NATIVE": "0"}).disable_native


def test_environment_is_read_at_each_call(monkeypatch):
    monkeypatch.setenv("OSTINATO_CPU_ISA", "portable")
    assert _config.read().cpu_isa == "portable"
    monkeypatch.setenv("OSTINATO_CPU_ISA", "avx512")
    assert _config.read().cpu_isa == "avx512"


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("OSTINATO_DISABLE_NATIVE", "yes", "0, 1"),
        ("OSTINATO_BACKEND", "xla", "cuda"),
        ("OSTINATO_CPU_ISA", "AVX2", "portable, avx2, avx512, avx512_bf16, avx512_amx"),
    ],
)
def test_other_values_are_refused(name, value, allowed):
    with pytest.raises(ValueError) as error:
        _config.read({name: value})
    assert str(error.value) == (
        f"environment variable {name} must be one of {allowed}; got {value!r}"
    )


WRONG = ["0", "-1", "two", "1.5", " 2", "1_0", str(2**31), "9" * 5000]


@pytest.mark.parametrize("value", WRONG, ids=lambda value: value[:10])
def test_a_number_of_threads_is_a_positive_integer(value):
    with pytest.raises(ValueError) as error:
        _config.read({"OSTINATO_NUM_THREADS": value})
    assert str(error.value) == (
        "environment variable OSTINATO_NUM_THREADS must be an integer from 1 to "
        f"2147483647; got {value[:40]!r}"
    )
