"""Which engine runs the calls of a wrapper, and its life."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from paceline._dp import effects, engines
from paceline._dp.gpus.engine import GpuEngine
from paceline._dp.thread_engine import ThreadEngine
from paceline._recorder import Steps
from paceline._replicas import devices as devices_
from paceline._replicas.errors import UnsupportedCallError, UnsupportedModelError
from paceline._replicas.replicate import check_lazy, parts_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from paceline._dp.engines import Engine

_log = logging.getLogger("paceline")
_starting = threading.Lock()


class ChoosesEngine:
    """The part of a wrapper that has engines.

    Replicas on the CPU are processes where the model can be sent to them, else threads;
    on GPUs they are threads.
    """

    module: Module
    device_ids: list[Any]
    _asked: str
    _are_gpus: bool = False  # also of pickles from before there were any
    _alone_because: str
    _choice: tuple[str, str]
    _engine: Engine | None
    _threads: ThreadEngine | None
    _reasons_logged: set[str]
    _steps: Steps | None = None  # what records them

    if TYPE_CHECKING:

        @property
        def _override_for_threads(self) -> str | None: ...

    def _choose(self) -> tuple[str, str]:
        if len(self.device_ids) < 2:
            return "none", self._alone_because
        return engines.choose(
            self._asked, self.module, self._override_for_threads, self._are_gpus
        )

    def _engine_for_call(self) -> Engine | None:
        """Return the engine that runs the next forward; None: the module itself."""
        if self._are_gpus:
            return self._gpu_engine()
        if self._override_for_threads is not None and self._choice[0] == "process":
            error = engines.obstacle(self.module, self._override_for_threads)
            assert error is not None
            return self._use_threads(error)
        engine = self._engine or self._start_engine()
        obstacle = getattr(engine, "obstacle", None)
        if obstacle and self._asked == "auto":
            engine = self._use_threads(UnsupportedModelError(obstacle))
        if engine and engine.n_replicas not in (0, len(self.device_ids)):  # changed
            self.close()
            engine = self._start_engine()
        return engine

    def _gpu_engine(self, device_ids: Sequence[Any] | None = None) -> GpuEngine:
        """Return the engine for GPUs; for others than its own, one for a call."""
        indices = list(self.device_ids)
        wanted = indices if device_ids is None else list(device_ids)
        with _starting:
            before = engine = self._engine
            if not isinstance(engine, GpuEngine) or engine.indices != indices:
                check_lazy(parts_of(self.module))
                engine = self._engine = GpuEngine(indices)
                self._choice = self._choose()
        if before is not engine and before is not None:
            before.close()
        if wanted == indices[: len(wanted)]:
            return engine
        return GpuEngine(devices_.read(wanted, None).ids)

    def _start_engine(self) -> Engine | None:
        """Return the engine, made at the first forward that needs it, if one is."""
        with _starting:
            if self._engine is None:
                check_lazy(parts_of(self.module))
                # The module, or the number of replicas, may have changed since.
                self._choice = self._choose()
                if self._choice[0] == "none":
                    return None
                if self._asked == "auto":
                    error = engines.obstacle(self.module, self._override_for_threads)
                    if isinstance(error, UnsupportedCallError):
                        return self._use_threads(error)
                n_replicas = len(self.device_ids)
                try:
                    self._engine = engines.make(
                        self._choice[0], self.module, n_replicas
                    )
                except UnsupportedModelError as error:
                    return self._use_threads(error)
            return self._engine

    def _use_threads(self, error: UnsupportedModelError) -> Engine:
        """Take threads, for a call or for good, if the choice is ours.

        Graphs of earlier forwards keep the processes they need.
        """
        if self._asked != "auto":
            raise error
        if isinstance(error, UnsupportedCallError):
            self._log_reason(logging.WARNING, str(error))
            self._threads = self._threads or ThreadEngine()
            return self._threads
        self._choice = "thread", str(error)
        self._engine = ThreadEngine()
        self._log_reason(logging.WARNING, str(error))
        return self._engine

    def _log_reason(self, level: int, reason: str) -> None:
        """Log each reason for threads once."""
        if reason not in self._reasons_logged:
            self._reasons_logged.add(reason)
            _log.log(level, "DataParallel runs its replicas as threads: %s", reason)

    # ---- engine ---------------------------------------------------------------------

    @property
    def engine(self) -> str:
        """What runs replicas: ``"process"``, ``"thread"``; ``"none"`` for one."""
        return self._choice_now()[0]

    @property
    def engine_reason(self) -> str:
        """Why it is this engine, as a sentence."""
        return self._choice_now()[1]

    def _choice_now(self) -> tuple[str, str]:
        """Return what would run the replicas of a call made now, and why."""
        if len(self.device_ids) < 2:
            return "none", self._alone_because
        if self._asked == "auto" and self._choice[0] == "process":
            error = engines.obstacle(
                self.module, self._override_for_threads, self._engine is None
            )
            if error is not None:
                return "thread", str(error)
        return self._choice

    def refresh(self) -> None:
        """Have replicas start anew at the next forward, with all as it is now.

        Worker processes import modules once.  After a change inside one that they have
        imported, this makes them import it again.  It also gives an engine that was
        left another try, and looks for generators of random numbers that the module has
        been given.  Graphs of earlier forwards cannot be run backward any more.
        """
        self.close()
        effects.forget(self.module)
        self._choice = self._choose()

    def close(self) -> None:
        """Let go of threads and processes; may be called again.

        A later forward starts them anew.  They also end with the wrapper, and with the
        interpreter.  Parameters get ordinary memory again, at the same addresses, so
        no other thread may write into them meanwhile.
        """
        open_engines = (self._engine, self._threads)
        self._engine = self._threads = None
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        for engine in open_engines:
            if engine is not None:
                engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
