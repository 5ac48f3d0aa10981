"""Lua scripts of locks on Redis; each is atomic, and may be repeated by the same owner.

Keys of one lock, all in the hash slot of its shard and always all in KEYS:

    <prefix>:{<shard>}:<key>        lock      "token fence holder name", expires with the lease
    <prefix>:{<shard>}:<key>:q      queue     ZSET of waiting tokens by time of arrival
    <prefix>:{<shard>}:<key>:w      entries   HASH of waiters and members:
                                              token -> "heard ttl channel limit holder name"
                                              token -> "fence limit holder name"
    <prefix>:{<shard>}:held:<part>  index     ZSET of held keys by expiry, for people
    <prefix>:{<shard>}:fence        counter   the last fence given; one key, and it stays
    <prefix>:{<shard>}:<key>:m      members   ZSET of tokens that hold it together, by expiry

Times are microseconds of the server's clock, ttls and expiries milliseconds. The fence is such a
time too, so it grows even after the server lost its data, and says when the lock was acquired.

The limit of a claim says what it tolerates beside it: 1 nothing (a mutex, a writer), n up to n - 1
semaphore permits, 0 other readers. Only one of the two, lock or members, exists.

A full server (noeviction) refuses what takes memory, but only as the first write of a script. So
what must work there begins with a write that takes none: PEXPIRE, ZREM, HDEL or DEL, before ZADD,
HSET, SET or GETSET. It grants no new lock; extensions, releases, hand-overs and waiting go on.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

# Every script begins with this.
# KEYS 1 lock, 2 queue, 3 entries, 4 index, 5 counter, 6 members     ARGV 1 key, 2 token
_BEGIN = """
local lock, queue, entries, index, counter = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local members = KEYS[6]
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
local QUEUE_MS = 10000  -- a queue that nobody refreshes may go

local function text(number) return string.format('%.0f', number) end  -- '..' keeps 14 digits

-- Note in the index when the claim ends; the index itself goes some time after its last claim.
local function note(ttl)
  redis.call('ZADD', index, now_ms + ttl, key)
  if redis.call('PTTL', index) < tonumber(ttl) then redis.call('PEXPIRE', index, 2 * ttl) end
end

-- Let `owner` be a member for so long. The entries outlive the last member, so that the next
-- request cleans up.
local function add_member(owner, ttl)
  redis.call('ZADD', members, now_ms + ttl, owner)
  local life = ttl + QUEUE_MS
  if redis.call('PTTL', members) < life then
    for _, list in ipairs({members, entries, queue}) do redis.call('PEXPIRE', list, life) end
  end
  note(redis.call('ZRANGE', members, -1, -1, 'WITHSCORES')[2] - now_ms)
end

-- Make `owner` an owner; return the fence, greater than all before even if they were lost.
local function take(owner, ttl, limit, about)
  local fence = now
  local last = tonumber(redis.call('GETSET', counter, fence) or 0)
  if last >= fence then
    fence = last + 1
    redis.call('SET', counter, fence)
  end
  if limit == '1' then
    redis.call('SET', lock, owner .. ' ' .. text(fence) .. ' ' .. about, 'PX', ttl)
    held = true
    note(ttl)
  else
    redis.call('HSET', entries, owner, text(fence) .. ' ' .. limit .. ' ' .. about)
    add_member(owner, ttl)
  end
  if now % 16 == 0 then  -- now and then: drop what expired unreleased from the index
    local stale = redis.call('ZRANGEBYSCORE', index, '-inf', now_ms - 1, 'LIMIT', 0, 64)
    if #stale > 0 then redis.call('ZREM', index, unpack(stale)) end
  end
  return fence
end
"""

_MEMBERS = """
local function is_member()
  return tonumber(redis.call('ZSCORE', members, token) or -1) >= now_ms
end

local function fence_of(owner)
  return string.match(redis.call('HGET', entries, owner) or '', '^%d+')
end

-- Leave nothing of `owner`, a waiter or a member.
local function drop(owner)
  redis.call('ZREM', queue, owner)
  redis.call('ZREM', members, owner)
  redis.call('HDEL', entries, owner)
end

local function drop_expired()
  local gone = redis.call('ZRANGEBYSCORE', members, '-inf', '(' .. text(now_ms))
  for _, owner in ipairs(gone) do drop(owner) end
end

-- May a claim with this limit come in now? The members are all readers or all permits.
local function fits(limit)
  if held then return false end
  local beside = redis.call('ZCARD', members)
  if beside == 0 then return true end
  if limit == '1' then return false end
  local other = redis.call('HGET', entries, redis.call('ZRANGE', members, 0, 0)[1])
  local readers = string.match(other, '^%d+ (%d+)') == '0'
  if limit == '0' then return readers end
  return not readers and beside < tonumber(limit)
