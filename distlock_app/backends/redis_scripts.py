"""What Redis runs for us: whole scripts, each atomic, and idempotent for one owner token.

Keys of one lock, all in the hash slot of its shard and always all in KEYS:

    <prefix>:{<shard>}:<key>        lock      "token fence holder name", expires with the lease
    <prefix>:{<shard>}:<key>:q      queue     ZSET of waiting tokens by time of arrival
    <prefix>:{<shard>}:<key>:w      waiters   HASH token -> "heard ttl channel holder name"
    <prefix>:{<shard>}:held:<part>  index     ZSET of held keys by expiry, for people
    <prefix>:{<shard>}:fence        counter   the last fence given; one key, and it stays

Times are microseconds of the server's clock, ttls milliseconds. The fence is such a time too
(see DESIGN "Fences that survive"), so it also says when the lock was acquired.
"""

from __future__ import annotations

import hashlib

# Every script begins with this.
# KEYS 1 lock, 2 queue, 3 waiters, 4 index, 5 counter     ARGV 1 key, 2 token
_BEGIN = """
local lock, queue, waiters, index, counter = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local key, token = ARGV[1], ARGV[2]
local held = redis.call('GET', lock)
local mine = held and string.sub(held, 1, #token + 1) == token .. ' '
"""

# Only where the time is needed: this costs as much as an empty script.
_CLOCK = """
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local now_ms = math.floor(now / 1000)
"""

_TAKE = """
local function text(number) return string.format('%.0f', number) end  -- '..' keeps 14 digits

-- Note in the index when the claim ends; the index itself goes some time after its last claim.
local function note(ttl)
  redis.call('ZADD', index, now_ms + ttl, key)
  if redis.call('PTTL', index) < tonumber(ttl) then redis.call('PEXPIRE', index, 2 * ttl) end
end

-- Make `owner` the owner; return the fence, greater than all before even if they were lost.
local function take(owner, ttl, about)
  local fence = now
  local last = tonumber(redis.call('GETSET', counter, fence) or 0)
  if last >= fence then
    fence = last + 1
    redis.call('SET', counter, fence)
  end
  redis.call('SET', lock, owner .. ' ' .. text(fence) .. ' ' .. about, 'PX', ttl)
  note(ttl)
  if now % 16 == 0 then  -- now and then: drop what expired unreleased from the index
    local stale = redis.call('ZRANGEBYSCORE', index, '-inf', now_ms - 1, 'LIMIT', 0, 64)
    if #stale > 0 then redis.call('ZREM', index, unpack(stale)) end
  end
  return fence
end
"""

_HAND_OVER = """
local HEARD_WITHIN = 3000000  -- a waiter asks again each second: after three it has died
local QUEUE_MS = 10000        -- so a queue that nobody refreshes may go
local UNHEARD_MS = 3000       -- first lease of a waiter without a channel: its next try renews it

-- Make the first waiter who is still there the owner, and return it; nil: nobody waits.
-- When it is `me` who comes first, only return me: the answer tells me, not a message.
-- A waiter whom nobody heard of lately, or whose process does not listen, has died or lost
-- its connection: it gets its old place back (by time of arrival) if it ever asks again.
local function hand_over(me)
  while true do
    local head = redis.call('ZPOPMIN', queue)[1]
    if not head then return nil end
    local entry = redis.call('HGET', waiters, head) or ''
    redis.call('HDEL', waiters, head)
    if head == me then return me end
    local heard, ttl, channel, about = string.match(entry, '^(%d+) (%d+) (%S+) (.*)$')
    if heard and now - heard < HEARD_WITHIN then
      if channel == '-' then
        take(head, math.min(ttl, UNHEARD_MS), about)
        return head
      end
      local fence = take(head, ttl, about)
      if redis.call('PUBLISH', channel, head .. ' ' .. text(fence) .. ' ' .. text(now)) > 0 then
        return head
      end
      redis.call('DEL', lock)
      redis.call('ZREM', index, key)
    end
  end
end

-- Hand the lock over, or leave it free.
local function give_up()
  if not hand_over('') then
    redis.call('DEL', lock)
    redis.call('ZREM', index, key)
  end
end

local function forget(waiter)
  redis.call('ZREM', queue, waiter)
  redis.call('HDEL', waiters, waiter)
end
"""

_FENCE_OF = """
local function fence_of(held) return tonumber(string.match(held, '^%S+ (%d+)')) end
"""

# Never let a claim end earlier than was promised before.
_LENGTHEN = """
local function lengthen(ttl)
  if redis.call('PTTL', lock) < tonumber(ttl) then
    redis.call('PEXPIRE', lock, ttl)
    note(ttl)
  end
end
"""

