-- Take, renew or release a partition's lease. The epoch only grows: it fences what an earlier holder still sends.
-- KEYS 1 lease (hash: h holder, i incarnation, o the incarnation that i replaced, e epoch, u until ms)
-- ARGV 1 holder, 2 incarnation, 3 time to live in ms, 0 to release
-- Answer: mine (1 or 0), epoch, holder, until ms, server ms
local lease = redis.call('HMGET', KEYS[1], 'h', 'i', 'o', 'e', 'u')
local holder, incarnation, ousted = lease[1] or '', lease[2] or '', lease[3] or ''
local epoch, ends = tonumber(lease[4] or 0), tonumber(lease[5] or 0)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ttl = tonumber(ARGV[3])
local same = holder == ARGV[1] and incarnation == ARGV[2]

if ttl == 0 then
  if same then redis.call('HSET', KEYS[1], 'h', '', 'i', '', 'o', '', 'u', 0) end
  return {0, epoch, same and '' or holder, same and 0 or ends, now}
end
-- A process that its own successor has replaced stays out while the lease lives, or the two would take turns for ever.
local successor = holder == ARGV[1] and ousted ~= ARGV[2]
if not same and ends > now and not successor then return {0, epoch, holder, ends, now} end
if not same then
  epoch = epoch + 1
  redis.call('HSET', KEYS[1], 'h', ARGV[1], 'i', ARGV[2], 'o', holder == ARGV[1] and incarnation or '', 'e', epoch)
end
redis.call('HSET', KEYS[1], 'u', now + ttl)
return {1, epoch, ARGV[1], now + ttl, now}
