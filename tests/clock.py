"""A fake clock for code that measures time: it advances by every sleep, and by one tick when read."""

TICK_S = 2**-20


class Clock:
    """Replacement for the module ``time``."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def perf_counter(self) -> float:
        self._now_s += TICK_S
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += seconds
