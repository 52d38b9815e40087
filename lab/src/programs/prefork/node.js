// A cluster whose workers hold the bytes of a file, objects made from them, and modules. They answer with their pid and
// a checksum of all bytes. The environment gives the file, the socket and the number of workers.
const cluster = require("cluster");
if (cluster.isPrimary) {
  for (let number = 0; number < Number(process.env.WORKERS); number++) cluster.fork();
} else {
  const [fs, crypto, http] = ["fs", "crypto", "http"].map(require);
  ["https", "stream", "url", "zlib"].forEach(require);
  const shared = fs.readFileSync(process.env.HELD_FILE);
  const objects = [];
  for (let at = 0; at < shared.length; at += 1000) objects.push(shared.toString("latin1", at, at + 100));
  http
    .createServer((_request, response) => {
      const hash = crypto.createHash("md5").update(shared);
      for (const item of objects) hash.update(item, "latin1");
      response.end(`${process.pid} ${objects.length} ${hash.digest("hex")}\n`);
    })
    .listen(process.env.SOCKET);
}
