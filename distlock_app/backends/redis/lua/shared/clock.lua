-- The server's clock.
--
-- Include it only where the time is needed: it costs as much as an empty script.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
