-- Take the lock at this node if it is free; if not, wait in its queue, or leave it.
--
-- KEYS  1 lock, 2 part: see shared/begin.lua
-- ARGV  1 token, 2 ttl, 3 "holder name", 4 stamp, which is also the proposed fence; of a waiter
--       also: 5 channel to be called on, '-' without one, 6 ticket; '' and '' only ask for the time,
--       '' and 'again' are of an owner that this node forgot: before all who wait
-- ->    "1 fence" mine, or "0 milliseconds", after which it may be free; mostly the time, in seconds
--       and microseconds; and "<stamp> again" if it was mine before, since that try
--
-- When the nodes agree on a fence there is nothing to write back to them. So each takes the number
-- that the client proposes, its guess of this node's time, if it is not far ahead of the last one.
-- A node that does not know the last one takes its own time, which no guess is ahead of: so the
-- fence goes on growing even if all nodes forget.

-- include: shared/begin.lua

local ttl, about, stamp, channel, ticket = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local CLOSE, AHEAD = 50000, 10000000  -- microseconds
local sweeps = stamp % 128 == 0  -- now and then: drop from the part what is free again

-- Most locks are free. What follows takes longer to define than this to run.
local known = redis.call('HMGET', part, ':', lock)
local ahead = known[1] and stamp - known[1]
if ahead and ahead > 0 and ahead < AHEAD and known[2] ~= 'q' and not channel and not sweeps then
  local value = token .. ' ' .. stamp .. ' ' .. stamp .. ' ' .. about
  if redis.call('SET', lock, value, 'NX', 'PX', ttl) then
    redis.call('HSET', part, ':', stamp, lock, '')
    return {ok = '1 ' .. stamp}
  end
end

-- include: ../../redis/lua/shared/clock.lua

local function take()
  local fence, last = tonumber(stamp), tonumber(known[1] or 0)
  if last == 0 or fence > now or fence < now - CLOSE then fence = now end
  if fence <= last then fence = last + 1 end
  fence = text(fence)
  redis.call('SET', lock, token .. ' ' .. fence .. ' ' .. stamp .. ' ' .. about, 'PX', ttl)
  local mark = redis.call('EXISTS', lock .. ':q') == 1 and 'q' or ''
  redis.call('HSET', part, ':', fence, lock, mark)
  if sweeps then
    for _, key in ipairs(redis.call('HKEYS', part)) do
      if key ~= ':' and redis.call('EXISTS', key, key .. ':q') == 0 then
        redis.call('HDEL', part, key)
      end
    end
  end
  return {ok = '1 ' .. fence .. ' ' .. time[1] .. ' ' .. time[2]}
end

-- include: ../../redis/lua/shared/mine.lua
-- include: shared/queue.lua

if mine then  -- a repeated request
  local fence, last = string.match(held, '^%S+ (%d+) (%d+)')
  redis.call('PEXPIRE', lock, math.max(redis.call('PTTL', lock), ttl))
  if tonumber(last) < tonumber(stamp) then
    held = token .. ' ' .. fence .. ' ' .. stamp .. ' ' .. about
    redis.call('SET', lock, held, 'KEEPTTL')
  end
  return {ok = '1 ' .. fence .. ' ' .. time[1] .. ' ' .. time[2] .. ' ' .. last .. ' again'}
end
if not held and not is_gone(stamp) then
  local head = first()
  if not head or head == token or ticket == 'again' then
    if head then forget(token) end
    return take()
  end
end
if channel and channel ~= '' then enqueue(channel, ticket) else forget(token) end
return {ok = '0 ' .. redis.call('PTTL', lock) .. ' ' .. time[1] .. ' ' .. time[2]}
