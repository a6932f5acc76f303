"""One part of the run: `python part.py NAME`; see main.py."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILT = HERE.parents[1] / "build" / "gpu"
SITES = {"default": BUILT / "site", "nvrtc": BUILT / "site-nvrtc"}


def main() -> int:
    """Run the part whose module is part_NAME."""
    name = sys.argv[1]
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    if name != "build":  # which sees nothing but what it builds
        tests = HERE.parent
        site = SITES["nvrtc" if name == "first" else "default"]
        paths = [str(site), str(tests / "bench"), str(tests)]
        sys.path[:0] = paths
        inherited = os.environ.get("PYTHONPATH")
        all_paths = [*paths, inherited] if inherited else paths
        os.environ["PYTHONPATH"] = os.pathsep.join(all_paths)
    seconds = float(os.environ.get("PACELINE_GPU_SECONDS", "480"))
    return 0 if importlib.import_module(f"part_{name}").run(seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
