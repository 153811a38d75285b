"""A thread that writes a checkpoint while the next round trains."""

import threading
from collections.abc import Callable


class Background:
    """Runs one job at a time; what a job raises is raised again by `finish`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Run a job, when the one before it has finished.

        The process does not wait for it at its exit, where it would be in the way of an error.
        """
        self.finish()
        name = "lightfed-checkpoint"
        self._thread = threading.Thread(target=self._run, args=(job,), name=name, daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether `finish` raises already."""
        return self._error is not None

    def finish(self) -> None:
        """Wait for the job; what it has raised is raised once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            self._error = error
