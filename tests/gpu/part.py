"""One part of the run: `python part.py NAME`; see main.py and parts.py."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILT = HERE.parents[1] / "build" / "gpu"
SITES = {"default": BUILT / "site", "nvrtc": BUILT / "site-nvrtc"}


def main() -> int:
    """Run the part with the package built for it, or with the installed one."""
    name = sys.argv[1]
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    if name != "build":  # it uses only the packages that it builds
        tests = HERE.parent
        folders = "bench", ".", "parity/ddp", "parity/dp", "unit/native"
        paths = [str(tests / folder) for folder in folders]
        if not os.environ.get("PACELINE_GPU_INSTALLED"):
            paths.insert(0, str(SITES["nvrtc" if name == "first" else "default"]))
        sys.path[:0] = paths
        inherited = os.environ.get("PYTHONPATH")
        all_paths = [*paths, inherited] if inherited else paths
        os.environ["PYTHONPATH"] = os.pathsep.join(all_paths)
    seconds = float(os.environ.get("PACELINE_GPU_SECONDS", "480"))
    import parts

    return 0 if parts.run(name, seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
