"""Launches on GPUs, with a driver that records its calls: status, errors, lowering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_driver import calls, compile_emulated, driver, fake_gpu
from cuda_emulation import needs_emulator
from jax import export

import ostinato as ost
from ostinato import _native, cells
from ostinato._cuda import check, device, kernels, nvrtc, plan
from ostinato._rnn import backends
from ostinato._rnn import cuda as rnn_cuda

pytestmark = needs_emulator
TARGET = _native.CUDA_TARGET
X = jnp.ones((1, 3, 2), jnp.float32)


@pytest.fixture(autouse=True)
def gpu(monkeypatch, tmp_path):
    """Put the fake GPU in the place of a real one, with kernels that are trusted."""
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "_compiled", {})
    monkeypatch.setattr(check, "failure", lambda *_: None)
    fake_gpu(monkeypatch.setattr)
    yield driver()
    driver().fake_reset()
    device.status.cache_clear()


# ------------------------------------------------------------------------------- status


def test_a_gpu_is_described(gpu):
    found, reason = device.status()
    assert reason is None
    assert found == ("Emulated GPU", (9, 0), 2, 232448, "13.0")
    told = ost.backends()["cuda"]
    assert told.available
    for words in ("Emulated GPU (sm_90a)", "driver for CUDA 13.0", "when asked for"):
        assert words in told.detail


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda fake: fake.fake_gpu(0, 9, 0), "sees no GPU"),
        (lambda fake: fake.fake_gpu(1, 7, 5), "too old: compute capability 7.5"),
        (lambda fake: fake.fake_gpu(2, 9, 0), "CUDA_VISIBLE_DEVICES chooses some"),
        (lambda fake: fake.fake_fail(b"cuInit", 100), "cuInit: CUDA_ERROR_NO_DEVICE"),
        (lambda fake: fake.fake_fail(b"cuInit", 12), "fails: cuInit: 12"),
    ],
)
def test_what_is_missing_is_told(prepare, words, gpu, monkeypatch):
    prepare(gpu)
    says_why(words)


def says_why(words):
    """Check that every way to ask for the backend gives the reason."""
    device.status.cache_clear()
    told = ost.backends()["cuda"]
    assert not told.available and words in told.detail
    assert words in cells.explain(cells.LRU(2, 4), X).rejected["cuda"]
    with pytest.raises(ost.BackendError) as error:
        ost.linear_recurrence(X, X, backend="cuda")
    assert words in str(error.value)


def test_no_driver_no_library_no_nvrtc(monkeypatch):
    missing = nvrtc.Found(None, "no NVRTC at all")
    monkeypatch.setattr(nvrtc, "find", lambda: missing)
    says_why("no NVRTC at all")
    none = _native.NativeStatus(None, "it was left out")
    with monkeypatch.context() as patch:
        patch.setattr(_native, "status", lambda: none)
        says_why("need the native library: it was left out")
    monkeypatch.setattr(device, "DRIVER", "libno-such-driver.so")
    says_why("no NVIDIA driver: libno-such-driver.so")


def test_a_new_gpu_needs_a_compiler_that_knows_it(monkeypatch):
    old = nvrtc.Found(nvrtc.Compiler(driver(), "12.0", (80, 86)), None)
    monkeypatch.setattr(nvrtc, "find", lambda: old)
    says_why("NVRTC 12.0 does not know sm_90a yet; a newer nvidia-cuda-nvrtc")
    assert nvrtc.Compiler(None, "12.9", (80, 90)).knows((9, 0))


def test_calls_on_cpus_do_not_start_the_driver(monkeypatch):
    spec = ost.RNNSpec("gru", 2, 7)
    weights = ost.init_weights(jax.random.key(0), spec)
    step = lambda p, s, x, t: (0.5 * s + jnp.tanh(x), s)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(device, "status", lambda: pytest.fail("the driver is asked"))
        ost.rnn(spec, weights, X)
        ost.linear_recurrence(X[..., :1], X[..., :1])
        ost.recurrent_net(step, X, X[:, 0])


def test_explain_knows_kernels_that_are_disabled(monkeypatch):
    told = lambda: rnn_cuda.known_refusal(ost.RNNSpec("gru", 2, 3), X)  # noqa: E731
    assert told() is None
    backward = kernels.recurrent_backward(plan.RnnPlan("gru", "float32", 32, 1, 1, 1))
    linear = kernels.linear("complex64", False)
    known = {backward: "it is wrong", linear: "so is this"}
    monkeypatch.setattr(check, "failures", lambda texts, gpu: known)
    assert told() == "it is wrong"
    here = backends.Place("cuda", "`x` is on the cuda")
    monkeypatch.setattr(backends, "place_of", lambda x: here)
    monkeypatch.setenv("OSTINATO_BACKEND", "cuda")
    found = ost.explain(ost.RNNSpec("gru", 2, 3), X)
    assert found.backend == "xla" and found.rejected["cuda"] == "it is wrong"
    assert ost.explain(ost.RNNSpec("lstm", 2, 3), X).backend == "cuda"
    rejected = cells.explain(cells.LRU(2, 4), X).rejected
    assert rejected["cuda"] == "so is this"


def test_a_library_that_is_no_driver(gpu, monkeypatch):
    monkeypatch.setattr(device, "DRIVER", "libm.so.6")
    says_why("no NVIDIA driver that can be used: ")
    monkeypatch.setattr(device, "DRIVER", gpu._name)
    library = _native.status().library
    assert b"has no cuLibraryLoadData" in library.ostinato_cuda_open(b"libc.so.6")
    assert library.ostinato_cuda_open(b"libno-such-driver.so") is not None
    assert library.ostinato_cuda_open(device.DRIVER.encode()) is None


def test_plans_are_told():
    spec = ost.RNNSpec("gru", 2, 3)
    reason = ost.explain(spec, X).rejected["cuda"]
    assert "it runs on the cuda" in reason
    reason = ost.explain(ost.RNNSpec("rnn_tanh", 2, 513), X).rejected["cuda"]
    assert "kernels for up to 512 units, not 513" in reason
    assert "1 cluster of 1 block, each of 8" in rnn_cuda.describe(spec, X)
    for option in (dict(proj_size=1), dict(cell_clip=0.5), dict(batch_invariant=True)):
        reason = rnn_cuda.unsupported_reason(ost.RNNSpec("lstm", 2, 3, **option), "f4")
        assert f"no kernels for {next(iter(option))}=" in reason
    reason = ost.explain(cells.LRU(2, 4), X).rejected["cuda"]
    assert "it runs on the cuda" in reason
    reason = ost.explain(cells.MinGRU(2, 4), X).rejected["cuda"]
    assert "it runs on the cuda" in reason


# ----------------------------------------------------------------------------- launches

# Reverses each block through shared memory.
REVERSE = """
OSTINATO_KERNEL void reverse(const float* x, const float* none, float* y, Index count) {
  float* const shared = reinterpret_cast<float*>(SharedMemory());
  const Index thread = ThreadOfBlock(), threads = ThreadsOfBlock();
  const Index at = Block() * threads + thread;
  Store(shared + thread, at < count && none == nullptr ? Load(x + at) : -1.f);
  WaitForBlock();
  const Index from = (Block() * threads + threads > count ? count % threads : threads);
  if (at < count) Store(y + at, Load(shared + from - 1 - thread));
}
"""


def reverse(text=REVERSE, count=300, target=TARGET, **changes):
    """Run the kernel on the fake GPU."""
    x = jnp.arange(float(count), dtype=jnp.float32)
    made = compile_emulated(None, text, ["-std=c++17"]).cubin
    attributes = dict(
        cubin=np.frombuffer(made, np.uint8),
        digest=str(hash((made, str(changes)))),
        name="reverse",
        grid=np.array([-(-count // 128), 128, 512, 1], np.int64),
        parameters=np.array([0, -1, 1], np.int64),
        numbers=np.array([count], np.int64),
    )
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call(target, result)(x, **attributes | changes)


def test_a_launch_has_its_grid_and_arguments():
    y = np.asarray(reverse())
    x = np.arange(300.0)
    np.testing.assert_array_equal(
        y, np.concatenate([x[i : i + 128][::-1] for i in (0, 128, 256)])
    )
    assert calls() == [
        "cuLibraryLoadData",
        "cuLibraryGetKernel reverse",
        "cuKernelGetFunction",
        "cuKernelGetFunction",
        "cuLaunchKernelEx reverse grid 3 1 1 block 128 shared 512 stream 0",
    ]
    reverse()
    assert calls().count("cuLibraryLoadData") == 1


def test_shared_memory_and_clusters_are_asked_for():
    for shared in (100_000, 200_000):  # the second launch wants more than the first
        reverse(grid=np.array([16, 128, shared, 16], np.int64), digest="one")
        told = "\n".join(calls())
        launch = f"grid 16 1 1 block 128 shared {shared} stream 0 attribute 4 16 1 1"
        assert f"cuFuncSetAttribute 8 {shared}\ncuFuncSetAttribute 14 1" in told
        assert launch in told


@pytest.mark.parametrize(
    ("call", "result", "words"),
    [
        ("cuLibraryLoadData", 209, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        ("cuLibraryGetKernel", 500, "CUDA_ERROR_NOT_FOUND"),
        ("cuKernelGetFunction", 12345, "12345"),
        ("cuLaunchKernelEx", 701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"),
    ],
)
def test_errors_of_the_driver_are_errors_of_xla(call, result, words, gpu):
    gpu.fake_fail(call.encode(), result)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        jax.block_until_ready(reverse(digest=call))
    for each in (f"{call} of the kernel reverse", words, f"error {result}"):
        assert each in str(error.value)


def test_the_handler_of_the_library_reads_everything_but_a_stream():
    """Check the attributes of the real handler, which a CPU has no stream for."""
    handler = jax.ffi.pycapsule(_native.status().library.ostinato_cuda_launch)
    jax.ffi.register_ffi_target("ostinato_cuda_launch_test", handler, platform="cpu")
    words = r"bad operands at: 0\)(.|\n)*Failed to get platform stream"
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(reverse(target="ostinato_cuda_launch_test"))


def test_wrong_attributes_are_errors():
    for changes, words in (
        (dict(grid=np.array([1], np.int64)), "`grid` has another size"),
        (dict(parameters=np.array([2], np.int64)), "an array that is not there"),
        (dict(cubin=np.zeros(9, np.uint8)), "CUDA_ERROR_INVALID_IMAGE"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            jax.block_until_ready(reverse(**changes))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("WaitForBlock();", ""),
        ("WaitForBlock();", "if (thread < 9) WaitForBlock();"),
        ("if (at < count)", ""),
        ("512", "256"),
    ],
)
def test_the_emulator_sees_faults(old, new):
    """Check that a missing wait, half a wait, and accesses outside of arrays show."""
    changes = {}
    if old == "512":
        changes["grid"] = np.array([3, 128, 256, 1], np.int64)
    try:
        y = np.asarray(reverse(REVERSE.replace(old, new), **changes))
    except jax.errors.JaxRuntimeError as error:
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in str(error)
    else:
        assert y[0] != 127 or y[299] != 256 or np.any(np.diff(y[:128]) != -1)


# ----------------------------------------------------------------------------- lowering


def lowered(platform="cuda", **options):
    """Return the text of values and gradients, compiled for a platform."""

    def both(a, b):
        out, pull_back = jax.vjp(
            lambda *x: ost.linear_recurrence(*x, **options).h, a, b
        )
        return out, pull_back(out)

    jax.clear_caches()
    return jax.jit(both).trace(X, X).lower(lowering_platforms=(platform,)).as_text()


def test_a_gpu_gets_kernels_where_they_are_asked_for(monkeypatch):
    assert lowered(backend="cuda").count(f"custom_call @{TARGET}") == 2
    assert TARGET not in lowered() and TARGET not in lowered(backend="xla")
    monkeypatch.setenv("OSTINATO_BACKEND", "cuda")
    assert lowered().count(f"custom_call @{TARGET}") == 2
    assert TARGET not in lowered("cpu") and TARGET not in lowered("tpu")
    with pytest.raises(ost.BackendError, match="compiled for cpu"):
        lowered("cpu", backend="cuda")


def lowered_rnn(platform="cuda", dtype="float32", **options):
    """Return the text of a network's values and gradients."""
    spec = ost.RNNSpec("lstm", 2, 200, bidirectional=True)
    weights = jnp.zeros(spec.num_params, dtype)

    def both(weights, x):
        out, pull_back = jax.vjp(lambda *a: ost.rnn(spec, *a, **options).y, weights, x)
        return out, pull_back(out)

    jax.clear_caches()
    trace = jax.jit(both).trace(weights, X.astype(dtype))
    return trace.lower(lowering_platforms=(platform,)).as_text()


