"""Strict JAX for every test: 64 bits, no silent promotion, four host devices.

Programs are compiled quickly, see `compile_options.py`, and those that take long not
twice: every process of pytest has a compilation cache, new in every run, which the
programs that it starts share.
"""

import gc
import os
import shutil
import tempfile

import compile_options
import every_module
import jax
import parts
import pytest

# Read when the CPU client starts, so before the first use of a device.
_FLAGS = {"xla_force_host_platform_device_count": 4, **compile_options.QUICK}
os.environ["XLA_FLAGS"] = " ".join(
    [compile_options.flags(_FLAGS), os.environ.get("XLA_FLAGS", "")]  # the last wins
).strip()
# Not one for all workers: JAX writes its files in place, so others can see half of one.
_CACHE = tempfile.mkdtemp(prefix="ostinato-compiled-")
_OPTIONS = {
    "jax_compilation_cache_dir": _CACHE,
    "jax_persistent_cache_min_compile_time_secs": 0.1,  # others take less to compile
    # Of 21,000 programs, JAX notes where each operation comes from, and drops its own
    # frames from tracebacks: a seventh of the time of the tests.
    "jax_traceback_in_locations_limit": 0,
    "jax_traceback_filtering": "off",
}
for _name, _value in _OPTIONS.items():
    os.environ[_name.upper()] = str(_value)
    jax.config.update(_name, _value)

import emulation  # noqa: E402
import hypothesis  # noqa: E402

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


def pytest_addoption(parser):
    parser.addoption(
        "--every-module",
        action="store_true",
        help="fail unless the tests call something in every module of ostinato",
    )
    parts.add_option(parser)


def pytest_configure(config):
    config.addinivalue_line("markers", "peers: needs a package of the extra `peers`")
    if config.getoption("--every-module"):
        config.pluginmanager.register(every_module.EveryModule(config))
    parts.configure(config)


def pytest_collection_finish():
    """Collect garbage seldom: each time all that JAX has cached is looked through."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)


# Each program that JAX holds makes the next ones slower to lower: those of 3,000 others
# take four times as long.
HELD = 500
_compiled = 0  # since JAX dropped all that it held


def _count_compiled(event: str, duration: float, **_) -> None:
    global _compiled
    _compiled += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_count_compiled)


def pytest_runtest_teardown(item):
    """Drop the programs of earlier tests, now and then."""
    global _compiled
    if _compiled >= HELD:
        jax.clear_caches()
        _compiled = 0


def pytest_unconfigure():
    shutil.rmtree(_CACHE, ignore_errors=True)


@pytest.fixture
def configure():
    """Sets instruction set, or emulated tiles, and threads of calls that begin later.

    JAX may begin one after it has returned: wait for results before the next setting.
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


@pytest.fixture
def jax_as_it_comes():
    """Restore JAX's defaults, for code that is not written for strict promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
