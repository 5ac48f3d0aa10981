"""Locks in ZooKeeper: `ZooKeeperBackend`."""

from __future__ import annotations

from .backend import ZooKeeperBackend

__all__ = ["ZooKeeperBackend"]
