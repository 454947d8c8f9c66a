"""Install each file of a build into a new environment: `python packaging/try.py dist`.

Programs in these environments see no compiler. The source distribution is compiled
during its installation, so a compiler is needed for it.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import contents

PROGRAM = """
import jax, ostinato as ost

status = ost.backends()["cpu"]
spec = ost.RNNSpec("gru", input_size=3, hidden_size=5, num_layers=2)
weights = ost.init_weights(jax.random.key(0), spec)
x = jax.random.normal(jax.random.key(1), (2, 7, 3))

def loss(weights, backend):
    y, state = ost.rnn(spec, weights, x, backend=backend)
    return (y**2).sum()

ours, xla = (jax.grad(loss)(weights, backend) for backend in (None, "xla"))
assert abs(ours - xla).max() < 1e-5, abs(ours - xla).max()
print(ost.__version__, ost.explain(spec, x).backend, status.detail, sep="; ")
"""


def main(folder: Path) -> None:
    """Try the wheel with the library, the one without it, and the sources."""
    for pattern, backend in (
        (f"*-{contents.NATIVE}.whl", "cpu"),
        (f"*-{contents.PURE}.whl", "xla"),
        ("*.tar.gz", "cpu"),
    ):
        (path,) = folder.glob(pattern)
        said = tried(path)
        print(f"{path.name}: {said}", flush=True)
        _, chosen, detail = said.split("; ", 2)
        assert chosen == backend, f"want the backend {backend}"
        if backend == "xla":
            assert "the wheel for all platforms has none" in detail, detail


def tried(path: Path) -> str:
    """Return what a program says in an environment that has only the file."""
    with tempfile.TemporaryDirectory() as temporary:
        environment = Path(temporary) / "environment"
        make = [sys.executable, "-m", "venv", "--without-pip", str(environment)]
        subprocess.run(make, check=True)
        python = environment / "bin" / "python"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        install = [*pip, "--python", str(python), "install", "--quiet", str(path)]
        subprocess.run(install, check=True)
        bare = {"PATH": str(python.parent), "HOME": temporary, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [str(python), "-c", PROGRAM],
            env={**bare, "LANG": os.environ.get("LANG", "C.UTF-8")},
            cwd=temporary,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            sys.exit(f"{path.name}: {done.stderr}")
        return done.stdout.strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
