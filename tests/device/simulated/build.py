"""Build the simulated accelerator for this torch: `python tests/device/simulated/build.py CACHE`.

It prints a directory for PYTHONPATH. An entry point there lets `import torch` load the device.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
_METADATA = "Metadata-Version: 2.1\nName: simulated-device\nVersion: 0\n"
_ENTRY = "[torch.backends]\nsim = simulated_device:load\n"


def missing() -> str | None:
    """Return what this machine lacks to build it, or `None`."""
    absent = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    return f"no {' and no '.join(absent)}" if absent else None


def build(cache: Path) -> Path:
    """Return a directory in `cache` with the device, built unless it is there already.

    Its name has a hash of the sources and of torch's version.
    """
    import torch  # not before `TORCH_DEVICE_BACKEND_AUTOLOAD` is set

    sources = sorted(p for p in SOURCES.iterdir() if p.suffix in (".h", ".cpp", ".py"))
    text = b"".join(path.read_bytes() for path in sources)
    digest = hashlib.sha256(text + torch.__version__.encode()).hexdigest()[:16]
    directory = cache / digest
    if not directory.exists():
        cache.mkdir(parents=True, exist_ok=True)
        # In a new directory: the lock file of a killed build would block all later ones.
        with tempfile.TemporaryDirectory(dir=cache) as unfinished:
            made = Path(unfinished) / digest
            made.mkdir()
            _compile(made)
            try:
                made.rename(directory)
            except OSError:
                if not directory.exists():  # else another build has finished meanwhile
                    raise
    return directory


def _compile(directory: Path) -> None:
    from torch.utils.cpp_extension import load

    load(
        "simulated_device_c",
        [str(path) for path in sorted(SOURCES.glob("*.cpp"))],
        build_directory=str(directory),
        extra_cflags=["-O1", "-std=c++20"],
        is_python_module=False,
    )
    information = directory / "simulated_device-0.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text(_METADATA)
    (information / "entry_points.txt").write_text(_ENTRY)
    shutil.copy(SOURCES / "simulated_device.py", directory)


if __name__ == "__main__":
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    sys.stdout.write(f"{build(Path(sys.argv[1]))}\n")
