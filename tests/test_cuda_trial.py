"""Trials of kernels in a child process: what is right, wrong, crashes, hangs."""

import functools as ft
import sys
import warnings
from pathlib import Path

import cuda_driver
import jax
import jax.numpy as jnp
import pytest
from cuda_child import CHANGES
from cuda_emulation import gpu_in_place, needs_emulator

import ostinato as ost
from ostinato._cuda import check, device, kernels, plan
from ostinato._linear import cuda, lowering
from ostinato._rnn import cuda as rnn_cuda
from ostinato._rnn import cuda_trial as rnn_trial
from ostinato._step.cuda import loops
from ostinato._step.cuda import trial as step_trial

CHILD = Path(__file__).parent / "cuda_child.py"
TEXT = kernels.linear("float32", False)
pytestmark = needs_emulator


@pytest.fixture
def trial(monkeypatch, tmp_path):
    """Make a trial with a bug, and return its failure."""
    monkeypatch.setenv("OSTINATO_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(cuda_driver.FOLDER_VARIABLE, str(cuda_driver.built()))
    monkeypatch.setattr(check, "_verdicts", {})
    monkeypatch.setattr(check, "_tried", {})
    cuda_driver.fake_gpu(monkeypatch.setattr)

    def run(bug, text=TEXT, module=cuda.TRIAL, case=None):
        def command(module, arguments):
            return [sys.executable, str(CHILD), bug, module, *arguments]

        monkeypatch.setattr(check, "command", command)
        gpu, reason = device.status()
        assert reason is None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            failure = check.failure(text, gpu, module, case)
        assert len(caught) == (failure is not None), [str(w.message) for w in caught]
        return failure

    yield run
    device.status.cache_clear()


def forget(monkeypatch):
    """Do as a new process does: it knows files only."""
    monkeypatch.setattr(check, "_verdicts", {})


def test_kernels_that_are_right_run(trial, monkeypatch):
    assert trial("none") is None
    assert trial("crash") is None  # no second trial in this process
    forget(monkeypatch)
    assert trial("crash") is None  # nor in the next one
    assert ost.backends()["cuda"].available
    assert "disabled" not in ost.backends()["cuda"].detail


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("wrong", "a wrong result: h differs by"),
        ("crash", "ended with signal"),
        ("hang", "did not end within 1 s"),
    ],
)
def test_kernels_that_fail_are_disabled(bug, words, trial, monkeypatch, tmp_path):
    if bug == "hang":
        monkeypatch.setattr(check, "LIMIT", 1.0)
    failure = trial(bug)
    assert words in failure and str(tmp_path) in failure
    told = ost.backends()["cuda"].detail
    assert f"disabled: {TEXT}: " in told and words in told
    forget(monkeypatch)
    assert words in trial("none")  # a file keeps the verdict
    for path in tmp_path.glob("*.verdict"):
        path.unlink()
    forget(monkeypatch)
    monkeypatch.setattr(check, "_try", lambda *_: "")  # it would be tried again
    assert trial("none") is None


def test_kernels_of_networks_are_tried(trial, monkeypatch):
    text = kernels.recurrent(plan.RnnPlan("lstm", "float32", 32, 1, 1, 1))
    assert text in kernels.RECURRENT_TEXTS
    assert trial("none", text, rnn_cuda.TRIAL) is None
    forget(monkeypatch)
    other = kernels.recurrent(plan.RnnPlan("lstm", "bfloat16", 32, 1, 1, 1))
    failure = trial("wrong gate", other, rnn_cuda.TRIAL)
    assert "a wrong result" in failure and "for RNNSpec(mode='lstm'" in failure
    assert f"disabled: {other}" in ost.backends()["cuda"].detail


