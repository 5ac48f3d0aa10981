-- Release the lock, or undo tries to take it, and call the next waiter.
--
-- KEYS  1 lock, 2 part: see shared/begin.lua
-- ARGV  1 token, 2 stamp of the last try that this undoes; of a waiter that stays: 3 channel,
--       4 ticket; of an owner that is gone for good: 3 ''
-- ->    "1" it was mine, "0" not; either way nothing is left of these tries

-- include: shared/begin.lua
-- include: ../../redis/lua/shared/mine.lua

local channel, ticket = ARGV[3], ARGV[4]
mine = mine and tonumber(string.match(held, '^%S+ %d+ (%d+)')) <= tonumber(ARGV[2])
if mine then
  redis.call('DEL', lock)
elseif channel == '' then
  -- Its tries may be in another connection, which a busy node reads a moment later: a second is
  -- ample. A full node does without.
  redis.pcall('SET', lock .. ':g:' .. token, ARGV[2], 'PX', 1000)
  redis.pcall('HSET', part, lock, 'q')  -- so that acquire.lua looks
end
if ticket or redis.call('EXISTS', lock .. ':q') == 1 then
  -- include: ../../redis/lua/shared/clock.lua
  -- include: shared/queue.lua
  if ticket then enqueue(channel, ticket) else forget(token) end
  if mine or not held then call_next(token) end
end
return {ok = mine and '1' or '0'}
