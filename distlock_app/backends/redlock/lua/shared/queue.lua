-- The queue of a lock at this node.
--
-- A queue has no say in who is the owner: it only keeps all others from asking in vain, and from
-- taking a node each. Its order is the same at every node, for so are the waiters' tickets.
-- Include it after begin and clock.

local HEARD_WITHIN = 3000000  -- a waiter asks again each second: after three it has died
local QUEUE_MS = 10000        -- so a queue that nobody refreshes may go
local queue, waiters = lock .. ':q', lock .. ':w'

local function forget(waiter)
  redis.call('ZREM', queue, waiter)
  redis.call('HDEL', waiters, waiter)
end

-- Return whose turn it is and its channel, passing over those who died; nil: nobody waits.
local function first()
  while true do
    local head = redis.call('ZRANGE', queue, 0, 0)[1]
    if not head then return nil end
    local heard, channel = string.match(redis.call('HGET', waiters, head) or '', '^(%d+) (%S+)$')
    if heard and now - heard < HEARD_WITHIN then return head, channel end
    forget(head)
  end
end

-- Whether a release of all tries up to this stamp overtook them, over a connection of its own.
local function is_gone(stamp)
  return tonumber(redis.call('GET', lock .. ':g:' .. token) or -1) >= tonumber(stamp)
end

-- Enter the queue. The ticket is the stamp of the waiter's first try.
local function enqueue(channel, ticket)
  if is_gone(ticket) then return end
  redis.call('HDEL', waiters, token)
  redis.call('HSET', part, lock, 'q')
  redis.call('ZADD', queue, 'NX', ticket, token)
  redis.call('HSET', waiters, token, text(now) .. ' ' .. channel)
  redis.call('PEXPIRE', queue, QUEUE_MS)
  redis.call('PEXPIRE', waiters, QUEUE_MS)
end

-- Notify the first waiter that listens; `me` knows that it is its turn.
local function call_next(me)
  while true do
    local head, channel = first()
    if not head or head == me or channel == '-' then return end
    local key = string.sub(lock, -40)
    if redis.call('PUBLISH', channel, head .. key) > 0 then return end
    forget(head)  -- its process has died; if not, it gets its place back when it asks
  end
end