def test_a_simple_network_passes_its_trial(monkeypatch, jax_as_it_comes):
    """Check it in this process, which is quicker."""
    made = plan.RnnPlan("rnn_tanh", "bfloat16", 32, 1, 1, 1)
    text = kernels.recurrent_backward(made)
    monkeypatch.setattr(check, "ready", lambda: None)
    with gpu_in_place(monkeypatch), jax.enable_x64(False):
        assert rnn_trial.main(list(text.definitions)) == ""


@pytest.mark.parametrize(
    ("bug", "words", "backward", "dtype"),
    [
        ("none", None, True, "float64"),  # which the trial has to allow
        ("wrong store", "a wrong result: array 0", True, "float32"),
        ("crash in a step", "ended with signal", False, "float32"),
        ("hang in a step", "did not end within 1 s", False, "float32"),
    ],
)
def test_kernels_that_are_made_for_a_step_are_tried(
    bug, words, backward, dtype, trial, monkeypatch
):
    with monkeypatch.context() as patch:
        cuda_driver.fake_gpu(patch.setattr, CHANGES[bug])
        kernel, case = kernel_of_a_step(patch, backward, dtype)
    if "hang" in bug:
        monkeypatch.setattr(check, "LIMIT", 1.0)
    bug = "none"  # the file holds the code that is tried
    failure = trial(bug, kernel.text, step_trial.PROGRAM, lambda: case)
    assert failure is None if words is None else words in failure
    told = ost.backends()["cuda"].detail
    assert (f"disabled: {kernel.text}: " in told) == (words is not None)


def kernel_of_a_step(patch, backward, dtype):
    """Return a kernel, and the file for its trial."""

    def step(p, s, x, t):
        s = jnp.tanh(p[None] * s + x)
        return s, s

    def traced(p, x):
        run = ft.partial(ost.recurrent_net, step, x, x[:, 0], backend="cuda")
        return jnp.sum(run(params=p, seq_lengths=jnp.array([3, 1])).outputs)

    patch.setattr(step_trial, "PLATFORMS", ("cpu",))
    x = jnp.ones((2, 3, 4), dtype)
    found = jax.make_jaxpr(jax.grad(traced))(x[0, 0], x)
    (eqn,) = (e for e in found.eqns if e.primitive.name == "ostinato_loop_bwd")
    kernel = loops.kernels_of(eqn.params["loop"], eqn.params["wrt"])[backward]
    return kernel, step_trial.case(kernel)


def test_a_forward_kernel_of_a_step_passes_its_trial(
    trial, monkeypatch, tmp_path, jax_as_it_comes
):
    """Check it in this process, which is quicker."""
    _, case = kernel_of_a_step(monkeypatch, False, "float32")
    (tmp_path / "case").write_bytes(case)
    monkeypatch.setattr(check, "ready", lambda: None)
    try:
        assert step_trial.main(str(tmp_path / "case")) == ""
    finally:
        jax.config.update("jax_enable_x64", True)  # which a trial sets


def test_a_trial_that_does_not_begin_is_repeated_by_the_next_process(
    trial, monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    assert "no other process could be started" in trial("none")
    assert not list(tmp_path.glob("*.verdict"))


def test_disabled_kernels_leave_their_calls_to_xla(trial, monkeypatch):
    monkeypatch.setattr(lowering, "KERNELS", {"cpu": cuda})
    monkeypatch.setenv("OSTINATO_BACKEND", "cuda")
    monkeypatch.setattr(check, "_try", lambda *_: "they are wrong")
    jax.clear_caches()
    x = jnp.ones((1, 3, 2), jnp.float32)
    with pytest.warns(RuntimeWarning, match="disabled on Emulated GPU.*they are wrong"):
        assert ost.linear_recurrence(x, x).h[0, :, 0].tolist() == [1, 2, 3]
    with pytest.raises(ost.BackendError, match="they are wrong"):
        ost.linear_recurrence(x, x, backend="cpu")
    assert not [c for c in cuda_driver.calls() if "Launch" in c]
    jax.clear_caches()
