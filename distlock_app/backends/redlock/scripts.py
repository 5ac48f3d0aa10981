"""Lua scripts that Redlock runs on each node; each answers with one line."""

from __future__ import annotations

from ..redis.scripts import Script

# KEYS of every script: 1 lock: "token fence stamp holder name"; 2 part: a hash with the last fence,
# ":", and the locks taken lately, 'q' with waiters. Beside a lock with waiters: its queue of owners
# by ticket and what is known of them; they are named here, as nodes are single servers and each
# word more costs as much as a command.
# ARGV of every script: 1 token
#
# As on a single server, what must work on a full node begins with a write that takes no memory.
#
# The stamp numbers the tries of an owner: what undoes a try may come late, over a connection of
# its own, and must not take away what a later try was given.
_BEGIN = """
local lock, part, token = KEYS[1], KEYS[2], ARGV[1]
"""

_MINE = """
local held = redis.call('GET', lock)
local mine = held and string.sub(held, 1, #token + 1) == token .. ' '
"""

# Only where the time is needed.
_CLOCK = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local function text(number) return string.format('%.0f', number) end  -- '..' keeps 14 digits
"""

# A queue has no say in who is the owner: it only keeps all others from asking in vain, and from
# taking a node each. Its order is the same at every node, for so are the waiters' tickets.
_QUEUE = """
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

-- Enter the queue. The ticket is the stamp of the waiter's first try.
local function enqueue(channel, ticket)
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
"""

# ARGV 2 ttl, 3 "holder name", 4 stamp, which is also the proposed fence; of a waiter also:
#      5 channel to be called on, '-' without one, 6 ticket; '' and '' only ask for the time
# -> "1 fence" mine, or "0 milliseconds", after which it may be free; and mostly the time, in
#    seconds and microseconds
#
# When the nodes agree on a fence there is nothing to write back to them. So each takes the number
# that the client proposes, its guess of this node's time, if it is not far ahead of the last one. A
# node that does not know the last one takes its own time, which no guess is ahead of: so the fence
# goes on growing even if all nodes forget.
_ACQUIRE = (
    _BEGIN
    + """
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
"""
    + _CLOCK
    + """

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

"""
    + _MINE
    + _QUEUE
    + """
if mine then  -- a repeated request
  local fence, last = string.match(held, '^%S+ (%d+) (%d+)')
  redis.call('PEXPIRE', lock, math.max(redis.call('PTTL', lock), ttl))
  if tonumber(last) < tonumber(stamp) then
    held = token .. ' ' .. fence .. ' ' .. stamp .. ' ' .. about
    redis.call('SET', lock, held, 'KEEPTTL')
  end
  return {ok = '1 ' .. fence .. ' ' .. time[1] .. ' ' .. time[2]}
end
if not held then
  local head = first()
  if not head or head == token then
    if head then forget(token) end
    return take()
  end
end
if channel and channel ~= '' then enqueue(channel, ticket) else forget(token) end
return {ok = '0 ' .. redis.call('PTTL', lock) .. ' ' .. time[1] .. ' ' .. time[2]}
"""
)

# ARGV 2 fence -> "1" mine, with that fence; no later fence of this node is smaller or equal
_RAISE = (
    _BEGIN
    + _MINE
    + """
local fence = ARGV[2]
if tonumber(redis.call('HGET', part, ':') or 0) < tonumber(fence) then
  redis.call('HSET', part, ':', fence)
end
if not mine then return {ok = '0'} end
local rest = string.match(held, '^%S+ %d+ (.*)$')
redis.call('SET', lock, token .. ' ' .. fence .. ' ' .. rest, 'KEEPTTL')
return {ok = '1'}
"""
)

# ARGV 2 ttl, 3 to end then, also sooner -> "1" mine, and else never ending earlier than before,
#      "0" not
_EXTEND = (
    _BEGIN
    + _MINE
    + """
if not mine then return {ok = '0'} end
if ARGV[3] or redis.call('PTTL', lock) < tonumber(ARGV[2]) then
  redis.call('PEXPIRE', lock, ARGV[2])
end
return {ok = '1'}
"""
)

# ARGV 2 stamp of the last try that this undoes; of a waiter that stays: 3 channel, 4 ticket
# -> "1" it was mine, "0" not; either way nothing is left of these tries
_RELEASE = (
    _BEGIN
    + _MINE
    + """
local channel, ticket = ARGV[3], ARGV[4]
mine = mine and tonumber(string.match(held, '^%S+ %d+ (%d+)')) <= tonumber(ARGV[2])
if mine then redis.call('DEL', lock) end
if channel or redis.call('EXISTS', lock .. ':q') == 1 then
"""
    + _CLOCK
    + _QUEUE
    + """
  if channel then enqueue(channel, ticket) else forget(token) end
  if mine or not held then call_next(token) end
end
return {ok = mine and '1' or '0'}
"""
)

# ARGV 1 token of the owner to take it from, or '' -> "1" taken away, "0" nothing to take
_CLEAR = (
    _BEGIN
    + _MINE
    + _CLOCK
    + _QUEUE
    + """
if not held or (token ~= '' and not mine) then return {ok = '0'} end
redis.call('DEL', lock)
redis.call('HSET', part, ':', text(math.max((redis.call('HGET', part, ':') or 0) + 1, now)))
call_next('')
return {ok = '1'}
"""
)

# KEYS 1 a part     ARGV 1 what a lock's name begins with, 2 the end of one name, or '' for all
# -> "1 now JSON": [[end of the name, held, milliseconds left, waiters], ...]
_LIST = """
local locks = {ARGV[1] .. ARGV[2]}
if ARGV[2] == '' then locks = redis.call('HKEYS', KEYS[1]) end
local found = {}
for _, lock in ipairs(locks) do
  local held = lock ~= ':' and redis.call('GET', lock)
  if held then
    local waiters = redis.call('ZCARD', lock .. ':q')
    found[#found + 1] = {string.sub(lock, #ARGV[1] + 1), held, redis.call('PTTL', lock), waiters}
  end
end
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000000 + time[2])
return {ok = '1 ' .. now .. ' ' .. (#found > 0 and cjson.encode(found) or '[]')}
"""


ACQUIRE = Script(_ACQUIRE, keys=2, args=4)
ACQUIRE_OR_WAIT = Script(_ACQUIRE, keys=2, args=6)
RAISE = Script(_RAISE, keys=2, args=2)
EXTEND = Script(_EXTEND, keys=2, args=2)
END_IN = Script(_EXTEND, keys=2, args=3)
RELEASE = Script(_RELEASE, keys=2, args=2)
RELEASE_AND_WAIT = Script(_RELEASE, keys=2, args=4)
CLEAR = Script(_CLEAR, keys=2, args=1)
LIST = Script(_LIST, keys=1, args=2)
SCRIPTS = (ACQUIRE, RAISE, EXTEND, RELEASE, CLEAR, LIST)
