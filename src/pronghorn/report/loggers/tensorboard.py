"""TensorBoard: event files in RUN/tensorboard. Shown by `tensorboard --logdir RUN/tensorboard`, or with runs/ for all runs."""

from __future__ import annotations

from typing import Any

from pronghorn.report.loggers.logger import About


class TensorBoard:
    def __init__(self, about: About) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        folder = about.folder / "tensorboard"
        self.place = f"tensorboard --logdir {folder}"
        self._writer: Any = EventFileWriter(str(folder), flush_secs=5)
        if about.session > 1:
            self.again(about.resumed_from or 0)

    def log(self, step: int, figures: dict[str, float], time: float) -> None:
        values = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=time, step=step, summary=summary))

    def again(self, step: int) -> None:
        """TensorBoard drops what earlier events say about this step and later ones."""
        begins = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.add_event(self._events.Event(step=step + 1, session_log=begins))

    def end(self, code: int) -> None:
        self._writer.close()