def test_networks_get_kernels_where_they_are_asked_for(monkeypatch):
    text = lowered_rnn(backend="cuda")
    assert text.count(f"custom_call @{TARGET}") == 2  # forward and backward
    assert "grid = dense<[16, 128, 81936, 8]>" in text  # 256 units, two directions
    assert TARGET not in lowered_rnn() and TARGET not in lowered_rnn(backend="xla")
    with pytest.raises(ost.BackendError, match="precision=.*asks for more"):
        lowered_rnn(backend="cuda", precision="highest")
    for same in (
        (jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH),
        jax.lax.DotAlgorithmPreset.TF32_TF32_F32,
    ):
        assert TARGET in lowered_rnn(backend="cuda", precision=same)
    monkeypatch.setenv("OSTINATO_BACKEND", "cuda")
    assert TARGET in lowered_rnn() and TARGET in lowered_rnn(dtype="bfloat16")
    assert TARGET not in lowered_rnn(precision="highest")
    assert TARGET not in lowered_rnn("cpu", backend="xla")
    monkeypatch.setattr(check, "failure", lambda *_: "it is wrong")
    assert TARGET not in lowered_rnn()
    with pytest.raises(ost.BackendError, match="it is wrong"):
        lowered_rnn(backend="cuda")


def test_measured_architectures_need_no_asking(monkeypatch):
    monkeypatch.setattr(plan, "MEASURED", frozenset({"sm_90a"}))
    assert TARGET in lowered()
    monkeypatch.setattr(plan, "MEASURED", frozenset({"sm_80"}))
    assert TARGET not in lowered()
    assert "not been measured on sm_90a" in rnn_cuda.unasked_reason()


