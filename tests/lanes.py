"""Which tests a run has: the lanes, each a database with a pair of Python and Django."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.machine import Pair

DATABASES = ("sqlite", "mysql", "postgresql")
# In the order in which they are started.
SERVERS = (
    "redis",
    "redis_cluster",
    "redlock",
    "mysql",
    "mysql9",
    "postgresql",
    "etcd",
    "zookeeper",
)


@dataclass(frozen=True)
class Choice:
    """What the command line asks for."""

    quick: bool = False
    upstream: bool = False
    coverage: bool = False
    only: str = ""
    keep: bool = False
    pytest: tuple[str, ...] = ()

    @property
    def databases(self) -> tuple[str, ...]:
        """The databases of the run; every run has Redis."""
        if self.quick or self.only == "redis":
            return ("sqlite",)
        return (self.only,) if self.only else DATABASES

    @property
    def kept(self) -> str:
        """The lane whose servers run on in the end."""
        if not self.keep:
            return ""
        usual = "once" if "sqlite" in self.databases else "new"
        return f"{min(self.kinds & {'upstream', 'coverage'}, default=usual)}-{self.databases[0]}"

    @property
    def stores(self) -> tuple[str, ...]:
        """Servers that are tested beside SQLite only: they need no database."""
        if self.quick or self.only == "redis":
            return ("redlock",)
        return () if self.only in DATABASES[1:] else ("redlock", "etcd", "zookeeper")

    @property
    def kinds(self) -> set[str]:
        """Which of LANES the run has."""
        if self.quick:
            return {"new", "once", "checks"}
        if self.upstream:
            return {"upstream"}
        if self.coverage:
            return {"coverage"}
        few = {"new", "once", "slow", "slow-once", "old", "checks"}
        return few if self.only else {*few, "lowest", "contract", "wheel"}

    @property
    def programs(self) -> set[str]:
        """What has to be on this machine."""
        whole = not self.quick
        browser = ["chromium"] if whole and self.only != "redis" else []
        return {*self.databases, *self.stores, *browser, *(["gettext", "curl"] if whole else [])}


@dataclass(frozen=True)
class Lane:
    """Tests of one kind on one database, by one pair of Python and Django."""

    kind: str
    database: str
    pair: Pair
    marks: str = ""  # as pytest's -m

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.database}" if self.database else self.kind


FEW = "not slow and not crowd and not once"
# Kind, database and marks of each lane, the longest first.
LANES = (
    ("once", "sqlite", "not slow and once"),
    ("lowest", "sqlite", "not slow and not crowd and once"),
    ("slow-once", "sqlite", "slow and once"),
    ("slow", "sqlite", "slow and not once"),
    ("new", "postgresql", "not slow and not once"),
    ("new", "mysql", "not slow and not once"),
    ("new", "mysql9", FEW),
    ("old", "postgresql", FEW),
    ("old", "mysql", "not slow and not once"),
    ("wheel", "sqlite", FEW),
    ("new", "sqlite", "not slow and not once"),
    ("slow", "postgresql", "slow and not once"),
    ("slow", "mysql", "slow and not once"),
    ("old", "sqlite", FEW),
    ("contract", "postgresql", FEW),
    ("contract", "mysql", FEW),
    ("contract", "sqlite", FEW),
    ("checks", "", ""),
    # What starts processes is left out: some are killed, others fork, and neither can be traced.
    ("coverage", "sqlite", "not slow and not crowd"),
    ("coverage", "postgresql", FEW),
    ("coverage", "mysql", FEW),
    ("upstream", "sqlite", "not slow and not crowd"),
    ("upstream", "mysql", FEW),
    ("upstream", "postgresql", FEW),
)
# Which pair runs it, if not the one of its own name.
NEW = dict.fromkeys(("once", "slow", "slow-once", "checks", "coverage"), "new")
PAIR_OF = {**NEW, "contract": "lowest"}
# What each pair leaves out; without it, or where it is not chosen, that is everything.
LEFT_OUT = {
    "new": "on MySQL what is slow, starts processes, or needs no database",
    "old": "what is slow; what starts processes, but on MariaDB; what needs no database",
    "lowest": "what is slow or starts processes; of each database all but the contract",
    "wheel": "what is slow, starts processes or needs no database; MariaDB and PostgreSQL",
    "upstream": "what is slow or starts processes; MySQL",
}


def pairs_of(versions: Sequence[str]) -> dict[str, Pair]:
    """Choose a pair for each part.

    The oldest and the newest Django run on every database, the newest with the slow tests. What
    does not depend on the database runs beside SQLite only: with the newest, and with the lowest
    versions that setup.cfg allows, which have to pass the contract suite on every database, too.
    With Django 6.0 the built wheel is tested.
    """
    olds = [version for version in ("3.11", "3.10") if version in versions]  # 5.2 is their last
    news = [version for version in ("3.14", "3.13", "3.12") if version in versions]
    pairs = {}
    if news:
        pairs["new"] = Pair(news[0], "6.1")
        pairs["upstream"] = Pair(news[0], "upstream", "upstream")
    if olds:
        pairs["old" if news else "new"] = Pair(olds[0], "5.2")
    if olds[1:]:
        pairs["lowest"] = Pair(olds[1], "5.2", "lowest")
    if news[1:]:
        pairs["wheel"] = Pair(news[1], "6.0")
    return pairs


def plan(choice: Choice, versions: Sequence[str]) -> tuple[list[Lane], list[str]]:
    """Return the lanes for the Pythons that are here, and what is left out."""
    pairs = pairs_of(versions)
    skipped = [
        f"Python {one}" for one in versions if one not in {p.version for p in pairs.values()}
    ]
    lanes = []
    for kind, database, marks in LANES:
        part = PAIR_OF.get(kind, kind)
        if part not in pairs or kind not in choice.kinds:
            continue
        alone = "lowest" not in pairs or "lowest" not in choice.kinds
        if alone and (kind, database) == ("old", "sqlite"):
            marks = "not slow and not crowd"  # with what needs no database
        if database.removesuffix("9") in ("", *choice.databases):
            lanes.append(Lane(kind, database, pairs[part], marks))
    for part, what in LEFT_OUT.items():
        if part not in pairs:
            skipped.append(f"{part}: no Python for it is here")
        elif part not in choice.kinds:
            skipped.append(f"{part} ({pairs[part]}): not chosen")
        else:
            skipped.append(f"{part} ({pairs[part]}): {what}")
    return lanes, skipped
