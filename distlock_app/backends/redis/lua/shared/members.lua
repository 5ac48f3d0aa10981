-- The members of a lock (its readers, or its permits), and what a token leaves behind.
--
-- Include it after take.

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

-- May a claim with this limit come in beside the members? They are all readers or all permits.
local function fits(limit)
  local beside = redis.call('ZCARD', members)
  if beside == 0 then return true end
  if limit == '1' then return false end
  local other = redis.call('HGET', entries, redis.call('ZRANGE', members, 0, 0)[1])
  if not other then return false end  -- evicted: readers or permits, nobody knows
  local readers = string.match(other, '^%d+ (%d+)') == '0'
  if limit == '0' then return readers end
  return not readers and beside < tonumber(limit)
end
