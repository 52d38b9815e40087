# The first process of a container: sets up the root file system and the network, and starts the servers.
# $1: the image. $2: an empty directory to mount on; only this mount namespace sees the mount. $3: the host name.
# $4: busybox.
# This process ends when the program at the other end of its standard input closes it or ends, in whatever way. Then the
# kernel ends all other processes of the pid namespace, and removes the mounts after the last one.
set -e
umask 022
echo "$3" >/proc/sys/kernel/hostname
"$4" ip link set lo up
# Standard error is the log. Apache opens it again by this name, as another user.
chmod a+w /dev/stderr

# The writable layer, in memory. It goes away with the mount namespace, even after a kill.
mount -t tmpfs -o mode=755 tmpfs "$2"
cd "$2"
mkdir upper work root
mount -t overlay -o "lowerdir=$1,upperdir=upper,workdir=work" overlay root
cd root
# The container uses this machine's programs and libraries, read-only.
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

# We start both servers without root, as an image for an unprivileged user does. A program that drops root's rights
# itself is no longer dumpable, and pagefold leaves it alone.
as="setpriv --reuid=www-data --regid=www-data --clear-groups --no-new-privs"
$as mariadbd --no-defaults --skip-networking --skip-log-bin --innodb-log-file-size=16M --innodb-flush-method=fsync \
  --datadir=/srv/mysql --pid-file=/run/mysqld.pid --socket=/run/mysqld.sock </dev/null &
# PHP takes its settings only from the image.
PHP_INI_SCAN_DIR='' $as apache2 -f /srv/conf/apache.conf -D FOREGROUND </dev/null &
read -r _
