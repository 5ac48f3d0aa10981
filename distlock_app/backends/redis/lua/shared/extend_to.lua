-- Extend what this token holds.
--
-- It writes in any case: after that, and on the same connection, WAIT asks the replicas for all
-- that went before. Include it after take.

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
