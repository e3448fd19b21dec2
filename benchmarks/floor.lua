-- What a commit costs at the least: the same bytes into one stream and one key, and nothing looked at.
-- KEYS 1 stream, 2 blob    ARGV 1 events, 2 blob
redis.call('SET', KEYS[2], ARGV[2])
return redis.call('XADD', KEYS[1], '*', 'e', ARGV[1])
