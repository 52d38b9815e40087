<?php
/* Reads a file, makes objects from its bytes, and answers with the worker's pid and a checksum of all bytes. PHP frees
   all of it at the end of each request. */
$shared = file_get_contents(getenv("HELD_FILE"));
$objects = [];
for ($at = 0; $at < strlen($shared); $at += 1000) {
    $objects[] = substr($shared, $at, 100);
}
$hash = hash_init("md5");
hash_update($hash, $shared);
foreach ($objects as $item) {
    hash_update($hash, $item);
}
echo getmypid(), " ", count($objects), " ", hash_final($hash), "\n";
