"""How busy a card is while something runs, once a second, as `nvidia-smi` sees it."""

import shutil
import statistics
import subprocess
from types import TracebackType

_QUERY = "--query-gpu=utilization.gpu,memory.used"
_FORMAT = "--format=csv,noheader,nounits"


class Activity:
    """Samples a card from entering the context to leaving it.

    `utilization.gpu` is the share of the last second in which at least one kernel ran: it does not
    say how many of the multiprocessors were at work.

    Attributes:
        busy: percent, one figure a second; empty without nvidia-smi.
        megabytes: memory in use by all processes, as many.
    """

    def __init__(self) -> None:
        self.busy: list[float] = []
        self.megabytes: list[float] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Activity":
        if shutil.which("nvidia-smi") is not None:
            command = ["nvidia-smi", _QUERY, _FORMAT, "--loop-ms=1000"]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is None:
            return
        self._process.terminate()
        output, _ = self._process.communicate()
        for line in output.splitlines():
            fields = line.split(",")
            # The last line may be cut off.
            if len(fields) == 2 and all(field.strip().isdigit() for field in fields):
                self.busy.append(float(fields[0]))
                self.megabytes.append(float(fields[1]))

    @property
    def sustained(self) -> float | None:
        """The median in percent, without the first and the last second; None if too short."""
        inner = self.busy[1:-1]
        return statistics.median(inner) if inner else None

    def line(self) -> str:
        """One line for a log."""
        if self.sustained is None:
            return "activity of the card: not measured"
        figures = " ".join(f"{value:.0f}" for value in self.busy)
        most = max(self.megabytes)
        return f"busy {self.sustained:.0f} % (seconds: {figures}), at most {most:.0f} MB in use"