# ARGV 3 ttl, 4 "holder name", 5 channel to be woken on, '-' without one, '' not to wait,
#      6 time of arrival as answered before, 0 at first
# -> {1, fence, now} mine, or {0, milliseconds until it may be free, now, time of arrival}
_ACQUIRE = (
    _BEGIN
    + _CLOCK
    + _TAKE
    + """
local ttl, about, channel, arrived = ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])

-- Most locks are free. What follows takes longer to define than this to run.
if not held and redis.call('EXISTS', queue) == 0 then
  return {1, take(token, ttl, about), now}
end
"""
    + _FENCE_OF
    + _LENGTHEN
    + _HAND_OVER
    + """
if mine then  -- a repeated request, or a hand-over whose message was not heard
  lengthen(ttl)
  return {1, fence_of(held), now}
end
if not held then
  local owner = hand_over(token)
  if owner == nil or owner == token then
    return {1, take(token, ttl, about), now}
  end
end
if channel == '' then
  forget(token)
else
  if arrived == 0 then arrived = now end
  redis.call('ZADD', queue, 'NX', arrived, token)
  redis.call('HSET', waiters, token, text(now) .. ' ' .. ttl .. ' ' .. channel .. ' ' .. about)
  redis.call('PEXPIRE', queue, QUEUE_MS)
  redis.call('PEXPIRE', waiters, QUEUE_MS)
end
return {0, redis.call('PTTL', lock), now, arrived}
"""
)

# ARGV 3 ttl -> 1 mine, 0 not
_EXTEND = (
    _BEGIN
    + """
if not mine then return 0 end
"""
    + _CLOCK
    + _TAKE
    + _LENGTHEN
    + """
lengthen(ARGV[3])
return 1
"""
)

# -> 1 it was mine, 0 not; either way nothing of the token is left
_RELEASE = (
    _BEGIN
    + """
if mine and redis.call('EXISTS', queue) == 0 then  -- most often; see ACQUIRE
  redis.call('DEL', lock)
  redis.call('ZREM', index, key)
  return 1
end
"""
    + _CLOCK
    + _TAKE
    + _HAND_OVER
    + """
if mine then
  give_up()
  return 1
end
forget(token)
if not held then hand_over('') end
return 0
"""
)

# ARGV 2 fence that was seen, or ''  -> how many claims were taken away
_CLEAR = (
    _BEGIN
    + _CLOCK
    + _TAKE
    + _FENCE_OF
    + _HAND_OVER
    + """
local seen = token
if not held or (seen ~= '' and fence_of(held) ~= tonumber(seen)) then return 0 end
redis.call('SET', counter, math.max((redis.call('GET', counter) or 0) + 1, now))
give_up()
return 1
"""
)

# KEYS 6 what to write     ARGV 3 value, 4 its ttl or 0, 5 '1' to release as well
# -> 1 written, 0 not mine, nothing written
_GUARDED_SET = (
    _BEGIN
    + """
if not mine then return 0 end
if ARGV[4] == '0' then
  redis.call('SET', KEYS[6], ARGV[3])
else
  redis.call('SET', KEYS[6], ARGV[3], 'PX', ARGV[4])
end
if ARGV[5] == '0' then return 1 end
"""
    + _CLOCK
    + _TAKE
    + _HAND_OVER
    + """
give_up()
return 1
"""
)


def pack(*words: bytes) -> bytes:
    """Return the words of one command as they go over the wire (RESP)."""
    return b"*%d\r\n%b" % (len(words), bulks(*words))


def bulks(*words: bytes) -> bytes:
    """Return words as they stand inside a command."""
    return b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


class Script:
    """A script, and the requests that run it."""

    __slots__ = ("_opening", "_words", "load")

    def __init__(self, source: str, *, keys: int = 5, args: int) -> None:
        code = source.encode()
        sha = hashlib.sha1(code, usedforsecurity=False).hexdigest().encode()
        self.load = pack(b"SCRIPT", b"LOAD", code)
        self._words = keys + args
        self._opening = b"*%d\r\n" % (3 + keys + args) + bulks(b"EVALSHA", sha, b"%d" % keys)

    def template(self, *words: bytes) -> bytes:
        """Return the packed EVALSHA with its keys and first arguments, for `fill`."""
        known = (self._opening + bulks(*words)).replace(b"%", b"%%")
        missing = self._words - len(words)
        return known + b"$%d\r\n%b\r\n" * missing


def fill(template: bytes, *words: bytes) -> bytes:
    """Return the request with its last arguments; packing anew takes three times as long."""
    return template % tuple([part for word in words for part in (len(word), word)])


ACQUIRE = Script(_ACQUIRE, args=6)
EXTEND = Script(_EXTEND, args=3)
RELEASE = Script(_RELEASE, args=2)
CLEAR = Script(_CLEAR, args=2)
GUARDED_SET = Script(_GUARDED_SET, keys=6, args=5)
