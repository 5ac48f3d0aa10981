-- What is in the lock, and whether this token is its owner.

local held = redis.call('GET', lock)
local mine = held and string.sub(held, 1, #token + 1) == token .. ' '
