"""A notebook kernel in which a test runs and interrupts cells."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from support.prints import without_gloo

NEEDED = ("jupyter_client", "ipykernel")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
SECONDS = 120.0
"""The longest wait for a message of a cell."""


class Kernel:
    """A kernel, started as by Jupyter; returns the output of its cells."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import KernelManager

        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.manager: Any = KernelManager(kernel_name="python3")
        self.manager.kernel_spec.argv[0] = sys.executable
        self.manager.start_kernel(cwd=str(folder), env=env)
        self._connect()

    def _connect(self) -> None:
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=SECONDS)

    def run(self, code: str, interrupt_at: str = "") -> str:
        """Run a cell; return its output, or the name of its error."""
        asked = self.client.execute(code)
        printed = ""
        while True:
            message = self.client.get_iopub_msg(timeout=SECONDS)
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "error":
                printed = content["ename"]
            elif kind == "stream":
                printed += content["text"]
                if interrupt_at and interrupt_at in printed:
                    interrupt_at = ""
                    self.manager.interrupt_kernel()
            elif kind == "status" and content["execution_state"] == "idle":
                return without_gloo(printed)

    def restart(self) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel()
        self._connect()

    def end(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
