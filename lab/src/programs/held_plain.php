/* Holds the bytes of a file, and objects made from them. Answers with a checksum of all of them.
   Argument: the file. Prints "ready", then answers each input line until end of input. */
$shared = file_get_contents($argv[1]);
$objects = [];
for ($at = 0; $at < strlen($shared); $at += 1000) {
    $objects[] = substr($shared, $at, 100);
}
echo "ready\n";
while (fgets(STDIN) !== false) {
    $hash = hash_init("md5");
    hash_update($hash, $shared);
    foreach ($objects as $item) {
        hash_update($hash, $item);
    }
    echo count($objects), " ", hash_final($hash), "\n";
}
