"""Trackio: a database in TRACKIO_DIR, or a Space where TRACKIO_SPACE_ID names one. Shown by `trackio show`."""

from __future__ import annotations

from pronghorn.report.loggers.logger import About


class Trackio:
    def __init__(self, about: About) -> None:
        import trackio

        # Trackio finds a run again by its name, and two folders may have the same one.
        self._run = trackio.init(
            project=about.project, name=f"{about.name}-{about.id[:6]}", resume="allow", config=about.config, embed=False
        )
        self.place = f'trackio show --project "{about.project}"'

    def log(self, step: int, figures: dict[str, float], time: float) -> None:
        self._run.log(dict(figures), step=step)

    def again(self, step: int) -> None:
        """Points of the same step stand beside the earlier ones."""

    def end(self, code: int) -> None:
        self._run.finish()
