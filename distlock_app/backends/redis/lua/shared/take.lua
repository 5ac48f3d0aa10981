-- Become an owner.
--
-- Include it after begin and clock.

local now_ms = math.floor(now / 1000)
local QUEUE_MS = 10000  -- a queue that nobody refreshes may go

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

-- Make `owner` an owner; return the fence as text, greater than all before even if they were lost.
local function take(owner, ttl, limit, about)
  local fence = now
  local last = tonumber(redis.call('GETSET', counter, fence) or 0)
  if last >= fence then
    fence = last + 1
    redis.call('SET', counter, fence)
  end
  fence = text(fence)
  if limit == '1' then
    redis.call('SET', lock, owner .. ' ' .. fence .. ' ' .. about, 'PX', ttl)
    held = true
    note(ttl)
  else
    redis.call('HSET', entries, owner, fence .. ' ' .. limit .. ' ' .. about)
    add_member(owner, ttl)
  end
  if now % 16 == 0 then  -- now and then: drop what expired unreleased from the index
    local stale = redis.call('ZRANGEBYSCORE', index, '-inf', now_ms - 1, 'LIMIT', 0, 64)
    if #stale > 0 then redis.call('ZREM', index, unpack(stale)) end
  end
  return fence
end
