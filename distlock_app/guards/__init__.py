"""Write guards, which need no lock: optimistic and pessimistic locking, fencing tokens."""
