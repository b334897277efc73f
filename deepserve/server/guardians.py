"""Guardians of instances that outlive their ranks, as a frontend knows them: commands go to them, and each answers with a `Guardian`."""

import asyncio
from collections.abc import Callable

from deepserve.messages import Guardian, Scale, ToEngine

ANSWER_S = 10.0  # by which one has answered


class Guardians:
    """`send` gives a message to an identity; False: nobody is there any more."""

    def __init__(self, send: Callable[[bytes, ToEngine], bool]):
        self._send = send
        self._known: dict[str, tuple[bytes, Guardian]] = {}  # by instance: its latest word, and whose
        self._asked: dict[str, asyncio.Future[Guardian]] = {}

    @property
    def num_more(self) -> int:
        """DP replicas that are wanted beyond those of the cluster file."""
        return sum(word.num_more for _, word in self._known.values())

    def on_word(self, identity: bytes, word: Guardian) -> None:
        """It is there, or it answers. On another connection than that on which it was asked it only is there."""
        asked, before = self._asked.get(word.instance), self._known.get(word.instance)
        self._known[word.instance] = identity, word
        if asked is None or asked.done():
            return
        if before is not None and before[0] != identity:
            asked.set_exception(ValueError(f"the guardian of instance {word.instance!r} lost its connection before it answered"))
        else:
            asked.set_result(word)

    async def scale(self, instance: str, dp: int) -> None:
        """Have an instance get so many DP replicas. instance: may be empty if there is one. Raises ValueError where that cannot be."""
        names = sorted(self._known)
        if not instance and len(names) == 1:
            instance = names[0]
        if instance not in names:
            which = f"one of {', '.join(names)}" if names else "one that was started with on_rank_death = replan, and none was"
            raise ValueError(f"instance must be {which}, got {instance!r}")
        if instance in self._asked:
            raise ValueError(f"instance {instance!r} is being scaled by another request")
        answer = self._asked[instance] = asyncio.get_running_loop().create_future()
        try:
            if not self._send(self._known[instance][0], Scale(dp)):
                raise ValueError(f"the guardian of instance {instance!r} cannot be reached")
            async with asyncio.timeout(ANSWER_S):
                word = await answer
        except TimeoutError:
            raise ValueError(f"the guardian of instance {instance!r} has not answered for {ANSWER_S:g} s") from None
        finally:
            self._asked.pop(instance, None)
        if word.error:
            raise ValueError(word.error)