end
"""

_HAND_OVER = """
local HEARD_WITHIN = 3000000  -- a waiter asks again each second: after three it has died
local FIRST_MS = 3000         -- a waiter's process may be stopped: if it is not, it extends

-- Does a process listen here? Asked before anything is sent: PUBLISH also reaches, without counting
-- them, subscribers at other nodes of a Cluster and at replicas.
local function has_subscriber(channel)
  return redis.call('PUBSUB', 'NUMSUB', channel)[2] > 0
end

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
    elseif there and has_subscriber(channel) then
      local first = math.min(ttl, FIRST_MS)
      local words = {head, key, text(take(head, first, limit, about)), text(now), first}
      redis.call('PUBLISH', channel, table.concat(words, ' '))
    end
  end
  if not held and redis.call('EXISTS', members) == 0 then redis.call('ZREM', index, key) end
  return granted
end

-- Take away what `owner` holds or waits for, and let the next in.
local function give_up(owner)
  if mine then
    redis.call('DEL', lock)
    held = false
  else
    drop_expired()
    drop(owner)
  end
  if not held then hand_over('') end
end
"""

# It writes in any case: after that, and on the same connection, WAIT asks the replicas for all
# that went before.
_EXTEND_TO = """
local function end_in(ttl)
  if mine then
    redis.call('PEXPIRE', lock, ttl)
    note(ttl)
  else
    redis.call('PEXPIRE', members, redis.call('PTTL', members))
    add_member(token, ttl)
  end
end

-- Never let a claim end earlier than was promised before.
local function extend_to(ttl)
  local left = mine and redis.call('PTTL', lock) or redis.call('ZSCORE', members, token) - now_ms
  end_in(math.max(left, ttl))
end
"""

# ARGV 3 ttl, 4 "holder name", 5 channel to be woken on, '-' without one, '' not to wait,
#      6 time of arrival as answered before, 0 at first, 7 limit
# -> {1, fence, now} mine, or {0, milliseconds until it may be free, now, time of arrival}
_ACQUIRE = (
    _BEGIN
    + _CLOCK
    + _TAKE
    + """
local ttl, about, channel, arrived, limit = ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7]

-- Most locks are free. What follows takes longer to define than this to run.
if not held and redis.call('EXISTS', queue, members) == 0 then
  return {1, take(token, ttl, limit, about), now}
end
"""
    + _MEMBERS
    + _EXTEND_TO
    + _HAND_OVER
    + """
-- A repeated request, or a hand-over whose message was not heard.
if mine then
  extend_to(ttl)
  return {1, tonumber(string.match(held, '^%S+ (%d+)')), now}
elseif not held and is_member() then
  extend_to(ttl)
  return {1, tonumber(fence_of(token)), now}
end

if not held then drop_expired() end
local empty = not held and redis.call('EXISTS', queue) == 0
if empty and fits(limit) then return {1, take(token, ttl, limit, about), now} end
if channel ~= '' or not (empty or held) then
  if arrived == 0 then arrived = now end
  local back = channel == '' and '-' or channel
  local entry = text(now) .. ' ' .. ttl .. ' ' .. back .. ' ' .. limit .. ' ' .. about
  redis.call('HDEL', entries, token)  -- first: see above of a full server
  redis.call('ZADD', queue, 'NX', arrived, token)
  redis.call('HSET', entries, token, entry)
  local life = held and QUEUE_MS or math.max(QUEUE_MS, redis.call('PTTL', members))
  redis.call('PEXPIRE', queue, life)
  redis.call('PEXPIRE', entries, life)
  local fence = not held and hand_over(token)
  if fence then return {1, fence, now} end
end
if channel == '' and not empty then
  drop(token)
  if not held then hand_over('') end  -- those behind may fit
end
local first = not held and redis.call('ZRANGE', members, 0, 0, 'WITHSCORES')[2]
return {0, first and first - now_ms or redis.call('PTTL', lock), now, arrived}
"""
)

# KEYS as above, for each lock     ARGV 1 key, 2 token, 3 ttl, 4 "holder name", for each lock
# -> {1, fence, ...} all are mine, or {0}: none was taken, at least one is held or waited for
_ACQUIRE_ALL = (
    _BEGIN
    + _CLOCK
    + _TAKE
    + _EXTEND_TO
    + """
