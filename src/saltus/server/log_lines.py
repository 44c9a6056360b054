"""Write the log on a thread of its own: lines are dropped where nobody reads them, and no request waits."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time

MAX_LINES = 10_000  # that wait to be written
FLUSH_SECONDS = 1.0  # at the end


class LogLines(logging.Handler):
    """Writes lines to a file descriptor, by default stderr's, and tells how many it had to drop."""

    def __init__(self, descriptor: int = 2, max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self.descriptor = descriptor
        self.lines: queue.Queue[str] = queue.Queue(max_lines)
        self.num_dropped = 0
        threading.Thread(target=self._write, name="saltus-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.lines.put_nowait(self.format(record))
        except queue.Full:
            self.num_dropped += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait a little for what is not written yet."""
        until = time.monotonic() + FLUSH_SECONDS
        while self.lines.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.01)

    def _write(self) -> None:
        """Write for ever. Not by sys.stderr: a write that blocks would hold its lock, which the program's end needs."""
        while True:
            line = self.lines.get()
            self.acquire()
            dropped, self.num_dropped = self.num_dropped, 0
            self.release()
            if dropped:
                line = f"{dropped} lines were dropped: nobody read the log\n{line}"
            left = f"{line}\n".encode(errors="replace")
            with contextlib.suppress(OSError):  # nobody can read it any more
                while left:
                    left = left[os.write(self.descriptor, left) :]
            self.lines.task_done()
