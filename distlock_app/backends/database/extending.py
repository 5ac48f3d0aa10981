"""Renewal of locks in the lock table: many by one statement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from ...claims import Grant
from ..base import batches, result_of
from ..sessions.queues import claim_key_of
from . import members
from .connections import Contended, Session
from .members import kind_of
from .queueing import Queueing

# Rows extended by one statement; SQLite allows 999 parameters before 3.32.
BATCH = 400


class Extending(Queueing):
    """Lets claims last longer, or end sooner."""

    _locked: set[str]  # keys whose rows were in other transactions when we asked last

    def extend(self, grant: Grant, ttl: float, *, exactly: bool = False) -> bool:
        [answer] = self._extend_batch([(grant, ttl)], exactly=exactly)
        return result_of(answer)

    def end_in(self, grant: Grant, ttl: float) -> bool:
        return self.extend(grant, ttl, exactly=True)

    def extend_many(self, work: Sequence[tuple[Grant, float]]) -> list[bool | Exception]:
        """Extend by one statement for each 400 mutexes of one ttl, or members of one row."""
        groups: defaultdict[Any, list[int]] = defaultdict(list)
        for index, (grant, ttl) in enumerate(work):
            key = grant.claim.key
            if kind_of(grant.claim):
                groups[key].append(index)
            elif key in self._locked:  # by itself: no other renewal waits for the locked row
                groups[key, ttl].append(index)
            else:
                groups[ttl].append(index)
        results: list[bool | Exception] = [False] * len(work)
        for group in groups.values():
            for batch in batches(group, BATCH):
                answers = self._extend_batch([work[index] for index in batch])
                for index, answer in zip(batch, answers, strict=True):
                    results[index] = answer
        return results

    def _probe(self, key: str, **how: Any) -> None:
        """Raise Contended at once if another transaction has the row, instead of after a second."""
        self._ask(lambda s: s.dialect.probe(s.cursor, key), **how)
        self._locked.discard(key)

    def _extend_batch(
        self, work: Sequence[tuple[Grant, float]], *, exactly: bool = False
    ) -> list[bool | Exception]:
        """Extend mutexes of one ttl, or members of one row."""
        keys = {grant.claim.key for grant, _ in work}
        key = work[0][0].claim.key
        try:
            if key in self._locked:
                self._probe(key, urgent=True)
            answers = self._ask(partial(_extend, work, exactly), urgent=True)
        except Exception as error:
            if isinstance(error, Contended) and self._sessions.dialect.locks_rows:
                # A row is in another transaction: the others must not expire for it. Until it is
                # found unlocked, no renewal waits for it again.
                self._locked |= keys
                if len(keys) > 1:
                    return [self._extend_batch([one])[0] for one in work]
            return [error] * len(work)
        for (grant, _), ours in zip(work, answers, strict=True):
            if not ours:
                self._sessions.close_kept(claim_key_of(grant.claim))
        return answers


def _extend(
    work: Sequence[tuple[Grant, float]], exactly: bool, session: Session
) -> list[bool | Exception]:
    claim, ttl = work[0][0].claim, work[0][1]
    if kind_of(claim):
        # A stable owner may be there twice: for the longer time.
        owners = {grant.claim.owner: ttl for grant, ttl in sorted(work, key=lambda one: one[1])}
        kept = members.extend(claim.key, owners, session, exactly=exactly)
        return [grant.claim.owner in kept for grant, _ in work]
    claim_keys = [(grant.claim.key, grant.claim.owner) for grant, _ in work]
    ours = session.dialect.extend(session.cursor, claim_keys, ttl, exactly=exactly)
    return [claim_key in ours for claim_key in claim_keys]
