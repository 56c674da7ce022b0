"""Where the instances of a batch meet, so that one call of `map_batch` serves them all.

Every instance is solved on its own thread, and threads of the core may help with its components. A
thread that needs an answer from the oracle waits until all other instances wait for one, too, or
have finished; the last one to arrive calls `map_batch`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from factormax.arrays import grad_mode_keeper

__all__ = ["Rendezvous"]

R = TypeVar("R")

_LARGEST = 256  # instances at a time


class _Question:
    """The scores one instance asks about, and the answer."""

    def __init__(self, factor: Any, eta_u: Any, eta_v: Any) -> None:
        self.factor, self.eta_u, self.eta_v = factor, eta_u, eta_v
        self.answer: Any = None
        self.error: BaseException | None = None
        self.answered = False


class Rendezvous:
    """The meeting point of a group of instances."""

    def __init__(self, active: int) -> None:
        self._active = active  # instances that are not finished
        self._waiting: set[int] = set()  # instances that wait for an answer
        self._questions: list[_Question] = []
        self._condition = threading.Condition()
        self._cancelled = False
        self._keep = grad_mode_keeper()

    @classmethod
    def run(cls, batch: int, task: Callable[[int, Rendezvous], R]) -> list[R]:
        """The results of `task(i, rendezvous)` for all instances, run concurrently."""
        results: list[Any] = [None] * batch
        errors: list[BaseException] = []
        for start in range(0, batch, _LARGEST):
            members = range(start, min(start + _LARGEST, batch))
            meeting = cls(len(members))

            def work(i: int, meeting: Rendezvous = meeting) -> None:
                try:
                    results[i] = task(i, meeting)
                except BaseException as error:
                    errors.append(error)
                finally:
                    meeting.leave()

            threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in members]
            try:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            except BaseException:  # Ctrl-C: all of them end at their next question
                meeting.cancel()
                for thread in threads:
                    if thread.ident is not None:
                        thread.join()
                raise
            if errors:
                raise errors[0]
        return results

    def callback(self, factor: Any, member: int) -> Callable[..., Any]:
        """What the core calls, for this instance, in place of the factor's own callback."""

        def ask(instance: int, eta_u: Any, eta_v: Any) -> Any:
            question = _Question(factor, eta_u, eta_v)
            with self._condition:
                self._questions.append(question)
                self._waiting.add(member)
                self._answer_if_all_wait()
                while not question.answered and not self._cancelled:
                    self._condition.wait()
            if self._cancelled:
                raise RuntimeError("factormax: the solve was cancelled.")
            if question.error is not None:
                raise question.error
            return question.answer

        return ask

    def cancel(self) -> None:
        """Ends all waiting: every question now raises an error."""
        with self._condition:
            self._cancelled = True
            self._condition.notify_all()

    def leave(self) -> None:
        """Called when an instance is finished."""
        with self._condition:
            self._active -= 1
            self._answer_if_all_wait()

    def _answer_if_all_wait(self) -> None:
        if len(self._waiting) < self._active or not self._questions or self._cancelled:
            return
        questions, self._questions = self._questions, []
        for factor in {id(q.factor): q.factor for q in questions}.values():
            asked = [q for q in questions if q.factor is factor]
            try:
                eta_u, eta_v = (
                    np.stack([q.eta_u for q in asked]),
                    np.stack([q.eta_v for q in asked]),
                )
                answers = self._keep(factor._call_batch)(eta_u, eta_v)
                for question, answer in zip(asked, answers, strict=True):
                    question.answer = answer
            except BaseException as error:
                for question in asked:
                    question.error = error
        for question in questions:
            question.answered = True
        self._waiting.clear()
        self._condition.notify_all()
