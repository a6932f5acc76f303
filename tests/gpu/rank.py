"""One rank of a session: `python rank.py FOLDER RANK`; see session.py."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from checks import Check, Skip


def say(file: Any, row: dict[str, Any]) -> None:
    file.write(json.dumps(row, default=str) + "\n")
    file.flush()


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    job = json.loads((folder / "job.json").read_text())
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    said = open(folder / f"said.{rank}", "a")  # noqa: SIM115
    world: Any = None
    for number, (module, name, _) in enumerate(job["checks"]):
        begin = time.monotonic()
        row: dict[str, Any] = {"n": number, "result": "passed", "words": ""}
        print(f"---- {name}", flush=True)
        try:
            if world is None:
                module_of_world = os.environ.get("PACELINE_GPU_WORLD", "world")
                kind = importlib.import_module(module_of_world).World
                world = kind.join(rank, job["size"], job["port"])
            check = getattr(importlib.import_module(module), name)
            assert isinstance(check, Check)
            row["figures"] = world.run(check)
        except Skip as why:
            row.update(result="skipped", words=str(why))
        except BaseException:
            row.update(result="failed", words=traceback.format_exc())
        row["seconds"] = round(time.monotonic() - begin, 2)
        say(said, row)
        if row["result"] == "failed":
            time.sleep(30)  # other ranks may still need this rank's sockets
            break
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of NCCL and Gloo may crash in an ordinary exit


if __name__ == "__main__":
    main()
