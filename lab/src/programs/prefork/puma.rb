# Configuration and application in one: holds the bytes of a file, objects made from them, and libraries. Answers with
# the worker's pid and a checksum of all bytes. The environment gives the file, the socket and the number of workers.
require "json"
require "net/http"
require "set"
require "zlib"

SHARED = File.binread(ENV.fetch("HELD_FILE"))
OBJECTS = (0...SHARED.bytesize).step(1000).map { |at| SHARED.byteslice(at, 100) + "." }

bind "unix://#{ENV.fetch("SOCKET")}"
workers Integer(ENV.fetch("WORKERS"))
threads 1, 1
preload_app!
app do |_env|
  total = OBJECTS.reduce(Zlib.crc32(SHARED)) { |sum, item| Zlib.crc32(item, sum) }
  [200, { "Content-Type" => "text/plain" }, ["#{Process.pid} #{OBJECTS.size} #{total}\n"]]
end
