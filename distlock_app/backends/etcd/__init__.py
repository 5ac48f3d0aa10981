"""Locks in etcd: `EtcdBackend`."""

from __future__ import annotations

from .backend import EtcdBackend

__all__ = ["EtcdBackend"]