def test_other_calls_stay_with_xla(monkeypatch):
    monkeypatch.setenv("OSTINATO_BACKEND", "cuda")
    x = jax.ShapeDtypeStruct((1, 3, 2), jnp.float16)
    trace = jax.jit(ost.linear_recurrence).trace(x, x)
    assert TARGET not in trace.lower(lowering_platforms=("cuda",)).as_text()
    with pytest.raises(ost.BackendError, match="no kernels for float16"):
        ost.linear_recurrence(
            jnp.ones((2,), jnp.float16), X.astype("float16"), backend="cuda"
        )


def test_an_exported_program_holds_the_machine_code():
    run = jax.jit(lambda x: ost.linear_recurrence(x, x, backend="cuda").h)
    allowed = [export.DisabledSafetyCheck.custom_call(TARGET)]
    made = export.export(run, platforms=["cuda"], disabled_checks=allowed)(X)
    again = export.deserialize(made.serialize())
    code = kernels.compiled(kernels.linear("float32", False), "sm_90a")
    text = str(again.mlir_module())
    assert code.digest in text and code.cubin[:4].hex().upper() in text.upper()
    shapes = jax.ShapeDtypeStruct(export.symbolic_shape("b, 3, 2"), jnp.float32)
    with pytest.raises(ost.BackendError, match="sizes that are known"):
        export.export(run, platforms=["cuda"], disabled_checks=allowed)(shapes)


def test_an_exported_program_without_a_backend_runs_anywhere(monkeypatch):
    monkeypatch.setenv("OSTINATO_BACKEND", "cuda")
    jax.clear_caches()
    run = jax.jit(lambda x: ost.linear_recurrence(x, x))
    made = export.export(run, platforms=["cuda", "cpu"])(X)
    assert TARGET not in str(made.mlir_module())
    assert made.call(X)[0][0, :, 0].tolist() == [1, 2, 3]
