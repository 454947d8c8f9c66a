"""Strict JAX for every test: 64 bits, no silent promotion, four host devices."""

import os

# Read when the CPU client starts, so before the first use of a device.
_DEVICES = "--xla_force_host_platform_device_count=4"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()

import emulation  # noqa: E402
import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from ostinato import _config, _native  # noqa: E402

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "ostinato",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=False,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("ostinato")


def pytest_configure(config):
    config.addinivalue_line("markers", "peers: needs a package of the extra `peers`")


@pytest.fixture
def configure():
    """Sets instruction set, or emulated tiles, and threads.

    Afterwards those of the environment return.
    """
    library = _native.status().library
    assert library is not None

    def to(isa: str, threads: int) -> None:
        level = _config.CPU_ISAS.index(emulation.use(isa))
        library.ostinato_configure(level, threads)

    yield to
    config = _config.read()
    to(config.cpu_isa, config.num_threads or 0)
