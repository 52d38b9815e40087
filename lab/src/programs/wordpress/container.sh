# The first process of a container: its root file system, its network, and the servers in it.
# $1: the image. $2: an empty directory to mount on, which is seen in this mount namespace only. $3: its host name. $4: busybox.
# When this ends, so does everything in the pid namespace, and with the last process all mounts. It ends when its standard input is
# closed: by the program that holds the other end, or with that program, however it ends.
set -e
umask 022
echo "$3" >/proc/sys/kernel/hostname
"$4" ip link set lo up
# The log: Apache opens it anew by this name, as another user.
chmod a+w /dev/stderr

# The writable layer, in memory: it is gone with the mount namespace, also after a kill.
mount -t tmpfs -o mode=755 tmpfs "$2"
cd "$2"
mkdir upper work root
mount -t overlay -o "lowerdir=$1,upperdir=upper,workdir=work" overlay root
cd root
# Programs and libraries are this machine's, and cannot be written.
for directory in usr etc bin sbin lib lib64; do
  if [ -d "/$directory" ] && [ ! -L "/$directory" ]; then
    mount --bind "/$directory" "$directory"
    mount -o remount,bind,ro "$directory"
  fi
done
mount --bind /dev dev
mount -t proc proc proc
pivot_root . .
umount -l .
cd /

# Both run as they do in an image without root: a program that drops root's rights itself is not dumpable, and left alone.
as="setpriv --reuid=www-data --regid=www-data --clear-groups --no-new-privs"
$as mariadbd --no-defaults --skip-networking --skip-log-bin --innodb-log-file-size=16M --innodb-flush-method=fsync \
  --datadir=/srv/mysql --pid-file=/run/mysqld.pid --socket=/run/mysqld.sock </dev/null &
# Its settings are those of the image alone.
PHP_INI_SCAN_DIR='' $as apache2 -f /srv/conf/apache.conf -D FOREGROUND </dev/null &
read -r _
