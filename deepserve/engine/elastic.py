"""One rank's part in an instance that outlives its ranks (`--on-rank-death replan`): notice, agree on who is in, go on with them."""

import logging
import time
from collections.abc import Collection
from dataclasses import replace

import torch.distributed as dist

from deepserve.engine.engine import Engine
from deepserve.engine.membership import GRACE_S, Membership
from hw.groups import PeerLost, Rendezvous

logger = logging.getLogger("deepserve.engine")

LOOK_S = 0.5  # between looks for ranks that want to join
OPEN_TIMEOUT_S = 10.0  # for groups to open whose members have all just said that they are there


class Elastic:
    """Keeps an engine's groups those of the members that there are."""

    def __init__(self, engine: Engine, membership: Membership, rendezvous: Rendezvous):
        self._engine, self._membership, self._rendezvous = engine, membership, rendezvous
        self._looked_s = time.monotonic()
        # After which the others have gone on without this rank, if it stands still.
        self.limit_s = engine.config.args.step_timeout_s + 2 * GRACE_S

    def check(self) -> None:
        """Raises PeerLost if a member is known to be dead: it shows here before a collective fails, and while nothing runs."""
        if lost := self._membership.lost:
            raise PeerLost(f"member {lost[0]} is dead")

    @property
    def somebody_applies(self) -> bool:
        """Whether others wait to be let in. The first member looks for all, now and then."""
        if self._membership.rank > 0 or time.monotonic() - self._looked_s < LOOK_S:
            return False
        self._looked_s = time.monotonic()
        return bool(self._membership.applicants())

    def join(self) -> None:
        """A fresh rank, loaded, is let in by the others. Raises PeerLost where that fails."""
        self._membership.apply()
        self._open()

    def regroup(self, leaving: Collection[int] = (), *, planned: bool = False) -> None:
        """Hang up, meet those who go on, open groups with them, hold experts for those who are gone. What was in flight is done again.

        For arguments see `Membership.meet`. Raises PeerLost when somebody dies meanwhile: call it again; Excluded, for good.
        """
        started = time.monotonic()
        self._engine.discard()
        self._engine.groups.close()
        self._membership.meet(leaving, planned=planned)
        num_read = self._open()
        seconds, size = time.monotonic() - started, len(self._membership.members)
        logger.info("went on with %d ranks after %.2f s, %d experts read", size, seconds, num_read)

    def _open(self) -> int:
        members, groups = self._membership, self._engine.groups
        store = dist.PrefixStore(members.prefix, self._rendezvous.store)
        groups.close()
        groups.reopen(members.parallel, members.rank, replace(self._rendezvous, store=store, timeout_s=OPEN_TIMEOUT_S))
        groups.set_timeout(self._engine.config.args.step_timeout_s)
        return self._engine.regroup()