-- Let the names and functions above mean this lock from now on.
local function choose(at)
  lock, queue, entries, index, counter, members = unpack(KEYS, 6 * at - 5, 6 * at)
  key, token = ARGV[4 * at - 3], ARGV[4 * at - 2]
  held = redis.call('GET', lock)
  mine = held and string.sub(held, 1, #token + 1) == token .. ' '
end

for at = 1, #KEYS / 6 do
  choose(at)
  if not mine and (held or redis.call('EXISTS', queue, members) > 0) then return {0} end
end
local answer = {1}
for at = 1, #KEYS / 6 do
  choose(at)
  if mine then  -- a repeated request
    answer[at + 1] = tonumber(string.match(held, '^%S+ (%d+)'))
    extend_to(ARGV[4 * at - 1])
  else
    answer[at + 1] = take(token, ARGV[4 * at - 1], '1', ARGV[4 * at])
  end
end
return answer
"""
)

# ARGV 3 ttl, 4 to end then, also sooner -> 1 mine, 0 not
_EXTEND = (
    _BEGIN
    + _CLOCK
    + _TAKE
    + _MEMBERS
    + _EXTEND_TO
    + """
if not mine and not is_member() then return 0 end
if ARGV[4] then end_in(ARGV[3]) else extend_to(ARGV[3]) end
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
    + _MEMBERS
    + _HAND_OVER
    + """
local was_mine = mine or is_member()
give_up(token)
return was_mine and 1 or 0
"""
)

# ARGV 2 version (fence) of the claim, or ''  -> how many claims were taken away
_CLEAR = (
    _BEGIN
    + _CLOCK
    + _TAKE
    + _MEMBERS
    + _HAND_OVER
    + """
local version, cleared = token, 0
drop_expired()
if held and (version == '' or string.match(held, '^%S+ (%d+)') == version) then
  redis.call('DEL', lock)
  held = false
  cleared = 1
end
for _, owner in ipairs(redis.call('ZRANGE', members, 0, -1)) do
  if version == '' or fence_of(owner) == version then
    drop(owner)
    cleared = cleared + 1
  end
end
if cleared == 0 then return 0 end
redis.call('SET', counter, math.max((redis.call('GET', counter) or 0) + 1, now))
hand_over('')
return cleared
"""
)

# KEYS 7 what to write     ARGV 3 value, 4 its ttl or 0, 5 '1' to release as well
# -> 1 written, 0 not mine, nothing written
_GUARDED_SET = (
    _BEGIN
    + _CLOCK
    + _TAKE
    + _MEMBERS
    + _HAND_OVER
    + """
if not mine and not is_member() then return 0 end
if ARGV[4] == '0' then
  redis.call('SET', KEYS[7], ARGV[3])
else
  redis.call('SET', KEYS[7], ARGV[3], 'PX', ARGV[4])
end
if ARGV[5] == '1' then give_up(token) end
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

    __slots__ = ("_by_hash", "_by_source", "_opening", "_words", "load", "promises")

    def __init__(self, source: str, *, keys: int = 6, args: int, promises: bool = False) -> None:
        """`promises`: its 1, alone or first in a list, means that the caller has the lock."""
        self.promises = promises
        code = source.encode()
        sha = hashlib.sha1(code, usedforsecurity=False).hexdigest().encode()
        self.load = pack(b"SCRIPT", b"LOAD", code)
        self._by_hash = bulks(b"EVALSHA", sha)
        self._by_source = bulks(b"EVAL", code)
        self._words = keys + args
        self._opening = b"*%d\r\n%b%b" % (3 + keys + args, self._by_hash, bulks(b"%d" % keys))

    def template(self, *words: bytes) -> bytes:
        """Return the packed EVALSHA with its keys and first arguments, for `fill`."""
        known = (self._opening + bulks(*words)).replace(b"%", b"%%")
        missing = self._words - len(words)
        return known + b"$%d\r\n%b\r\n" * missing

    def in_full(self, request: bytes) -> bytes:
        """Return the request for a server that does not know the script: it will then."""
        return request.replace(self._by_hash, self._by_source, 1)


def fill(template: bytes, *words: bytes) -> bytes:
    """Return the request with its last arguments; packing anew takes three times as long."""
    return template % tuple([part for word in words for part in (len(word), word)])


@lru_cache(maxsize=64)
def acquire_all(count: int) -> Script:
    """Return the script that takes so many mutexes."""
    return Script(_ACQUIRE_ALL, keys=6 * count, args=4 * count, promises=True)


ACQUIRE = Script(_ACQUIRE, args=7, promises=True)
EXTEND = Script(_EXTEND, args=3, promises=True)
END_IN = Script(_EXTEND, args=4, promises=True)
RELEASE = Script(_RELEASE, args=2)
CLEAR = Script(_CLEAR, args=2)
GUARDED_SET = Script(_GUARDED_SET, keys=7, args=5)
