-- Give the lock to those who wait for it.
--
-- Include it after members.

local HEARD_WITHIN = 3000000  -- a waiter asks again each second: after three it has died
local FIRST_MS = 3000         -- a waiter's process may be stopped: if it is not, it extends

-- Let waiters in, in order of arrival, as long as the next one fits (call drop_expired() first);
-- return the fence of `me` if I am among them: the answer tells me, not a message.
-- A waiter that did not ask lately, or whose process does not listen, has died or lost its
-- connection: it gets its old place back (by time of arrival) if it ever asks again.
local function hand_over(me)
  local granted
  while not held do
    local head = redis.call('ZRANGE', queue, 0, 0)[1]
    if not head then break end
    local entry = redis.call('HGET', entries, head) or ''
    local heard, ttl, channel, limit, about =
      string.match(entry, '^(%d+) (%d+) (%S+) (%d+) (.*)$')
    local there = heard and now - heard < HEARD_WITHIN
    if there and not fits(limit) then break end
    redis.call('ZREM', queue, head)  -- before take(), which a full server would refuse
    redis.call('HDEL', entries, head)
    if there and head == me then
      granted = take(head, ttl, limit, about)
    elseif there and channel == '-' then
      take(head, math.min(ttl, FIRST_MS), limit, about)
    elseif there and redis.call('PUBSUB', 'NUMSUB', channel)[2] > 0 then
      -- Its process listens here. PUBLISH does not tell: it also reaches, without counting them,
      -- subscribers at other nodes of a Cluster and at replicas.
      local first = math.min(ttl, FIRST_MS)
      local words = {head, key, take(head, first, limit, about), text(now), first}
      redis.call('PUBLISH', channel, table.concat(words, ' '))
    end
  end
  if not held and redis.call('EXISTS', members) == 0 then redis.call('ZREM', index, key) end
  return granted
end

-- Take away what this token holds or waits for, and let the next in.
local function give_up()
  if mine then
    redis.call('DEL', lock)
    held = false
  else
    drop_expired()
    drop(token)
  end
  if not held then hand_over('') end
end
