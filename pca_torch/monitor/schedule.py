"""Which steps of a training run are sampled."""

from __future__ import annotations

from dataclasses import dataclass

from pca_torch._checks import check_number, check_whole

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """The last `window` of every `every_n_steps` optimizer steps.

    The first ones of the run are a window too, so that it begins with a spectrum, where they do not meet
    those that are sampled anyway.

    Raises:
        ValueError: a window longer than the distance between two.
    """

    every_n_steps: int
    window: int

    def __post_init__(self) -> None:
        check_whole(self.every_n_steps, "every_n_steps", least=1)
        check_whole(self.window, "window", least=1)
        fits = self.window <= self.every_n_steps
        check_number(self.window, "window", f"at most `every_n_steps`, {self.every_n_steps}", fits)

    @property
    def _first(self) -> int:
        """The step that ends the first window; 0 is none of its own."""
        return self.window if 2 * self.window <= self.every_n_steps else 0

    def is_sampled(self, step: int) -> bool:
        """Whether the tokens of a step count.

        Args:
            step: from 1.
        """
        return step <= self._first or (step - 1) % self.every_n_steps >= self.every_n_steps - self.window

    def ends_window(self, step: int) -> bool:
        """Whether a spectrum is logged after a step.

        Args:
            step: from 1.
        """
        return step == self._first or step % self.every_n_steps == 0
