-- Take the lock away from its owner, and call the next waiter.
--
-- KEYS  1 lock, 2 part: see shared/begin.lua
-- ARGV  1 token of the owner, '' any owner
-- ->    "1" taken away, "0" nothing to take

-- include: shared/begin.lua
-- include: ../../redis/lua/shared/mine.lua
-- include: ../../redis/lua/shared/clock.lua
-- include: shared/queue.lua

if not held or (token ~= '' and not mine) then return {ok = '0'} end
redis.call('DEL', lock)
redis.call('HSET', part, ':', text(math.max((redis.call('HGET', part, ':') or 0) + 1, now)))
call_next('')
return {ok = '1'}
