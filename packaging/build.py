"""Build what is published into a folder: `python packaging/build.py dist`.

Two wheels, one for Linux on x86-64 with the native library, and one for all platforms
without it, and the source distribution. Needs the packages build and ziglang.
"""

import os
import subprocess
import sys
from pathlib import Path

import contents

HERE = Path(__file__).resolve().parent
REASON = (
    "the wheel for all platforms has none; with a C++ compiler, "
    "`pip install --no-binary ostinato ostinato` builds it"
)
BUILDS = {
    "source distribution": ["--sdist"],
    "wheel without the native library": [
        "--wheel",
        f"--config-setting=wheel.tags={contents.PURE}",
        "--config-setting=wheel.platlib=false",
        f"--config-setting=cmake.define.OSTINATO_LEAVE_OUT={REASON}",
    ],
    "wheel with the native library": [
        "--wheel",
        f"--config-setting=wheel.tags={contents.NATIVE}",
        f"--config-setting=cmake.define.CMAKE_TOOLCHAIN_FILE={HERE / 'zig.cmake'}",
    ],
}


def main(out: Path) -> None:
    """Build all three, and check what is in them."""
    import ziglang

    zig = Path(ziglang.__file__).parent / "zig"
    for what, options in BUILDS.items():
        print(f"--- {what}", flush=True)
        command = [sys.executable, "-m", "build", *options, "--outdir", str(out)]
        subprocess.run(
            [*command, str(HERE.parent)],
            env={**os.environ, "OSTINATO_ZIG": str(zig)},
            check=True,
        )
    if faults := contents.faults(out):
        sys.exit("\n".join(faults))
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size / 2**20:6.2f} MiB  {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
