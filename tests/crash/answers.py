"""Whether each question ended once, and as reported to those who answered it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tests.crash.history import Execution

#: The events that end a question.
ENDS = ("response", "failure", "timeout")
#: The replies to an answer that is accepted for its question, and all replies.
TAKEN = ("accepted", "early")
SAID = (*TAKEN, "late", "unknown")


@dataclass
class Question:
    """A question that a task asked; `id` is the id of that task."""

    id: str
    asked: bool = False
    #: Answer, as (what, content) -> the reply to it, one of `SAID`.
    told: dict[tuple[str, str], str] = field(default_factory=dict)
    #: Unexpected errors that answerers got instead of a reply.
    errors: list[str] = field(default_factory=list)
    #: The tasks that followed, each as (task id, what, content).
    ends: set[tuple[str, str, str]] = field(default_factory=set)
    #: Whether a worker of the previous version handled its timeout: it knows no later answers.
    by_previous: bool = False

    @property
    def is_lost(self) -> bool:
        return self.asked and not self.ends

    @property
    def is_contrary(self) -> bool:
        """Whether the outcome contradicts the replies to the answerers."""
        taken = {answer for answer, said in self.told.items() if said in TAKEN}
        followed = {(what, content) for _, what, content in self.ends if what != "timeout"}
        by_time = not self.by_previous and any(what == "timeout" for _, what, _ in self.ends)
        return len(taken) > 1 or not followed <= taken or (by_time and bool(taken))

    @property
    def followers(self) -> list[str]:
        return [id for id, _, _ in self.ends]

    def describe(self) -> str:
        told = "".join(f"\n  {what} {n}: {said}" for (what, n), said in self.told.items())
        told += "".join(f"\n  {error}" for error in self.errors)
        ends = "".join(f"\n  {id}: {what} {content}" for id, what, content in self.ends)
        return f"{self.id}{told}{ends}"


@dataclass
class Answers:
    """Counts of questions and answers, and the questions that went wrong."""

    asked: int = 0
    told: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    lost: list[Question] = field(default_factory=list)
    #: Ended in more than one way.
    twice: list[Question] = field(default_factory=list)
    contrary: list[Question] = field(default_factory=list)
    #: Questions with answers that were neither accepted nor refused.
    unheard: list[Question] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.lost or self.twice or self.contrary or self.unheard)


def judge_answers(executions: Iterable[Execution], previous: Collection[str]) -> Answers:
    """Judge the questions. `previous` has the names of the workers of the previous version."""
    found = Answers()
    for question in _questions(executions, previous):
        found.asked += question.asked or bool(question.ends)
        found.told.update(question.told.values())
        found.ended.update({what for _, what, _ in question.ends})
        if question.is_lost:
            found.lost.append(question)
        if len(question.ends) > 1:
            found.twice.append(question)
        if question.is_contrary:
            found.contrary.append(question)
        if question.errors:
            found.unheard.append(question)
    return found


def _questions(executions: Iterable[Execution], previous: Collection[str]) -> list[Question]:
    found: dict[str, Question] = {}

    def question(id: str) -> Question:
        return found.setdefault(id, Question(id))

    for execution in executions:
        id = execution.key[0]
        senders = {line["owner"] for line in execution.lines if line["event"] == "publish"}
        for line in execution.lines:
            if line["event"] == "asked":
                question(id).asked = True
            elif line["event"] == "told":
                question(id).told[line["what"], line["content"]] = line["said"]
            elif line["event"] == "unheard":
                question(id).errors.append(line["error"])
            elif line["event"] == "start" and line.get("question"):
                asked = question(line["question"])
                asked.ends.add((id, line["what"], line["content"]))
                asked.by_previous |= line["what"] == "timeout" and not senders.isdisjoint(previous)
    return [*found.values()]
